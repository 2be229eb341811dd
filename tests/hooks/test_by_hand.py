"""What verl, NeMo-RL and Megatron-LM RL are handed, against loops over numbers: losses, slopes, masks, metrics."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_plugin.hooks.verl.config import settings as verl_settings
from mismatch_plugin.hooks.verl.driver import correct_rollout_batch
from mismatch_plugin.hooks.verl.loss import verl_token_loss as token_loss
from tests.hooks.contracts.by_hand import Token, correct_by_hand, rows_of
from tests.hooks.contracts.megatron_rl_batches import ALGORITHMS, CLIP, LAYOUTS, make_config, run_loss, whole_sequences
from tests.hooks.nemo_rl.test_adapter import BLOCKS, batch, build, call
from tests.hooks.nemo_rl.test_adapter import MASK as NEMO_MASK

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


def placed(sequences: list[list[Token]], name: str) -> Tensor:
    """[sequences, tokens] of one value, 0 under the mask."""
    return torch.tensor([[t.get(name, 0.0) for t in tokens] for tokens in sequences], dtype=torch.float64)


# verl -----------------------------------------------------------------------------------------------------------------

MASK = torch.tensor(
    [[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
)
ACTOR = {"clip_ratio": 0.1, "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.2}
WAYS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "bypass": {"bypass_mode": True, "loss_type": "ppo_clip"},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce"},
}
CRITERIA = {
    "token": "token:ratio:0.7:1.4", "sequence": "sequence_sum:ratio:0.5:1.8", "geometric": "token:k2:0.05",
}  # fmt: skip


def policies(seed: int) -> dict[str, Tensor]:
    """Three policies' log-probs, all different, and advantages; NaN under the mask."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = (rollout + noise(0.3)).clamp(max=-0.01)
    current = (old + noise(0.3)).clamp(max=-0.01)
    data = {"rollout": rollout, "old": old, "current": current, "advantages": noise(1.0)}
    return {name: value.masked_fill(MASK == 0, torch.nan) for name, value in data.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask", "mask normalised"])
@pytest.mark.parametrize(("denominator", "objective"), [("auto", "ppo"), ("original", "ppo"), ("original", "cispo")])
def test_verl(way: str, level: str, mode: str, denominator: str, objective: str) -> None:
    bounds = {"upper_bound": 1.2} if mode == "truncate" else {"lower_bound": 0.7, "upper_bound": 1.4}
    ours: dict[str, Any] = {"denominator": denominator, "rs": {"veto_threshold": 0.6}}
    if way != "reinforce":
        ours["objective"] = objective
    if way != "bypass":
        tis = {"level": level, "mode": mode.split()[0], **bounds}
        ours |= {"use_tis": True, "tis": tis}
    elif "mask" in mode:  # there are no weights, and what masks is rejection
        ours["rs"] |= {"criteria": [CRITERIA[level]]}
    correction = {**WAYS[way], "rollout_is_batch_normalize": "normalised" in mode and way != "bypass", "mismatch": ours}
    config = verl_settings({**ACTOR, "policy_loss": {"rollout_correction": correction}})
    kept = clipped = dual = 0.0
    for seed in range(4):
        data = policies(seed)
        anchor, mask, weights = data["rollout"], MASK, None
        if way == "decoupled":
            given = {"old_log_probs": data["old"], "rollout_log_probs": anchor, "response_mask": MASK.clone()}
            made = correct_rollout_batch(SimpleNamespace(batch=given), verl_settings(correction))[0].batch
            anchor, mask, weights = data["old"], made["response_mask"], made["rollout_is_weights"]
        log_prob = data["current"].clone().requires_grad_()
        losses, aggregated, metrics = token_loss(
            anchor, log_prob, data["advantages"], mask.bool(), config, rollout_is_weights=weights
        )
        (gradient,) = torch.autograd.grad((losses * aggregated).sum(), log_prob)
        sequences = correct_by_hand(rows_of(MASK, **data), config)
        units = placed(sequences, "keep") if denominator == "auto" else MASK.double()
        torch.testing.assert_close(aggregated.double(), units)
        torch.testing.assert_close(losses * aggregated, placed(sequences, "pg_loss"))
        torch.testing.assert_close(gradient.nan_to_num(7.0), placed(sequences, "slope"))
        names = {"actor/ppo_kl": "ppo_kl", "actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual"}
        for name in names if way != "reinforce" else ["actor/ppo_kl"]:
            wanted = (placed(sequences, names[name]) * units).sum() / units.sum()
            assert metrics[name] == pytest.approx(float(wanted), rel=1e-9, abs=1e-12), name
        kept += float(placed(sequences, "keep").sum()) / float(4 * MASK.sum())
        clipped, dual = clipped + metrics.get("actor/pg_clipfrac", 1), dual + metrics.get("actor/pg_clipfrac_lower", 1)
    assert 0.2 < kept < 1 and clipped and (dual or objective == "cispo")  # every rule was at work


# NeMo-RL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("token_level", "kind"), [(True, "k3"), (False, "k3"), (True, "k1"), (False, "k2")])
def test_nemo_rl(name: str, token_level: bool, kind: str) -> None:
    host = {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind, "token_level_loss": token_level}
    loss = build(BLOCKS[name], **host)
    log_probs, data = batch(2)
    value, gradient, metrics = call(loss, log_probs, data, 31.0, 7.0)
    columns = {"rollout": "generation_logprobs", "old": "prev_logprobs", "ref": "reference_policy_logprobs"}
    rows = {mine: data[theirs][:, 1:] for mine, theirs in {**columns, "advantages": "advantages"}.items()}
    config = loss.config.model_copy(update={"terms": loss.config.terms.model_copy(update={"kl_type": kind})})
    sequences = correct_by_hand(rows_of(NEMO_MASK[:, 1:], current=log_probs, **rows), config)
    trained = [[token for token in tokens if token] for tokens in sequences]

    def mean(value: Any) -> float:
        if token_level:
            return sum(value(token) for tokens in trained for token in tokens) / 31.0
        return sum(sum(map(value, tokens)) / len(tokens) for tokens in trained if tokens) / 7.0

    everything = list(itertools.chain(*trained))
    errors = sum(math.exp(abs(token["log_ratio"])) for token in everything)
    kinds = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(d) - d}
    policy = mean(lambda token: token["pg_loss"])
    wanted = {
        "token_mult_prob_error": errors / 31.0,
        "gen_kl_error": sum(kinds[kind](token["log_ratio"]) for token in everything) / 31.0,
        "sampling_importance_ratio": sum(token["used"] for token in everything) / 31.0,
        "kl_penalty": mean(lambda token: token["kl"]),
        "loss": policy + 0.3 * mean(lambda token: token["kl"]),
    }
    if coefficient := config.terms.rollout_kl_coef:
        wanted["loss"] += coefficient * mean(lambda token: (token["current"] - token["rollout"]) ** 2 / 2)
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-6)
    assert float(value) == pytest.approx(wanted["loss"], rel=1e-6)
    assert gradient.shape == log_probs.shape


