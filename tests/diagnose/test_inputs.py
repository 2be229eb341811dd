"""What `inspect` reads and compares: files, a trainer's dump, a checkpoint, a server that rescores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from tests.fixtures.sglang_check.policies import FOLDER, policy, recorded, score, training
from tests.fixtures.sglang_check.serving import serving

CLEAN = "bfloat16_temperature_1.0"
RECORDS = FOLDER / f"{CLEAN}.jsonl"


def _run(*arguments: object) -> Result:
    given = ["inspect", "--brief", *(str(item) for item in arguments)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "160", "TERM": "dumb"})


def _found(*arguments: object) -> dict[str, Any]:
    return json.loads(_run(*arguments, "--json").stdout)


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


def test_brief_prints_the_findings_alone_and_writes_no_page(tmp_path: Path):
    clean = _run(RECORDS, _training_file(tmp_path))
    assert clean.exit_code == 0 and clean.output.startswith("NORMAL: mean |Δ log p| ")
    path = _training_file(tmp_path, train_log_probs=lambda _, line: [-1.0, *line["train_log_probs"][:-1]])
    fault = _run(RECORDS, path)
    assert fault.exit_code == 1 and "Cause: shift_by_one" in fault.output
    for said in ("fix: Pair the log-prob of token t", f"first: sample 0 ({CLEAN}-0), position 0", "once fixed: mean"):
        assert said in fault.output
    assert f"note: training side: {path}" in fault.output.splitlines()
    for result in (clean, fault):
        assert "No setting" not in result.output and "ESS of" not in result.output and "Report" not in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["training.jsonl"]
    found = _found(RECORDS, path)
    assert found["predictions"] == [] and found["findings"][0]["fault"] == "shift_by_one"
    contradicting = _run(RECORDS, path, "--out", tmp_path / "page")
    assert contradicting.exit_code == 2 and "--brief contradict each other" in contradicting.output


def test_samples_are_matched_by_name_or_index_in_any_order(tmp_path: Path):
    by_name = _training_file(tmp_path, sample_id=lambda index, _: f"{CLEAN}-{index}").read_text()
    by_index = _training_file(tmp_path, index=lambda index, _: index).read_text()
    for text in (by_name, by_index):
        path = tmp_path / "reversed.jsonl"
        path.write_text("\n".join(reversed(text.splitlines())))
        assert _run(RECORDS, path).exit_code == 0
    more = tmp_path / "more.jsonl"
    more.write_text(by_index + json.dumps({"index": 10_000, "train_log_probs": [-1.0]}) + "\n")
    result = _run(RECORDS, more)
    assert result.exit_code == 0 and "1 of its samples belong to no record" in result.output


def test_staleness_counts_from_the_version_given(tmp_path: Path):
    records, path = FOLDER / "float32_temperature_1.0.jsonl", _training_file(tmp_path, "float32_temperature_1.0")
    assert _run(records, path, "--weight-version", "2").exit_code == 0
    stale = _run(records, path, "--weight-version", "4")
    assert stale.exit_code == 1 and "3 steps behind" in stale.output
    assert _run(records, path, "--weight-version", "4", "--max-staleness", "3").exit_code == 0


def test_a_checkpoint_tells_which_side_is_wrong(checkpoint: Path, tmp_path: Path):
    name = "float32_temperature_0.7"
    at_one = [
        record.with_fields(sampling=record.sampling.model_copy(update={"temperature": 1.0}))
        for record in recorded(name)
    ]
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in score("float32", at_one)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = _found(FOLDER / f"{name}.jsonl", path, "--checkpoint", checkpoint)["findings"]
    assert (finding["fault"], finding["side"]) == ("temperature", "training")
    assert _run(FOLDER / f"{name}.jsonl", "--checkpoint", checkpoint).exit_code == 0  # itself a training side
    (finding,) = _found(FOLDER / "raw_temperature_0.7.jsonl", "--checkpoint", checkpoint)["findings"]
    assert (finding["fault"], finding["side"]) == ("temperature", "rollout")
    assert finding["statistics"]["temperature"] == pytest.approx(1.0, abs=0.01)


def test_a_server_is_a_training_side_at_temperature_1_only(server: str, checkpoint: Path, tmp_path: Path):
    clean = _run(RECORDS, "--url", server)
    assert clean.exit_code == 0, clean.output
    assert clean.output.count("quantization fp8: ") == 1  # what the server itself tells is known to widen the mismatch
    hot = FOLDER / "float32_temperature_0.7.jsonl"
    refused = _run(hot, "--url", server)
    assert refused.exit_code == 2 and "temperature 0.7" in refused.output
    note = _found(hot, "--checkpoint", checkpoint, "--url", server)["notes"][-1]
    assert "rescoring at temperature 1, against the checkpoint: k3 " in note
    assert float(note.split("k3 ")[1].split(",")[0]) < 1e-8
    both = _run(RECORDS, _training_file(tmp_path), "--url", server)
    assert both.exit_code == 2 and "leave one out" in both.output


def test_a_trainers_dump_is_judged_by_the_sides_that_it_holds(tmp_path: Path):
    ids = torch.arange(64)[None].repeat(8, 1) + torch.arange(8)[:, None]
    log_probs = -torch.rand(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
    sides = {"responses": ids, "rollout_log_probs": log_probs, "old_log_probs": log_probs + 1e-3 * torch.randn(8, 64)}
    torch.save({**sides, "response_mask": torch.ones(8, 64)}, tmp_path / "both.pt")
    result = _run(tmp_path / "both.pt")
    assert result.exit_code == 0 and f"training side: {tmp_path / 'both.pt'}" in result.output.replace("\n", "")
    torch.save({name: sides[name] for name in ("responses", "rollout_log_probs")}, tmp_path / "one.pt")
    result = _run(tmp_path / "one.pt")
    assert result.exit_code == 3 and "There is no training side" in result.output
    assert _run(tmp_path / "one.pt", tmp_path / "both.pt").exit_code == 0
    result = _run(tmp_path / "both.pt", "--format", "slime")
    assert result.exit_code == 2 and "holds no list of samples" in " ".join(result.output.split())


def test_equal_sides_of_a_verl_dump_are_not_decided(tmp_path: Path):
    """Its bypass mode copies one side into the other; of other dumps that is remarked."""
    made = torch.Generator().manual_seed(0)
    shape, log_probs = (8, 64), -torch.rand(8, 64, generator=made) - 0.1
    dump = {"prompts": torch.ones(8, 2, dtype=torch.long), "responses": torch.randint(5, 90, shape, generator=made),
            "attention_mask": torch.ones(8, 66), "rollout_log_probs": log_probs}  # fmt: skip
    for old, status, verdict in ((log_probs, 3, "undecided"), (log_probs - 1e-3, 0, "normal")):
        torch.save({**dump, "old_log_probs": old}, tmp_path / "verl.pt")
        found = _found(tmp_path / "verl.pt")
        assert (found["format"], found["verdict"]) == ("verl", verdict)
        assert ("bypass_mode=False" in found["next_step"]) == (status == 3)
        screen = CliRunner().invoke(app, ["inspect", str(tmp_path / "verl.pt"), "--no-report"]).output
        assert ("--mismatch-preset" in screen) == ("verl (--host " in screen) == (status == 0)
        assert _run(tmp_path / "verl.pt").exit_code == status
    write_samples(tmp_path / "a.jsonl", recorded(CLEAN))
    lines = [json.dumps({"train_log_probs": one.rollout_log_probs.tolist()}) for one in recorded(CLEAN)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    found = _found(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert found["verdict"] == "normal" and "aligned kernels work, or one list was given twice" in found["next_step"]


GOOD_RECORD = '{"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}\n'
GOOD_LINE = '{"train_log_probs": [-1.0, -2.0]}\n'


@pytest.mark.parametrize(
    ("records", "lines", "said"),
    [
        (GOOD_RECORD, None, "training.jsonl"),
        ("", GOOD_LINE, "no response"),
        ("{nonsense", GOOD_LINE, "records.jsonl"),
        (GOOD_RECORD.replace("response_ids", "replies"), GOOD_LINE, "lacks token ids of the responses"),
        (GOOD_RECORD, "{nonsense", "line 1"),
        (GOOD_RECORD, '{"train_log_probs": null}', "has no train_log_probs"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0, "low"]}', "train_log_probs, position 1 is"),
        (GOOD_RECORD, "\n", "no sample"),
        (GOOD_RECORD, GOOD_LINE * 2, "1 records and 2 lines"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "index": 4}', "no index 0"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "sample_id": "a"}', "no record has one"),
        (GOOD_RECORD, GOOD_LINE + '{"train_log_probs": [-1.0], "index": 0}\n', "give all or none"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0], "index": 0}\n' * 2, "index 0 twice"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0, -2.0], "loss_mask": [1]}', "loss_mask has 1 entries for 2 log-probs"),
        (GOOD_RECORD, '{"train_log_probs": [-1.0, -2.0], "loss_mask": [0, 0]}', "every loss mask is 0"),
    ],
)
def test_what_cannot_be_read_is_told_with_status_2(tmp_path: Path, records: str, lines: str | None, said: str):
    (tmp_path / "records.jsonl").write_text(records)
    if lines is not None:
        (tmp_path / "training.jsonl").write_text(lines)
    result = _run(tmp_path / "records.jsonl", tmp_path / "training.jsonl")
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_checkpoints_and_servers_that_cannot_score_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    record = recorded(CLEAN)[0]
    write_samples(tmp_path / "a.jsonl", [record.with_fields(response_ids=np.append(record.response_ids[:-1], 99_999))])
    prefixed, coded, marker = tmp_path / "prefixed", tmp_path / "coded", tmp_path / "ran"
    shutil.copytree(checkpoint, prefixed)
    named = {f"module.{name}": value for name, value in load_file(prefixed / "model.safetensors").items()}
    save_file(named, prefixed / "model.safetensors", metadata={"format": "pt"})
    coded.mkdir()
    (coded / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    told = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (coded / "config.json").write_text(json.dumps(told))
    for given, said in (
        ((tmp_path / "a.jsonl", "--checkpoint", checkpoint), "vocabulary ends at 159"),
        ((RECORDS, "--checkpoint", prefixed), "tensors of its model, such as"),
        ((RECORDS, "--checkpoint", coded), "cannot load a causal language model"),
        ((RECORDS, "--checkpoint", tmp_path / "nowhere"), "is no folder"),
        ((RECORDS, "--url", "http://127.0.0.1:9"), "does not rescore"),
    ):
        result = _run(*given)
        assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert not marker.exists()
