"""What `tests/lab/test_run.py` runs on every rank: weights that leave a parallel layout, and the first steps of a run.

Importing this module imports no megatron-core; running its functions does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mismatch_plugin as mp
from mismatch_plugin.lab.settings import LabSettings

TINY = {
    "layers": 2,
    "hidden": 32,
    "kv_groups": 2,
    "ffn": 48,
    "prompts_per_batch": 4,
    "samples_per_prompt": 4,
    "mini_batches": 2,
    "steps": 4,
    "eval_every": 0,
    "eval_prompts": 16,
}


@dataclass(frozen=True)
class LabCase:
    """`settings` on top of TINY, `config` of the correction, on weights drawn from the seed."""

    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class LabOutcome:
    """log-probs of answers by megatron (empty but on the last stage) and by the float32 engine (but on rank 0)."""

    by_megatron: list[list[float]]
    by_engine: list[list[float]]
    records: list[dict[str, Any]]


def run_case(case: LabCase) -> LabOutcome:
    """Score held-out answers in both engines, then train."""
    from mismatch_plugin.hooks.megatron_core.batch import Sample
    from mismatch_plugin.lab.policy import Policy
    from mismatch_plugin.lab.trainer import is_first_rank, make_engine, train

    settings = LabSettings.model_validate({**TINY, **case.settings})
    policy = Policy(settings, None, lr=settings.lr)
    prompts = policy.task.prompts(5, 0, "held_out")
    answers = [policy.task.target(prompt) for prompt in prompts]
    batches = policy.batches([Sample(*pair, 0.0) for pair in zip(prompts, answers, strict=True)])
    scored = [batch.packed.old_log_probs for batch in policy.with_old_log_probs(batches)]
    by_megatron = [log_probs.tolist() for log_probs in scored if log_probs is not None]
    state, by_engine = policy.export(), []
    if is_first_rank():
        engine = make_engine(settings, "float32")
        engine.load_weights(state, 0)
        by_engine = [score(engine, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    records: list[dict[str, Any]] = []
    train(settings, mp.MismatchConfig.model_validate(case.config), policy.weights(), records.append)
    return LabOutcome(by_megatron, by_engine, records)


def score(engine: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """log π of each token of `answer` by the engine's model, token by token through its KV cache."""
    import torch
    from transformers import DynamicCache

    cache, ids, found = DynamicCache(), prompt, []
    with torch.no_grad():
        for token in answer:
            logits = engine.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
            found.append(float(logits[0, -1].float().log_softmax(-1)[token]))
            ids = [token]
    return found
