"""Until the host has read its command line nothing that looks like a trainer is started, and everything else is."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

from mismatch_plugin.hooks.hosts import HOSTS, find_host
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.guard import Guard, starts_trainer
from tests.hooks.contracts.launch_trees import Outcome, launch, ray_tree

REFUSED = "mismatch_plugin: train.py has not read slime's command line and starts another program ("
_HEAD = "import asyncio, json, os, shlex, subprocess, sys, threading, time\nimport slime\nPYTHON = sys.executable\n"

# Each is one statement of a script; x.py leaves a file where it runs.
_STARTS = (
    "subprocess.run([PYTHON, 'x.py'])",
    "subprocess.run(['python', '-u', 'x.py', *sys.argv[1:]], check=True)",
    "subprocess.Popen(args=['python', 'x.py'])",
    "subprocess.check_output('cd . && A=1 python x.py', shell=True)",
    "subprocess.run('python x.py', shell=True, executable='/bin/bash')",
    "os.system('python x.py')",
    "os.system('set -e\\nray job submit --no-wait \\\\\\n  -- x.py')",
    "os.popen('torchrun --nproc-per-node 8 x.py')",
    "os.execv(PYTHON, [PYTHON, 'x.py'])",
    "os.execvp('python', ['python', 'x.py'])",
    "os.posix_spawn(PYTHON, [PYTHON, 'x.py'], os.environ)",
    "asyncio.run(asyncio.create_subprocess_exec(PYTHON, 'x.py'))",
    "asyncio.run(asyncio.create_subprocess_shell('accelerate launch x.py'))",
)
_HARMLESS = (
    "subprocess.run(['git', 'rev-parse', 'HEAD'])",
    "subprocess.run(['git', 'log', '-m', 'now; python x.py'])",
    "subprocess.run('nvidia-smi topo -m | grep -o NV1', shell=True)",
    "subprocess.run([PYTHON, '-m', 'json.tool', '--help'], stdout=subprocess.DEVNULL)",
    "subprocess.run([PYTHON, '-c', 'pass', 'x.py'])",
    "subprocess.run([PYTHON, 'site-packages/ray/monitor.py'])",
    "os.system('ulimit -c 0; mkdir -p a; cp x.py a; rm -r a; echo train.py')",
    "os.system('bash -c \"ulimit -c 0; python_limit=1\"')",
    "os.system('pkill -9 no_such_python; ray --version; which python')",
    "os.popen('true')",
)
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


def _tree(folder: Path, source: str) -> Path:
    """slime's tree with a script of these lines, and what it may start, which leaves a file."""
    script = ray_tree(folder / "tree", "slime")
    script.write_text(f"{_HEAD}os.chdir({str(script.parent)!r})\n{source}\n")
    (script.parent / "x.py").write_text("open('started', 'a').write('x')\n")
    (script.parent / "site-packages" / "ray").mkdir(parents=True)
    (script.parent / "site-packages" / "ray" / "monitor.py").write_text("")
    return script


def _run(folder: Path, source: str, line: str = "--use-tis") -> tuple[Outcome, bool]:
    """(what came of the script, whether x.py has run)."""
    script = _tree(folder, source)
    return launch(script, line), (script.parent / "started").exists()


def test_every_way_to_start_a_trainer_is_refused(tmp_path: Path) -> None:
    done, started = _run(tmp_path, f"STATEMENTS = {_STARTS!r}{_EACH}")
    assert done.given == dict.fromkeys(_STARTS, "SystemExit")
    assert (done.status, started, done.errors.count(REFUSED)) == (2, False, 1)


def test_other_programs_run_and_trainers_too_once_the_line_is_read(tmp_path: Path) -> None:
    read = "from slime.utils.arguments import parse_args\nparse_args()\nsubprocess.run([PYTHON, 'x.py'])\n"
    done, started = _run(tmp_path, f"STATEMENTS = {_HARMLESS!r}{_EACH}{read}")
    assert done.given == dict.fromkeys(_HARMLESS, "ran")
    assert (done.status, started) == (0, True), done.errors


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    subprocess.run('python x.py', shell=True)\nexcept Exception:\n    pass",
        "try:\n    os.system('python x.py')\nexcept:\n    raise RuntimeError",
        "def run():\n    subprocess.run(['python', 'x.py'])\nthreading.Thread(target=run).start()\ntime.sleep(60)",
    ],
    ids=["except Exception", "bare except", "a thread"],
)
def test_a_refusal_is_one_sentence_and_exit_2(source: str, tmp_path: Path) -> None:
    done, started = _run(tmp_path, source)
    assert (done.status, started) == (2, False)
    (line,) = done.errors.splitlines()
    assert line.startswith(REFUSED)
    for part in ("python x.py", "python -m mismatch_plugin.launch train.py …", "--host slime --root DIR", "ost slime."):
        assert part in line


_READ = "from slime.utils.arguments import parse_args\nparse_args()\n"
_AGAIN = "os.execv(PYTHON, [PYTHON, '-m', 'mismatch_plugin.launch', 'y.py', '--use-tis'])"


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("os._exit(0)", 2, "train.py has ended and never read slime's command line"),
        ("os._exit(3)", 3, ""),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 0'])", 2, REFUSED),
        ("try:\n    os.execlp('true', 'true')\nexcept BaseException:\n    pass\nos._exit(0)", 2, REFUSED),
        # Neither silent nor ours: once the line was read, in a child, and where the launcher starts anew.
        (f"{_READ}os._exit(0)", 0, ""),
        (f"{_READ}os.execlp('true', 'true')", 0, ""),
        (f"child = os.fork()\nif not child:\n    os._exit(0)\nos.waitpid(child, 0)\n{_READ}", 0, ""),
        (f"child = os.fork()\nif not child:\n    os.execlp('true', 'true')\nos.waitpid(child, 0)\n{_READ}", 0, ""),
        (f"with open('y.py', 'w') as file:\n    file.write('import slime\\n' + {_READ!r})\n{_AGAIN}", 0, ""),
    ],
)
def test_a_script_that_leaves_before_its_line_is_read_is_noticed(
    source: str, status: int, said: str, tmp_path: Path
) -> None:
    """Also where the host is named by hand, which says that the script trains in its own process."""
    done, _ = _run(tmp_path, source, "--use-tis --mismatch-host slime")
    assert (done.status, said in done.errors, bool(done.errors)) == (status, True, bool(said)), done.errors


