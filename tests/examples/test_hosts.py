"""Every flag and YAML of the examples, parsed by the launcher, and by the hosts' own parsers with MISMATCH_HOST_SRC."""

from __future__ import annotations

import ast
import json
import os
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
from mismatch_plugin.config import MismatchConfig, bound_warnings
from mismatch_plugin.hooks import slime
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.nemo_rl import config as nemo_rl_settings
from mismatch_plugin.hooks.tree import put, read_overrides
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.report.log import write_step
from tests.hooks.contracts.launch_parsers import host_parser, read_custom_config
from tests.hooks.contracts.launch_trees import ROOT, megatron_tree, ray_tree, run

EXAMPLES = ROOT / "examples"
HOST_EXAMPLES = sorted(
    path for path in EXAMPLES.rglob("*") if path.suffix in (".sh", ".diff", ".yaml") and path.is_file()
)

TOKEN_IS = ("algorithm 2: decoupled PPO", "weights: token level, truncate, at most 2", "rejection: none")


def _source(*parts: str) -> Path:
    root = os.environ.get("MISMATCH_HOST_SRC")
    path = Path(root or "", *parts)
    if root is None or not path.exists():
        pytest.skip("NOT RUN (host source absent)")
    return path


def _array(text: str, name: str = "FLAGS") -> list[str]:
    """The words of a shell array."""
    found = re.search(rf"^{name}=\((.*?)^\)", text, re.M | re.S)
    assert found is not None, f"no array {name}"
    return shlex.split(found[1], comments=True)


def _added(path: Path) -> list[str]:
    """The flags that a diff adds."""
    lines = [line[1:] for line in path.read_text().splitlines() if re.match(r"\+ +--\w", line)]
    return shlex.split(" ".join(lines))


def _flags(path: Path) -> list[str]:
    return _added(path) if path.suffix == ".diff" else _array(path.read_text())


def _plan(script: Path, *arguments: str) -> Plan:
    return prepare([str(script), *arguments])[3]


# All of them ----------------------------------------------------------------------------------------------------------


def test_every_example_is_in_the_table_and_tested() -> None:
    """A new file must be named in the README, and by a test of this file."""
    page, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for path in HOST_EXAMPLES:
        name = path.relative_to(EXAMPLES).as_posix()
        if path.parent.name not in ("benchmarks", "compare", "megatron_core"):
            assert f"`{name}`" in page, f"examples/README.md does not name {name}"
            assert path.name in tests, f"no test parses {name}"


