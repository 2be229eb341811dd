"""miles's adapter: what is not slime's in it, and, in a checkout, miles's own `loss_function`.

Without a checkout the hooks run on hand-made data with megatron-core's groups in place of miles's; with one, from
logits, packed and padded, out of $MISMATCH_HOST_SRC/miles with only `ray` stubbed.
"""

from __future__ import annotations

import importlib.util
from inspect import signature
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks import miles, slime
from tests.distributed.launch import launch
from tests.hooks.contracts.slime_cases import (
    TERMS,
    WEIGHTED_KL,
    custom,
    drawn,
    hooked,
    ours,
    own_switches,
    pair_data,
    product,
    weights,
)
from tests.hooks.contracts.slime_compare import HOST_LAYOUTS, compare, same, they_bite
from tests.hooks.contracts.slime_data import arguments, owned, samples
from tests.hooks.contracts.slime_live import run_host
from tests.hooks.contracts.slime_worker import Case, Runs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

PADDED = {"qkv_format": "bshd", "padded": 40}  # longer than every sample, and cut in other chunks than their lengths
CASES: dict[str, dict[str, Any]] = {
    **{name: {"changes": changes} for name, changes in product("miles").items()},
    "padded, 3": {"changes": {**custom("miles"), **ours(3, weights("sequence", "truncate")), **PADDED}},
    "padded, 2 by the hook": {"changes": {**hooked("miles"), **ours(2, weights("geometric", "mask")), **PADDED}},
    "rollouts of two samples": {
        "changes": {**custom("miles"), **ours(2, weights("sequence", "mask")), **TERMS},
        "shared": True,
    },
    "KL with importance weights": {
        "changes": {**custom("miles"), **ours(2, weights("token", "mask"), **WEIGHTED_KL), **TERMS}
    },
    "contiguous context": {
        "changes": {**custom("miles"), **ours(3, weights("sequence", "clip")), "allgather_cp": True}
    },
    "no forward pass beforehand": {
        "changes": {**hooked("miles"), **ours(2, weights("token", "clip")), "skip_actor_forward_only": True},
        "old": False,
        "hooks": False,  # miles refuses them with that option
    },
}


DRAWN = drawn(CASES, HOST_LAYOUTS)
IN_MILES = Runs(run_host, "miles", CASES, HOST_LAYOUTS, DRAWN)


@pytest.mark.parametrize(("layout", "name"), DRAWN)
def test_miles_s_loss_function_equals_one_process(layout: str, name: str):
    compare(IN_MILES(layout, name), IN_MILES.case(layout, name), miles, by_logits=True)


def _pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(ours, miles's own) that mean the same."""
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "PPO": ({**custom("miles"), **TERMS}, TERMS),
        "bypass PPO": ({**custom("miles"), "use_rollout_logprobs": True}, {"use_rollout_logprobs": True}),
    }
    for name, clip in {"": {}, ", both bounds": {"tis_clip": 1.3, "tis_clip_low": 0.8}}.items():
        own = {"use_tis": True, **clip, **TERMS}
        pairs[f"built-in TIS{name}"] = ({**hooked("miles"), **own}, own)
        pairs[f"built-in TIS, whole loss{name}"] = ({**custom("miles"), **own}, own)
    return pairs | own_switches("miles", ("gspo",))  # it has no CISPO


PAIRS = _pairs()
SIDES = {(name, side): {"changes": pair[side], **pair_data(name)} for name, pair in PAIRS.items() for side in (0, 1)}
COMPARED = drawn(PAIRS, ["one", "tp2 cp2"])
DRAWN_SIDES = [(layout, (name, side)) for layout, name in COMPARED for side in (0, 1)]
BOTH = Runs(run_host, "miles", SIDES, HOST_LAYOUTS, DRAWN_SIDES)


