"""What one optimizer step trains on, of every run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.lab.batched.rollout import Responses


class MiniBatch(NamedTuple):
    """One mini-batch of every run: its share of every prompt's responses."""

    prompts: Tensor
    drawn: Responses
    advantages: Tensor
    old: Tensor | None
    versions: tuple[int, int] = (0, 0)
    """Of the weights that sampled and of those that train."""
    entropy: Tensor | None = None
    """For the metrics, at the steps that have them."""

    def packed(self, n: int, config: MismatchConfig) -> mp.PackedSequences:
        """Run n's responses."""
        mask = self.drawn.mask[n]
        lengths = mask.sum(-1)
        tokens = int(lengths.sum())
        old = None if self.old is None or config.use_rollout_log_probs else self.old[n][mask]
        return mp.PackedSequences(
            loss_mask=torch.ones(tokens, dtype=torch.bool),
            lengths=tuple(lengths.tolist()),
            rollout_log_probs=self.drawn.log_probs[n][mask],
            old_log_probs=old,
            advantages=self.advantages[n].repeat_interleave(lengths),
            weight_versions=torch.full((tokens,), self.versions[0]),
            trainer_version=self.versions[1],
            entropy=None if self.entropy is None else self.entropy[n][mask],
        )


def mini_batch(
    j: int, parts: int, prompts: Tensor, drawn: Responses, advantages: Tensor, old: Tensor | None
) -> MiniBatch:
    """Number j of `parts`: its share of every prompt's responses. Rows come prompt by prompt, [N, B, …]."""

    def of(rows: Tensor) -> Tensor:
        groups = rows.unflatten(1, (prompts.shape[1], -1))
        share = groups.shape[2] // parts
        return groups[:, :, j * share : (j + 1) * share].flatten(1, 2)

    return MiniBatch(prompts, Responses(*map(of, drawn)), of(advantages), None if old is None else of(old))
