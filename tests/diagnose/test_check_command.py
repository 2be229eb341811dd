"""The `check` command from files to exit status: a training file, a checkpoint, a server that rescores."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.check_command import check
from mismatch_plugin.diagnose.check_report import show
from mismatch_plugin.diagnose.findings import FAULTS, CheckResult
from mismatch_plugin.diagnose.read import check_files
from mismatch_plugin.diagnose.scorers import Checkpoint
from tests.fixtures.sglang_check.policies import FOLDER, policy, recorded, score, training
from tests.fixtures.sglang_check.serving import serving

CLEAN = "bfloat16_temperature_1.0"
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(check)


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(item) for item in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def _training_file(folder: Path, name: str = CLEAN, **changes: Any) -> Path:
    """The float32 trainer's file; a change is a function of (index, line)."""
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in training("float32", name)]
    for field, change in changes.items():
        for index, line in enumerate(lines):
            line[field] = change(index, line)
    path = folder / "training.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    policy("float32").save_pretrained(folder)
    return folder


@pytest.fixture
def server() -> Iterator[str]:
    with serving(info={"dtype": "float32", "quantization": "fp8"}) as url:
        yield url


def test_help_tells_the_training_files_form():
    text = " ".join(_run("--help").output.replace("│", " ").split())
    for part in ("train_log_probs", "sample_id", "token_ids", "prompt_ids", "weight_version", "Exit status"):
        assert part in text


def test_help_shows_a_record_and_names_its_fields():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    (line,) = (line for line in text.splitlines() if line.strip().startswith('{"prompt_ids"'))
    least = {"prompt_ids", "response_ids", "rollout_log_probs"}
    assert Sample.model_validate(json.loads(line)).model_fields_set == least
    fields = [*Sample.model_fields]
    of_rollouts = {*fields[: fields.index("train_log_probs")]} - {"index", "group", "step"}
    assert [name for name in of_rollouts if f'"{name}"' not in text] == []