@pytest.mark.parametrize(("layout", "name"), COMPARED)
def test_miles_s_own_loss_means_the_same(layout: str, name: str):
    # Under bypass miles compares the rollout with itself.
    other = "train_rollout_logprob_abs_diff" if name.startswith("bypass") else ""
    mine, theirs = BOTH(layout, (name, 0)), BOTH(layout, (name, 1))
    same(mine, theirs, other, "miles")
    they_bite(name, mine, theirs)


# Without miles --------------------------------------------------------------------------------------------------------


def run_padded(case: Case) -> list[float]:
    """Gradient of the TIS hook's loss by the host's loss, in a padded batch of all samples, at the places held here."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=case.cp)
    rank, padded = parallel_state.get_context_parallel_rank(), case.changes["padded"]
    miles.ADAPTER.groups = slime.ADAPTER.find_groups()
    held = [owned(sample.total, sample.prompt, case.cp, rank, padded) for sample in samples()]
    rows = {
        name: [sample.rows[name][at] for sample, at in zip(samples(), held, strict=True)]
        for name in ("log_probs", "rollout_log_probs")
    }
    pg_loss = torch.ones(sum(map(len, held)), requires_grad=True)
    loss, _, _ = miles.tis_function(
        args=arguments("miles", **case.changes),
        pg_loss=pg_loss,
        train_log_probs=rows["log_probs"],
        rollout_log_probs=rows["rollout_log_probs"],
        loss_masks=[sample.rows["loss_masks"] for sample in samples()],
        total_lengths=[sample.total for sample in samples()],
        response_lengths=[sample.response for sample in samples()],
        parallel_state=None,
        max_seq_lens=[padded] * len(samples()),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), pg_loss)
    starts = torch.tensor([0, *(sample.response for sample in samples())]).cumsum(0)
    places = torch.cat([torch.tensor(at, dtype=torch.int64) + start for at, start in zip(held, starts, strict=False)])
    whole = torch.zeros(int(starts[-1])).index_copy(0, places, gradient)
    torch.distributed.all_reduce(whole)
    return whole.tolist()


@pytest.mark.parametrize("cp", [1, 2])
def test_padded_batches_are_cut_where_miles_cuts_them(cp: int):
    changes = {**hooked("miles"), **ours(2, weights("sequence", "clip")), **PADDED}
    weights_here = launch(run_padded, [Case("miles", 1, cp, changes)], cp)[0][0]
    rows = {name: [sample.rows[name] for sample in samples()] for name in samples()[0].rows}
    packed = mp.PackedSequences.from_lists(
        old_log_probs=rows["log_probs"], rollout_log_probs=rows["rollout_log_probs"], loss_masks=rows["loss_masks"]
    )
    correction = mp.correct(packed, miles.settings(arguments("miles", **changes)))
    torch.testing.assert_close(torch.tensor(weights_here), correction.weights * correction.keep)


def test_missing_log_probs_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(vars(miles.ADAPTER), "groups", slime.ADAPTER.find_groups())
    args = arguments("miles", **hooked("miles"), **ours(2))
    values: dict[str, Any] = dict.fromkeys(signature(miles.tis_function).parameters)
    values |= {"args": args, "pg_loss": torch.ones(2), "loss_masks": [torch.ones(2)]}
    values |= {"total_lengths": [4], "response_lengths": [2]}
    with pytest.raises(ValueError, match="miles passes no training log-probs"):
        miles.tis_function(**values)
    with pytest.raises(ValueError, match="rollout_log_probs is missing: algorithm 2"):
        miles.tis_function(**{**values, "train_log_probs": [torch.zeros(2)]})


def test_arguments_are_checked_before_a_rollout_s_steps():
    args = arguments("miles", **hooked("miles"), use_rollout_logprobs=True, use_tis=True)
    with pytest.raises(ValueError, match=r"would count twice.*mismatch_plugin\.hooks\.miles\.policy_loss"):
        miles.rollout_data_postprocess(args)
