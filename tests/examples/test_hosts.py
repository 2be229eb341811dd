"""Every flag and YAML of the examples, parsed by the launcher, and by the hosts' own parsers with MISMATCH_HOST_SRC."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from examples.collect_report import collect
from mismatch_plugin.hooks import nemo_rl as nemo_rl_settings
from mismatch_plugin.hooks import slime
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.tree import put, read_overrides
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.report.log import write_step
from tests.hooks.contracts.launch_parsers import host_parser, read_custom_config
from tests.hooks.contracts.launch_trees import ROOT, megatron_tree, ray_tree, run
from tests.host_source import host_source

EXAMPLES = ROOT / "examples"
TOKEN_IS = ("algorithm 2: decoupled PPO", "weights: token level, truncate, at most 2", "rejection: none")
SLIME = EXAMPLES / "slime"


def folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def array(text: str, name: str = "FLAGS") -> list[str]:
    """The words of a shell array, slime's files in this checkout."""
    found = re.search(rf"^{name}=\((.*?)^\)", text, re.M | re.S)
    assert found is not None, f"no array {name}"
    return here(shlex.split(found[1], comments=True))


def here(words: list[str]) -> list[str]:
    return [str(SLIME / Path(word).name) if re.fullmatch(r"/root/mis\w*\.yaml", word) else word for word in words]


def flags_of(path: Path) -> list[str]:
    """Of a script, or those that a diff adds."""
    if path.suffix == ".sh":
        return array(path.read_text())
    lines = [line[1:] for line in path.read_text().splitlines() if re.match(r"\+ +--\w", line)]
    return here(shlex.split(" ".join(lines)))


def plan_of(script: Path, *arguments: str) -> Plan:
    return prepare([str(script), *arguments])[3]


def importing(path: Path, package: str) -> Path:
    (folder(path) / "main.py").write_text(f"import {package}\n")
    return path / "main.py"


@pytest.mark.parametrize(
    "words",
    [
        flags_of(SLIME / "run-qwen3-4B.diff"),
        flags_of(SLIME / "run-qwen3-4B-yaml.diff"),  # mismatch.yaml
        ["--use-tis", "--custom-config-path", str(SLIME / "mis.yaml")],
    ],
)
def test_slime_s_examples_mean_token_weights(words: list[str], tmp_path: Path) -> None:
    assert plan_of(ray_tree(tmp_path, "slime"), *words).lines[:3] == TOKEN_IS


def meant_by_path(args: Namespace) -> None:
    config = slime.check(args)
    assert config is not None and "no step metrics" not in "\n".join(slime.describe(config, args))
    assert (config.algorithm, config.tis.level, config.tis.upper_bound) == (2, "token", 2.0)


def test_slime_without_the_launcher(tmp_path: Path) -> None:
    done = run(ray_tree(tmp_path, "slime"), " ".join(flags_of(SLIME / "run-qwen3-4B-by-path.diff")))
    assert done.given is not None, done.errors
    meant_by_path(Namespace(**done.given["args"]))