def test_a_program_started_in_a_forked_child_is_refused_there(tmp_path: Path) -> None:
    """os.spawn* forks and calls exec, whose error it turns into exit status 127."""
    done, started = _run(tmp_path, "assert os.spawnlp(os.P_WAIT, 'python', 'python', 'x.py') == 127")
    assert (done.status, started) == (2, False)
    assert REFUSED in done.errors and "never read slime's command line" in done.errors


@pytest.mark.parametrize(("line", "status"), [("--use-tis --mismatch-host slime", 2), ("--num-rollout 3", 0)])
def test_a_host_named_by_hand_is_believed_and_a_run_without_us_is_left_alone(
    line: str, status: int, tmp_path: Path
) -> None:
    """Whether the named host has read its command line is asked in the end all the same."""
    done, started = _run(tmp_path, "subprocess.run([PYTHON, 'x.py'])", line)
    assert (done.status, started) == (status, True)
    assert ("never read slime's command line" in done.errors) == bool(status) and REFUSED not in done.errors


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_scripts_of_the_host_that_start_a_trainer_are_refused_before_they_run(host: str, tmp_path: Path) -> None:
    """They end what runs on the machine first."""
    script = tmp_path / "run.py"
    script.write_text(f"import {host}.utils.external_utils.command_utils as U\nU.execute_train(train_args='')\n")
    with pytest.raises(
        ValueError, match=rf"run.py starts its trainer in another .*patch apply --host {host}"
    ) as caught:
        prepare([str(script), "--use-tis"])
    assert ("--extra-args" in str(caught.value)) == (host == "miles")
    assert prepare([str(script)])[3].added == ()
    assert prepare(["--mismatch-host", host, str(script), "--use-tis"])[1].name == host


def test_a_starter_without_a_host_is_told_both_ways(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import subprocess\nsubprocess.run(['python', 'x.py'])\n")
    with pytest.raises(
        ValueError, match=r"say which it is, --mismatch-host .* or, if it only starts a trainer, put the"
    ):
        prepare([str(script), "--use-tis"])


# Whether the command line was read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_name", HOSTS)
def test_every_host_says_what_reads_its_command_line(host_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = find_host(host_name)
    for module, function in host.reads:
        for part in accumulate(module.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        for _, name in host.reads:
            setattr(sys.modules[module], name, lambda *args: args)
        guard = Guard(host, "train.py", stops=False)
        guard.watch()
        assert not guard.read
        assert getattr(sys.modules[module], function)(1, 2) == (1, 2)
        assert guard.read


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("python train.py", "/usr/bin/python3.12 -u x.py", "A=1 B=2 python x.py", "cd x && exec python x.py"),
        *("bash run.sh", "bash -lc 'python x.py'", "sh -c 'true; torchrun x.py'", "env A=1 python -m mine"),
        *("ray job submit -- x", "uv run x.py", "conda run -n rl python x.py", "accelerate launch x.py"),
        *("srun -N 2 python x.py", "ssh host 'cd x && python x.py'", "if true; then python x.py; fi", "(python x.py)"),
        *("./train.py", "my_launcher --file run_train_rl.py", "other -m verl.trainer.main_ppo"),
        *("echo 'it's; python x.py", "python -m sglang_like", "git pull\npython x.py", "python -mverl.main_ppo"),
        *("ray --address x job submit -- x", "python -m torch.distributed.run x.py", "nohup env A=1 python x.py"),
    ],
)
def test_a_command_that_starts_a_trainer(text: str) -> None:
    assert starts_trainer(["sh", "-c", text])


@pytest.mark.parametrize(
    "text",
    [
        *("", "true", "ulimit -n 65535", "nvidia-smi", "git rev-parse HEAD", "which python3", "pkill -9 ray", "python"),
        *(
            "ray start --head",
            "ray stop --force",
            "ray status",
            "ray job list",
            "python --version",
            "python -m pip install python-x",
        ),
        *("python -m sglang.launch_server --port 1", "bash -c 'ulimit -c 0'", "cat scripts/train.py", "echo python"),
        *("git log -- train.py", "uv pip list", "accelerate env", "hostname -I 2>&1 | head -1", "hf download python"),
        *("timeout 5 cat train.py", "sudo cp python x.py", "[ -f train.py ]", "test -f train.py", "ln -s train.py x"),
        *("nvcc -I/usr/include/python3.11 x.cu", "g++ -I/usr/include/python3.11 x.cpp -o x", "gcc -I/x/python3.11 m.c"),
        *("apt-get install -y python3 git", "ps -C python -o pid", "ldd /usr/bin/python3 -v x", "ninja -v x"),
        *("tensorboard --logdir /runs/ray job submit", "python -m torch.utils.collect_env", "python setup.py x"),
        *("python -m wandb login", "python -m mismatch_plugin.launch train.py --use-tis", "wget https://x/python3.11"),
        "raylet '--python_worker_command=/x/python /x/site-packages/ray/setup_worker.py /x/default_worker.py --a b'",
    ],
)
def test_a_command_that_starts_none(text: str) -> None:
    assert not starts_trainer(["sh", "-c", text])
