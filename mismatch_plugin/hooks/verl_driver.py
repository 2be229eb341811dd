"""verl's driver in decoupled mode: weights and rejection over the whole rollout batch, before the advantages."""

from __future__ import annotations

from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.packed import PackedSequences


def correct_rollout_batch(batch: Any, config: MismatchConfig) -> tuple[Any, dict[str, float]]:
    """(the batch with weights and mask, metrics): what verl's compute_rollout_correction_and_add_to_batch returns.

    batch.batch holds old_log_probs, rollout_log_probs and response_mask, [B, S]. Denominator `original` leaves
    response_mask as it is and gives rejected tokens the weight 0; otherwise they leave response_mask, and so verl's
    count of tokens too. rollout_is_weights [B, S] is added where there are weights or the mask stays.
    Where everything is rejected the mask stays and all weights are 0: a zero loss instead of a division by 0
    (`rollout_corr/all_rejected` is 1).
    Raises: InvalidLogProbError naming row, position and value.
    """
    data = batch.batch
    mask = data["response_mask"]
    packed = PackedSequences.from_padded(
        old_log_probs=data["old_log_probs"], rollout_log_probs=data["rollout_log_probs"], loss_masks=mask
    )
    correction = correct(packed, config)
    metrics = correction.statistics.metrics()
    keep, weights = correction.keep.view(mask.shape), (correction.weights * correction.keep).view(mask.shape)
    emptied = bool(mask.any()) and not bool(keep.any())
    stays = config.denominator == "original" or emptied
    if not stays:
        data["response_mask"] = keep.to(mask.dtype)
    if config.weighted or (stays and config.rejects):
        data["rollout_is_weights"] = weights
    return batch, metrics
