"""miles's scripts/run_qwen3_4b.py, which starts Ray's job itself, on a patched checkout: our flags in --extra-args.

The script's own arguments are those of Qwen3-0.6B on one GPU; --extra-args makes it the tiny model on CPU. Ray is there
before it (MILES_SCRIPT_EXTERNAL_RAY), and `hf` and `pkill` do nothing: no network, and other people's processes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.trainers.columns import Shown, largest
from tests.trainers.jobs import REUSE
from tests.trainers.miles.test_losses import FULL, SEQUENCE, differences, expected
from tests.trainers.miles.trainer import CPU, FROM_DUMPS, LR, MODEL, TRAINING, Job, Sources, Trained
from tests.trainers.run import Finished, run
from tests.trainers.trained import RUNS, once

# What the script sets and no flag takes back: recomputation, which asks for a CUDA generator.
SETTINGS = {"bf16": False, **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))}
HERE = """
    --attention-backend auto --no-offload-train --no-offload-rollout --debug-train-only --eps-clip-high 0.2
    --adam-beta2 0.999
"""
SCRIPT = "scripts/run_qwen3_4b.py"
RAY = """
ray start --head --node-ip-address 127.0.0.1 --port {port} --dashboard-host 127.0.0.1 --dashboard-port {dashboard} \
    --dashboard-agent-listen-port {agent} --num-gpus 2 --num-cpus 8 --object-store-memory 200000000 --temp-dir {ray} \
    --disable-usage-stats &&
export RAY_ADDRESS=http://127.0.0.1:{dashboard} &&
for i in $(seq 60); do ray job submit -- true > /dev/null 2>&1 && break; sleep 2; done &&
exec {script}
"""


@pytest.fixture(scope="module")
def patched(sources: Sources) -> Path:
    """A copy of the checkout with our patch, as `mismatch-plugin patch apply` makes it."""
    copy = RUNS / "miles/patched"
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", str(sources.miles), str(copy)], check=True)
    command = [
        str(Path(sys.executable).with_name("mismatch-plugin")),
        "patch",
        "apply",
        "--host",
        "miles",
        "--root",
        str(copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "applied to miles/utils/arguments.py" in done.stdout
    return copy


def words(sources: Sources, folder: Path, ours: str) -> list[str]:
    inputs, settings = sources.inputs, folder / "cpu.yaml"
    paths = f"--hf-checkpoint {inputs}/hf --ref-load {inputs}/torch_dist --load {folder}/none"
    data = f"--prompt-data {inputs}/prompts.jsonl --load-debug-rollout-data {inputs}/dump/{{rollout_id}}.pt"
    extra = f"{MODEL} {CPU} {paths} {data} {TRAINING} {FROM_DUMPS} {HERE} --lr {LR} --num-rollout 2 {ours}"
    extra += f" --custom-config-path {settings} --input-key text --use-tensorboard --tb-project-name miles"
    return [
        *(SCRIPT, "--model-name", "Qwen3-0.6B", "--mode", "debug_minimal", "--num-gpus-per-node", "1"),
        *("--model-dir", str(folder / "models"), "--data-dir", str(folder / "data"), "--run-id", "one"),
        *("--output-dir", str(folder / "out"), "--megatron-path", str(sources.megatron)),
        *("--extra-args", " ".join(extra.split())),
    ]


def start(name: str, ours: str, sources: Sources, checkout: Path) -> Trained:
    folder = RUNS / "miles/script" / name
    ours = ours.replace("{run}", str(folder))
    command = [str(sources.python), *words(sources, folder, ours)]

    def begin() -> Finished:
        prepare(folder)
        port = 20000 + os.getpid() % 3000 * 3
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
            env = Sources(checkout, sources.megatron, sources.python, sources.inputs).environment(Path(ray))
            env = {key: value for key, value in env.items() if key not in ("RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES")}
            env |= {"PATH": f"{folder}/bin:{env['PATH']}", "TENSORBOARD_DIR": str(folder / "tensorboard")}
            env |= {"MILES_SCRIPT_EXTERNAL_RAY": "1", "NCCL_NVLS_ENABLE": "0", "RAY_AUTH_MODE": "disabled"}
            line = RAY.format(port=port, dashboard=port + 1, agent=port + 2, ray=ray, script=shlex.join(command))
            finished = run(["bash", "-c", line], folder / "log", limit=600, env=env, cwd=checkout)
        for dump in folder.glob("out/one/dump_details/train_data/*.pt"):  # where the script says
            dump.rename(folder / f"train_{dump.name}")
        return finished

    return Trained(Job(ours.split()), folder, once(folder, command, REUSE, begin))


def prepare(folder: Path) -> None:
    (folder / "cpu.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / "bin").mkdir()
    for tool in ("hf", "pkill"):
        (folder / "bin" / tool).write_text("#!/bin/sh\n")
        (folder / "bin" / tool).chmod(0o755)
    # The script converts a checkpoint unless this says that it has.
    (folder / "models/Qwen3-0.6B_torch_dist").mkdir(parents=True)
    (folder / "models/Qwen3-0.6B_torch_dist/latest_checkpointed_iteration.txt").write_text("release")


@pytest.mark.shows("flags_arrive", "loss_equals_reference")
def test_flags_arrive_through_its_extra_args(sources: Sources, patched: Path, shows: Shown) -> None:
    ours = f"{SEQUENCE} {FULL}"
    trained = start("flags", ours, sources, patched)
    losses, _, metrics = differences(trained, expected(trained, SEQUENCE, sources))
    loss = largest(losses)
    assert loss < 1e-5
    assert metrics > 20
    assert trained.said(r"mismatch_plugin on miles")
    assert len((trained.folder / "report/metrics.jsonl").read_text().splitlines()) == 4
    shows("flags_arrive", f"{SCRIPT} --extra-args, patched")
    shows("loss_equals_reference", SCRIPT, loss)


@pytest.mark.shows("fault_named", "exit_status")
def test_a_misspelt_flag_in_its_extra_args_ends_it(sources: Sources, patched: Path, shows: Shown) -> None:
    trained = start("misspelt", "--use-tis --tis-levl sequence", sources, patched)
    assert trained.finished.status not in (0, 124), trained.text[-2000:]
    assert trained.said(r"mismatch_plugin: .*--tis-levl"), trained.text[-2000:]
    shows("fault_named", f"{SCRIPT}: a misspelt flag, the launcher in the wrong place")


@pytest.mark.shows("fault_named")
def test_the_launcher_refuses_to_run_it(sources: Sources, shows: Shown) -> None:
    """Nothing is started: not even the script's own `pkill`."""
    words = ("-m", "mismatch_plugin.launch", SCRIPT, "--num-gpus-per-node", "1", "--use-tis")
    env = sources.environment(Path("/tmp"))
    done = subprocess.run([str(sources.python), *words], cwd=sources.miles, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "EXEC" not in done.stdout
    said = "mismatch_plugin: run_qwen3_4b.py starts its trainer in another program .*--extra-args"
    assert re.search(said, done.stderr), done.stderr[-2000:]
    shows("fault_named", f"{SCRIPT}: a misspelt flag, the launcher in the wrong place")
