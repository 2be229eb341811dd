"""The same corrections with their metrics: by verl's helper, by slime's example, and by a loop over the sequences."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.correction_cases import LOWER, TRUNCATE, UPPER, VETO, Batch, Run, Setting
from examples.benchmarks.machine import version
from examples.benchmarks.results import NotHereError
from examples.benchmarks.sources import PACKAGES, SLIME
from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP

Metrics = dict[str, list[Tensor]]


def verl(batch: Batch, setting: Setting) -> Run:
    """verl's own helper on padded tensors."""
    if version("verl") is None:
        raise NotHereError(PACKAGES)
    before = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # this package is one of them; what is meant is verl as it comes
    try:
        from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore
    except ImportError as error:
        raise NotHereError(f"cannot be imported: {error}") from error
    finally:
        if before is None:
            del os.environ["VERL_USE_EXTERNAL_PLUGINS"]
        else:
            os.environ["VERL_USE_EXTERNAL_PLUGINS"] = before
    train, rollout, mask = batch.padded
    options = setting.verls

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        found, accepted, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            train, rollout, mask, **options
        )
        weights = mask if found is None else found.batch["rollout_is_weights"]
        return batch.cut(weights), batch.cut(accepted), metrics

    return run


def slime(batch: Batch, setting: Setting, reduced: bool = True) -> Run:
    """slime's `compute_mis_weights`, or what does the same operations in the same order.

    Its metrics are tensors of every token. reduced: each is averaged over the sequences as slime's loss does it.
    """
    if setting.level is None:
        raise NotHereError("it rejects nothing without weights")
    if SLIME.there:
        compute = SLIME.file("examples/train_infer_mismatch_helper/mis.py").compute_mis_weights
    else:
        compute = slime_as_described
    args, rows = setting.slimes, batch.rows
    train, rollout = [row[0] for row in rows], [row[1] for row in rows]
    masks = [row[2].int() for row in rows]  # slime's are integers

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        weights, kept, metrics = compute(args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks)
        return weights, kept, _averaged(metrics, masks) if reduced else dict.fromkeys(metrics, 0.0)

    return run


def slime_unreduced(batch: Batch, setting: Setting) -> Run:
    """The same without an average of the metrics."""
    return slime(batch, setting, reduced=False)


def _averaged(metrics: Metrics, masks: list[Tensor]) -> dict[str, float]:
    """What slime's loss does with them: flat, split again, Σ x·mask / tokens a sequence, summed; then to the host."""
    counts, lengths = [mask.sum() for mask in masks], [len(mask) for mask in masks]
    sums = []
    for values in metrics.values():
        parts = torch.cat(values).split(lengths)
        shares = [
            (part * mask).sum() / count.clamp_min(1) for part, mask, count in zip(parts, masks, counts, strict=True)
        ]
        sums.append(sum(shares[1:], shares[0]) / len(masks))
    return dict(zip(metrics, torch.stack(sums).tolist(), strict=True))


