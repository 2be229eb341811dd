"""verl's SGLang server and its adapter, for the released sglang that serves on CPU."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from verl.workers.rollout.sglang_rollout import async_sglang_server, sglang_rollout
from verl.workers.rollout.utils import ensure_async_iterator


def fields_of(arguments: Any) -> list[Any]:
    """What verl asks of `dataclasses.fields(ServerArgs)`."""
    return [SimpleNamespace(name=name) for name in arguments.__struct_fields__]


class CpuServer(async_sglang_server.SGLangHttpServer):
    """verl's server actor, unchanged but for how it reads the names of ServerArgs."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        async_sglang_server.dataclasses = SimpleNamespace(fields=fields_of)
        await super().launch_server(*args, **kwargs)


class CpuReplica(async_sglang_server.SGLangReplica):
    """verl's replica, of that server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuServer)


class CpuServerClient(sglang_rollout.AsyncHttpServerAdapter):
    """verl's client of the server, with the two abstract methods that sglang 0.5.23 has added."""

    async def begin_weight_update(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("weights are read from a file here, in one call")

    end_weight_update = begin_weight_update


sglang_rollout.AsyncHttpServerAdapter = CpuServerClient


class FileServerAdapter(sglang_rollout.ServerAdapter):
    """verl's adapter; the weights that it is given go to a folder that the server reads."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        await self._init_server_adapter()
        tensors = {name: t.detach().contiguous() async for name, t in ensure_async_iterator(weights)}
        if self._engine is not None and self._is_server_tp_leader():
            folder = Path(os.environ["VERL_CPU_WEIGHTS"]) / f"server_{self.replica_rank}_version_{global_steps}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(self.model_config.local_path) / "config.json", folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            answer = await self._engine._make_async_request(
                "update_weights_from_disk", {"model_path": str(folder), "load_format": "safetensors"}
            )
            if not answer.get("success"):
                raise RuntimeError(f"the server did not take the weights of step {global_steps}: {answer}")
            shutil.rmtree(folder)
            await self._engine.flush_cache()
            if global_steps is not None:
                await self.server_actor.set_global_steps.remote(global_steps)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
