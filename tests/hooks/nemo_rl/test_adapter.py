"""The loss object for NeMo-RL, on hand-made data, against policy_loss; with a checkout, against NeMo-RL's own loss."""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks.nemo_rl import MismatchLoss, settings, setup_with_loss
from mismatch_plugin.report.log import read_steps
from tests.hooks.contracts import nemo_rl as contract
from tests.host_source import host_source

NO_KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}
# Prompt, response, padding; a tool's output inside the first row; the third row is no valid sample.
TOKEN_MASK = torch.tensor(
    [[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
)
SAMPLE_MASK = torch.tensor([1, 1, 0, 1])
MASK = TOKEN_MASK * SAMPLE_MASK.unsqueeze(1)
REINFORCE = {"use_tis": True, "use_rollout_log_probs": True}
CURRENT = {"criteria": ["sequence_mean:k3:0.04"], "veto_threshold": 0.5, "policy": "current"}
BLOCKS: dict[str, dict[str, Any]] = {
    "0 gspo, current": {"objective": "gspo", "rs": CURRENT},
    "1": {"use_rollout_log_probs": True, "rs": {"criteria": ["token:k2:0.1"]}},
    "2 sequence clip": {"use_tis": True, "tis": {"level": "sequence", "mode": "clip", "upper_bound": 1.2}},
    "2 distance": {"use_tis": True, "terms": {"rollout_kl_coef": 0.2}},
    "3 sequence": {**REINFORCE, "tis": {"level": "sequence"}, "rs": {"veto_threshold": 0.7}},
}


def build(block: dict[str, Any] | None = None, **host: Any) -> MismatchLoss:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return MismatchLoss({**host, "mismatch": block or {}})


def batch(seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs [4, 7] of a model and NeMo-RL's batch [4, 8]; the first column is never read."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(TOKEN_MASK.shape, generator=generator, dtype=torch.float64)

    generation = -noise(1.0).abs() - 0.05
    previous = (generation + noise(0.3)).clamp(max=-0.01)
    current = (previous + noise(0.3)).clamp(max=-0.01)
    data = {
        "token_mask": TOKEN_MASK, "sample_mask": SAMPLE_MASK, "advantages": noise(1.0), "prev_logprobs": previous,
        "generation_logprobs": generation, "reference_policy_logprobs": current + noise(0.3),
    }  # fmt: skip
    return current[:, 1:], data


def packed_of(data: dict[str, torch.Tensor]) -> mp.PackedSequences:
    columns = {"rollout_log_probs": "generation_logprobs", "old_log_probs": "prev_logprobs", "advantages": "advantages"}
    rows: dict[str, Any] = {mine: list(data[theirs][:, 1:]) for mine, theirs in columns.items()}
    return mp.PackedSequences.from_lists(loss_masks=list(MASK[:, 1:]), **rows)


def call(loss: Any, log_probs: torch.Tensor, data: dict[str, Any], toks: float, seqs: float) -> tuple[Any, Any, Any]:
    """(loss, gradient, metrics), called as NeMo-RL calls it."""
    log_probs = log_probs.clone().requires_grad_()
    value, metrics = loss(
        data=data,
        global_valid_seqs=torch.tensor(seqs),
        global_valid_toks=torch.tensor(toks),
        **{contract.LOSS_INPUT: log_probs},
    )
    value.backward()
    assert log_probs.grad is not None
    return value.detach(), log_probs.grad, metrics


@pytest.mark.parametrize("on_policy", [False, True])
def test_the_kl_penalty_has_its_gradient(on_policy: bool) -> None:
    """With no advantage it is the only one: (k + k')(d) times the sampling ratio, k3."""
    loss = build(reference_policy_kl_penalty=0.3, use_on_policy_kl_approximation=on_policy)
    log_probs, data = batch()
    value, gradient, _ = call(loss, log_probs, {**data, "advantages": 0.0 * data["advantages"]}, 31.0, 7.0)
    d = log_probs - data["reference_policy_logprobs"][:, 1:]
    ratio = (log_probs - data["generation_logprobs"][:, 1:]).exp() if on_policy else 1.0
    mask = MASK[:, 1:]
    torch.testing.assert_close(gradient, 0.3 / 31.0 * ratio * (torch.expm1(-d) + d + 1.0 - (-d).exp()) * mask)
    assert float(value) == pytest.approx(float((0.3 / 31.0 * ratio * (torch.expm1(-d) + d) * mask).sum()), rel=1e-6)


@pytest.mark.parametrize("policy", ["neutral", "drop-token", "drop-sequence"])
def test_a_token_without_a_log_prob_is_out_of_the_penalty_too(policy: str) -> None:
    block = {**BLOCKS["3 sequence"], "rollout_log_prob_policy": policy}
    log_probs, data = batch()
    row, column = MASK[:, 1:].nonzero()[0].tolist()
    for value in (math.nan, -math.inf):
        log_probs[row, column] = value
        found, gradient, _ = call(build(block, reference_policy_kl_penalty=0.1), log_probs, data, 31.0, 7.0)
        assert found.isfinite() and gradient.isfinite().all() and gradient[row, column] == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_loss_and_metrics_of_single_rows_add_up_to_policy_loss(name: str) -> None:
    """As NeMo-RL's sequence packing makes them. Pickled before, as the loss travels to the workers. test_contract has
    the token-level loss and the gradients."""
    loss = pickle.loads(pickle.dumps(build(BLOCKS[name], **NO_KL, token_level_loss=False, ratio_clip_max=0.28)))
    log_probs, data = batch()
    toks, seqs = float(MASK.sum()), float(SAMPLE_MASK.sum())
    value, _, metrics = call(loss, log_probs, data, toks, seqs)
    result = mp.policy_loss(log_probs.flatten(), packed_of(data), loss.config)
    expected = (result.loss_sum + sum(result.terms.values())) / seqs
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-12)
    assert metrics["loss"] == float(value) and metrics["num_valid_samples"] == 3.0
    if loss.config.rs.policy != "current":
        train = log_probs if loss.config.use_rollout_log_probs else data["prev_logprobs"][:, 1:]
        gap = (train - data["generation_logprobs"][:, 1:])[MASK[:, 1:] > 0]
        assert metrics["gen_kl_error"] == pytest.approx(float((gap.exp() - 1 - gap).sum()) / toks, rel=1e-6)
        assert metrics["token_mult_prob_error"] == pytest.approx(float(gap.abs().exp().sum()) / toks, rel=1e-6)
    rows = [{key: value[i : i + 1] for key, value in data.items()} for i in range(4)]
    parts = [call(loss, log_probs[i : i + 1], row, toks, seqs)[2] for i, row in enumerate(rows)]
    for key, value in metrics.items():
        assert sum(part.get(key, 0.0) for part in parts) == pytest.approx(value, rel=1e-9, abs=1e-9), key
    theirs = result.statistics.metrics()
    compared = metrics.keys() & theirs.keys()
    assert len(compared) >= 15
    for key in compared:
        assert metrics[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12), key


def test_old_log_probs_are_read_only_where_they_are_needed() -> None:
    log_probs, data = batch()
    without = {key: value for key, value in data.items() if key != "prev_logprobs"}
    for name in ("1", "3 sequence"):
        loss = build(BLOCKS[name], **NO_KL)
        torch.testing.assert_close(call(loss, log_probs, without, 9, 3)[:2], call(loss, log_probs, data, 9, 3)[:2])
    with pytest.raises(ValueError, match="prev_logprobs is missing"):
        call(build({}, **NO_KL), log_probs, without, 9, 3)
    # NeMo-RL's placeholder: zeros that must not be read as log-probs.
    on_policy = build({}, **NO_KL, force_on_policy_ratio=True)
    value, gradient, _ = call(on_policy, log_probs, {**data, "prev_logprobs": torch.zeros(4, 8)}, 9.0, 3.0)
    advantages = data["advantages"][:, 1:] * MASK[:, 1:]
    torch.testing.assert_close(value, -advantages.sum() / 9, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(gradient, -advantages / 9, rtol=1e-7, atol=1e-12)


def test_what_stops_a_micro_batch() -> None:
    log_probs, data = batch()
    metrics = call(build({}, **NO_KL), log_probs, data, float(MASK.sum()), 3)[2]
    k3_kl = metrics["rollout_corr/k3_kl"]
    off = call(build({"metrics": "off"}, **NO_KL), log_probs, data, 9, 3)[2]
    assert set(contract.READ_METRICS) <= off.keys() and not any("rollout_corr/" in name for name in off)
    with pytest.raises(mp.GateError, match="--mismatch-gate-kl"):
        call(build({"gate_kl": 0.99 * k3_kl}, **NO_KL), log_probs, data, 9, 3)
    call(build({"gate_kl": 1.01 * k3_kl}, **NO_KL), log_probs, data, 9, 3)
    with pytest.raises(ValueError, match=r"\(4, 6\), the token mask without its first column \(4, 7\)"):
        call(build({}, **NO_KL), log_probs[:, 1:], data, 9, 3)
    data["generation_logprobs"][1, 4] = torch.nan
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position 3"):
        call(build(BLOCKS["3 sequence"], **NO_KL), log_probs, data, 9, 3)


def test_settings_by_hand() -> None:
    """NeMo-RL's configuration as an object, a preset in our block, and misspelt settings."""
    section = SimpleNamespace(model_dump=lambda: {"ratio_clip_min": 0.1, "mismatch": {"use_rollout_log_probs": True}})
    config = settings(SimpleNamespace(loss_fn=section))
    assert (config.algorithm, config.ppo.eps_clip_low, config.denominator) == (1, 0.1, "original")
    assert settings({"mismatch": {"preset": "pg_is"}}).algorithm == 3
    with pytest.raises(ValueError, match="did you mean use_tis"):
        settings({"mismatch": {"use_tsi": True}})
    with pytest.raises(ValueError, match="has none: switch it off"):
        settings({"use_importance_sampling_correction": True, "mismatch": {"use_tis": False}})


# Where it is put ------------------------------------------------------------------------------------------------------


def test_setup_returns_our_loss_in_the_place_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = SimpleNamespace(input_type="logprob", loss_type="token_level", use_fused_linear_logprobs=True)

    wrapped = partial(setup_with_loss, lambda master_config, tokenizer: ("policy", own, tokenizer))
    config = {"loss_fn": {"mismatch": BLOCKS["1"]}}
    policy, loss, tokenizer = wrapped(config, tokenizer="tokenizer")
    assert (policy, tokenizer) == ("policy", "tokenizer")
    assert isinstance(loss, MismatchLoss) and loss.use_fused_linear_logprobs
    printed = capsys.readouterr().out
    assert "algorithm 1: bypass PPO" in printed and "host: nemo-rl " in printed
    assert wrapped({"loss_fn": {}}, "t")[1] is own  # not asked for
    with pytest.raises(ValueError, match="with 0 items that may be its loss"):
        setup_with_loss(lambda master_config: ("policy",), config)


def test_a_report_folder_gets_each_step_that_the_logger_gets(tmp_path: Path) -> None:
    own = SimpleNamespace(input_type="logprob", loss_type="token_level")
    logged: list[tuple[Any, ...]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step, prefix="", **rest: logged.append((step, prefix, rest)))
    config = {"loss_fn": {"mismatch": {**BLOCKS["3 sequence"], "report_dir": str(tmp_path)}}}
    made = setup_with_loss(lambda master_config: ("policy", own, logger), config)
    losses = call(made[1], *batch(), float(MASK.sum()), 3)[2]
    for step in (1, 2):
        made[2].log_metrics({"fetch": 0.1}, step, prefix="timing/train", step_finished=True)
        made[2].log_metrics({**losses, "reward": np.float64(0.5), "lengths": [1, 2]}, step, prefix="train")
    assert [step for step, _, _ in logged] == [1, 1, 2, 2] and logged[0][2] == {"step_finished": True}
    first, second = read_steps(tmp_path)
    assert (first["step"], second["step"], first["reward"]) == (1, 2, 0.5) and "lengths" not in first
    assert first["rollout_corr/k3_kl"] == losses["rollout_corr/k3_kl"] and "fetch" not in first
    other = {"loss_fn": {"mismatch": {**BLOCKS["1"], "report_dir": str(tmp_path)}}}
    with pytest.raises(ValueError, match="give this run another folder"):  # before the cluster starts
        setup_with_loss(lambda master_config: pytest.fail("setup ran"), other)


# NeMo-RL's own loss, from a checkout ----------------------------------------------------------------------------------

_TIS = "truncated_importance_sampling"
_CORRECTED = {"use_importance_sampling_correction": True}


def _corrected(kind: str, low: float, high: float) -> dict[str, Any]:
    return {**_CORRECTED, f"{_TIS}_type": kind, f"{_TIS}_ratio": high, f"{_TIS}_ratio_min": low}


_GSPO = {"sequence_level_importance_ratios": True, "ratio_clip_min": 0.02, "ratio_clip_max": 0.03}
_KL = {"reference_policy_kl_penalty": 0.3}
_CISPO = {"use_cispo": True, "ratio_clip_min": 0.3, "ratio_clip_max": 0.2}
OWN_LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"ratio_clip_max": 0.28},
    "dual clip": {"ratio_clip_c": 1.3},
    "on policy": {"force_on_policy_ratio": True},
    "correction": _CORRECTED,
    "tis": _corrected("tis", 0.8, 1.2),
    "icepop": _corrected("icepop", 0.8, 1.3),
    "seq-mask-tis": _corrected("seq-mask-tis", 0.95, 1.05),
    "reinforce, correction": {**_CORRECTED, "disable_ppo_ratio": True},
    "reinforce, on policy": {**_CORRECTED, "disable_ppo_ratio": True, "force_on_policy_ratio": True},
    "kl k1": {**_KL, "reference_policy_kl_type": "k1"},
    "kl k2": {**_KL, "reference_policy_kl_type": "k2"},
    "kl clamped": {**_KL, "kl_input_clamp_value": 0.3, "kl_output_clamp_value": 0.03},
    "kl from the rollout": {**_KL, "use_on_policy_kl_approximation": True},
    "kl in the reward": {**_KL, "use_kl_in_reward": True},
    "cispo": _CISPO,  # NeMo-RL has it with the token-level loss only, and GSPO with the other
    "gspo": _GSPO,
    "gspo, dual clip": {**_GSPO, "ratio_clip_c": 1.05},
    "gspo, correction": {**_GSPO, **_CORRECTED},
    "gspo, tis": {**_GSPO, **_corrected("tis", 0.8, 1.2)},
}


@pytest.mark.parametrize("name", OWN_LOSSES)
@pytest.mark.parametrize("token_level", [True, False])
def test_equals_nemo_rls_own_loss(name: str, token_level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's GSPO has its gradient through the mean, ours through each token: the same for constant advantages."""
    if ("cispo" in name and not token_level) or ("gspo" in name and token_level):
        return
    source, host = host_source("NeMo-RL"), {**NO_KL, **OWN_LOSSES[name], "token_level_loss": token_level}
    # Its own weights are bounded by nothing where the correction has no type.
    bare = host.get("use_importance_sampling_correction") and f"{_TIS}_type" not in host
    interfaces = contract.interfaces(source)
    for parent in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, interfaces.__name__, interfaces)
    oracle, loss = contract.own_loss(source, host), build({"tis": {"upper_bound": math.inf}} if bare else {}, **host)
    clipped = 0
    for seed in range(4):
        log_probs, data = batch(seed)
        if "gspo" in name:
            data["advantages"] = data["advantages"][:, :1].expand(MASK.shape).contiguous()
        theirs, mine = call(oracle, log_probs, data, 31.0, 7.0), call(loss, log_probs, data, 31.0, 7.0)
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-9)
        clipped += theirs[2]["probs_ratio"] != theirs[2]["probs_ratio_clamped"]
        names = ["kl_penalty", "num_valid_samples"]
        names += ["token_mult_prob_error", "gen_kl_error"] if name != "on policy" and "," not in name else []
        for metric in names:
            assert mine[2][metric] == pytest.approx(theirs[2][metric], rel=1e-6, abs=1e-9), metric
    assert clipped or not {"gspo", "cispo"} & {*name.split(", ")}  # the clip acts
    # What NeMo-RL reads off the loss object.
    assert loss.input_type is interfaces.LossInputType.LOGPROB and loss.loss_type.name == oracle.loss_type.name
    ours = {metric: kind.name for metric, kind in loss.metric_normalizations.items()}
    own = {metric: kind.name for metric, kind in oracle.metric_normalizations.items()}
    shared = ours.keys() & own.keys()
    assert "gspo" in name or [metric for metric in shared if ours[metric] != own[metric]] == []
    assert {"loss", "kl_penalty", "token_mult_prob_error", "num_valid_samples"} <= shared
    assert call(loss, *batch(), 31.0, 7.0)[2].keys() <= ours.keys()