def slime_as_described(
    args: Any, *, train_log_probs: list[Tensor], rollout_log_probs: list[Tensor], loss_masks: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Metrics]:
    """Two rounds over the sequences and a third for the final figures; every metric is a copy of a token's size.

    First perplexities, KL and χ². Then weights, bounds, criterion and veto. Then the batch's mean of the weights, and
    their mean, minimum and maximum, the last two by a boolean index.
    """
    metrics: Metrics = {}

    def note(**values: Tensor) -> None:
        for name, value in values.items():
            metrics.setdefault(name, []).append(value.clone().detach())

    def mean(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sum() / mask.sum().clamp_min(1)

    sequences = list(zip(train_log_probs, rollout_log_probs, loss_masks, strict=True))
    for train, rollout, integers in sequences:
        mask = integers.float()
        of_train, of_rollout = -mean(train, mask).expand_as(train), -mean(rollout, mask).expand_as(train)
        note(training_log_ppl=of_train, training_ppl=of_train.exp())
        note(rollout_log_ppl=of_rollout, rollout_ppl=of_rollout.exp(), kl=rollout - train)
        l = train - rollout  # noqa: E741  # as in the formulas
        difference = of_train - of_rollout
        note(k3_kl=l.exp() - l - 1, log_ppl_diff=difference, log_ppl_abs_diff=difference.abs())
        note(ppl_ratio=difference.exp())
        squares = (train - rollout).clamp(-20, 20).exp().square()
        note(chi2_token=(mean(squares, mask) - 1.0).expand_as(train))
        note(chi2_seq=(2.0 * (l * mask).sum().expand_as(l).clamp(-20, 20)).exp() - 1.0)
    weights, kept = [], []
    for train, rollout, integers in sequences:
        mask = integers.float()
        l, keep = train - rollout, mask.clone().float()  # noqa: E741
        total = l if args.tis_level == "token" else (l * mask).sum().expand_as(l)
        weight = total.clamp(-20, 20).exp()
        note(tis_weight_before_bound=weight, tis_truncate_fraction=(weight > args.tis_upper_bound).int())
        weight = weight.clamp(0, args.tis_upper_bound) * mask
        note(tis_weight_after_bound=weight)
        if args.use_rs:
            judged = mean(l, mask).expand_as(l).clamp(-20, 20).exp()
            below, above = judged < args.rs_lower_bound, judged > args.rs_upper_bound
            note(rs_mask_fraction_low=below.int(), rs_mask_fraction_high=above.int())
            keep = keep * ((judged >= args.rs_lower_bound) & (judged <= args.rs_upper_bound)).float()
            if args.rs_veto_threshold is not None:
                low = (l < torch.tensor(args.rs_veto_threshold, device=l.device).log()) & mask.bool()
                note(rs_catastrophic_token_fraction=low.int())
                note(rs_catastrophic_seq_fraction=low.any().int().expand_as(mask))
                keep = keep * (~low.any()).float().expand_as(l)
        note(is_ratio_mean_after_tis_rs=weight)
        weights.append(weight.detach())
        kept.append(keep.detach())
    if args.tis_batch_normalize:
        if args.tis_level == "token":
            sums = [(w * m).sum() for w, m in zip(weights, loss_masks, strict=True)]
            factor = sum(sums[1:], sums[0]) / sum(m.sum() for m in loss_masks)
        else:
            means = [mean(w, m) for w, m in zip(weights, loss_masks, strict=True)]
            factor = sum(means[1:], means[0]) / len(means)
        if factor > 1e-8:
            weights = [w / factor for w in weights]
            for weight in weights:
                note(batch_norm_factor=factor.expand_as(weight))
    for weight, integers in zip(weights, loss_masks, strict=True):
        mask = integers.float()
        note(is_ratio_mean_final=mean(weight, mask).expand_as(weight))
        for name in ("min", "max"):
            inside = mask.bool()
            extreme = getattr(weight[inside], name)() if inside.any() else weight.new_zeros(())
            note(**{f"is_ratio_{name}_final": extreme.expand_as(weight)})
    return weights, kept, metrics


def loop(batch: Batch, setting: Setting) -> Run:
    """One sequence after the other, some eighty small operations each; the metrics of all meet at the end."""
    rows = batch.rows

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        weights, kept, found, names = [], [], [], ()
        for train, rollout, mask in rows:
            weight, keep, metrics = _one_sequence(train, rollout, mask, setting)
            weights.append(weight)
            kept.append(keep)
            found.append(torch.stack(list(metrics.values())))
            names = tuple(metrics)
        if setting.normalize:
            totals = torch.stack([torch.stack([w.sum(), m.sum()]) for w, (_, _, m) in zip(weights, rows, strict=True)])
            factor = totals.sum(0)
            weights = [weight * (factor[1] / factor[0]) for weight in weights]
        table = torch.stack(found)
        summary = torch.cat([table.mean(0), table.amax(0), table.amin(0)]).tolist()
        parts = (f"{name}_{how}" for how in ("mean", "max", "min") for name in names)
        return weights, kept, dict(zip(parts, summary, strict=True))

    return run


def _one_sequence(
    train: Tensor, rollout: Tensor, mask: Tensor, setting: Setting
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    ones = mask.float()
    count = ones.sum().clamp(min=1)
    fill = (rollout == 0.0) & (train < -ZERO_FILL_GAP)
    wrong = (
        (rollout <= FLOOR) | (rollout > POSITIVE_TOLERANCE) | fill | rollout.isnan() | ~(train <= POSITIVE_TOLERANCE)
    )
    l = torch.where(mask & ~wrong, train - rollout, 0.0)  # noqa: E741  # as in the formulas
    total = l.sum()
    mean = total / count
    sequence_ratio = total.clamp(-20, 20).exp()
    ratio = l.clamp(-20, 20).exp() * ones
    judged = {None: ones, "token": ratio, "sequence": sequence_ratio}[setting.level]
    weight = judged.clamp(max=TRUNCATE)
    outside = ((mean < math.log(LOWER)) | (mean > math.log(UPPER))) & setting.geometric
    vetoed = (l < math.log(VETO)).any() & setting.veto
    keep = ones * ~(outside | vetoed)
    mean_ratio = ratio.sum() / count
    clamped = ratio.clamp(1 / TRUNCATE, TRUNCATE) * ones
    squares = clamped.square().sum() / count
    metrics = {
        "ratio": mean_ratio,
        "std": (squares - (clamped.sum() / count).square()).clamp(min=0).sqrt(),
        "ess": (clamped.sum() / count).square() / squares,
        "high": ((ratio > TRUNCATE) & mask).sum() / count,
        "low": ((ratio < 1 / TRUNCATE) & mask).sum() / count,
        "kl": -mean,
        "k3": ((ratio - 1.0 - l) * ones).sum() / count,
        "chi2": ((ratio.square() - 1.0) * ones).sum() / count,
        "chi2_seq": sequence_ratio.square() - 1.0,
        "training_ppl": (-(train * ones).sum() / count).exp(),
        "rollout_ppl": (-(rollout * ones).sum() / count).exp(),
        "ppl_ratio": (-mean).exp(),
        "invalid": (wrong & mask).sum().float(),
        "masked": outside.float(),
        "vetoed": vetoed.float(),
        "accepted": keep.sum() / count,
        "weight": (weight * ones).sum() / count,
    }
    return weight * ones, keep, metrics
