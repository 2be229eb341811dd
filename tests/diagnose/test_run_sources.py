"""What `inspect` reads of a run: its own file, exports of trackers, other trainers' names; and the pictures."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.core.metrics.registry import METRICS
from mismatch_plugin.diagnose.run_sources import KNOWN, kind_of, read_source
from mismatch_plugin.diagnose.runs import judge_run
from mismatch_plugin.report.log import to_json, write_step

KL, K3, GAP = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/log_ratio_abs_mean"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: Mapping[str, object]) -> str:
    return "".join(to_json(row) + "\n" for row in rows)


# Names and steps.


def test_a_jsonl_export_of_wandb(tmp_path: Path) -> None:
    """`run.history()` as lines: every column in every row, null where nothing was logged, NaN as text."""
    own = {"_runtime": 3.5, "_timestamp": 1.7e9}
    rows: list[dict[str, object]] = [
        {"_step": 10, **own, f"train/{KL}": 0.1, "train/step": 1, "eval/reward": None},
        {"_step": 11, **own, f"train/{KL}": None, "train/step": None, "eval/reward": 0.5},
        {"_step": 20, **own, f"train/{KL}": "NaN", "train/step": 2, "eval/reward": None},
        {"_step": 30, **own, f"train/{KL}": "-Infinity", "train/step": 3},
    ]
    source = read_source(write(tmp_path, "export.jsonl", lines(*rows)))
    assert source.numbers == (1.0, 2.0, 3.0) and source.rows[0] == {KL: 0.1}
    assert math.isnan(source.rows[1][KL]) and source.rows[2][KL] == -math.inf
    for row in rows:
        row.pop("train/step", None)
    source = read_source(write(tmp_path, "export.jsonl", lines(*rows)))
    assert source.numbers == (10.0, 20.0, 30.0)  # its own count, where there is no other


CHART = (
    '\ufeff"Step","run-7 - train/rollout_corr/kl","run-7 - train/rollout_corr/kl__MIN",'
    '"run-7 - train/rollout_corr/kl__MAX"\r\n'
    '"1","0.01","0.01","0.01"\r\n"2","","",""\r\n"3","1.5e-05","1.5e-05","1.5e-05"\r\n'
)
TWO = "Step,a - train/rollout_corr/kl,b - train/rollout_corr/kl,b - val/rollout_corr/kl\n1,0.1,0.2,0.3\n"


def test_csv_exports_of_a_chart_of_one_run_or_several(tmp_path: Path) -> None:
    source = read_source(write(tmp_path, "chart.csv", CHART))
    assert source.rows == ({KL: 0.01}, {KL: 1.5e-5}) and source.numbers == (1.0, 3.0)
    path = write(tmp_path, "two.csv", TWO)
    with pytest.raises(ValueError, match=r"rollout_corr/kl for several runs, 'a - train/', 'b - train/', .* --run"):
        read_source(path)
    assert read_source(path, "a").rows[0] == {KL: 0.1}  # "a" is in "val", too
    assert read_source(path, "b - val/").rows[0] == read_source(path, "val/").rows[0] == {KL: 0.3}
    with pytest.raises(ValueError, match=r"for several runs, 'b - train/', 'b - val/'"):
        read_source(path, "b")
    with pytest.raises(ValueError, match=r"--run c is none of those in .*two\.csv: there is 'a - train/'"):
        read_source(path, "c")
    path = write(tmp_path, "families.csv", f"global_step,{KL},actor/{K3}\n1,0.1,0.2\n")
    assert read_source(path).rows == ({KL: 0.1, K3: 0.2},)  # without a metric in common they are one run


def test_a_folder_of_charts_is_one_run(tmp_path: Path) -> None:
    write(tmp_path, "kl.csv", CHART)
    write(tmp_path, "k3.csv", "Step,run-7 - train/mis_k3_kl\n3,0.5\n1,0.25\n2,NaN\n")
    write(tmp_path, "again.csv", "Step,run-7 - train/mis_k3_kl\n2,NaN\n")
    write(tmp_path, "machines.csv", "host,gpus\na,8\n")
    assert kind_of(tmp_path) == "metrics"
    source = read_source(tmp_path)
    assert source.numbers == (1.0, 2.0, 3.0) and [row.get(KL) for row in source.rows] == [0.01, None, 1.5e-5]
    assert source.rows[0][K3] == 0.25 and source.rows[2][K3] == 0.5
    write(tmp_path, "again.csv", "Step,run-7 - train/mis_k3_kl\n1,7\n")
    with pytest.raises(ValueError, match=r"mis_k3_kl is 0\.25 at step 1, in another file 7: leave one of them out"):
        read_source(tmp_path)
    write(tmp_path, "again.csv", "train/step,run-7 - train/mis_kl\n1,7\n")
    with pytest.raises(ValueError, match="counts by Step, another by train/step: export all charts over one x axis"):
        read_source(tmp_path)
    for name in ("kl.csv", "k3.csv", "again.csv"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"no step holds a known metric .* It has: gpus"):
        read_source(tmp_path)
    write(tmp_path, "dump.jsonl", "{}")
    assert kind_of(tmp_path) == "dump"


NOTHING = r"no step holds a known metric .* rollout_corr/\*, mis_\*, .* It has: "


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "Step,loss\n1,2\n", NOTHING + r"Step, loss\. The plugin writes none with --mismatch-metrics off"),
        ("a.csv", "", NOTHING + "nothing"),
        ("a.csv", f"Step,{KL}\n1,0.1,7\n", r"a\.csv, line 2 has more cells than the 2 columns"),
        ("a.csv", f"Step,{KL},{KL}\n1,0.1,7\n", rf"a\.csv has the column {KL} twice"),
        ("a.csv", f"Step,{KL}\n1,{'9' * 200_000}\n", r"a\.csv, line \d is no line of a CSV file"),
        ("a.csv", f'"Step,{KL}\n1,0.1\n2,0.2\n', r"a\.csv, line 1 is no line of a CSV file: .* a quote not closed"),
        ("a.csv", f'Step,{KL}\n1,0.1\n2,"0.2\n3,0.3\n', r"a\.csv, line 3 is no line of a CSV file: .* a quote not"),
        ("a.jsonl", "Step,loss\n1,2\n", r"a\.jsonl, line 1 is no step"),
        ("a.txt", "{}\n", NOTHING),
    ],
)
def test_what_holds_nothing_of_a_run_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_source(write(tmp_path, name, text))


def test_what_is_no_metrics_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"{KL}": 0.1}}', encoding="utf-16")
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.csv")
    reasons = {
        tmp_path / "metrics.jsonl": "metrics.jsonl is no metrics.jsonl: ",
        tmp_path / "folder": "holds neither metrics.jsonl nor TensorBoard events nor CSVs",
        tmp_path / "pipe.csv": "is a pipe, not a regular file",
        tmp_path / "none.csv": "is not there",
        Path("/dev/zero"): "is a device, not a regular file",
    }
    for given, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            read_source(given)


# Other trainers.

OTHERS = {
    "slime": {"train/train_rollout_logprob_abs_diff": 0.01, "train/pg_loss": 0.3, "rollout/response_len/mean": 90.0},
    "slime, mis.py": {"train/mis_k3_kl": 8e-4, "train/mis_kl": 1e-4, "train/mis_tis_weight_after_bound": 0.99},
    "verl": {"training/rollout_probs_diff_mean": 0.003, "rollout_corr/kl": 1e-4, "rollout_corr/k3_kl": 8e-4},
    "NeMo-RL": {"train/gen_kl_error": 8e-4, "train/token_mult_prob_error": 1.02, "train/reward": 0.5},
    "TRL": {"train/sampling/sampling_logp_difference/mean": 0.01, "train/sampling/importance_sampling_ratio/mean": 1.0},
    "prime-rl": {"mismatch_kl/all/mean": 8e-4, "masked_mismatch_kl/all/mean": 3.0, "mismatch_kl/all/max": 9.0},
}


@pytest.mark.parametrize("trainer", OTHERS)
def test_what_other_trainers_record_is_read_and_judged(tmp_path: Path, trainer: str) -> None:
    """Sound, and two hundred times that; no number of theirs is taken for another."""
    for times, verdict in ((1.0, "normal"), (200.0, "large")):
        rows = [{"_step": i, **{name: value * times for name, value in OTHERS[trainer].items()}} for i in range(30)]
        path = write(tmp_path, "export.jsonl", lines(*rows))
        assert kind_of(path) == "metrics"
        source = read_source(path)
        found = judge_run(source, None)
        assert found.verdict == verdict and source.numbers == tuple(range(30)), found
        expected = {GAP: 0.01 * times} if trainer in ("slime", "TRL") else {K3: 8e-4 * times}
        assert {name: source.rows[0][name] for name in (K3, GAP) if name in source.rows[0]} == pytest.approx(expected)
        assert "metrics of the trainer itself are read under our names" in source.notes[0]
        if verdict == "normal" and K3 in source.rows[0]:  # its own launch line, where it has one
            lines_of = {"NeMo-RL": "run_grpo.py", "verl": "main_ppo", "slime, mis.py": "train.py"}
            said = inspected(path, "--no-pictures")[1]
            if trainer == "prime-rl":  # it has no algorithm 0, and says so in place of flags
                assert "algorithm 0 cannot be had on prime-rl" in said and "<" not in said
                continue
            assert "--mismatch-preset disabled" in said and lines_of[trainer] in said
            assert ("mismatch_plugin.launch" in said) == (trainer in lines_of)


def test_names_of_others_are_documented_and_ours_come_first(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metric_names.md").read_text(encoding="utf-8")
    assert [name for name in KNOWN if f"`{name}`" not in page] == []
    row = {K3: 1e-4, "train/gen_kl_error": 2e-4, "train/mis_k3_kl": 3e-4, "train/tis_abs": 0.1}
    source = read_source(write(tmp_path, "both.jsonl", lines(row)))
    assert source.rows == ({K3: 1e-4},) and source.notes == ()
    path = write(tmp_path, "two.csv", "Step,a - train/mis_kl,b - train/mis_kl\n1,0.1,0.2\n")
    with pytest.raises(ValueError, match=r"holds mis_kl for several runs, 'a - train/', 'b - train/'"):
        read_source(path)
    assert read_source(path, "b").rows == ({KL: 0.2},)


# TensorBoard.


def events(folder: Path, *, start: int = 1, shift: float = 0.0, suffix: str = "", **writing: bool | int | None) -> Path:
    pytest.importorskip("tensorboard", reason="TensorBoard's files need the extra [lab]")
    from torch.utils.tensorboard.writer import SummaryWriter

    new_style = bool(writing.pop("new_style", False))
    with SummaryWriter(str(folder), filename_suffix=suffix, **writing) as writer:  # pyright: ignore[reportArgumentType]
        for step in range(start, start + 3):
            writer.add_scalar(f"train/{KL}", 0.25 * step + shift, step, new_style=new_style)
            writer.add_scalar("reward", 1.0, step)
        writer.add_text("rollout_corr/note", "text and tensors hide no number", 1)
        writer.add_histogram("rollout_corr/weights", torch.arange(5.0), 1)
        writer.add_tensor("rollout_corr/shape", torch.ones(2, 2), 1)
    return folder


@pytest.mark.parametrize("new_style", [False, True])
def test_tensorboard_events(tmp_path: Path, new_style: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = events(tmp_path / "logs" / "run", new_style=new_style)
    for given in (tmp_path, folder, next(folder.iterdir())):
        source = read_source(given)
        assert source.rows == ({KL: 0.25}, {KL: 0.5}, {KL: 0.75}) and source.numbers == (1.0, 2.0, 3.0)
    events(tmp_path / "other")
    with pytest.raises(ValueError, match="events of 2 runs: give one of logs/run, other"):
        read_source(tmp_path)
    os.mkfifo(folder / "events.out.tfevents.2.pipe")
    with pytest.raises(ValueError, match="is a pipe, not a regular file"):
        read_source(folder)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ValueError, match=r"tensorboard is not installed: pip install 'mismatch-plugin\[lab\]'"):
        read_source(tmp_path / "other")


def test_a_resumed_run_is_one_run_and_two_runs_are_refused(tmp_path: Path) -> None:
    events(tmp_path / "apart", suffix=".a")
    apart = read_source(events(tmp_path / "apart", start=4, suffix=".b"))
    assert apart.numbers == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0) and apart.notes == ()
    events(tmp_path / "overlap", suffix=".a")  # 1, 2, 3
    source = read_source(events(tmp_path / "overlap", start=3, shift=5.0, suffix=".b"))  # 3, 4, 5
    assert source.numbers == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert [row[KL] for row in source.rows] == [0.25, 0.5, 5.75, 6.0, 6.25]
    (note,) = source.notes
    assert note.startswith("1 steps before a resume are in events") and note.endswith(".b again: its own count")
    body = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "overlap"), "--json", "--no-pictures"]).output)
    assert body["notes"] == [note]
    events(tmp_path / "purged", suffix=".a")
    source = read_source(events(tmp_path / "purged", start=2, shift=5.0, suffix=".b", purge_step=2))
    assert [row[KL] for row in source.rows] == [0.25, 5.5, 5.75, 6.0]
    events(tmp_path / "two", suffix=".first")
    events(tmp_path / "two", shift=5.0, suffix=".second")
    with pytest.raises(ValueError, match=r"tfevents.*\.second begins at step 1, as an earlier file does\. Two runs"):
        read_source(tmp_path / "two")
    (second,) = (tmp_path / "two").glob("*.second")
    assert read_source(second).rows == ({KL: 5.25}, {KL: 5.5}, {KL: 5.75})


def test_events_are_read_up_to_where_they_are_cut_or_damaged_and_it_is_said(tmp_path: Path) -> None:
    (path,) = events(tmp_path).iterdir()
    whole = path.read_bytes()
    at = 0  # where the first event of step 3 begins: a length of 8 bytes, its sum, the event, its sum
    for _ in range(5):
        at += 16 + int.from_bytes(whole[at : at + 8], "little")
    damaged = whole[: at + 20] + bytes([whole[at + 20] ^ 1]) + whole[at + 21 :]
    for data, steps in ((whole, 3), (whole[:-5], 3), (damaged, 2)):
        path.write_bytes(data)
        source = read_source(tmp_path)
        assert len(source.rows) == steps
        said = f"{path.name} is cut or damaged after step {steps}: nothing behind that was read"
        assert source.notes == (() if data is whole else (said,))
    for data in (b"no events at all", b""):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="holds no events with a number"):
            read_source(tmp_path)


# Pictures.

NAMES = (
    *("rollout_is_mean", "rollout_is_ratio_mean", "rollout_is_weight_after_mean", "rollout_is_ratio_eff_sample_size"),
    *("rollout_is_veto_fraction", "kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq"),
)


def write_run(folder: Path, names: tuple[str, ...] = NAMES, steps: int = 30) -> Path:
    for step in range(steps):
        write_step(folder, mp.preset("token_is"), {f"rollout_corr/{name}": 0.5 + 0.01 * step for name in names})
    return folder


def inspected(path: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", str(path), *arguments], env={"COLUMNS": "80"})
    return result.exit_code, result.output


def test_inspect_draws_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra [lab]")
    from mismatch_plugin.diagnose import panels

    drawn = {f"rollout_corr/{name}" for panel in panels.PANELS for name in (*panel.series, *panel.older)}
    assert drawn <= {GAP, *(f"rollout_corr/{metric.name}" for metric in METRICS)}  # a name without one draws nothing
    run = write_run(tmp_path / "run")
    assert inspected(run)[1].splitlines()[-1] == f"picture: {run}/plots/six_panels.png"
    body = json.loads(inspected(run, "--json", "--pictures", str(tmp_path / "p"))[1])
    assert body["picture"] == str(tmp_path / "p" / "six_panels.png")
    assert (tmp_path / "p" / "six_panels.png").read_bytes().startswith(b"\x89PNG")
    assert body["settings"] == str(run / "settings.json") and body["source"] == str(run / "metrics.jsonl")
    old = write_run(tmp_path / "old", ("rollout_is_eff_sample_size", "kl"), steps=1)  # of an older version
    write_step(old, mp.preset("token_is"), {"step": 9, KL: math.nan, "rollout_corr/chi2_token": math.inf})
    assert "picture: " in inspected(old)[1]
    write(tmp_path, "settings.json", '{"unrelated": 1}')
    status, output = inspected(write(tmp_path, "chart.csv", CHART))
    assert status == 0 and "since the run's settings are not known" in " ".join(output.split())


def test_the_verdict_does_not_need_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", ("kl",))
    status, output = inspected(run, "--no-pictures")
    assert "picture" not in output and not (run / "plots").exists()
    (run / "plots").write_text("a file")
    blocked = inspected(run)
    assert f"no picture: {run}/plots cannot be written" in blocked[1] and blocked[0] == status
    monkeypatch.delitem(sys.modules, "mismatch_plugin.diagnose.panels", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = inspected(run)
    assert "pip install 'mismatch-plugin[lab]'" in without[1] and without[0] == status