# Megatron-LM RL -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "weighted_kl", "objective"),
    [
        *(("0", False, "ppo"), ("1", False, "ppo"), ("2", False, "ppo"), ("2", True, "ppo"), ("3", False, "ppo")),
        *(("3", True, "ppo"), ("0", False, "gspo"), ("1", False, "cispo"), ("2", False, "gspo"), ("2", True, "cispo")),
        ("2", False, "reinforce"),
    ],
)
def test_megatron_rl(algorithm: str, weighted_kl: bool, objective: str) -> None:
    terms = {"kl_coef": CLIP.kl_beta, "kl_type": "k3", "kl_importance_weighted": weighted_kl}
    more: dict[str, Any] = {"rs": {"criteria": ["sequence_max:k2:0.3"]}, "terms": terms, "objective": objective}
    low, high = 1.0 - CLIP.eps_lower, 1.0 + CLIP.eps_upper
    if algorithm in "23":
        more["tis"] = {"mode": "clip", "lower_bound": 0.9, "upper_bound": 1.25}
    if algorithm == "3":
        low, high = 0.9, 1.25
    if objective == "reinforce":
        low, high = 0.0, math.inf  # no clip
    config = make_config(**ALGORITHMS[algorithm], **more)
    outside = {"above": 0.0, "below": 0.0}
    for layout in LAYOUTS.values():
        data, place = layout()
        handed, gradient, _ = run_loss(config, data, place)
        where = whole_sequences(data, place)
        names = ("mask", "current", "old", "rollout", "ref")
        columns = {name: [data[name][row, part] for row, part in where] for name in names}
        advantages = [[a] * len(mask) for a, mask in zip(data["advantages"], columns["mask"], strict=True)]
        sequences = correct_by_hand(rows_of(**columns, advantages=advantages), config)
        for tokens, (row, part) in zip(sequences, where, strict=True):
            for at, token in enumerate(tokens):
                got = [float(value[row, part][at].detach()) for value in handed]
                if not token:
                    assert [*got[:2], *got[3:], float(gradient[row, part][at])] == [0.0] * 6
                    continue
                entropy = -math.exp(token["current"]) * token["current"]
                loss = token["pg_loss"] + CLIP.kl_beta * token["weighted_kl"] - CLIP.entropy_weight * entropy
                above, below = float(token["r"] > high), float(token["r"] < low)
                assert got == pytest.approx([loss, token["kl"], token["r"], entropy, above, below], rel=1e-9, abs=1e-12)
                outside = {"above": outside["above"] + above, "below": outside["below"] + below}
    assert all(outside.values()) or objective in ("gspo", "reinforce")  # the mean of a response moves less
