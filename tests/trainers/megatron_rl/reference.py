"""`mp.policy_loss` on what `forward_step` had in its hands in one optimizer step."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch

import mismatch_plugin as mp


def config_of(flags: Sequence[str]) -> mp.MismatchConfig:
    """Our flags, with what trainer.py's command line says of the clip and the KL, over Megatron's own token count."""
    parser = ArgumentParser()
    mp.add_arguments(parser)
    own = ["--mismatch-kl-coef", "0.01", "--mismatch-kl-type", "k3", "--mismatch-denominator", "original"]
    if not {"--use-tis", "--use-rollout-log-probs"} <= set(flags):  # REINFORCE has no clip
        own += ["--mismatch-eps-clip-low", "0.2", "--mismatch-eps-clip-high", "0.28"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        args, _ = parser.parse_known_args([*own, *flags])
        return mp.MismatchConfig.from_args(args)


def sequences(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The trained tokens of each sequence, of rows and of bins alike; those that train nothing are left out."""
    keys = ("current", "old", "ref", "rollout", "gradient", "advantages")
    found: dict[str, list[Any]] = {key: [] for key in keys}
    for record in records:
        width, advantages = record["current_logprobs"].shape[1], record["advantages"].tolist()
        spans = [(row, 0, width, value) for row, value in enumerate(advantages)]
        if record["seq_starts"] is not None:  # one more than there are sequences: where the padding starts
            ends = zip(record["seq_starts"], record["seq_lengths"], advantages, strict=False)
            spans = [(0, int(start), int(start) + int(n) - 1, value) for start, n, value in ends]
        for row, start, end, advantage in spans:
            trained = record["loss_mask"][row, start:end] != 0
            if trained.any():
                names = {"current": "current_logprobs", "old": "old_logprobs", "ref": "ref_logprobs"}
                for key, name in {**names, "rollout": "inference_logprobs", "gradient": "gradient"}.items():
                    values = record[name]
                    found[key].append(values[row, start:end][trained].float() if values is not None else None)
                found["advantages"].append(torch.full((int(trained.sum()),), advantage))
    return found


def gradients_of(records: Sequence[dict[str, Any]], flags: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """∂ loss/∂ log π_θ of the step's trained tokens: (the trainer's, that of `mp.policy_loss`)."""
    theirs = torch.cat(sequences(records)["gradient"])
    theta = torch.cat(sequences(records)["current"]).requires_grad_()
    (mine,) = torch.autograd.grad(loss_of(records, flags, theta).loss, theta)
    return theirs / len(theirs), mine  # Megatron-LM divides by the step's tokens


def loss_of(
    records: Sequence[dict[str, Any]], flags: Sequence[str], theta: torch.Tensor | None = None
) -> mp.PolicyLoss:
    """The step's loss by `mp.policy_loss`; only one context-parallel rank's records, as each has all tokens."""
    data = sequences(records)
    packed = mp.PackedSequences.from_lists(
        loss_masks=[torch.ones(len(x)) for x in data["current"]],
        rollout_log_probs=data["rollout"] if data["rollout"][0] is not None else None,
        old_log_probs=data["old"],
        ref_log_probs=data["ref"],
        advantages=data["advantages"],
    )
    theta = torch.cat(data["current"]).requires_grad_() if theta is None else theta
    return mp.policy_loss(theta, packed, config_of(flags))
