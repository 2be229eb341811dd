"""Experts of both sides: replays that do not replay, each with its cause; and caches that only statistics show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.arrays import Ints
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.diagnose.scorers import Checkpoint, from_checkpoint

PROMPT, N, LAYERS, K, EXPERTS = 6, 20, 3, 2, 16
ROWS = PROMPT + N - 1


def routes(seed: int) -> Ints:
    """[ROWS, LAYERS, K], no expert twice in a row."""
    chosen = np.random.default_rng(seed).random((ROWS, LAYERS, EXPERTS)).argsort(axis=-1)
    return chosen[..., :K].astype(np.int32)


def sample(seed: int, trained: Ints | None, rollout: Ints | None = None) -> Sample:
    """A clean pair of log-probs, with routes."""
    draw = np.random.default_rng(seed)
    log_probs = -draw.uniform(0.1, 3.0, N)
    return Sample(
        prompt_ids=np.arange(PROMPT),
        response_ids=draw.integers(9, 99, N),
        rollout_log_probs=log_probs,
        train_log_probs=log_probs + draw.normal(0, 1e-3, N),
        routed_experts=routes(seed) if rollout is None else rollout,
        trained_experts=trained,
        index=seed,
    )


def replays(samples: list[Sample], *, from_checkpoint: bool = False) -> list[Finding]:
    batch = replace(make_batch(samples), from_checkpoint=from_checkpoint)
    return [item for item in check_batch(batch).findings if item.fault == "replay_off"]


def other_layer(own: Ints) -> Ints:
    return np.concatenate([own[:, :2], own[:, 1:2]], axis=1)


def other_order(own: Ints) -> Ints:
    return own[..., ::-1].copy()


def filled(own: Ints) -> Ints:
    own = own.copy()
    own[ROWS // 2 :] = 0
    return own


OFF: dict[str, tuple[Callable[[Ints], Ints], str]] = {
    "one earlier": (lambda own: np.roll(own, -1, axis=0), "one position earlier 100.0% agree: they are shifted by one"),
    "one later": (lambda own: np.roll(own, 1, axis=0), "one position later 100.0% agree: they are shifted by one"),
    "filled in": (filled, "of the rows name an expert twice: they are filled in"),
    "of another layer": (other_layer, "(layer 2: "),
    "of another run": (lambda own: routes(77), "99.9% or more was expected"),
}


@pytest.mark.parametrize("name", OFF)
def test_a_replay_that_does_not_replay_is_named_with_its_cause(name: str) -> None:
    change, says = OFF[name]
    sound = [sample(seed, routes(seed)) for seed in range(12)]
    assert replays(sound) == []
    assert replays([sample(seed, other_order(routes(seed))) for seed in range(12)]) == []  # a set of experts
    mirrored = [sample(seed, routes(seed), change(routes(seed))) for seed in range(8, 12)]
    assert [item.samples for item in replays([*sound[:8], *mirrored])] == [4]
    (finding,) = replays([*sound[:8], *(sample(seed, change(routes(seed))) for seed in range(8, 12))])
    assert says in finding.evidence, finding.evidence
    assert (finding.samples, finding.of_samples, finding.confidence) == (4, 12, "certain")


def test_what_is_not_told_is_not_compared() -> None:
    masked = sample(0, routes(1)).with_fields(loss_mask=np.zeros(N, dtype=bool))
    assert replays([masked, sample(2, routes(2))]) == []
    assert replays([sample(seed, None) for seed in range(4)]) == []
    only_prompt = routes(3)
    only_prompt[: PROMPT - 1] = 0  # rows that made no token of the response
    assert replays([sample(3, only_prompt)]) == []


def test_routes_survive_files_and_a_dump_of_slime(tmp_path: Path) -> None:
    given = sample(4, routes(5))
    for suffix in (".jsonl", ".parquet"):
        write_samples(tmp_path / f"samples{suffix}", [given])
        (back,) = read(tmp_path / f"samples{suffix}").samples
        for told, expected in ((back.routed_experts, routes(4)), (back.trained_experts, routes(5))):
            assert told is not None and np.array_equal(told, expected)
    one = {
        "tokens": [*given.prompt_ids.tolist(), *given.response_ids.tolist()],
        "response_length": N,
        "rollout_log_probs": given.rollout_log_probs.tolist(),
        "rollout_routed_experts": routes(4),
        "prefix_cache_info": {"cached_tokens": 5, "total_prompt_tokens": PROMPT},
    }
    torch.save({"rollout_id": 0, "samples": [one, {**one, "rollout_routed_experts": routes(4)[1:]}]}, tmp_path / "0.pt")
    dump = read(tmp_path / "0.pt")
    whole, short = dump.samples
    assert whole.routed_experts is not None and np.array_equal(whole.routed_experts, routes(4))
    assert whole.cached_tokens == 5
    assert short.routed_experts is None
    assert "1 samples have rollout_routed_experts of another number of tokens: not read" in dump.notes


def test_the_routers_of_a_checkpoint_stand_in_for_a_trainers_routes(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=EXPERTS, num_experts_per_tok=K)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    model = Checkpoint(tmp_path)
    found: list[torch.Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(_keep(found)) for layer in model.model.model.layers]
    records = [sample(seed, None) for seed in range(4)]
    asked, _ = from_checkpoint(model, records)
    for hook in hooks:
        hook.remove()
    chosen = torch.stack(found[-LAYERS:], dim=1).numpy()
    last = asked[-1].trained_experts
    assert last is not None and np.array_equal(np.sort(last), np.sort(chosen[:ROWS]))
    own = [one.with_fields(routed_experts=one.trained_experts) for one in asked]
    some = [one.with_fields(routed_experts=_with_strangers(one.trained_experts, 0.1)) for one in asked]
    others = [one.with_fields(routed_experts=routes(50 + one.index)) for one in asked]
    assert replays(own) == [] and replays(some, from_checkpoint=True) == []  # other kernels choose otherwise
    assert [item.confidence for item in replays(some)] == ["certain"]  # a replay is exact
    assert [item.confidence for item in replays(others, from_checkpoint=True)] == ["likely"]


def _keep(found: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: object, inputs: object, output: object) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        assert isinstance(logits, torch.Tensor)
        found.append(logits.reshape(-1, EXPERTS).topk(K).indices)

    return hook


def _with_strangers(own: Ints | None, share: float) -> Ints:
    """Some of the choices are of an expert that no other names."""
    assert own is not None
    changed = own.copy()
    changed[..., 0] = np.where(np.random.default_rng(0).random(own.shape[:2]) < 2 * share, EXPERTS, own[..., 0])
    return changed


def cached(tokens: int | None, noise: float, seed: int) -> Sample:
    draw = np.random.default_rng(seed)
    log_probs = -draw.uniform(0.5, 3.0, 40)
    return Sample(
        prompt_ids=np.arange(PROMPT),
        response_ids=draw.integers(9, 99, 40),
        rollout_log_probs=log_probs,
        train_log_probs=log_probs + draw.normal(0, noise, 40),
        cached_tokens=tokens,
        index=seed,
    )


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ([cached(5 * (seed % 2), 0.2 if seed % 2 else 0.02, seed) for seed in range(40)], True),
        ([cached(5 * (seed % 2), 0.02, seed) for seed in range(40)], False),
        ([cached(5 * (seed % 2), 0.02 if seed % 2 else 0.2, seed) for seed in range(40)], False),  # the others are
        ([cached(None, 0.2 if seed % 2 else 0.02, seed) for seed in range(40)], False),
        ([cached(5 * (seed < 6), 0.2 if seed < 6 else 0.02, seed) for seed in range(40)], False),  # too few
        (
            [cached(5 * (seed % 2), 0.004 if seed % 2 else 0.001, seed) for seed in range(40)],
            False,
        ),  # kernels differ so
    ],
)
def test_cached_samples_that_lie_further_off(samples: list[Sample], named: bool) -> None:
    found = [item for item in check_batch(make_batch(samples)).findings if item.fault == "stale_cache"]
    assert [(item.confidence, item.samples) for item in found] == [("possible", 20)] * named
    if named:
        assert "samples with a cached prompt lie" in found[0].evidence
