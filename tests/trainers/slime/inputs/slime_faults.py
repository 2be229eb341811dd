"""Faults as users make them, through slime's own function paths: what a server is told, and which weights it reads."""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import contextlib
import os
import pathlib
import shutil

HOTTER = 0.7
ARRIVES = 4  # from this version on, one layer of new weights reaches the server; before, nothing does
DIES = "3"  # the version of weights under which the server is killed


async def other_temperature(args, sample, sampling_params):
    """For --custom-generate-function-path: the server samples at a temperature that the trainer is not told."""
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, {**sampling_params, "temperature": HOTTER})


async def killed_server(args, sample, sampling_params):
    """For the same: after a few updates the server's process is killed, as the kernel does where memory ends."""
    import psutil  # pyright: ignore[reportMissingModuleSource]
    from slime.rollout.sglang_rollout import generate

    sample = await generate(args, sample, sampling_params)
    if sample.weight_versions and sample.weight_versions[-1] == DIES:
        for process in psutil.process_iter(["name"]):
            if "sglang::sched" in process.info["name"]:
                with contextlib.suppress(psutil.NoSuchProcess):  # another sample has killed it
                    if process.environ().get("RUN_FOLDER") == os.environ["RUN_FOLDER"]:
                        print("the server is killed", flush=True)
                        process.kill()
    return sample


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
