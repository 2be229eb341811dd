"""verl's FSDP engine on CPU, which also writes what it trained on (verl imports it by `model.external_lib`)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

FIELDS = (
    "prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs", "old_log_probs", "advantages",
    "rollout_is_weights",
)  # fmt: skip


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuFSDPEngine(FSDPEngineWithLMHead):
    """The engine itself; what the loss was given and made goes to VERL_CPU_DUMP, one file a micro-batch."""

    written = steps = 0

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        folder = os.environ.get("VERL_CPU_DUMP")
        if not folder or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)

        def observed(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            loss, metrics = loss_function(model_output=model_output, data=data, dp_group=dp_group)
            log_probs = model_output["log_probs"]  # of whole sequences, nested
            (gradient,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
            record = {name: [*data[name].unbind()] for name in FIELDS if name in data.keys()}  # noqa: SIM118 (`in` is not defined)
            record |= {"log_probs": [*log_probs.detach().unbind()], "gradient": [*gradient.unbind()]}
            record |= {"loss": float(loss), "step": self.steps, "rank": self.rank}
            torch.save(record, Path(folder) / f"rank{self.rank}_{self.written:05d}.pt")
            self.written += 1
            return loss, metrics

        return super().forward_step(micro_batch, observed, forward_only)

    def optimizer_step(self) -> float:
        self.steps += 1
        return super().optimizer_step()
