"""Scripts that start a trainer in another program are refused, and those that train next to other programs run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_plugin.launch.__main__ import HOSTS, prepare
from mismatch_plugin.launch.commands import starts_trainer
from mismatch_plugin.launch.starters import refuse_starter
from tests.hooks.contracts.launch_trees import launch, ray_tree

REFUSED = r"^run\.py trains nothing itself, it starts another program \(.* line \d+\)"

# What starts a trainer ------------------------------------------------------------------------------------------------

_STARTERS = {
    "miles's scripts": "import miles.utils.external_utils.command_utils as U\nU.execute_train(train_args='')\n",
    "miles's for NPU": "from miles.utils.external_utils.command_utils import execute_train_npu as go\ngo(a='')\n",
    "slime's scripts": "from slime.utils.external_utils.command_utils import execute_train\nexecute_train(a='')\n",
    "a host's shell": "import slime.utils.misc as U\nU.exec_command('cd /x && python3 train.py')\n",
    "a shell": "import os\nos.system('python3 train.py')\n",
    "subprocess": "import subprocess\nsubprocess.run(['python3', 'train.py'], check=True)\n",
    "a from-import": "from subprocess import run\nrun(['python', 'train.py'])\n",
    "an alias": "import subprocess as sp\nsp.run(['python', 'train.py'])\n",
    "both": "from os import system as shell\nshell('torchrun --nproc-per-node 8 x.py')\n",
    "a star": "from subprocess import *\ncheck_call(['accelerate', 'launch', 'x.py'])\n",
    "an assigned name": "import subprocess\nrun = subprocess.check_call\nrun(['bash', 'go.sh'])\n",
    "a keyword": "import subprocess\nsubprocess.Popen(args=['uv', 'run', 'x.py'])\n",
    "this interpreter": "import subprocess, sys\nsubprocess.run([sys.executable, '-u', 'x.py', *sys.argv[1:]])\n",
    "exec": "import os, sys\nos.execv(sys.executable, [sys.executable] + sys.argv)\n",
    "spawn": "import os\nos.spawnlp(os.P_WAIT, 'python3', 'python3', 'x.py')\n",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.create_subprocess_exec('python', 'x.py')\n",
    "an f-string": "import os\nname = input()\nos.system(f'cd {name} && A=1 {name}/bin/python3 {name}.py')\n",
    "a trainer's name": "import os, sys\nos.system(f'{sys.argv[1]} {sys.argv[2]}/train_async.py')\n",
    "a trainer's module": "import os, sys\nos.system(f'{sys.argv[1]} -m verl.trainer.main_ppo')\n",
    "a variable": "import subprocess\ncmd = ['nice', '-n', '5']\ncmd += ['python', 'x.py']\nsubprocess.run(cmd)\n",
    "words appended": "import os\ncmd = []\ncmd.append('python')\ncmd.append('x.py')\nos.system(' '.join(cmd))\n",
    "lines": "import os\nos.system('''\nset -e\nray job submit --no-wait \\\n  -- x.py\n''')\n",
    "a function": "import os\ndef sh(cmd, *, dry=False):\n    os.system(cmd)\nsh('ls')\nsh(cmd='python x.py')\n",
    "a function of words": "import subprocess\ndef sh(*cmd):\n    subprocess.run(cmd)\nsh('python', 'x.py')\n",
    "a command made": "import os\ndef make():\n    return f'torchrun {1} x.py'\nos.system(make())\n",
    "a Ray job": (
        "from ray.job_submission import JobSubmissionClient\n"
        "client = JobSubmissionClient()\nclient.submit_job(entrypoint='python3 train.py')\n"
    ),
    "a module next to it": "import common\ncommon.start()\n",
    "a helper next to it": "from helper import sh\nsh('python x.py')\n",
}


def _script(folder: Path, source: str) -> Path:
    (folder / "common.py").write_text("import subprocess\n\n\ndef start():\n    subprocess.Popen(['ray'])\n")
    (folder / "helper.py").write_text("import os\n\n\ndef sh(line):\n    os.system(line)\n")
    (folder / "run.py").write_text(source)
    return folder / "run.py"


@pytest.mark.parametrize("name", _STARTERS)
def test_a_script_that_only_starts_a_trainer_is_refused(name: str, tmp_path: Path) -> None:
    script = _script(tmp_path, _STARTERS[name])
    for host in HOSTS:
        with pytest.raises(ValueError, match=REFUSED) as caught:
            refuse_starter(host, script)
        assert "python -m mismatch_plugin.launch" in str(caught.value)
        assert ("mismatch-plugin patch apply" in str(caught.value)) == (host in ("slime", "miles"))
        assert f"if run.py does train in its own process, say so with --mismatch-host {host}" in str(caught.value)


def test_the_whole_line_is_refused_and_without_our_flags_it_runs(tmp_path: Path) -> None:
    script = _script(tmp_path, "import verl\n" + _STARTERS["subprocess"])
    with pytest.raises(ValueError, match=REFUSED):
        prepare([str(script), "--use-tis", "--use-rollout-log-probs"])
    assert prepare([str(script)])[3].added == ()


def test_a_starter_without_a_host_is_not_sent_to_name_one(tmp_path: Path) -> None:
    """Naming the host would only let it start."""
    script = _script(tmp_path, _STARTERS["an alias"])
    with pytest.raises(ValueError, match=rf"{REFUSED}.*say so with --mismatch-host HOST"):
        prepare([str(script), "--use-tis"])


def test_where_the_flags_go_instead_is_said(tmp_path: Path) -> None:
    script = _script(tmp_path, _STARTERS["miles's scripts"] + "extra_args = ''\n")
    with pytest.raises(
        ValueError, match=r"\(U\.execute_train, run\.py line 2\).*--host miles .*--extra-args \"--use-tis"
    ):
        prepare([str(script), "--use-tis"])


@pytest.mark.parametrize("host", ["slime", "miles", "verl"])
def test_a_host_named_by_hand_is_believed(host: str, tmp_path: Path) -> None:
    script = _script(tmp_path, _STARTERS["subprocess"])
    line = ["--mismatch-host", host, str(script), "--use-tis"]
    assert prepare([*line, "--use-rollout-log-probs"] if host == "verl" else line)[1].name == host


# What does not --------------------------------------------------------------------------------------------------------

_TRAINERS = {
    "platform": "import platform\nprint(platform.system())\n",
    "a commit": "import subprocess\nsubprocess.check_output(['git', 'rev-parse', 'HEAD'])\n",
    "the GPUs": "import subprocess\nprint(subprocess.run('nvidia-smi topo -m | grep -o NV1', shell=True))\n",
    "limits": "import os\nos.system('ulimit -n 65535')\nos.system('bash -c \"ulimit -c 0; python_limit=1\"')\n",
    "versions": "import sys, subprocess\nsubprocess.run([sys.executable, '-m', 'pip', 'freeze'])\n",
    "the cluster": "import os\nos.popen('ray status')\nos.system('ray start --head')\n",
    "python -c": "import os\nos.system('python3 -c \"import torch; print(torch.__version__)\"')\n",
    "clean-up": "import os\nos.system('pkill -9 python; ray stop --force; rm -rf /tmp/train.py')\n",
    "a message": "import subprocess\nsubprocess.run(['git', 'commit', '-m', 'now; python train.py'])\n",
    "a tracker": "import run\nrun.system('python x.py')\nrun.submit_job('python train.py')\n",
    "a method": "class Job:\n    def run(self, command): ...\n    popen = run\nJob().popen('python x.py')\n",
    "a name of its own": "def run(words): ...\nrun(['python', 'train.py'])\n",
    "an unknown command": "import os, sys\nos.system(sys.argv[1])\n",
    "another scope": "import os\ndef a():\n    cmd = 'python x.py'\ndef b():\n    cmd = 'ls'\n    os.system(cmd)\n",
    "a long sum": "import os\nos.system(" + "'a' + " * 900 + "'b')\n",
    "itself": "import os\ncmd = 'ls'\ncmd = cmd + cmd\nos.system(cmd)\ndef f(x):\n    f(x)\n    os.system(f(x))\n",
}


@pytest.mark.parametrize("name", _TRAINERS)
def test_a_trainer_next_to_other_programs_runs(name: str, tmp_path: Path) -> None:
    """The trainer is imported from elsewhere, where no source is read: an installed package, or by its name."""
    source = _TRAINERS[name] + "import importlib\nimport slime\nimportlib.import_module('my_trainer').main()\n"
    script = _script(tmp_path, source)
    assert prepare([str(script), "--use-tis"])[1].name == "slime"


def test_a_run_with_a_trainer_from_the_path(tmp_path: Path) -> None:
    """To the end: the flags arrive at the parser that the trainer calls."""
    trainer = ray_tree(tmp_path / "tree", "slime")
    trainer.rename(tmp_path / "tree" / "my_trainer.py")
    programs = "import os, platform, subprocess\nplatform.system()\nos.system('true')\nsubprocess.run(['true'])\n"
    trainer.write_text(f"{programs}import runpy\nimport slime\nrunpy.run_module('my_trainer', run_name='__main__')\n")
    done = launch(trainer, "--use-tis --num-rollout 3")
    assert done.status == 0, done.errors
    assert done.given is not None and done.given["args"]["use_tis"] is True


def test_a_trainer_that_also_starts_trainers_runs(tmp_path: Path) -> None:
    """Directly, or by a module of its own folder that reads the command line."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_text("import subprocess\nsubprocess.run(['python', 'eval.py'])\n" + script.read_text())
    assert prepare([str(script), "--use-tis"])[1].name == "slime"
    (script.parent / "mine.py").write_text("import os, train\nimport slime\nos.system('python eval.py')\n")
    assert prepare([str(script.parent / "mine.py"), "--use-tis"])[1].name == "slime"


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("python train.py", "/usr/bin/python3.12 -u x.py", "A=1 B=2 python x.py", "cd x && exec python x.py"),
        *("bash run.sh", "bash -lc 'python x.py'", "sh -c 'true; torchrun x.py'", "env A=1 python -m mine"),
        *("ray job submit -- x", "uv run x.py", "conda run -n rl python x.py", "accelerate launch x.py"),
        *("srun -N 2 python x.py", "ssh host 'cd x && python x.py'", "if true; then python x.py; fi", "(python x.py)"),
        *("./train.py", "my_launcher --file run_train_rl.py", "… -m verl.trainer.main_ppo", "…python x.py"),
        *("echo 'it's; python x.py", "python -m sglang_like", "git pull\npython x.py", "python … -m pip"),
    ],
)
def test_a_command_that_starts_a_trainer(text: str) -> None:
    assert starts_trainer(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "…", "true", "ulimit -n 65535", "nvidia-smi", "git rev-parse HEAD", "which python3", "pkill -9 ray"),
        *(
            "ray start --head",
            "ray status",
            "ray job list",
            "python --version",
            "python -m pip install python-dateutil",
        ),
        *("python -m sglang.launch_server --port 1", "bash -c 'ulimit -c 0'", "cat scripts/train.py", "echo python"),
        *("git log -- train.py", "uv pip list", "accelerate env", "hostname -I 2>&1 | head -1", "hf download python"),
        *("timeout 5 cat train.py", "sudo cp python x.py"),
    ],
)
def test_a_command_that_starts_none(text: str) -> None:
    assert not starts_trainer(text)
