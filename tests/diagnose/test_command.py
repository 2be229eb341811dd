"""`mismatch-plugin inspect` of a dump: from files to verdict, JSON, page and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.diagnose.diagnosis import own_settings
from tests.fixtures.sglang_check.policies import FOLDER, recorded, score, training

CLEAN = "bfloat16_temperature_1.0"
RECORDS = FOLDER / f"{CLEAN}.jsonl"
HOSTS = {"slime", "miles", "megatron-lm", "verl", "nemo-rl", "trl", "skyrl", "prime-rl", "python"}


def _inspect(*arguments: object) -> Result:
    given = ["inspect", *(str(item) for item in arguments)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "100", "TERM": "dumb"})


def _training(
    folder: Path, change: Callable[[list[Any]], list[Any]] = lambda values: values, first: int = 10**6
) -> Path:
    """The float32 trainer's file of the recorded responses."""
    path = folder / "training.jsonl"
    samples = training("float32", CLEAN)[:first]
    path.write_text(
        "".join(json.dumps({"train_log_probs": change(s.train_log_probs.tolist())}) + "\n" for s in samples)
    )
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("clean")
    flags = "--use-tis --tis-mode clip --tis-upper-bound 3"
    result = _inspect(
        RECORDS, _training(folder), "--json", "--flags", flags, "--gate-kl", "0.01", "--out", folder / "page"
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) | {"folder": folder / "page"}


def test_one_screen_with_the_verdict_first(tmp_path: Path) -> None:
    result = _inspect(RECORDS, _training(tmp_path), "--no-report", "--host", "verl")
    lines = result.output.splitlines()
    assert result.exit_code == 0 and lines[0].startswith("NORMAL") and lines[1].startswith("Is this normal? Yes")
    assert len(lines) <= 40 and "-m mismatch_plugin.launch -m verl.trainer.main_ppo" in result.output
    assert not (tmp_path / "training_inspect").exists()


def test_a_fault_is_named_first_and_nothing_is_recommended(tmp_path: Path) -> None:
    path = _training(tmp_path, lambda values: [*values[1:], values[0]])
    result = _inspect(RECORDS, path, "--json", "--no-report")
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and told["verdict"] == "fault" and told["recommendation"] is None
    finding = told["findings"][0]
    counted = {"samples", "of_samples", "tokens", "of_tokens", "statistics", "severity", "accepted"}
    assert set(finding) == counted | {"fault", "side", "confidence", "evidence", "first", "fix"}
    assert finding["fault"] == "shift_by_one" and finding["first"]["sample"] == 0
    assert told["headline"].startswith("Fault found: shift_by_one; mean") and told["fixed"]["k3_kl"] < 0.01
    screen = _inspect(RECORDS, path, "--no-report").output
    assert screen.startswith("FAULT FOUND") and "No setting is recommended: fix the fault first" in screen


def test_an_accepted_fault_is_none(tmp_path: Path) -> None:
    samples = training("float32", CLEAN)
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": s.train_log_probs.tolist(), "temperature": 0.9} for s in samples]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _inspect(RECORDS, path, "--no-report").exit_code == 1
    assert _inspect(RECORDS, path, "--no-report", "--accept", "temperature").exit_code == 0
    unknown = _inspect(RECORDS, path, "--accept", "temprature")
    assert unknown.exit_code == 2 and "--accept temprature is no fault" in unknown.output


def test_the_gate_fails_above_its_bar(tmp_path: Path) -> None:
    path = _training(tmp_path)
    failed = _inspect(RECORDS, path, "--json", "--no-report", "--gate-kl", "1e-9")
    gate = json.loads(failed.stdout)["gate"]
    assert failed.exit_code == 1 and gate["passed"] is False and gate["bar"] == 1e-9
    assert _inspect(RECORDS, path, "--no-report", "--gate-kl", "0").exit_code == 2
    for bar, status in (("1e-6", 1), ("0.1", 0)):  # that of the user's own settings
        result = _inspect(RECORDS, path, "--json", "--no-report", "--flags", f"--use-tis --mismatch-gate-kl {bar}")
        assert result.exit_code == status and json.loads(result.stdout)["gate"]["bar"] == float(bar)