@pytest.mark.parametrize("name", ["run-qwen3-4B.diff", "run-qwen3-4B-yaml.diff", "run-qwen3-4B-by-path.diff"])
def test_slime_s_script_with_the_diff(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied to slime's script: all words of its arrays go through the launcher and slime's own parser."""
    script = folder(tmp_path / "scripts") / "run-qwen3-4B.sh"
    shutil.copy(host_source("slime", "scripts", script.name), script)
    subprocess.run(["git", "apply", str(SLIME / name)], cwd=tmp_path, check=True)
    text = script.read_text()
    names = re.findall(r"^   \$\{(\w+_ARGS)\[@\]\}", text, re.M)
    words = [word for each in names if each != "MODEL_ARGS" for word in array(text, each)]
    if "by-path" not in name:
        assert "-- python3 -m mismatch_plugin.launch train.py" in text
        plan = plan_of(ray_tree(tmp_path / "tree", "slime"), *words)
        assert plan.lines[:3] == TOKEN_IS
        words = list(plan.argv)
    args, unknown = host_parser("slime", monkeypatch).parse_known_args(words)
    assert (args.use_tis, args.eps_clip_high, args.kl_loss_type) == (True, 0.28, "low_var_kl")
    assert not [flag for flag in unknown if flag.startswith(("--tis", "--rs", "--mismatch", "--use"))]
    if "by-path" in name:
        read_custom_config("slime", args)
        meant_by_path(args)


def test_miles(tmp_path: Path) -> None:
    """The script hands one string on; its words are those of the array."""
    path, root = EXAMPLES / "miles" / "run_qwen3_4b.sh", folder(tmp_path / "miles")
    recorded = run_script(path, tmp_path, {"MILES": str(root)}, ["mismatch-plugin", "python3"])
    assert recorded[0] == ["mismatch-plugin", "patch", "apply", "--host", "miles", "--root", str(root)]
    assert recorded[1][:3] == ["python3", "scripts/run_qwen3_4b.py", "--extra-args"]
    assert recorded[1][3].split() == flags_of(path)
    assert plan_of(ray_tree(tmp_path / "tree", "miles"), *recorded[1][3].split()).lines[:3] == TOKEN_IS


def test_megatron_lm(tmp_path: Path) -> None:
    """train_rl.sh run with a stand-in for torchrun: what it starts is parsed."""
    tree, path = megatron_tree(tmp_path / "tree").parent, EXAMPLES / "megatron_lm" / "train_rl.sh"
    model = folder(tree / "examples" / "rl" / "model_configs") / "qwen3_4b.sh"
    model.write_text(
        'MODEL_OPTIONS="--num-layers 36"\nCOMMON_OPTIONS="--tensor-model-parallel-size 1"\nENV_DEPENDENT=""'
    )
    given = {"MEGATRON": str(tree), "CHECKPOINT": "/none"}
    patch, line = run_script(path, tmp_path, given, ["mismatch-plugin", "torchrun"], "--seed", "3")
    assert patch[1:] == [
        "patch",
        "apply",
        "--host",
        "megatron-lm",
        "--root",
        str(tree),
        "--file",
        "megatron/rl/rl_utils.py",
    ]
    at = line.index("mismatch_plugin.launch")
    assert line[at - 1] == "-m" and line[-2:] == ["--seed", "3"]
    plan = plan_of(tree / line[at + 1], *line[at + 2 :])
    assert plan.lines[:3] == TOKEN_IS and any("by the step's trained tokens" in line for line in plan.lines)


def test_what_scripts_of_miles_and_megatron_lm_rely_on_is_there() -> None:
    text = host_source("miles", "scripts", "run_qwen3_4b.py").read_text()
    assert 'extra_args: str = ""' in text and 'f"{args.extra_args} "' in text
    text = host_source("Megatron-LM", "examples", "rl", "model_configs", "qwen3_4b.sh").read_text()
    assert all(name in text for name in ("MODEL_OPTIONS", "ENV_DEPENDENT", "$CHECKPOINT", "$ENV_CONFIG"))
    assert host_source("Megatron-LM", "examples", "rl", "environment_configs", "dapo.yaml").is_file()


def test_verl(tmp_path: Path) -> None:
    flags = flags_of(EXAMPLES / "verl" / "grpo_megatron_sglang.sh")
    plan = plan_of(importing(tmp_path, "verl.trainer"), "model_engine=megatron", *flags)
    overrides = read_overrides(plan.argv)
    assert plan.lines[:3] == TOKEN_IS
    assert overrides["algorithm.rollout_correction.bypass_mode"] is False
    assert overrides["algorithm.rollout_correction.mismatch"] == {"use_tis": True}


def test_verl_s_script_with_the_diff(tmp_path: Path) -> None:
    """grpo_megatron_sglang.sh applies run_qwen3_8b_megatron.diff once, and verl's script starts the launcher."""
    name = Path("examples", "grpo_trainer", "run_qwen3_8b_megatron.sh")
    tree = folder(tmp_path / "verl" / name.parent).parents[1]
    shutil.copy(host_source("verl", *name.parts), tree / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    script, given = EXAMPLES / "verl" / "grpo_megatron_sglang.sh", {"VERL": str(tree), "HOME": "/none"}
    for _ in range(2):
        (line,) = run_script(script, tmp_path, given, ["python3"])
        assert line[:5] == ["python3", "-m", "mismatch_plugin.launch", "-m", "verl.trainer.main_ppo"]
        plan = plan_of(importing(tmp_path, "verl.trainer"), *line[5:])
        assert plan.lines[:3] == TOKEN_IS
        assert read_overrides(plan.argv)["actor_rollout_ref.rollout.name"] == "sglang"


def test_nemo_rl_by_flags_and_by_yaml_is_the_same(tmp_path: Path) -> None:
    path = EXAMPLES / "nemo_rl" / "run_grpo.sh"
    (line,) = run_script(path, tmp_path, {"NEMO_RL": str(folder(tmp_path / "nemo"))}, ["uv"])
    assert line[:6] == ["uv", "run", "python", "-m", "mismatch_plugin.launch", "examples/run_grpo.py"]
    config = tmp_path / "grpo.yaml"
    config.write_text("loss_fn: {token_level_loss: true}\n")
    line[line.index("--config") + 1] = str(config)
    plan = plan_of(importing(tmp_path / "script", "nemo_rl.algorithms.grpo"), *line[6:])
    section: dict[str, Any] = {"token_level_loss": True}
    put(section, "mismatch", read_overrides(plan.argv)["loss_fn.mismatch"])
    by_flags = nemo_rl_settings.settings({"loss_fn": section})
    by_file = yaml.safe_load((EXAMPLES / "nemo_rl" / "grpo_mismatch.yaml").read_text())
    assert by_file["defaults"] == "grpo_math_1B_megatron.yaml"
    assert nemo_rl_settings.settings({"loss_fn": {"token_level_loss": True, **by_file["loss_fn"]}}) == by_flags
    assert by_flags.replace(denominator="auto") == mp.preset("token_is")


# The cluster ----------------------------------------------------------------------------------------------------------

RAY = """
import json, os, pathlib, sys
words = sys.argv[1:]
if "--mismatch-explain-only" in words:
    raise SystemExit(0)
folder = pathlib.Path(words[words.index("--mismatch-report-dir") + 1])
if folder.parent.name == os.environ.get("FAIL"):
    raise SystemExit(1)
folder.mkdir(parents=True, exist_ok=True)
(folder / "settings.json").write_text("{}")
with (folder / "metrics.jsonl").open("a") as lines:
    for step in range(1, 4):
        row = {"step": step, "rollout_corr/kl": 0.1, "rollout_corr/rollout_is_mean": 1.0 + step}
        lines.write(json.dumps(row) + chr(10))
"""
FOUR = EXAMPLES / "compare_four_on_a_cluster.sh"


def jobs_of(tmp_path: Path, environment: dict[str, str], *arguments: str) -> list[list[str]]:
    return run_script(FOUR, tmp_path, environment, ["ray"], *arguments, body=RAY)


def test_compare_four_on_a_cluster(tmp_path: Path) -> None:
    """Four jobs, each with its algorithm; a job that failed stops it, and what has finished is not run again."""
    pytest.importorskip("matplotlib", reason="a report needs matplotlib")
    output, arguments = tmp_path / "output", [str(ray_tree(tmp_path / "tree", "slime")), "--num-rollout", "3"]
    environment = {"OUTPUT": str(output), "RUNTIME_ENV_JSON": '{"env_vars": {"A": "b c"}}', "FAIL": "2"}
    with pytest.raises(subprocess.CalledProcessError):
        jobs_of(tmp_path, environment, *arguments)
    assert sorted(p.parent.parent.name for p in output.glob("*/*/*/done.json")) == ["0", "1"]
    jobs = jobs_of(tmp_path, {**environment, "FAIL": ""}, *arguments)
    for job, algorithm in zip(jobs, (0, 1, 2, 2, 3), strict=True):  # 2 failed at first
        assert job[job.index("--runtime-env-json") + 1] == environment["RUNTIME_ENV_JSON"]
        at = job.index("mismatch_plugin.launch")
        # The settings that the stand-in has written are no run's, and the launcher would refuse them.
        words = [word.replace(str(output), str(tmp_path / "planned")) for word in job[at + 2 :]]
        plan = plan_of(Path(job[at + 1]), *words)
        assert plan.lines[0].startswith(f"algorithm {algorithm}: ")
        assert plan.argv[:2] == ("--num-rollout", "3")
    page = (output / "report.html").read_text()
    assert all(name in page for name in ("PPO", "bypass", "Complete, every run", "KL(rollout‖trainer)"))
    assert "rewards are in the logs of the host" in page and "This is a partial report" not in page
    assert len(list(output.glob("cluster/*/seed0/config.json"))) == 4
    (output / "cluster" / "3" / "seed0" / "done.json").unlink()
    page = collect(output).read_text(encoding="utf-8")  # again, after more has been written
    assert "This is a partial report" in page and "seed 0: unfinished, 3 steps" in page


def test_a_report_of_what_is_not_what_it_seems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics\.jsonl below .*: did the runs get --mismatch-report-dir"):
        collect(folder(tmp_path / "empty"))
    write_step(tmp_path / "mixed" / "cluster" / "1" / "seed7", mp.preset("seq_is"), {"rollout_corr/kl": 0.1})
    with pytest.raises(ValueError, match=r"seed7 holds a run of algorithm 2: move it to a folder of that name"):
        collect(tmp_path / "mixed")


def run_script(
    script: Path, where: Path, variables: dict[str, str], stand_ins: list[str], *arguments: str, body: str = ""
) -> list[list[str]]:
    """Command lines with which a shell script calls its stand-ins, in order (of all runs in this folder)."""
    programs, record = folder(where / "bin"), where / "calls.jsonl"
    for name in {*stand_ins, "python3"}:
        code = f"import json, sys\nopen({str(record)!r}, 'a').write(json.dumps([{name!r}, *sys.argv[1:]]) + chr(10))\n"
        (programs / f"{name}.py").write_text(code + body)
        words = [sys.executable, *([str(programs / f"{name}.py")] if name in stand_ins else [])]
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (programs / name).chmod(0o755)
    if not body:
        record.unlink(missing_ok=True)
    # Only what the scripts need besides: no program of this machine is started by accident.
    for name in ("bash", "env", "dirname", "git", "mkdir", "sh"):
        found = shutil.which(name)
        if found is not None and not (programs / name).exists():
            (programs / name).symlink_to(found)
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(where), **variables, "PATH": str(programs)}
    command = [shutil.which("bash") or "bash", str(script), *arguments]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=where)
    return [json.loads(line) for line in record.read_text().splitlines()]
