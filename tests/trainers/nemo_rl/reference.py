"""`mp.policy_loss` on what NeMo-RL's data flow handed to its policy, one optimizer step."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch

import mismatch_plugin as mp

COLUMNS = {
    "rollout": "generation_logprobs",
    "old": "prev_logprobs",
    "ref": "reference_policy_logprobs",
    "advantages": "advantages",
}


def loss_of(parts: Sequence[dict[str, Any]], flags: Sequence[str]) -> float:
    """parts: the step's micro-batches, [B, S], with `current` [B, S − 1].

    NeMo-RL's KL penalty is 0.01 · k3 of each token, where that is below 10 (its clamp).
    """
    parser = ArgumentParser()
    mp.add_arguments(parser)
    own = ["--mismatch-kl-coef", "0.01", "--mismatch-kl-type", "k3", "--mismatch-denominator", "original"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        config = mp.MismatchConfig.from_args(parser.parse_known_args([*own, *flags])[0])
    current, columns = [], {name: [] for name in COLUMNS}
    for part in parts:
        for row in range(len(part["current"])):
            trained = (part["token_mask"][row, 1:] * part["sample_mask"][row]) != 0
            current.append(part["current"][row][trained])
            for name, theirs in COLUMNS.items():
                columns[name].append(part[theirs][row, 1:][trained])
    packed = mp.PackedSequences.from_lists(
        loss_masks=[torch.ones(len(x)) for x in current],
        rollout_log_probs=columns["rollout"],
        old_log_probs=columns["old"],
        ref_log_probs=columns["ref"],
        advantages=columns["advantages"],
    )
    return mp.policy_loss(torch.cat(current).requires_grad_(), packed, config).loss.item()
