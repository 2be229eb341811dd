"""Methods of the papers against the peers' own functions: answers recorded by `tests/fixtures/*_peers.py`, NeMo-RL's
where its source is. gspo and cispo of slime: `tests/hooks/slime`, where its own loss means the same.

Where ours differ: verl's DPPO adds 1e-8 inside its logarithms where the binary KL here keeps probabilities in
[1e-6, 1 − 1e-6]. slime judges each token by its own advantage, and by default against π_old. TRL counts a NaN of the
rollout as no divergence; here that is the policy `neutral`. slime's `compute_gspo_kl`, NeMo-RL's sequence-level ratios
and GMPO of verl and TRL differentiate the sequence's mean: token k gets 1/n of the sum of what all its n tokens get
here (verl's form, the paper's GSPO-token). So gradients are equal where advantage and weight are constant in a
sequence; elsewhere theirs is the mean of ours. NeMo-RL's dual clip under `disable_ppo_ratio` compares c with log π_θ,
which is no ratio: a dual clip next to objective reinforce is refused here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from tests.fixtures import method_peers, rejection_peers
from tests.hooks.contracts import nemo_rl
from tests.host_source import host_source

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

METHODS: list[dict[str, Any]] = json.loads(method_peers.DATA.read_text(encoding="utf-8"))
RECORDED: dict[str, Any] = json.loads(rejection_peers.DATA.read_text(encoding="utf-8"))
REJECTION: list[dict[str, Any]] = RECORDED["cases"]


def padded(batch: dict[str, Tensor], advantages: str) -> tuple[Tensor, mp.PackedSequences]:
    """log π_θ with gradient, and the batch; NaN where the mask is 0, which must not matter."""
    away = batch["mask"] == 0
    rollout, old, current = (batch[name].masked_fill(away, torch.nan) for name in ("rollout", "old", "current"))
    each = batch[advantages]
    packed = mp.PackedSequences.from_padded(
        loss_masks=batch["mask"],
        rollout_log_probs=rollout,
        old_log_probs=old,
        advantages=each if each.dim() == 1 else each.masked_fill(away, torch.nan),
    )
    return current.requires_grad_(), packed


def answered(
    settings: mp.MismatchConfig, batch: dict[str, Tensor], advantages: str, answer: dict[str, Any], rel: float
) -> mp.PolicyLoss:
    """Ours, whose loss and gradient are the recorded ones."""
    log_probs, packed = padded(batch, advantages)
    result = mp.policy_loss(log_probs, packed, settings)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert float(result.loss.detach()) == pytest.approx(answer["loss"], rel=rel)
    expected = torch.tensor(answer["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=10 * rel, atol=1e-9)
    return result


# Recorded -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(rejection_peers.BATCHES))
def test_sapo_gmpo_and_gamma_are_verl_s_and_trl_s(number: int) -> None:
    answers, batch, clip = METHODS[number], rejection_peers.make(number), method_peers.CLIP
    taus = {"tau_positive": clip["tau_pos"], "tau_negative": clip["tau_neg"]}
    sapo = mp.preset("sapo").replace(use_tis=True, tis={"upper_bound": 1.2}, ppo=taus)
    metrics = answered(sapo, batch, "token_advantages", answers["sapo"], 1e-9).statistics.metrics()
    clipped = [metrics["rollout_corr/pg_clipfrac"], metrics["rollout_corr/pg_clipfrac_lower"]]
    assert clipped == answers["sapo"]["clipped"]
    ppo = {"eps_clip_low": clip["clip_ratio_low"], "eps_clip_high": clip["clip_ratio_high"]}
    result = answered(mp.preset("gmpo").replace(ppo=ppo), batch, "advantages", answers["geo_mean"], 1e-7)
    # verl counts a ratio beyond either bound, whatever the side of A's sign; here what the clip changes.
    assert 0 < result.statistics.metrics()["rollout_corr/pg_clipfrac"] < sum(answers["geo_mean"]["clipped"])
    log_probs, packed = padded(batch, "advantages")
    weights = mp.policy_loss(log_probs, packed, mp.preset("vespo")).correction.weights
    rows = zip(packed.unpack(weights), packed.unpack(packed.loss_mask), strict=True)
    assert [float(row[mask][0]) for row, mask in rows] == pytest.approx(answers["gamma"], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("number", range(len(REJECTION)))
def test_dppo_is_verl_s_and_opsm_trl_s_and_slime_s(number: int) -> None:
    """opsm: their masks, and the loss and gradient of the clipped objective times them, over the original tokens."""
    answers = REJECTION[number]["answers"]
    batch = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in REJECTION[number]["batch"].items()}
    for name in ("dppo_tv", "dppo_kl"):
        settings = mp.preset(name, threshold=RECORDED["delta"][name], is_threshold=20.0)
        result = answered(settings, batch, "token_advantages", answers[name], 1e-6)
        rejected = f"rollout_corr/rollout_rs_{settings.criteria[0].name}_masked_fraction"
        assert result.statistics.metrics()[rejected] == pytest.approx(answers[name]["rejected_share"], rel=1e-6)
        assert 0 < answers[name]["rejected_share"] < 0.5
    keep, mask = torch.tensor(answers["slime"], dtype=torch.float64), batch["mask"]
    assert torch.equal(keep, torch.tensor(answers["trl"], dtype=torch.float64).unsqueeze(1).expand_as(keep))
    log_probs, each = batch["current"].clone().requires_grad_(), batch["advantages"].unsqueeze(1)
    ratio = (log_probs - batch["old"]).exp()
    theirs = -torch.minimum(ratio * each, ratio.clamp(0.8, 1.2) * each) * keep
    loss = (theirs * mask).sum() / mask.sum()
    answer = {"loss": float(loss.detach()), "gradient": torch.autograd.grad(loss, log_probs)[0].tolist()}
    result = answered(mp.preset("opsm", delta=RECORDED["delta"]["opsm"]), batch, "advantages", answer, 1e-6)
    assert torch.equal(result.correction.keep, (keep * mask).flatten())
    if os.environ.get("MISMATCH_HOST_SRC") and (root := Path(os.environ["MISMATCH_HOST_SRC"], "slime")).is_dir():
        assert rejection_peers.slime(root, batch) == answers["slime"], "slime answers otherwise than recorded"


def test_m2po_keeps_what_areal_keeps() -> None:
    """But for tokens within the width of a bin of where AReaL cuts."""
    rejected = 0
    for seed in range(rejection_peers.BATCHES):
        data, theirs = rejection_peers.make(seed), torch.tensor(METHODS[seed]["m2po"]).bool()
        _, packed = padded(data, "advantages")
        settings = mp.preset("m2po", second_moment=method_peers.SECOND_MOMENT)
        thresholds = mp.correct(packed, settings).statistics.thresholds()
        ours = packed.to_padded(mp.correct(packed, settings, thresholds=thresholds).keep).bool()
        squares, mask = (data["old"] - data["rollout"]).square(), data["mask"].bool()
        assert squares[ours].mean() <= method_peers.SECOND_MOMENT and (ours & ~theirs).sum() == 0
        assert (squares[theirs & ~ours & mask] > squares[theirs & mask].max() / 1.1).all()
        rejected += int((mask & ~theirs).sum())
    assert rejected > 20


_SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
_IS = {"use_importance_sampling_correction": True}
_UNBOUNDED = {"level": "sequence", "upper_bound": torch.inf}
NEMO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # NeMo-RL's settings, ours
    "gspo": (_SEQUENCE, {"objective": "gspo"}),
    "gspo, dual clip": (_SEQUENCE | {"ratio_clip_c": 1.05}, {"objective": "gspo", "ppo": {"dual_clip": 1.05}}),
    "gspo under weights": (_SEQUENCE | _IS, {"objective": "gspo", "use_tis": True, "tis": _UNBOUNDED}),
    "cispo": ({"use_cispo": True, "token_level_loss": True}, {"objective": "cispo", "aggregation": "token-mean"}),
    "reinforce": ({"disable_ppo_ratio": True, "token_level_loss": False}, {"objective": "reinforce"}),
}


@pytest.mark.parametrize("name", NEMO)
def test_gspo_cispo_and_reinforce_are_nemo_rl_s(name: str) -> None:
    host, ours = NEMO[name]
    host = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.04, "ratio_clip_max": 0.06, **host}
    oracle = nemo_rl.own_loss(host_source("NeMo-RL"), host)
    clips = {} if name == "reinforce" else {"eps_clip_low": 0.04, "eps_clip_high": 0.06}
    ours = {"aggregation": "seq-mean-token-mean", **ours, "ppo": clips | ours.get("ppo", {})}
    for seed in range(4):
        batch = rejection_peers.make(seed)
        mask, each = batch["mask"].double(), batch["advantages"][:, None].expand_as(batch["mask"])
        rows = {"token_mask": mask, "advantages": each, "prev_logprobs": batch["old"]}
        rows["generation_logprobs"] = batch["rollout"]
        # The first column is never read: NeMo-RL's log-probs begin at the second.
        data = {key: torch.cat([torch.zeros(len(mask), 1), value], 1) for key, value in rows.items()}
        data["sample_mask"] = torch.ones(len(mask))
        totals = {"global_valid_toks": mask.sum(), "global_valid_seqs": mask.any(1).sum()}
        leaf = batch["current"].clone().requires_grad_()
        loss = oracle(data=data, **totals, **{nemo_rl.LOSS_INPUT: leaf})[0]
        answer = {"loss": float(loss.detach()), "gradient": torch.autograd.grad(loss, leaf)[0].tolist()}
        answered(mp.MismatchConfig.model_validate(ours), batch, "advantages", answer, 1e-6)