def test_what_cannot_be_read_is_status_2(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut")
    for path in (tmp_path / "absent.pt", tmp_path / "empty.jsonl", tmp_path / "cut.pt"):
        result = _inspect(path, "--json")
        told = json.loads(result.stdout)
        assert result.exit_code == 2 and told["verdict"] == "cannot_read" and path.name in told["headline"]
    assert "nothing to inspect" in _inspect().output
    assert "--host nemo is unknown" in _inspect(RECORDS, "--host", "nemo").output
    for host in ("megatron-lm", "megatron_lm", "megatron_rl", "nemo-rl", "nemo_rl"):
        assert "is unknown" not in _inspect(tmp_path / "absent.pt", "--host", host).output


def test_own_settings_come_from_one_place() -> None:
    assert own_settings(None, None, None) is None
    assert own_settings(None, "token_is", None) == mp.preset("token_is")
    assert own_settings(None, None, "--use-tis --tis-upper-bound 5") == mp.MismatchConfig.build(
        {"use_tis": True, "tis": {"upper_bound": 5.0}}
    )
    with pytest.raises(ValueError, match=r"--preset and --flags all name your settings"):
        own_settings(None, "token_is", "--use-tis")
    with pytest.raises(ValueError, match=r"--lr is no flag of this package"):
        own_settings(None, None, "--use-tis --lr 1")
    with pytest.raises(ValueError, match=r"--flags '--tis-level tok'"):
        own_settings(None, None, "--tis-level tok")
    with pytest.raises(ValueError, match=r"--tis-upper-bound 3\.0 contradicts --tis-upper-bound 2\.0, give it once"):
        own_settings(None, None, "--use-tis --tis-upper-bound 2 --tis_upper_bound 3")
    again = "--use-tis --use-tis --tis-upper-bound 2 --tis-upper-bound 2.0 --rs-criterion token:k2:1"
    several = own_settings(None, None, f"{again} --rs-criterion sequence_max:k2:2")
    assert several is not None and several.tis.upper_bound == 2.0 and len(several.criteria) == 2


def test_sampling_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("[1, 2]\n")
    asked = ("--url", "http://127.0.0.1:1", "--prompts", tmp_path / "prompts", "--temperature")
    for value, why in (("nan", "nan: it should be a finite number"), ("-1", "-1.0: it should be greater than or eq")):
        result = _inspect(*asked, value)
        assert result.exit_code == 2 and result.stderr.startswith(f"cannot inspect: --temperature is {why}")
        assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1" in _inspect(*asked, "0.5").stderr  # it asks the server


def test_one_thread_unless_told_otherwise_or_a_model_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        for given, environment, threads in (((), {}, 1), ((), {"OMP_NUM_THREADS": "2"}, 2),
                                            (("--checkpoint", tmp_path), {}, 2)):  # fmt: skip
            torch.set_num_threads(2)
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            _inspect(RECORDS, "--json", "--no-report", *given)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_no_setting_contradicts_the_line_above_it(tmp_path: Path) -> None:
    """Normal and small: disabled. Above normal for fp16, and small: none. Far: none, and the next command."""

    def dump(spread: float) -> Path:
        made = np.random.default_rng(0)
        rollout = -made.exponential(0.7, (32, 200)) - 1e-3
        trained = np.minimum(rollout + spread * made.normal(size=rollout.shape), 0.0)
        np.savez(tmp_path / "a.npz", response_ids=made.integers(5, 9000, rollout.shape), rollout_log_probs=rollout,
                 old_log_probs=trained, response_mask=np.ones(rollout.shape, dtype=int))  # fmt: skip
        return tmp_path / "a.npz"

    command = "a.npz --checkpoint NOW --reference-checkpoint START"
    for spread, more, first, advised, next_step in (
        (0.01, (), "NORMAL", True, False),
        (0.03, ("--engine", "fp16"), "ABOVE NORMAL", False, True),
        (0.06, (), "ABOVE NORMAL", True, True),
        (0.8, (), "FAULT FOUND", False, True),
    ):
        said = _inspect(dump(spread), "--no-report", *more).output
        assert said.startswith(first) and ("Recommended: " in said) == advised == ("--mismatch-preset" in said), said
        assert ("Recommended: disabled" in said) == (first == "NORMAL") and (command in said) == next_step
        assert "note: the dump tells no sampling temperature" in said, "what the reader assumed"
    assert "so small a mismatch needs no correction" in _inspect(dump(0.03), "--no-report", "--engine", "fp16").output


def test_padding_on_the_left_is_told(tmp_path: Path) -> None:
    for mask, told in (([0, 0, 1, 1, 1], True), ([1, 1, 1, 0, 0], False)):
        rows = [[-1.0 if one else 0.0 for one in mask]] * 60
        columns = {"response_ids": [[7] * 5] * 60, "rollout_log_probs": rows, "old_log_probs": rows}
        torch.save({name: torch.tensor(value) for name, value in columns.items()}
                   | {"response_mask": torch.tensor([mask] * 60)}, tmp_path / "a.pt")  # fmt: skip
        said = " ".join(_inspect(tmp_path / "a.pt", "--no-report").output.split())
        assert ("in 60 of 60 responses the first token does not train: if they are padded on the left" in said) == told


def test_what_more_would_tell(tmp_path: Path) -> None:
    write_samples(tmp_path / "few.jsonl", [recorded(CLEAN)[0]])
    few = _inspect(tmp_path / "few.jsonl", _training(tmp_path, first=1), "--json", "--no-report")
    assert few.exit_code == 3 and json.loads(few.stdout)["verdict"] == "undecided"
    drifted = tmp_path / "drifted.jsonl"
    lines = [{"train_log_probs": s.train_log_probs.tolist()} for s in score("drift-0.004-3", list(recorded(CLEAN)))]
    drifted.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = json.loads(_inspect(RECORDS, drifted, "--json", "--no-report").stdout)
    assert told["verdict"] == "large" and "--reference-checkpoint START" in told["next_step"]
    assert told["recommendation"]["preset"] != "token_icepop"  # no router shows, whatever tail the drift has
    result = _inspect(RECORDS, "--no-report")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 3 and "There is no training side: add TRAINING, --checkpoint NOW" in text
    assert text.lower().count("not decided") == 1 and "larger dump" not in text and "shift_by_one" not in text
    told = json.loads(_inspect(RECORDS, "--no-report", "--json").stdout)
    assert told["one_sided"] and "shift_by_one" in told["undecided"][0]["faults"] and told["recommendation"] is None


def test_numbers_that_cannot_be_measured_hide_no_finding(tmp_path: Path) -> None:
    """Probabilities in place of log-probs leave no token, -1e308 no figure: the finding is what counts."""
    records = [one.with_fields(rollout_log_probs=np.full(len(one), 0.5)) for one in recorded(CLEAN)]
    write_samples(tmp_path / "probabilities.jsonl", records)
    for path, change, fault in (
        (tmp_path / "probabilities.jsonl", lambda values: values, "probabilities"),
        (RECORDS, lambda values: [-1e308] * len(values), "floor"),
    ):
        result = _inspect(path, _training(tmp_path, change), "--json", "--no-report")
        told = json.loads(result.stdout)
        assert result.exit_code == 1 and told["verdict"] == "fault" and told["size"] is None
        assert fault in [item["fault"] for item in told["findings"]]
    gone = _inspect(RECORDS, _training(tmp_path, lambda values: [*values[:-1], None]), "--json", "--no-report")
    told = json.loads(gone.stdout)
    assert told["verdict"] == "fault" and told["predictions"] == [] and told["size"] is not None
    assert any("have no number on one side: they are left out" in note for note in told["notes"])
    assert not any("predictions" in note for note in told["notes"])


def test_the_page_of_a_folder_lies_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = tmp_path / "run.1"
    dumps.mkdir()
    write_samples(dumps / "0.jsonl", recorded(CLEAN))
    monkeypatch.chdir(dumps)
    _inspect(".", _training(tmp_path))
    assert (tmp_path / "run.1_inspect" / "report.html").exists()


@pytest.mark.parametrize("name", ["dump.jsonl", "dump\udcff.jsonl"])
def test_names_that_no_file_takes_and_commands_of_a_terminal_are_harmless(tmp_path: Path, name: str) -> None:
    dump, out, rows = tmp_path / name, tmp_path / "out", []
    for index, sample in enumerate(training("float32", CLEAN)):
        values = [-0.5 - 0.01 * at for at in range(len(sample.train_log_probs))]
        rows.append({
            "prompt_ids": [1, 2], "response_ids": list(range(len(values))), "rollout_log_probs": values,
            "log_probs": [value - 1.0 for value in values], "sample_id": f"\ud800\x1b[31m{index}",
            "weight_versions": ["\udfff\x1b]0;x\x07"], "group": "\ud801", "\x1b[2Jcolumn": 1,
        })  # fmt: skip
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = _inspect(dump, "--json", "--out", out)
    found = json.loads(result.output)
    assert result.exit_code == 1 and (out / "report.html").exists()
    assert Path(found["source"]).name == name.encode("utf-8", "backslashreplace").decode()
    assert r"\ud800" in str(found["findings"][0]["first"]) or r"\ud800" in result.output
    for more in ("--brief", "--no-report"):
        result = _inspect(dump, more)
        assert result.exit_code == 1 and "\x1b" not in result.output and "\x07" not in result.output
    dump.write_text('{"response_ids": [1], "prompt_ids": [2], "\\u001b[2J": 1}\n')
    result = _inspect(dump)
    assert result.exit_code == 2 and "cannot inspect: " in result.output and "?[2J" in result.output, result.output


def test_what_the_user_knows_of_the_pair_counts(tmp_path: Path) -> None:
    path = _training(tmp_path)

    def told(*more: str) -> dict[str, Any]:
        return json.loads(_inspect(RECORDS, path, "--json", "--no-report", *more).stdout)

    assert told("--engine", "int8")["normal"][0]["pair"] == "int8 engine"
    assert told("--engine", "bf16", "--trainer", "fp32", "--dense")["normal"][0]["pair"] == "bf16 engine, fp32 trainer"
    assert told("--moe")["normal"][0]["pair"].startswith("MoE")
    assert told("--expensive-pass", "--one-step")["recommendation"]["preset"] == "pg_is"
    assert _inspect(RECORDS, path, "--engine", "fp12").exit_code == 2


def test_json_says_verdict_findings_predictions_and_flags(clean: dict[str, Any]) -> None:
    assert (clean["verdict"], clean["format"], clean["findings"]) == ("normal", "records", [])
    assert clean["gate"]["passed"] and clean["gate"]["value"] < clean["gate"]["bar"] == 0.01
    assert clean["metrics"]["rollout_corr/k3_kl"] == pytest.approx(clean["mismatch"]["k3_kl"], rel=1e-9)
    own = clean["predictions"][0]
    assert own["own"] and own["algorithm"] == 2 and own["settings"]["tis"]["upper_bound"] == 3.0
    assert {"setting", "kept", "ess", "bias", "noise", "second_pass"} <= own.keys()
    assert {0, 1, 2, 3} == {item["algorithm"] for item in clean["predictions"]}
    advice = clean["recommendation"]
    assert advice["preset"] == "seq_is" and set(advice["flags"]) == HOSTS and advice["reasons"]
    assert "--mismatch-preset seq_is" in advice["flags"]["verl"]
    assert next(item for item in clean["predictions"] if item["setting"] == advice["setting"])["kept"] == 1.0
