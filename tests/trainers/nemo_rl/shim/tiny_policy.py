"""A policy of NeMo-RL's own abstract type: a transformers model in this process; its own are Ray actors with a GPU.

It trains as NeMo-RL's workers do: global counts, `prepare_loss_input`, a backward a micro-batch, an optimizer step a
global batch, metrics over the number of global batches. What each micro-batch had is written to NEMO_RL_SEEN.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.algorithms.loss.utils import prepare_loss_input
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from transformers import AutoModelForCausalLM

MODELS: list[Any] = []  # the policy's, whose weights are sent to the engine


def load(config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32)


def log_probs(model: Any, data: Any) -> torch.Tensor:
    """[B, S] with a first column of 0, as NeMo-RL's workers return it."""
    ids = data["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits.float()
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(ids), 1), found], 1)


class TinyPolicy(ColocatablePolicyInterface):
    def __init__(self, config: Any, **_: Any) -> None:
        # NeMo-RL's memory tracker looks for "the" cluster; there may be others on this machine.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self.cfg = config
        self.model, self.reference = load(config), load(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **config["optimizer"]["kwargs"])
        self.calls = 0
        MODELS[:] = [self.model]

    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        return BatchedDataDict({"logprobs": log_probs(self.model, data)})

    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: Any = None, timer: Any = None) -> Any:
        return BatchedDataDict({"reference_logprobs": log_probs(self.reference, data)})

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **_: Any) -> dict[str, Any]:
        size = self.cfg["train_global_batch_size"]
        batches = [data.slice(start, start + size) for start in range(0, data.size, size)]
        losses, norms, metrics, seen = [], [], defaultdict(list), []
        for step, batch in enumerate(batches):
            losses.append(self._backward(batch, loss_fn, len(batches), metrics, step, seen))
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg["max_grad_norm"]))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.calls += 1
        norms = torch.stack(norms)
        torch.save({"parts": seen, "grad_norms": norms}, Path(os.environ["NEMO_RL_SEEN"]) / f"seen_{self.calls}.pt")
        return {"loss": torch.tensor(losses), "grad_norm": norms, "all_mb_metrics": dict(metrics)}

    def _backward(self, batch: Any, loss_fn: Any, steps: int, metrics: Any, step: int, seen: list[Any]) -> float:
        """One optimizer step's gradient, micro-batch by micro-batch; its loss."""
        small, total = self.cfg["train_micro_batch_size"], 0.0
        sequences = batch["sample_mask"].sum()
        tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
        for start in range(0, batch.size, small):
            part = batch.slice(start, start + small)
            inputs, part = prepare_loss_input(self.model(part["input_ids"]).logits, part, loss_fn)
            loss, found = loss_fn(data=part, global_valid_seqs=sequences, global_valid_toks=tokens, **inputs)
            loss.backward()
            total += float(loss.detach())
            kept = {name: value for name, value in part.items() if isinstance(value, torch.Tensor)}
            seen.append({**kept, "current": inputs["next_token_logprobs"].detach(), "step": step})
            for name, value in found.items():
                metrics[name].append(value if "_min" in name or "_max" in name else value / steps)
            metrics["lr"].append(self.optimizer.param_groups[0]["lr"])
            metrics["global_valid_seqs"].append(sequences.item())
            metrics["global_valid_toks"].append(tokens.item())
        return total

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return None

    prepare_for_training = finish_training = offload_before_refit = offload_after_refit = _nothing
    prepare_refit_info = prepare_for_lp_inference = start_gpu_profiling = stop_gpu_profiling = _nothing
    print_node_ip_and_gpu_id = _nothing

    def _not_here(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_topk_logits = calibrate_qkv_fp8_scales = save_checkpoint = _not_here
    broadcast_weights_for_collective = init_collective = stream_weights_via_ipc_zmq = _not_here

    def shutdown(self) -> bool:
        return True
