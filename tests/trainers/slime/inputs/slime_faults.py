"""Faults as users make them, through slime's own function paths: what a server is told, and which weights it reads."""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request

HOTTER = 0.7
ARRIVES = 4  # from this version on, one layer of new weights reaches the server; before, nothing does
SECOND = 128  # the first reply of the second rollout, before which something happens


async def other_temperature(args, sample, sampling_params):
    """For --custom-generate-function-path: the server samples at a temperature that the trainer is not told."""
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, {**sampling_params, "temperature": HOTTER})


def stale_files(args, folder, engines):
    """For --custom-update-weight-post-write-path: the server's file system still has old files when it is told to read.

    What should have arrived is kept in the run's folder, as `now/VERSION`.
    """
    from safetensors.torch import load_file, save_file

    folder = pathlib.Path(folder)
    version = int(folder.name.removeprefix("weight_v"))
    kept = pathlib.Path(os.environ["RUN_FOLDER"], "now", str(version))
    kept.parent.mkdir(exist_ok=True)
    shutil.copytree(folder, kept)
    (start,) = pathlib.Path(args.hf_checkpoint).glob("*.safetensors")
    (file,) = folder.glob("*.safetensors")
    old, new = load_file(start), load_file(file)
    arrived = {name for name in new if version >= ARRIVES and ".layers.0." in name}
    save_file({name: new[name] if name in arrived else old[name] for name in new}, file, metadata={"format": "pt"})


async def restarted_server(args, sample, sampling_params):
    """For the same: the server's process ends, and another one serves at its address what it was launched with."""
    import psutil  # pyright: ignore[reportMissingModuleSource]
    from slime.rollout.sglang_rollout import generate

    if _now("restarted", sample):
        url = _server(args)
        port = int(url.rpartition(":")[2])
        old = next(p for p in psutil.process_iter(["name"]) if _listens(p, port))
        for process in [*old.children(recursive=True), old]:
            process.kill()
        while any(_listens(p, port) for p in psutil.process_iter(["name"])):
            time.sleep(0.2)
        words = os.environ["SLIME_SERVER"].split()
        place = ["--model-path", args.hf_checkpoint, "--host", "127.0.0.1", "--port", str(port)]
        with pathlib.Path(os.environ["RUN_FOLDER"], "restarted.log").open("wb") as log:
            subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *place, *words], stdout=log, stderr=log)
        while not _answers(f"{url}/health"):
            time.sleep(0.5)
    return await generate(args, sample, sampling_params)


async def other_writer(args, sample, sampling_params):
    """For the same: somebody else sends the first checkpoint to the server, under the label that it has."""
    from slime.rollout.sglang_rollout import generate

    if _now("other writer", sample):
        url = _server(args)
        body = json.dumps({"model_path": args.hf_checkpoint, "weight_version": "2", "flush_cache": True})
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/update_weights_from_disk", body.encode(), headers)
        with urllib.request.urlopen(request) as reply:
            print("another writer's update:", json.load(reply), flush=True)
    return await generate(args, sample, sampling_params)


def _now(what, sample):
    """Once, before the first request of the rollout that is meant: no other task has sent one, since nothing awaits."""
    mark = pathlib.Path(os.environ["RUN_FOLDER"], what)
    if sample.index < SECOND or mark.exists():
        return False
    mark.touch()
    return True


def _server(args):
    with urllib.request.urlopen(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers") as reply:
        return json.load(reply)["workers"][0]["url"]


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _listens(process, port):
    import psutil  # pyright: ignore[reportMissingModuleSource]

    try:
        return any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections("tcp"))
    except psutil.Error:
        return False