@pytest.mark.parametrize("path", [path for path in HOST_EXAMPLES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_shell_scripts_are_sound(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()


# slime and miles ------------------------------------------------------------------------------------------------------


def test_slime_by_flags(tmp_path: Path) -> None:
    flags = _flags(EXAMPLES / "slime" / "run-qwen3-4B.diff")
    plan = _plan(ray_tree(tmp_path / "tree", "slime"), *flags)
    assert plan.lines[:3] == TOKEN_IS
    assert _plan(ray_tree(tmp_path / "tree", "slime"), *flags, "--rollout-max-response-len", "8192").lines == plan.lines


def test_one_example_shows_another_level_and_says_where_it_holds() -> None:
    """Of all files that set a level one names another, next to it, and the lengths at which its bound can hold."""
    named = {
        path.name: line
        for path in HOST_EXAMPLES
        for line in path.read_text().splitlines()
        if re.search(r"\b(sequence|geometric|turn|prefix)\b", line) and "level" in line
    }
    assert named == {"mismatch.yaml": named["mismatch.yaml"]}
    found = re.fullmatch(r"  level: token # (\w+): for .* of at most (\d+) tokens, .*", named["mismatch.yaml"])
    assert found is not None
    other = mp.preset("token_is").replace(tis={"level": found[1]})
    assert bound_warnings(other, int(found[2])) == [] and len(bound_warnings(other, 8192)) == 1


def test_slime_by_yaml_is_the_same(tmp_path: Path) -> None:
    by_flags = read_command_line(_flags(EXAMPLES / "slime" / "run-qwen3-4B.diff")).config
    by_file = MismatchConfig.from_file(EXAMPLES / "slime" / "mismatch.yaml")
    assert by_file == by_flags
    flags = _flags(EXAMPLES / "slime" / "run-qwen3-4B-yaml.diff")
    assert flags == ["--mismatch-config", "/root/mismatch.yaml"]
    line = ["--mismatch-config", str(EXAMPLES / "slime" / "mismatch.yaml")]
    assert _plan(ray_tree(tmp_path / "tree", "slime"), *line).lines[0] == "algorithm 2: decoupled PPO"


def test_slime_s_own_yaml(tmp_path: Path) -> None:
    path = EXAMPLES / "slime" / "mis.yaml"
    plan = _plan(ray_tree(tmp_path / "tree", "slime"), "--use-tis", "--custom-config-path", str(path))
    assert plan.lines[:3] == TOKEN_IS


def _by_path() -> list[str]:
    """Words of run-qwen3-4B-by-path.diff, its file in this checkout."""
    words = _flags(EXAMPLES / "slime" / "run-qwen3-4B-by-path.diff")
    return [str(EXAMPLES / "slime" / "mis.yaml") if word == "/root/mis.yaml" else word for word in words]


def _meant_by_path(args: Namespace) -> None:
    config = slime.check(args)
    assert config is not None
    assert (config.algorithm, config.tis.level, config.tis.upper_bound) == (2, "token", 2.0)
    assert "no step metrics" not in "\n".join(slime.describe(config, args))


def test_slime_without_the_launcher(tmp_path: Path) -> None:
    done = run(ray_tree(tmp_path / "tree", "slime"), " ".join(_by_path()))
    assert done.given is not None, done.errors
    _meant_by_path(Namespace(**done.given["args"]))


def test_slime_s_own_parser_and_file_without_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scripts" / "run-qwen3-4B.sh"
    script.parent.mkdir()
    shutil.copy(_source("slime", "scripts", "run-qwen3-4B.sh"), script)
    diff = EXAMPLES / "slime" / "run-qwen3-4B-by-path.diff"
    subprocess.run(["git", "apply", str(diff)], cwd=tmp_path, check=True)
    words = _array(script.read_text(), "GRPO_ARGS")
    assert words[-len(_by_path()) + 3 :] == _by_path()[3:]
    args, unknown = host_parser("slime", monkeypatch).parse_known_args(
        [*words[: -len(_by_path())], *_by_path(), "--rollout-batch-size", "4"]
    )
    assert unknown == []
    read_custom_config("slime", args)
    _meant_by_path(args)


@pytest.mark.parametrize("name", ["run-qwen3-4B.diff", "run-qwen3-4B-yaml.diff"])
def test_slime_s_script_with_the_diff(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied to slime's script: all words of its arrays go through the launcher and slime's own parser."""
    script = tmp_path / "scripts" / "run-qwen3-4B.sh"
    script.parent.mkdir()
    shutil.copy(_source("slime", "scripts", "run-qwen3-4B.sh"), script)
    subprocess.run(["git", "apply", str(EXAMPLES / "slime" / name)], cwd=tmp_path, check=True)
    text = script.read_text()
    assert "-- python3 -m mismatch_plugin.launch train.py" in text
    names = re.findall(r"^   \$\{(\w+_ARGS)\[@\]\}", text, re.M)
    words = [word for array in names if array != "MODEL_ARGS" for word in _array(text, array)]
    words = [str(EXAMPLES / "slime" / "mismatch.yaml") if word == "/root/mismatch.yaml" else word for word in words]
    plan = _plan(ray_tree(tmp_path / "tree", "slime"), *words)
    assert plan.lines[0] == "algorithm 2: decoupled PPO"
    args, unknown = host_parser("slime", monkeypatch).parse_known_args(list(plan.argv))
    assert (args.use_tis, args.eps_clip_high, args.kl_loss_type) == (True, 0.28, "low_var_kl")
    assert not [flag for flag in unknown if flag.startswith(("--tis", "--rs", "--mismatch", "--use"))]


def test_miles(tmp_path: Path) -> None:
    """The script hands one string on; its words are those of the array."""
    path = EXAMPLES / "miles" / "run_qwen3_4b.sh"
    recorded = _run(path, tmp_path, {"MILES": str(_folder(tmp_path / "miles"))}, ["mismatch-plugin", "python3"])
    assert recorded[0] == ["mismatch-plugin", "patch", "apply", "--host", "miles", "--root", str(tmp_path / "miles")]
    assert recorded[1][:3] == ["python3", "scripts/run_qwen3_4b.py", "--extra-args"]
    assert recorded[1][3].split() == _flags(path)
    plan = _plan(ray_tree(tmp_path / "tree", "miles"), *recorded[1][3].split())
    assert plan.lines[:3] == TOKEN_IS


def test_miles_takes_extra_arguments() -> None:
    text = _source("miles", "scripts", "run_qwen3_4b.py").read_text()
    assert 'extra_args: str = ""' in text
    assert 'f"{args.extra_args} "' in text


# Megatron-LM ----------------------------------------------------------------------------------------------------------

_MODEL = 'MODEL_OPTIONS="--num-layers 36 --bf16"\nCOMMON_OPTIONS="--tensor-model-parallel-size 1"\nENV_DEPENDENT=""\n'


def test_megatron_lm(tmp_path: Path) -> None:
    """train_rl.sh run with a stand-in for torchrun: what it starts is parsed in a patched tree."""
    tree = megatron_tree(tmp_path / "tree", patched=True).parent
    model = _folder(tree / "examples" / "rl" / "model_configs") / "qwen3_4b.sh"
    model.write_text(_MODEL)
    path = EXAMPLES / "megatron_lm" / "train_rl.sh"
    patch, line = _run(
        path, tmp_path, {"MEGATRON": str(tree), "CHECKPOINT": "/none"}, ["mismatch-plugin", "torchrun"], "--seed", "3"
    )
    assert patch[1:] == ["patch", "apply", "--host", "megatron-lm", "--root", str(tree), "--optional"]
    at = line.index("mismatch_plugin.launch")
    assert line[at - 1] == "-m"
    assert line[-2:] == ["--seed", "3"]
    plan = _plan(tree / line[at + 1], *line[at + 2 :])
    assert plan.lines[:3] == TOKEN_IS
    assert any("by the step's trained tokens" in line for line in plan.lines)


def test_megatron_lm_has_what_the_script_sources() -> None:
    text = _source("Megatron-LM", "examples", "rl", "model_configs", "qwen3_4b.sh").read_text()
    for name in ("MODEL_OPTIONS", "ENV_DEPENDENT", "$CHECKPOINT", "$ENV_CONFIG"):
        assert name in text
    assert _source("Megatron-LM", "examples", "rl", "environment_configs", "dapo.yaml").is_file()


# verl and NeMo-RL -----------------------------------------------------------------------------------------------------


def _importing(folder: Path, package: str) -> Path:
    path = _folder(folder) / "main.py"
    path.write_text(f"import {package}\n")
    return path


def test_verl(tmp_path: Path) -> None:
    flags = _flags(EXAMPLES / "verl" / "grpo_megatron_sglang.sh")
    plan = _plan(_importing(tmp_path, "verl.trainer"), "model_engine=megatron", *flags)
    assert plan.lines[:3] == TOKEN_IS
    overrides = read_overrides(plan.argv)
    assert overrides["algorithm.rollout_correction.bypass_mode"] is False
    assert overrides["algorithm.rollout_correction.mismatch"] == {"use_tis": True}


def test_verl_s_script_with_the_diff(tmp_path: Path) -> None:
    """grpo_megatron_sglang.sh applies run_qwen3_8b_megatron.diff once, and verl's script starts the launcher."""
    name = Path("examples", "grpo_trainer", "run_qwen3_8b_megatron.sh")
    tree = _folder(tmp_path / "verl" / name.parent).parents[1]
    shutil.copy(_source("verl", *name.parts), tree / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    line: list[str] = []
    for _ in range(2):
        (line,) = _run(
            EXAMPLES / "verl" / "grpo_megatron_sglang.sh", tmp_path, {"VERL": str(tree), "HOME": "/none"}, ["python3"]
        )
        assert line[:5] == ["python3", "-m", "mismatch_plugin.launch", "-m", "verl.trainer.main_ppo"]
    plan = _plan(_importing(tmp_path, "verl.trainer"), *line[5:])
    assert plan.lines[:3] == TOKEN_IS
    assert read_overrides(plan.argv)["actor_rollout_ref.rollout.name"] == "sglang"


def test_nemo_rl_by_flags_and_by_yaml_is_the_same(tmp_path: Path) -> None:
    path = EXAMPLES / "nemo_rl" / "run_grpo.sh"
    (line,) = _run(path, tmp_path, {"NEMO_RL": str(_folder(tmp_path / "nemo"))}, ["uv"])
    assert line[:6] == ["uv", "run", "python", "-m", "mismatch_plugin.launch", "examples/run_grpo.py"]
    config = tmp_path / "grpo.yaml"
    config.write_text("loss_fn: {token_level_loss: true}\n")
    line[line.index("--config") + 1] = str(config)
    plan = _plan(_importing(tmp_path / "script", "nemo_rl.algorithms.grpo"), *line[6:])
    section: dict[str, Any] = {"token_level_loss": True}
    put(section, "mismatch", read_overrides(plan.argv)["loss_fn.mismatch"])
    by_flags = nemo_rl_settings.settings({"loss_fn": section})
    by_file = yaml.safe_load((EXAMPLES / "nemo_rl" / "grpo_mismatch.yaml").read_text())
    assert by_file["defaults"] == "grpo_math_1B_megatron.yaml"
    assert nemo_rl_settings.settings({"loss_fn": {"token_level_loss": True, **by_file["loss_fn"]}}) == by_flags
    assert by_flags.replace(denominator="auto") == mp.preset("token_is")


def test_nemo_rl_s_own_class_keeps_the_block() -> None:
    """Its ClippedPGLossConfig, taken out of the source, with the section of its YAML and ours."""
    source = _source("NeMo-RL", "nemo_rl", "algorithms", "loss", "loss_functions.py").read_text()
    node = next(
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "ClippedPGLossConfig"
    )
    names: dict[str, Any] = {}
    code = "from typing import Optional\nfrom pydantic import BaseModel\n" + ast.unparse(node)
    exec(compile(code, "loss_functions.py", "exec", dont_inherit=True), names)
    configs = _source("NeMo-RL", "examples", "configs")
    section = {}
    for name in ("grpo_math_1B.yaml", "grpo_math_1B_megatron.yaml"):
        section |= yaml.safe_load((configs / name).read_text()).get("loss_fn") or {}
    section |= yaml.safe_load((EXAMPLES / "nemo_rl" / "grpo_mismatch.yaml").read_text())["loss_fn"]
    made = names["ClippedPGLossConfig"](**section)
    assert made.mismatch["tis"] == {"upper_bound": 2.0}
    assert nemo_rl_settings.settings(Namespace(loss_fn=made)).algorithm == 2


# The cluster ----------------------------------------------------------------------------------------------------------

_RAY = """
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
        lines.write(json.dumps({"step": step, "rollout_corr/rollout_is_mean": 1.0 + step}) + chr(10))
"""


def test_compare_four_on_a_cluster(tmp_path: Path) -> None:
    """Four jobs, each with its algorithm; a job that failed stops it, and what has finished is not run again."""
    pytest.importorskip("matplotlib", reason="a report needs matplotlib")
    path, output = EXAMPLES / "compare_four_on_a_cluster.sh", tmp_path / "output"
    tree = ray_tree(tmp_path / "tree", "slime")
    environment = {"OUTPUT": str(output), "RUNTIME_ENV_JSON": '{"env_vars": {"A": "b c"}}', "FAIL": "2"}
    arguments = [str(tree), "--num-rollout", "3"]
    with pytest.raises(subprocess.CalledProcessError):
        _run(path, tmp_path, environment, ["ray"], *arguments, body=_RAY, real=["python3"])
    assert sorted(p.parent.parent.name for p in output.glob("*/*/*/done.json")) == ["0", "1"]
    lines = _run(path, tmp_path, {**environment, "FAIL": ""}, ["ray"], *arguments, body=_RAY, real=["python3"])
    jobs = [line for line in lines if line[0] == "ray"]
    assert len(jobs) == 3 + 2  # 0, 1 and 2, which failed; then 2 and 3
    for job, algorithm in zip(jobs, (0, 1, 2, 2, 3), strict=True):
        assert job[job.index("--runtime-env-json") + 1] == environment["RUNTIME_ENV_JSON"]
        at = job.index("mismatch_plugin.launch")
        # The settings that the stand-in has written are no run's, and the launcher would refuse them.
        words = [word.replace(str(output), str(tmp_path / "planned")) for word in job[at + 2 :]]
        plan = _plan(Path(job[at + 1]), *words)
        assert plan.lines[0].startswith(f"algorithm {algorithm}: ")
        assert plan.argv[:2] == ("--num-rollout", "3")
    page = (output / "report.html").read_text()
    assert all(name in page for name in ("PPO", "bypass", "Complete, every run"))
    assert len(list(output.glob("cluster/*/seed0/config.json"))) == 4


@pytest.mark.parametrize("where", ["ARGS", "MORE"])
def test_explaining_four_runs_leaves_no_trace(where: str, tmp_path: Path) -> None:
    """Four jobs are explained, also behind a finished run, and nothing says afterwards that one has run."""
    output = tmp_path / "output"
    finished = _folder(output / "cluster" / "1" / "seed0") / "done.json"
    finished.write_text("{}")
    arguments = ["train.py", *(["--mismatch-explain-only"] if where == "ARGS" else [])]
    environment = {"OUTPUT": str(output)} | ({"MORE": "--mismatch-explain-only"} if where == "MORE" else {})
    path = EXAMPLES / "compare_four_on_a_cluster.sh"
    jobs = _run(path, tmp_path, environment, ["ray"], *arguments, body=_RAY, real=["python3"])
    assert [Path(job[job.index("--mismatch-report-dir") + 1]).parent.name for job in jobs] == ["0", "1", "2", "3"]
    assert [path for path in output.rglob("*") if path.is_file()] == [finished]
    assert not (output / "cluster" / "0").exists()


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did the runs get --mismatch-report-dir"):
        collect(tmp_path)
    command = [sys.executable, str(EXAMPLES / "collect_report.py"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("collect_report: no metrics.jsonl below")
    assert len(done.stderr.splitlines()) == 1


def _collected(output: Path, algorithm: str, preset: str, seed: int = 0, folder: str = "cluster") -> Path:
    run = output / folder / algorithm / f"seed{seed}"
    for _ in range(3):
        write_step(run, mp.preset(preset), {"rollout_corr/kl": 0.1, "rollout_corr/rollout_is_mean": 1.0})
    (run / "done.json").write_text("{}")
    return run


PRESETS = {"0": "disabled", "1": "bypass_ppo_clip", "2": "seq_is", "3": "pg_is"}


def test_a_report_of_four_runs_is_complete_and_says_what_it_is_about(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs matplotlib (extra lab)")
    pytest.importorskip("jinja2", reason="the report needs jinja2 (extra lab)")
    for algorithm, preset in PRESETS.items():
        _collected(tmp_path, algorithm, preset, seed=7)
    html = collect(tmp_path).read_text(encoding="utf-8")
    assert "Complete, " in html and "This is a partial report" not in html
    assert "rewards are in the logs of the host" in html and "same small task" not in html
    assert "<code>seq_is</code>" in html and "every run has finished" in html and "KL(rollout‖trainer)" in html
    (tmp_path / "cluster" / "3" / "seed7" / "done.json").unlink()
    html = collect(tmp_path).read_text(encoding="utf-8")  # again, after more has been written
    assert "This is a partial report" in html and "pg_is, seed 7: unfinished, 3 steps" in html


def test_a_report_of_what_is_not_what_it_seems_is_refused(tmp_path: Path) -> None:
    _collected(tmp_path / "mixed", "1", "seq_is")
    with pytest.raises(ValueError, match=r"seed0 holds a run of algorithm 2: move it to a folder of that name"):
        collect(tmp_path / "mixed")
    compared = _folder(tmp_path / "compared") / "run.json"
    compared.write_text('{"settings": ["control"]}')
    with pytest.raises(ValueError, match="holds a run of `mismatch-plugin compare`"):
        collect(tmp_path / "compared")
    compared.write_text('{"settings": ["con')
    with pytest.raises(ValueError, match=r"run\.json is damaged: "):
        collect(tmp_path / "compared")
    assert compared.read_text() == '{"settings": ["con'


# Running a script with stand-ins --------------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run(
    script: Path,
    folder: Path,
    variables: dict[str, str],
    stand_ins: list[str],
    *arguments: str,
    body: str = "",
    real: list[str] | None = None,
) -> list[list[str]]:
    """Command lines with which a shell script calls its stand-ins, in order (of all runs in this folder)."""
    programs, record = _folder(folder / "bin"), folder / "calls.jsonl"
    for name in stand_ins:
        code = f"import json, sys\nopen({str(record)!r}, 'a').write(json.dumps([{name!r}, *sys.argv[1:]]) + chr(10))\n"
        (programs / f"{name}.py").write_text(code + body)
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{programs / name}.py" "$@"\n')
        (programs / name).chmod(0o755)
    for name in real or ():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / name).chmod(0o755)
    if not body:
        record.unlink(missing_ok=True)
    # Only what the scripts need besides: no program of this machine is started by accident.
    for name in ("bash", "env", "dirname", "git", "mkdir", "sh"):
        found = shutil.which(name)
        if found is not None and not (programs / name).exists():
            (programs / name).symlink_to(found)
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), **variables, "PATH": str(programs)}
    bash = shutil.which("bash") or "bash"
    command = [bash, str(script), *arguments]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=folder)
    return [json.loads(line) for line in record.read_text().splitlines()]
