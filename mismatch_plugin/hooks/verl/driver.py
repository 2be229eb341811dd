"""verl's driver in decoupled mode: weights and rejection over the whole rollout batch, before the advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.verl.groups import mark_accepted


def correct_rollout_batch(
    batch: Any, config: MismatchConfig, keep: Callable[[Statistics], None] | None = None
) -> tuple[Any, dict[str, float]]:
    """(the batch with weights and mask, metrics): what verl's compute_rollout_correction_and_add_to_batch returns.

    batch.batch holds old_log_probs, rollout_log_probs and response_mask, [B, S]. Denominator `original` leaves
    response_mask as it is and gives rejected tokens the weight 0; otherwise they leave response_mask, and so verl's
    count of tokens too. rollout_is_weights [B, S] is added where there are weights or the mask stays.
    Where everything is rejected the mask stays and all weights are 0: a zero loss instead of a division by 0
    (`rollout_corr/all_rejected` is 1). keep: is given the batch's statistics. Under `rs.group` the batch
    also says who is accepted, for the advantages.
    Host syncs: none on the driver, whose batch is on the CPU (the rows' lengths, the metrics, and whether anything is
    left are read there). Collectives: none.
    Raises: ValueError for shapes that differ or a mask that is not 0 and 1; InvalidLogProbError naming row, position
    and value.
    """
    data = batch.batch
    mask = data["response_mask"]
    packed = pack_trained(data)
    correction = correct(packed, config)
    metrics = correction.statistics.metrics()  # raises before anything is written
    if config.rs.group != "keep":
        metrics |= mark_accepted(batch, config, correction.kept_N > 0)
    if keep is not None:
        keep(correction.statistics)

    stays = config.denominator == "original"
    if config.rejects and packed.loss_mask.numel():
        stays = stays or not bool(correction.keep.any())
    if config.rejects and not stays:
        data["response_mask"] = packed.to_padded(correction.keep).to(mask.dtype)
    if config.weighted or (stays and config.rejects):
        data["rollout_is_weights"] = packed.to_padded(correction.applied)
    return batch, metrics


def pack_trained(data: Mapping[str, Tensor]) -> PackedSequences:
    """The rows up to their last token under the response mask: padding is left behind.

    Positions are those in the padded response, where a tool's output in the middle counts. Host syncs: one, for the
    rows' lengths. Raises: ValueError for shapes that differ or a mask that is not 0 and 1.
    """
    mask = data["response_mask"]
    for name in ("old_log_probs", "rollout_log_probs"):
        if data[name].shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(data[name].shape)}, response_mask {tuple(mask.shape)}: both must "
                f"be of the same response tokens."
            )
    count, width = mask.shape
    if not mask.numel():
        lengths, odd = [0] * count, [0]
    else:
        order = torch.arange(1, width + 1, device=mask.device)
        lengths, odd = torch.stack([((mask != 0) * order).amax(-1), _odd(mask).any(-1).long()]).tolist()
    if any(odd):
        raise ValueError(f"response_mask of row {odd.index(1)} holds values other than 0 and 1: find what writes them.")

    def packed(rows: Tensor) -> Tensor:
        return torch.cat([rows[:0].flatten(), *(row[:length] for row, length in zip(rows, lengths, strict=True))])

    return PackedSequences(
        loss_mask=packed(mask) != 0,
        lengths=tuple(lengths),
        rollout_log_probs=packed(data["rollout_log_probs"]),
        old_log_probs=packed(data["old_log_probs"]),
        padded_width=width,
    )


def _odd(mask: Tensor) -> Tensor:
    """[B, …] bool: what is neither 0 nor 1."""
    if mask.is_floating_point():
        return mask != (mask != 0)
    if mask.dtype == torch.bool:
        return mask[:, :0]
    return torch.stack([mask.amin(-1) < 0, mask.amax(-1) > 1], -1)
