"""`mismatch-plugin inspect` of a dump: what it reads and compares, its verdict, JSON, page and exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_plugin.data.files import write_samples
from tests.diagnose.door import CLEAN, RECORDS, faults, inspect, noisy, run, saved, text, told, training_file
from tests.fixtures.sglang_check.policies import FOLDER, recorded, score
from tests.fixtures.sglang_check.serving import serving

HOSTS = {"any", "slime", "miles", "megatron-lm", "verl", "nemo-rl", "trl", "skyrl", "prime-rl", "python"}


def late(_: int, line: dict[str, Any]) -> list[float]:
    """Log-probs of the previous token."""
    return [-1.0, *line["train_log_probs"][:-1]]


def test_a_clean_dump_is_normal_and_its_json_says_all(tmp_path: Path) -> None:
    path = training_file(tmp_path)
    flags = "--use-tis --tis-mode clip --tis-upper-bound 3"
    clean = told(RECORDS, path, "--flags", flags, "--gate-kl", "0.01", "--out", tmp_path / "page")
    assert (clean["status"], clean["verdict"], clean["format"], clean["findings"]) == (0, "normal", "records", [])
    assert clean["gate"]["passed"] and clean["gate"]["value"] < clean["gate"]["bar"] == 0.01
    assert clean["metrics"]["rollout_corr/k3_kl"] == pytest.approx(clean["mismatch"]["k3_kl"], rel=1e-9)
    own = clean["predictions"][0]
    assert own["own"] and own["algorithm"] == 2 and own["settings"]["tis"]["upper_bound"] == 3.0
    assert {"setting", "kept", "ess", "bias", "noise", "second_pass"} <= own.keys()
    assert {item["algorithm"] for item in clean["predictions"]} == {0, 1, 2, 3}
    advice = clean["recommendation"]
    assert advice["preset"] == "seq_is" and {*advice["flags"]} == HOSTS and advice["reasons"] and advice["watch"]
    assert "--mismatch-preset seq_is" in advice["flags"]["verl"] and "histogram" not in clean
    assert next(item for item in clean["predictions"] if item["setting"] == advice["setting"])["kept"] == 1.0
    screen = run(RECORDS, path, "--no-report", "--host", "verl").output.splitlines()
    assert screen[0].startswith("NORMAL") and screen[1].startswith("Is this normal? Yes") and len(screen) <= 40
    assert "-m mismatch_plugin.launch -m verl.trainer.main_ppo" in " ".join(screen)
    assert not (tmp_path / "training_inspect").exists()


def test_a_fault_is_named_first_and_nothing_is_recommended(tmp_path: Path) -> None:
    path = training_file(tmp_path, train_log_probs=late)
    found = told(RECORDS, path)
    assert (found["status"], found["verdict"], found["recommendation"]) == (1, "fault", None)
    finding = found["findings"][0]
    counted = {"samples", "of_samples", "tokens", "of_tokens", "statistics", "severity", "accepted"}
    assert {*finding} == counted | {"fault", "side", "confidence", "evidence", "first", "fix"}
    assert finding["fault"] == "shift_by_one" and finding["first"]["sample"] == 0
    assert found["headline"].startswith("Fault found: shift_by_one; mean") and found["fixed"]["k3_kl"] < 0.01
    screen = run(RECORDS, path, "--no-report").output
    assert screen.startswith("FAULT FOUND") and "No setting is recommended: fix the fault first" in screen
    brief = run(RECORDS, path, "--brief", columns=160).output
    for said in ("Cause: shift_by_one", f"sample 0 ({CLEAN}-0), position 0", "fix: Pair the", "once fixed: mean"):
        assert said in brief
    advice = told(RECORDS, path, "--accept", "shift_by_one")["recommendation"]
    assert advice["preset"] == "token_is", "the cause is known and meant"
    assert "ESS of" not in brief and [file.name for file in tmp_path.iterdir()] == ["training.jsonl"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--brief", "--out", "page"), "--brief contradict each other"),
        (("--host", "nemo"), "--host nemo is unknown"),
        (("--preset", "token_is", "--flags", "--use-tis"), "--preset and --flags name your settings"),
        (("--flags", "--use-tis --lr 1"), "--lr is no flag of this package"),
        (("--flags", "--tis-upper-bound 2 --tis_upper_bound 3"), "contradicts --tis-upper-bound 2.0, give it once"),
        (("--url", "http://127.0.0.1:9"), "does not rescore"),
    ],
)
def test_an_option_that_means_nothing_is_one_sentence(options: tuple[str, ...], said: str) -> None:
    result = run(RECORDS, *options, columns=300)
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_what_the_user_knows_counts(tmp_path: Path) -> None:
    path = training_file(tmp_path)

    def pair(*options: str) -> str:
        return told(RECORDS, path, "--brief", *options)["normality"]

    assert "int8 engine" in pair("--engine", "int8") and "MoE bf16" in pair("--moe")
    assert "bf16 engine, fp32 trainer" in pair("--engine", "bf16", "--trainer", "fp32", "--dense")
    assert told(RECORDS, path, "--expensive-pass", "--one-step")["recommendation"]["preset"] == "pg_is"
    again = "--use-tis --use-tis --tis-upper-bound 2 --tis-upper-bound 2.0 --rs-criterion token:k2:1"
    own = told(RECORDS, path, "--flags", f"{again} --rs-criterion sequence_max:k2:2")["predictions"][0]["settings"]
    assert own["tis"]["upper_bound"] == 2.0 and len(own["rs"]["criteria"]) == 2
    for bar, status in (("1e-6", 1), ("0.1", 0)):  # the gate of the user's own settings
        found = told(RECORDS, path, "--flags", f"--use-tis --mismatch-gate-kl {bar}")
        assert (found["status"], found["gate"]["bar"]) == (status, float(bar))
    cold = training_file(tmp_path, temperature=lambda *_: 0.9)
    assert run(RECORDS, cold, "--brief").exit_code == 1
    assert run(RECORDS, cold, "--brief", "--accept", "temperature").exit_code == 0
    records, path = FOLDER / "float32_temperature_1.0.jsonl", training_file(tmp_path, name="float32_temperature_1.0")
    assert run(records, path, "--brief", "--weight-version", "2").exit_code == 0
    assert "3 steps behind" in text(records, path, "--brief", "--weight-version", "4")
    assert run(records, path, "--brief", "--weight-version", "4", "--max-staleness", "3").exit_code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [("", "training.jsonl"), ('{"train_log_probs": [-1.0, -2.0], "loss_mask": [0, 0]}', "every loss mask is 0")],
)
def test_what_cannot_be_read_is_told_with_status_2(tmp_path: Path, line: str, said: str) -> None:
    given = [tmp_path / "records.jsonl", tmp_path / "training.jsonl"]
    given[0].write_text('{"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}\n')
    if line:
        given[1].write_text(line)
    found = told(*given, "--brief")
    assert (found["status"], found["verdict"]) == (2, "cannot_read") and said in found["headline"]
    assert run(*given).stderr.startswith("cannot inspect: ")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut")
    assert "cut.pt" in told(tmp_path / "cut.pt", "--host", "megatron_lm")["headline"]


def test_a_checkpoint_tells_which_side_is_wrong(tmp_path: Path) -> None:
    name = "float32_temperature_0.7"
    at_one = [one.with_fields(sampling=one.sampling.model_copy(update={"temperature": 1.0})) for one in recorded(name)]
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in score("float32", at_one)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--brief", "--checkpoint", saved("float32"))
    (finding,) = told(FOLDER / f"{name}.jsonl", path, *given)["findings"]
    assert (finding["fault"], finding["side"]) == ("temperature", "training")
    assert run(FOLDER / f"{name}.jsonl", *given).exit_code == 0  # itself a training side
    (finding,) = told(FOLDER / "raw_temperature_0.7.jsonl", *given)["findings"]
    assert (finding["fault"], finding["side"]) == ("temperature", "rollout")


def test_checkpoints_that_cannot_score_are_refused(tmp_path: Path) -> None:
    record = recorded(CLEAN)[0]
    write_samples(tmp_path / "a.jsonl", [record.with_fields(response_ids=np.append(record.response_ids[:-1], 99_999))])
    prefixed, coded, marker = tmp_path / "prefixed", tmp_path / "coded", tmp_path / "ran"
    shutil.copytree(saved("float32"), prefixed)
    renamed = {f"module.{name}": value for name, value in load_file(prefixed / "model.safetensors").items()}
    save_file(renamed, prefixed / "model.safetensors", metadata={"format": "pt"})
    coded.mkdir()
    (coded / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (coded / "config.json").write_text(json.dumps(own))
    for path, folder, said in (
        (tmp_path / "a.jsonl", saved("float32"), "vocabulary ends at 159"),
        (RECORDS, prefixed, "tensors of its model, such as"),
        (RECORDS, coded, "cannot load a causal language model"),
    ):
        found = told(path, "--brief", "--checkpoint", folder)
        assert found["status"] == 2 and said in found["headline"]
    assert not marker.exists()


def test_a_server_is_a_training_side_at_temperature_1_only() -> None:
    with serving(info={"dtype": "float32", "quantization": "fp8"}) as server:
        clean = run(RECORDS, "--brief", "--url", server)
        assert clean.exit_code == 0, clean.output
        assert clean.output.count("quantization fp8: ") == 1  # what the server tells is known to widen the mismatch
        hot = FOLDER / "float32_temperature_0.7.jsonl"
        refused = run(hot, "--brief", "--url", server)
        assert refused.exit_code == 2 and "temperature 0.7" in refused.output
        note = told(hot, "--brief", "--checkpoint", saved("float32"), "--url", server)["notes"][-1]
        assert "rescoring at temperature 1, against the checkpoint: mean " in note
        assert float(note.split("k3 ")[1].split()[0]) < 1e-8


def test_equal_sides_of_a_verl_dump_are_not_decided(tmp_path: Path) -> None:
    """Its bypass mode copies one side into the other; of other dumps that is remarked."""
    draw = torch.Generator().manual_seed(0)
    shape, log_probs = (8, 64), -torch.rand(8, 64, generator=draw) - 0.1
    dump = {"prompts": torch.ones(8, 2, dtype=torch.long), "responses": torch.randint(5, 90, shape, generator=draw),
            "attention_mask": torch.ones(8, 66), "rollout_log_probs": log_probs}  # fmt: skip
    for old, status, verdict in ((log_probs, 3, "undecided"), (log_probs - 1e-3, 0, "normal")):
        torch.save({**dump, "old_log_probs": old}, tmp_path / "verl.pt")
        found = told(tmp_path / "verl.pt", "--brief")
        assert (found["format"], found["verdict"], found["status"]) == ("verl", verdict, status)
        assert ("bypass_mode=False" in found["next_step"]) == (status == 3)
        screen = run(tmp_path / "verl.pt", "--no-report").output
        assert ("--mismatch-preset" in screen) == ("Flags for verl (--host " in screen) == (status == 0)
    write_samples(tmp_path / "a.jsonl", recorded(CLEAN))
    lines = [json.dumps({"train_log_probs": one.rollout_log_probs.tolist()}) for one in recorded(CLEAN)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    found = told(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--brief")
    assert found["verdict"] == "normal" and "aligned kernels work, or one list was given twice" in found["next_step"]


def test_no_setting_contradicts_the_line_above_it(tmp_path: Path) -> None:
    """Normal and small: disabled. Above normal for fp16, and small: none. Far: none, and the next command."""
    path = tmp_path / "a.npz"
    command = "a.npz --checkpoint NOW --reference-checkpoint START"
    for spread, more, first, advised, next_step in (
        (0.01, (), "NORMAL", True, False),
        (0.03, ("--engine", "fp16"), "ABOVE NORMAL", False, True),
        (0.06, (), "ABOVE NORMAL", True, True),
        (0.8, (), "FAULT FOUND", False, True),
    ):
        draw = np.random.default_rng(0)
        rollout = -draw.exponential(0.7, (32, 200)) - 1e-3
        trained = np.minimum(rollout + spread * draw.normal(size=rollout.shape), 0.0)
        np.savez(path, response_ids=draw.integers(5, 9000, rollout.shape), rollout_log_probs=rollout,
                 old_log_probs=trained, response_mask=np.ones(rollout.shape, dtype=int))  # fmt: skip
        said = run(path, "--no-report", *more).output
        assert said.startswith(first) and ("Recommended: " in said) == advised == ("--mismatch-preset" in said), said
        assert ("Recommended: disabled" in said) == (first == "NORMAL") and (command in said) == next_step
        assert "note: the dump tells no sampling temperature" in said, "what the reader assumed"
        assert ("so small a mismatch needs no correction" in said) == (spread == 0.03)


def test_padding_on_the_left_is_told(tmp_path: Path) -> None:
    rows, mask = [[0.0, 0.0, -1.0, -1.0, -1.0]] * 60, [[0, 0, 1, 1, 1]] * 60
    columns = {"response_ids": [[7] * 5] * 60, "rollout_log_probs": rows, "old_log_probs": rows, "response_mask": mask}
    torch.save({name: torch.tensor(value) for name, value in columns.items()}, tmp_path / "a.pt")
    said = "in 60 of 60 responses the first token does not train: if they are padded on the left"
    assert said in text(tmp_path / "a.pt", "--no-report")


def test_what_more_would_tell(tmp_path: Path) -> None:
    write_samples(tmp_path / "few.jsonl", [recorded(CLEAN)[0]])
    few = told(tmp_path / "few.jsonl", training_file(tmp_path, first=1))
    assert (few["status"], few["verdict"]) == (3, "undecided") and "Inspect a larger dump" in few["next_step"]
    found = told(RECORDS, training_file(tmp_path, "drift-0.004-3"))
    assert found["verdict"] == "large" and "--reference-checkpoint START" in found["next_step"]
    assert found["recommendation"]["preset"] != "token_icepop"  # no router shows, whatever tail the drift has
    said = text(RECORDS, "--no-report")
    assert "There is no training side: add TRAINING, --checkpoint NOW" in said
    assert said.lower().count("not decided") == 1 and "larger dump" not in said and "shift_by_one" not in said
    found = told(RECORDS)
    assert found["one_sided"] and "shift_by_one" in found["undecided"][0]["faults"] and found["status"] == 3


def test_numbers_that_cannot_be_measured_hide_no_finding(tmp_path: Path) -> None:
    """Probabilities in place of log-probs leave no token, -1e308 no figure: the finding is what counts."""
    records = [one.with_fields(rollout_log_probs=np.full(len(one), 0.5)) for one in recorded(CLEAN)]
    write_samples(tmp_path / "a.jsonl", records)
    found = told(tmp_path / "a.jsonl", training_file(tmp_path))
    assert found["verdict"] == "fault" and found["size"] is None and "probabilities" in faults(found["findings"])
    path = training_file(tmp_path, train_log_probs=lambda _, line: [-1e308] * len(line["train_log_probs"]))
    found = told(RECORDS, path)
    assert found["verdict"] == "fault" and found["size"] is None and "floor" in faults(found["findings"])


def test_the_page_lies_next_to_a_folder_and_one_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    dumps = tmp_path / "run.1"
    dumps.mkdir()
    write_samples(dumps / "0.jsonl", recorded(CLEAN))
    run(dumps, training_file(tmp_path))
    assert (tmp_path / "run.1_inspect" / "report.html").exists()
    blocked = run(dumps, training_file(tmp_path), "--out", dumps / "0.jsonl")
    assert blocked.exit_code == 0 and "cannot be written" in blocked.stderr


def test_one_thread_unless_told_otherwise_or_a_model_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        for given, variable, threads in (((), None, 1), ((), "2", 2), (("--checkpoint", tmp_path), None, 2)):
            torch.set_num_threads(2)
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if variable:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            run(RECORDS, "--brief", *given)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_an_accepted_fault_that_leaves_no_token_decides_nothing() -> None:
    samples = [one.with_fields(train_log_probs=np.zeros(len(one))) for one in noisy(0.01, 60, (20, 47), seed=7)]
    found = inspect(samples, "--brief", "--accept", "zero_fill")
    assert (found["verdict"], found["status"]) == ("undecided", 3), found["findings"]
