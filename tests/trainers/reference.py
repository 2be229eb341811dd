"""What a trainer should have: `mp.policy_loss` on the batches that it dumped, or had in its hands."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp

TOLERANCE = 1e-5


def config_of(flags: Sequence[str], **more: Any) -> mp.MismatchConfig:
    """The settings that flags of ours mean; more: settings by section."""
    parser = ArgumentParser()
    mp.add_arguments(parser)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        given = mp.MismatchConfig.from_args(parser.parse_known_args(list(flags))[0]).model_dump(exclude_unset=True)
        return mp.MismatchConfig.build({**given, **more})


def loss_and_gradient(
    config: mp.MismatchConfig,
    current: Sequence[Tensor],
    *,
    rollout: Sequence[Tensor] | None,
    old: Sequence[Tensor] | None,
    advantages: Sequence[Tensor],
    ref: Sequence[Tensor] | None = None,
    masks: Sequence[Tensor] | None = None,
) -> tuple[float, Tensor]:
    """A step's loss, and its gradient with respect to log π_θ [T]. A tensor a response; masks: default all trained."""
    packed = mp.PackedSequences.from_lists(
        loss_masks=[torch.ones(len(row)) for row in current] if masks is None else masks,
        rollout_log_probs=rollout,
        old_log_probs=old,
        ref_log_probs=ref,
        advantages=advantages,
    )
    theta = torch.cat([*current]).requires_grad_()
    loss = mp.policy_loss(theta, packed, config).loss
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.item(), gradient
