"""Until the host has read its command line nothing that looks like a trainer is started, and everything else is."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.guard import Guard, starts_trainer
from tests.hooks.contracts.launch_trees import Outcome, launch, ray_tree

_HEAD = "import asyncio, json, os, subprocess, sys, threading\nimport slime\nPYTHON = sys.executable\n"
_READ = "from slime.utils.arguments import parse_args\nparse_args()\n"
_EACH = """
outcomes = {}
for statement in STATEMENTS:
    try:
        exec(statement)
        outcomes[statement] = "ran"
    except BaseException as error:
        outcomes[statement] = type(error).__name__
print("GIVEN " + json.dumps(outcomes))
"""
# Each is one statement of a script; x.py leaves a file where it runs.
_STARTS = (
    "subprocess.run(['python', '-u', 'x.py', *sys.argv[1:]], check=True)",
    "subprocess.check_output('cd . && A=1 python x.py', shell=True)",
    "os.system('set -e\\nray job submit --no-wait \\\\\\n  -- x.py')",
    "os.popen('torchrun --nproc-per-node 8 x.py')",
    "os.execv(PYTHON, [PYTHON, 'x.py'])",
    "asyncio.run(asyncio.create_subprocess_shell('accelerate launch x.py'))",
)
_HARMLESS = (
    "subprocess.run(['git', 'log', '-m', 'now; true x.py'])",
    "subprocess.run([PYTHON, '-c', 'pass', 'x.py'])",
    "subprocess.run([PYTHON, 'site-packages/ray/monitor.py'])",
    "os.system('ulimit -c 0; mkdir -p a; cp x.py a; rm -r a; echo train.py')",
)
_IN_A_THREAD = (
    "thread = threading.Thread(target=subprocess.run, args=(['python', 'x.py'],))\nthread.start(); thread.join()"
)


def _run(folder: Path, source: str, line: str = "--use-tis") -> tuple[Outcome, bool]:
    """(what came of slime's script with these lines, whether x.py has run)."""
    script = ray_tree(folder / "tree", "slime")
    script.write_text(f"{_HEAD}os.chdir({str(script.parent)!r})\n{source}\n")
    (script.parent / "x.py").write_text("from pathlib import Path\nPath('started').touch()\n")
    (script.parent / "site-packages" / "ray").mkdir(parents=True)
    (script.parent / "site-packages" / "ray" / "monitor.py").write_text("")
    return launch(script, line), (script.parent / "started").exists()


def test_every_way_to_start_a_trainer_is_refused(tmp_path: Path) -> None:
    done, started = _run(tmp_path, f"STATEMENTS = {_STARTS!r}{_EACH}{_IN_A_THREAD}")
    assert done.given == dict.fromkeys(_STARTS, "SystemExit")
    assert (done.status, started) == (2, False)
    (line,) = done.errors.splitlines()  # once, whatever the script makes of it
    assert line.startswith("mismatch_plugin: train.py has not read slime's command line and starts another program (")
    for part in ("python -u x.py", "-m mismatch_plugin.launch train.py …", "--host slime --root DIR", "ost slime."):
        assert part in line


def test_other_programs_run_and_trainers_too_once_the_line_is_read(tmp_path: Path) -> None:
    done, started = _run(tmp_path, f"STATEMENTS = {_HARMLESS!r}{_EACH}{_READ}subprocess.run([PYTHON, 'x.py'])\n")
    assert done.given == dict.fromkeys(_HARMLESS, "ran")
    assert (done.status, started) == (0, True), done.errors


def test_a_host_named_by_hand_is_believed_until_the_script_has_ended(tmp_path: Path) -> None:
    done, started = _run(tmp_path, "subprocess.run([PYTHON, 'x.py'])", "--use-tis --mismatch-host slime")
    assert (done.status, started) == (2, True)
    assert "train.py has ended and never read slime's command line" in done.errors


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_scripts_of_the_host_that_start_a_trainer_are_refused_before_they_run(host: str, tmp_path: Path) -> None:
    """They end what runs on the machine first."""
    script = tmp_path / "run.py"
    script.write_text(f"import {host}.utils.external_utils.command_utils as U\nU.execute_train(train_args='')\n")
    with pytest.raises(ValueError, match=rf"run.py starts its trainer in another .*patch apply --host {host}"):
        prepare([str(script), "--use-tis"])
    assert prepare([str(script)])[3].added == ()
    assert prepare(["--mismatch-host", host, str(script), "--use-tis"])[1].name == host


@pytest.mark.parametrize("name", HOSTS)
def test_every_host_says_what_reads_its_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HOSTS[name]
    for module, function in host.reads:
        for part in accumulate(module.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        for _, other in host.reads:
            setattr(sys.modules[module], other, lambda *args: args)
        guard = Guard(host, "train.py", stops=False)
        guard.watch()
        assert not guard.read
        assert getattr(sys.modules[module], function)(1, 2) == (1, 2)
        assert guard.read


COMMANDS = {
    True: [
        *("python train.py", "/usr/bin/python3.12 -u x.py", "A=1 B=2 python x.py", "cd x && exec python x.py"),
        *("bash run.sh", "bash -lc 'python x.py'", "sh -c 'true; torchrun x.py'", "env A=1 python -m verl.trainer"),
        *("ray job submit -- x", "uv run python x.py", "srun -N 2 python x.py", "sbatch x", "A=1 ./train.py --x"),
        *("ssh host 'cd x && python x.py'", "if true; then python x.py; fi", "(python x.py)", "true\npython x.py"),
        *("ray --address x job submit -- x", "python -m torch.distributed.run x", "deepspeed --num_gpus 8 x.py"),
    ],
    False: [
        *("true", "nvidia-smi", "git rev-parse HEAD", "which python3", "pkill -9 ray", "python", "ray start --head"),
        *("ray job list", "python --version", "python -m pip install python-x", "cat scripts/train.py", "echo python"),
        *("python -m sglang.launch_server --port 1", "bash -c 'ulimit -c 0'", "git log -- train.py", "uv pip list"),
        *("timeout 5 cat train.py", "[ -f train.py ]", "g++ -I/usr/include/python3.11 x.cpp", "python setup.py x"),
        *("python -m torch.utils.collect_env", "python -m mismatch_plugin.launch train.py --use-tis"),
        "raylet '--python_worker_command=/x/python /x/site-packages/ray/setup_worker.py /x/site-packages/w.py --a b'",
    ],
}


@pytest.mark.parametrize("starts", [True, False])
def test_which_commands_start_a_trainer(starts: bool) -> None:
    assert [text for text in COMMANDS[starts] if starts_trainer(["sh", "-c", text]) != starts] == []
