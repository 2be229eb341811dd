"""Until the host has read its command line nothing that looks like a trainer is started, and everything else is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.guard import Guard, starts_trainer
from tests.hooks.contracts.launch_trees import launch, ray_tree


def test_a_run_in_which_our_flags_would_not_arrive_exits_2_with_one_sentence(tmp_path: Path) -> None:
    """What is raised in a thread ends no script, and a host named by hand is believed until the end."""
    thread = "one = threading.Thread(target=subprocess.run, args=([sys.executable, 'x.py'],))\none.start()\none.join()"
    child = "subprocess.run([sys.executable, 'x.py'])\nsys.exit(0)"
    script = ray_tree(tmp_path / "tree", "slime")
    (tmp_path / "x.py").write_text("from pathlib import Path\nPath('started').touch()\n")
    for source, host, started, said in (
        (thread, "", False, "train.py has not read slime's command line and starts another program ("),
        (child, "--mismatch-host slime", True, "train.py has ended and never read slime's command line"),
        ("os.execv('/bin/true', ['true'])", "--mismatch-host slime", False, "train.py has not read slime's command"),
    ):
        start = f"import os, subprocess, sys, threading\nimport slime\nos.chdir({str(tmp_path)!r})"
        script.write_text(f"{start}\n{source}\n")
        (tmp_path / "started").unlink(missing_ok=True)
        done = launch(script, f"--use-tis {host}")
        assert (done.status, (tmp_path / "started").exists()) == (2, started), done.errors
        (sentence,) = done.errors.splitlines()
        assert sentence.startswith(f"mismatch_plugin: {said}")


def test_every_way_to_start_a_trainer_is_seen_until_the_line_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("from pathlib import Path\nPath('started').touch()\n")
    guard = Guard(replace(HOSTS["slime"], reads=()), "train.py", stops=True)
    guard.watch()
    try:
        for start in (
            lambda: subprocess.run(["python", "-u", "x.py"], check=True),
            lambda: subprocess.check_output("cd . && A=1 python x.py", shell=True),
            lambda: os.system("set -e\nray job submit --no-wait \\\n  -- x.py"),
            lambda: sys.audit("os.exec", sys.executable, [b"python", b"x.py"], {}),
        ):
            with pytest.raises(SystemExit, match="2"):
                start()
        subprocess.run([sys.executable, "-c", "pass", "x.py"], check=True)
        assert os.system("ulimit -c 0; cp x.py a; rm a; test -f x.py") == 0
    finally:
        guard.read = True  # no hook can be taken back
    first, *_ = capsys.readouterr().err.splitlines()
    for part in ("python -u x.py", "-m mismatch_plugin.launch train.py …", "--host slime --root DIR", "ost slime."):
        assert part in first
    assert not Path("started").exists()
    subprocess.run([sys.executable, "x.py"], check=True)
    assert Path("started").exists()


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
        *("bash run.sh", "bash -lc 'python x.py'", "env A=1 python -m verl.trainer", "ray --address x job submit -- x"),
        *("uv run python x.py", "srun -N 2 python x.py", "sbatch x", "A=1 ./train.py --x", "true\npython x.py"),
        *("ssh host 'cd x && python x.py'", "if true; then python x.py; fi", "deepspeed --num_gpus 8 x.py"),
    ],
    False: [
        *("nvidia-smi", "which python3", "pkill -9 ray", "python", "ray start --head", "git log -- train.py"),
        *("ray job list", "python --version", "python -m pip install python-x", "cat scripts/train.py", "echo python"),
        *("python -m sglang.launch_server --port 1", "bash -c 'ulimit -c 0'", "timeout 5 cat train.py"),
        *("python setup.py x", "python -m mismatch_plugin.launch train.py --use-tis"),
        "raylet '--python_worker_command=/x/python /x/site-packages/ray/setup_worker.py /x/site-packages/w.py --a b'",
    ],
}


@pytest.mark.parametrize("starts", [True, False])
def test_which_commands_start_a_trainer(starts: bool) -> None:
    assert [text for text in COMMANDS[starts] if starts_trainer(["sh", "-c", text]) != starts] == []