def test_clean_files_pass_with_one_line_as_verdict(tmp_path: Path):
    result = _run(FOLDER / f"{CLEAN}.jsonl", _training_file(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("No fault in 40 samples, 1195 tokens: k3 ")
    assert "KL(rollout" in result.output and "effective sample size" in result.output
    lines = [line.strip() for line in result.output.splitlines()]
    assert lines[lines.index("mismatch of the two sides") + 1].split() == ["figure", "as", "given"]


def test_a_fault_fails_and_is_explained_with_place_and_mend(tmp_path: Path):
    path = _training_file(tmp_path, train_log_probs=lambda index, line: [-1.0, *line["train_log_probs"][:-1]])
    result = _run(FOLDER / f"{CLEAN}.jsonl", path)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "1 fault in 40 samples, 1195 tokens: shift_by_one."
    assert "Fix: Pair the log-prob of token t" in result.output
    assert f"sample 0 ({CLEAN}-0), position 0" in " ".join(result.output.split())
    assert "once fixed" in result.output


def test_json_is_the_result_and_nothing_else(tmp_path: Path):
    path = _training_file(tmp_path, train_log_probs=lambda index, line: [-value for value in line["train_log_probs"]])
    result = _run(FOLDER / f"{CLEAN}.jsonl", path, "--json")
    assert result.exit_code == 1
    parsed = CheckResult.model_validate_json(result.stdout)
    assert parsed.status == "faults" and [item.fault for item in parsed.findings] == ["sign"]
    finding = json.loads(result.stdout)["findings"][0]
    counted = {"samples", "of_samples", "tokens", "of_tokens"}
    told = {"fault", "side", "evidence", "statistics", "first", "fix", "confidence", "severity", "accepted"}
    assert set(finding) == counted | told
    assert finding["first"]["position"] == 0 and finding["first"]["training"] > 0


def test_samples_are_matched_by_name_or_index_in_any_order(tmp_path: Path):
    by_name = _training_file(tmp_path, sample_id=lambda index, _: f"{CLEAN}-{index}").read_text()
    by_index = _training_file(tmp_path, index=lambda index, _: index).read_text()
    for text in (by_name, by_index):
        path = tmp_path / "reversed.jsonl"
        path.write_text("\n".join(reversed(text.splitlines())))
        assert _run(FOLDER / f"{CLEAN}.jsonl", path).exit_code == 0


def test_records_alone_and_accepted_faults():
    alone = _run(FOLDER / f"{CLEAN}.jsonl", "--records-only")
    assert alone.exit_code == 0 and "without a comparison of the two sides" in alone.output
    mixed = FOLDER / "float32_updated_in_flight.jsonl"
    assert _run(mixed, "--records-only").exit_code == 1
    accepted = _run(mixed, "--records-only", "--accept", "mixed_versions")
    assert accepted.exit_code == 0 and "Accepted: mixed_versions" in accepted.output


def test_too_few_tokens_are_not_decided(tmp_path: Path):
    lines = (FOLDER / f"{CLEAN}.jsonl").read_text().splitlines()[:2]
    records, path = tmp_path / "records.jsonl", _training_file(tmp_path)
    records.write_text("\n".join(lines))
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    few = _run(records, path)
    assert few.exit_code == 3 and few.output.splitlines()[-1].startswith("Not decided in 2 samples")
    assert "Exit status" in _run("--help").output and "3 not" in _run("--help").output
    assert _run(records, "--records-only").exit_code == 0


def test_a_training_side_left_out_by_mistake_is_no_pass(tmp_path: Path):
    alone = _run(FOLDER / f"{CLEAN}.jsonl")
    assert alone.exit_code == 2 and "give TRAINING, --checkpoint or --url, or --records-only" in alone.output
    for given in ([_training_file(tmp_path)], ["--checkpoint", tmp_path], ["--url", "http://127.0.0.1:9"]):
        both = _run(FOLDER / f"{CLEAN}.jsonl", *given, "--records-only")
        assert both.exit_code == 2 and "--records-only compares nothing: leave it out" in both.output


def test_staleness_counts_from_the_version_given(tmp_path: Path):
    records, path = FOLDER / "float32_temperature_1.0.jsonl", _training_file(tmp_path, "float32_temperature_1.0")
    assert _run(records, path, "--weight-version", "2").exit_code == 0
    stale = _run(records, path, "--weight-version", "4")
    assert stale.exit_code == 1 and "3 steps behind" in stale.output
    assert _run(records, path, "--weight-version", "4", "--max-staleness", "3").exit_code == 0


def test_a_checkpoint_is_a_training_side(checkpoint: Path):
    clean = _run(FOLDER / "float32_temperature_0.7.jsonl", "--checkpoint", checkpoint)
    assert clean.exit_code == 0, clean.output
    raw = _run(FOLDER / "raw_temperature_0.7.jsonl", "--checkpoint", checkpoint, "--json")
    assert raw.exit_code == 1
    (finding,) = CheckResult.model_validate_json(raw.stdout).findings
    assert (finding.fault, finding.side) == ("temperature", "rollout")
    assert finding.statistics["temperature"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("shown", [True, False])
def test_a_checkpoint_is_loaded_without_progress_bars(checkpoint: Path, capfd: pytest.CaptureFixture[str], shown: bool):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    change = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    try:
        change[shown]()
        Checkpoint(checkpoint)
        assert "%|" not in capfd.readouterr().err and logging.is_progress_bar_enabled() is shown
    finally:
        change[before]()


def test_a_checkpoint_tells_which_side_is_wrong(checkpoint: Path, tmp_path: Path):
    name = "float32_temperature_0.7"
    at_one = [
        record.with_fields(sampling=record.sampling.model_copy(update={"temperature": 1.0}))
        for record in recorded(name)
    ]
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in score("float32", at_one)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = _run(FOLDER / f"{name}.jsonl", path, "--checkpoint", checkpoint, "--json")
    (finding,) = CheckResult.model_validate_json(result.stdout).findings
    assert (finding.fault, finding.side) == ("temperature", "training")


def test_a_server_is_a_training_side_at_temperature_1_only(server: str):
    clean = _run(FOLDER / f"{CLEAN}.jsonl", "--url", server)
    assert clean.exit_code == 0, clean.output
    assert clean.output.count("quantization fp8: ") == 1  # what the server itself tells is known to widen the mismatch
    hot = _run(FOLDER / "float32_temperature_0.7.jsonl", "--url", server)
    assert hot.exit_code == 2 and "temperature 0.7" in hot.output


def test_a_server_beside_a_checkpoint_is_compared_with_it(server: str, checkpoint: Path):
    result = _run(FOLDER / "float32_temperature_0.7.jsonl", "--checkpoint", checkpoint, "--url", server, "--json")
    assert result.exit_code == 0, result.output
    note = CheckResult.model_validate_json(result.stdout).notes[-1]
    assert "rescoring at temperature 1, against the checkpoint: k3 " in note
    assert float(note.split("k3 ")[1].split(",")[0]) < 1e-8


def test_other_tokenizer_than_the_checkpoints(checkpoint: Path, tmp_path: Path):
    record = recorded(CLEAN)[0]
    strange = record.with_fields(response_ids=np.append(record.response_ids[:-1], 99_999))
    path = tmp_path / "records.jsonl"
    write_samples(path, [strange])
    result = _run(path, "--checkpoint", checkpoint)
    assert result.exit_code == 2 and "99999" in result.output and "vocabulary ends at 159" in result.output


def test_evidence_is_wrapped_at_words_and_paths_stay_whole(tmp_path: Path):
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    path = _training_file(folder, train_log_probs=lambda index, line: [-1.0, *line["train_log_probs"][:-1]])
    arguments = [str(FOLDER / f"{CLEAN}.jsonl"), str(path)]
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERM": "dumb"}).output.splitlines()
    assert f"training side: {path}" in lines
    assert all(len(line) <= 80 for line in lines if not line.endswith(".jsonl"))


def _bad(folder: Path, records: str | None, training: str | None) -> list[object]:
    paths: list[object] = []
    for name, text in (("records.jsonl", records), ("training.jsonl", training)):
        path = folder / name
        if text is not None:
            path.write_text(text)
        paths.append(path)
    return paths


GOOD_RECORD = '{"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}\n'
GOOD_LINE = '{"train_log_probs": [-1.0, -2.0]}\n'


@pytest.mark.parametrize(
    ("records", "lines", "said"),
    [
        (None, GOOD_LINE, "records"),
        (GOOD_RECORD, None, "training.jsonl"),
        ("", GOOD_LINE, "no response"),
        ("{nonsense", GOOD_LINE, "records.jsonl"),
        (GOOD_RECORD.replace("{", '{"mask": [1], '), GOOD_LINE, "`mismatch-plugin check --help` shows one"),
        (
            GOOD_RECORD.replace("response_ids", "replies"),
            GOOD_LINE,
            "lacks token ids of the responses. It has prompt_ids",
        ),
        (GOOD_RECORD, "{nonsense", "line 1"),
        (GOOD_RECORD, '{"log_probs": [-1.0]}', "log_probs"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0, "low"]}', "train_log_probs, position 1 is"),
        (GOOD_RECORD.replace("3]", f"{2**70}]"), GOOD_LINE, f"response_ids, position 1 is {2**70}, not an integer"),
        (GOOD_RECORD, "\n", "no sample"),
        (GOOD_RECORD, GOOD_LINE * 2, "1 records and 2 lines"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "index": 4}', "no index 0"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "sample_id": "a"}', "no record has one"),
        (GOOD_RECORD, GOOD_LINE + '{"train_log_probs": [-1.0], "index": 0}\n', "give all or none"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "index": 0}\n' * 2, "index 0 twice"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_checked_is_told_with_status_2(
    tmp_path: Path, records: str | None, lines: str | None, said: str, as_json: bool
):
    result = _run(*_bad(tmp_path, records, lines), *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    if as_json:
        assert json.loads(result.stdout)["status"] == "cannot_check"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--accept", "swaps"], "is no fault"),
        (["--checkpoint", "nowhere"], "is no folder"),
        (["--url", "http://127.0.0.1:9"], "does not rescore"),
    ],
)
def test_options_that_cannot_be_followed(options: list[str], said: str):
    result = _run(FOLDER / f"{CLEAN}.jsonl", *options)
    assert result.exit_code == 2 and said in result.output


def test_training_and_url_contradict_each_other(tmp_path: Path):
    result = _run(FOLDER / f"{CLEAN}.jsonl", _training_file(tmp_path), "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "leave one out" in result.output


def test_every_fault_has_a_name_for_accept():
    assert len(FAULTS) == 37 and "shift_by_one" in FAULTS


def test_training_masks_and_lines_that_do_not_fit(tmp_path: Path) -> None:
    records = FOLDER / f"{CLEAN}.jsonl"
    short = _training_file(tmp_path, loss_mask=lambda index, line: [1, 1])
    result = _run(records, short)
    assert result.exit_code == 2 and "loss_mask has 2 entries for" in result.output
    none = _training_file(tmp_path, loss_mask=lambda index, line: [0] * len(line["train_log_probs"]))
    result = _run(records, none)
    assert result.exit_code == 2 and "every loss mask is 0" in result.output
    more = _training_file(tmp_path, index=lambda index, line: index)
    more.write_text(more.read_text() + json.dumps({"index": 10_000, "train_log_probs": [-1.0]}) + "\n")
    result = _run(records, more)
    assert result.exit_code == 0 and "1 of its samples belong to no record" in result.output


def test_a_trainers_dump_is_checked_with_the_side_that_it_holds(tmp_path: Path):
    """One file with both sides; without the training side it is not enough; another format can be told."""
    ids = torch.arange(64)[None].repeat(8, 1) + torch.arange(8)[:, None]
    log_probs = -torch.rand(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
    sides = {"responses": ids, "rollout_log_probs": log_probs, "old_log_probs": log_probs + 1e-3 * torch.randn(8, 64)}
    torch.save({**sides, "response_mask": torch.ones(8, 64)}, tmp_path / "both.pt")
    result = _run(tmp_path / "both.pt")
    assert result.exit_code == 0, result.output
    assert f"training side: {tmp_path / 'both.pt'}" in result.output.replace("\n", "")
    torch.save({name: sides[name] for name in ("responses", "rollout_log_probs")}, tmp_path / "one.pt")
    result = _run(tmp_path / "one.pt")
    assert result.exit_code == 2 and "there is no training side" in result.output
    assert _run(tmp_path / "one.pt", tmp_path / "both.pt").exit_code == 0
    result = _run(tmp_path / "both.pt", "--format", "slime")
    assert result.exit_code == 2 and "holds no list of samples" in " ".join(result.output.split())


def test_a_checkpoint_that_lacks_weights_or_holds_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    prefixed, coded = tmp_path / "prefixed", tmp_path / "coded"
    shutil.copytree(checkpoint, prefixed)
    tensors = load_file(prefixed / "model.safetensors")
    named = {f"module.{name}": value for name, value in tensors.items()}
    save_file(named, prefixed / "model.safetensors", metadata={"format": "pt"})
    result = _run(FOLDER / f"{CLEAN}.jsonl", "--checkpoint", prefixed)
    assert result.exit_code == 2 and "tensors of its model, such as" in " ".join(result.output.split())
    coded.mkdir()
    marker = tmp_path / "ran"
    (coded / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    told = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (coded / "config.json").write_text(json.dumps(told))
    arguments = [str(FOLDER / f"{CLEAN}.jsonl"), "--checkpoint", str(coded)]
    result = CliRunner().invoke(app, arguments, input="y\ny\n")
    assert result.exit_code == 2 and not marker.exists() and "cannot load a causal language model" in result.output


def test_a_terminal_of_ascii_gets_ascii(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    write_samples(records, recorded(CLEAN))
    path = _training_file(tmp_path, train_log_probs=lambda _, line: [v - 1.0 for v in line["train_log_probs"]])
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(check_files(records, path), Console(file=out, width=160, highlight=False, markup=False))
    out.flush()
    assert b"KL(rollout || train" in out.buffer.getvalue()
