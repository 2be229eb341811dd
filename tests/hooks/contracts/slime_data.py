"""A rollout in slime's and miles's layout, cut by brute force, and the arguments that their adapters read.

Two steps of four samples. Tool tokens train nothing and carry 0.0 as rollout log-prob; one sample trains nothing at
all; some have prompts so long that a context-parallel rank holds nothing of their response.
"""

from __future__ import annotations

import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.hooks.slime.config import ARGUMENTS

VOCAB = 16
TEMPERATURE = 0.8
STEPS, MICRO_BATCHES = 2, 2
_LENGTHS = ((3, 9), (5, 20), (2, 1), (30, 4), (1, 31), (4, 13), (6, 7), (2, 16))  # prompt, response
_UNTRAINED = 6


@dataclass(frozen=True, eq=False)
class Sample:
    """logits [total, V]; the rest [response]. log_probs: log π_θ as the logits give it at the rollout temperature."""

    prompt: int
    tokens: Tensor
    logits: Tensor
    log_probs: Tensor
    entropy: Tensor
    rows: dict[str, Tensor]

    @property
    def total(self) -> int:
        return self.tokens.numel()

    @property
    def response(self) -> int:
        return self.total - self.prompt


@cache
def samples() -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(11)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    made = []
    for number, (prompt, response) in enumerate(_LENGTHS):
        total = prompt + response
        tokens = torch.randint(0, VOCAB, (total,), generator=generator)
        logits = normal(total, VOCAB)
        table = (logits / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        log_probs = table.gather(1, tokens[prompt:, None])[:, 0]
        mask = (torch.rand(response, generator=generator) < 0.85) | (response < 3)
        mask &= torch.tensor(number != _UNTRAINED)
        old = (log_probs + 0.1 * normal(response)).clamp(max=-0.01)
        rollout = (old + 0.3 * normal(response) * (0.3 if response > 15 else 1.0)).clamp(max=-0.01)
        rows = {
            "loss_masks": mask.int(),
            "log_probs": old,
            "rollout_log_probs": torch.where(mask, rollout, 0.0),
            "ref_log_probs": old + 0.2 * normal(response),
            "advantages": normal(1).expand(response) + 0.1 * normal(response),
        }
        made.append(Sample(prompt, tokens, logits, log_probs, -(table.exp() * table).sum(-1), rows))
    return tuple(made)


def owned(total: int, prompt: int, cp: int, rank: int, padded: int | None = None) -> list[int]:
    """Response positions that a context-parallel rank holds, one by one: who owns the position that predicts it."""
    chunk = -(-(padded or total) // (2 * cp))
    mine: dict[int, list[int]] = {rank: [], 2 * cp - 1 - rank: []}
    for position in range(prompt, total):
        if (position - 1) // chunk in mine:
            mine[(position - 1) // chunk].append(position - prompt)
    return [position for part in mine.values() for position in part]


def schedule(dp_rank: int, dp: int) -> list[list[list[int]]]:
    """Steps of micro-batches of sample numbers, for one data-parallel rank."""
    mine = list(range(len(_LENGTHS)))[dp_rank::dp]
    size = len(mine) // (STEPS * MICRO_BATCHES)
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [batches[start : start + MICRO_BATCHES] for start in range(0, len(batches), MICRO_BATCHES)]


def held_by(ids: Sequence[int], cp: int = 1, rank: int = 0, padded: int | None = None) -> list[list[int]]:
    """Of each of these samples the response positions that a context-parallel rank holds."""
    return [owned(samples()[i].total, samples()[i].prompt, cp, rank, padded) for i in ids]


def batch_of(ids: Sequence[int], cp: int = 1, rank: int = 0, padded: int | None = None) -> dict[str, Any]:
    """What the host's iterator gives of these samples: per-token rows of this rank's tokens, masks of the whole."""
    chosen = [samples()[i] for i in ids]
    at = held_by(ids, cp, rank, padded)
    names = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    local = {name: [sample.rows[name][here] for sample, here in zip(chosen, at, strict=True)] for name in names}
    return local | {
        "loss_masks": [sample.rows["loss_masks"] for sample in chosen],
        "total_lengths": [sample.total for sample in chosen],
        "response_lengths": [sample.response for sample in chosen],
        "max_seq_lens": None if padded is None else [padded] * len(ids),
    }


def sum_here(ids: Sequence[int], at: list[list[int]]) -> Callable[[Tensor], Tensor]:
    """The simplest of the host's reductions: the sum over this rank's trained tokens."""
    mask = torch.cat([samples()[i].rows["loss_masks"][here] for i, here in zip(ids, at, strict=True)])
    return lambda values: (values * mask).sum()


@cache
def initialize(cp: int = 1, tp: int = 1, pp: int = 1) -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    return parallel_state


class Model(torch.nn.Module):
    """Stands for megatron's DDP chunk: it has the config that the hook ends the step through, and scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = types.SimpleNamespace(finalize_model_grads_func=lambda model, *args, **kwargs: None)
        self.scale = 1.0

    def scale_gradients(self, factor: float) -> None:
        self.scale *= factor


# Arguments ------------------------------------------------------------------------------------------------------------

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
BOUNDS = {
    "token": (0.7, 1.4),
    "sequence": (0.3, 2.5),
    "geometric": (0.9, 1.1),
    "turn": (0.6, 1.7),
    "prefix": (0.6, 1.7),
}
TERMS = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
# What slime's own mis.yaml sets: see test_the_shipped_mis_yaml_is_the_recorded_one.
SHIPPED: dict[str, Any] = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1e-4,
    "tis_batch_normalize": True,
}
NARROW = {"eps_clip": 0.01, "eps_clip_high": 0.02}
"""ε that clips some of the sequences."""


def arguments(host: str = "slime", /, **changes: Any) -> Namespace:
    """The host's arguments as its parser leaves them, as far as the loss reads them, with `changes`."""
    values = {name: default for name, (_, default) in ARGUMENTS.items()}
    values |= {"recompute_loss_function": False, "allgather_cp": False, "log_probs_chunk_size": -1, "rank": 0}
    values |= {"rollout_temperature": TEMPERATURE, "eps_clip_high": 0.2, "grpo_std_normalization": True}
    if host == "miles":
        names = ("true_on_policy_mode", "skip_actor_forward_only", "observe_training_entropy")
        values |= dict.fromkeys((*names, "use_dynamic_global_batch_size"), False)
        values |= {"qkv_format": "thd", "global_batch_size": 0, "dump_details": None}
    return Namespace(**{**values, **changes})


def custom(host: str) -> dict[str, Any]:
    return {"loss_type": "custom_loss", "custom_loss_function_path": f"mismatch_plugin.hooks.{host}.policy_loss"}


def hooked(host: str) -> dict[str, Any]:
    return {"custom_tis_function_path": f"mismatch_plugin.hooks.{host}.tis_function"}


def stepped(host: str) -> dict[str, Any]:
    module = f"mismatch_plugin.hooks.{host}"
    post, step = f"{module}.rollout_data_postprocess", f"{module}.before_train_step"
    return {"rollout_data_postprocess_path": post, "custom_megatron_before_train_step_hook_path": step}


def ours(algorithm: int, tis: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The host's two switches as the launcher leaves them, and our settings with them."""
    bypass, weighted = algorithm in (1, 3), algorithm in (2, 3)
    settings = {"use_rollout_log_probs": bypass, "use_tis": weighted, "metrics": "full", **more}
    if tis:
        settings["tis"] = tis
    host = {"use_rollout_logprobs": bypass, "use_tis": weighted and not bypass, "mismatch_settings": settings}
    return host | {"get_mismatch_metrics": algorithm == 0}


def weights(level: str, mode: str, **more: Any) -> dict[str, Any]:
    lower, upper = BOUNDS[level]
    bounds = {"upper_bound": upper} | ({} if mode == "truncate" else {"lower_bound": lower})
    return {"level": level, "mode": mode, **bounds, **more}


def accepted_mean(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """A reducer of the policy loss as a user writes one, without context parallelism: a mean over tokens."""
    mask = torch.cat(loss_masks).float()
    return lambda values: (values * mask).sum() / mask.sum().clamp(min=1)


REDUCER = {"custom_pg_loss_reducer_function_path": f"{__name__}.accepted_mean"}
