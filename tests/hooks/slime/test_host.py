"""slime's adapter in slime: its own `loss_function`, from logits, with real megatron-core groups over gloo.

slime is imported from $MISMATCH_HOST_SRC/slime (commit in `contracts/slime.py`), with only `ray` stubbed. Loss and
gradients equal `policy_loss` in one process for every layout; and slime's own losses where they mean the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mismatch_plugin.hooks import slime
from tests.hooks.contracts.slime_cases import (
    BOUNDS,
    LEVELS,
    MODES,
    NARROW,
    SHIPPED,
    TERMS,
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
from tests.hooks.contracts.slime_data import ACCEPTED_MEAN
from tests.hooks.contracts.slime_live import run_host
from tests.hooks.contracts.slime_worker import Runs

_BATCH_NORMALISED = weights("sequence", "clip", batch_normalize=True)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"changes": changes} for name, changes in product("slime").items()},
    "rollouts of two samples": {
        "changes": {**custom("slime"), **ours(2, weights("sequence", "mask")), **TERMS},
        "shared": True,
    },
    "no old log-probs, normalised": {"changes": {**hooked("slime"), **ours(2, _BATCH_NORMALISED)}, "old": False},
    "contiguous context, 3": {
        "changes": {**custom("slime"), **ours(3, weights("sequence", "truncate")), "allgather_cp": True}
    },
    "contiguous context, 2": {
        "changes": {**hooked("slime"), **ours(2, weights("geometric", "mask")), "allgather_cp": True}
    },
    "recomputed loss": {
        "changes": {**custom("slime"), **ours(3, weights("sequence", "clip")), "recompute_loss_function": True}
    },
    **{
        f"{estimator}, {algorithm}": {
            "changes": {**custom("slime"), **ours(algorithm), **NARROW, "advantage_estimator": estimator, **more}
        }
        for estimator, algorithm, more in (
            ("gspo", 1, {}),
            ("gspo", 2, {"calculate_per_token_loss": True}),
            ("gspo", 0, {"allgather_cp": True}),
            ("cispo", 2, TERMS),
        )
    },
    "reinforce by hand, 2": {
        "changes": {**custom("slime"), **ours(2, weights("token", "clip"), objective="reinforce")}
    },
    "distance to the sampler": {
        "changes": {**custom("slime"), **ours(2, terms={"rollout_kl_coef": 0.1}), "calculate_per_token_loss": True}
    },
}


DRAWN = drawn(CASES, HOST_LAYOUTS)
IN_SLIME = Runs(run_host, "slime", CASES, HOST_LAYOUTS, DRAWN)


@pytest.mark.parametrize(("layout", "name"), DRAWN)
def test_slime_s_loss_function_equals_one_process(layout: str, name: str):
    compare(IN_SLIME(layout, name), IN_SLIME.case(layout, name), slime, by_logits=True)


# Against slime's own losses -------------------------------------------------------------------------------------------

_MIS = "slime_mis.compute_mis_weights_with_cp"
_OWN = "slime.backends.megatron_utils.loss"


def _pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(ours, slime's own) that mean the same. YAML's keys are plain attributes, for both."""
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, more in {
        "PPO": {},
        "PPO, dual clip": {"eps_clip_c": 1.05, "eps_clip": 0.1, "eps_clip_high": 0.15},
        "PPO, top-p": {"rollout_top_p": 0.9},
        "PPO, per token": {"calculate_per_token_loss": True},
        **{f"PPO, {kind}": {**TERMS, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    }.items():
        pairs[name] = ({**custom("slime"), **more}, more)
        pairs[f"bypass {name}"] = (
            {**custom("slime"), "use_rollout_logprobs": True, **more},
            {"use_rollout_logprobs": True, **more},
        )
    for name, clip in {"": {}, ", both bounds": {"tis_clip": 1.3, "tis_clip_low": 0.8}}.items():
        own = {"use_tis": True, **clip, **TERMS}
        pairs[f"built-in TIS{name}"] = ({**hooked("slime"), **own}, own)
        pairs[f"built-in TIS, whole loss{name}"] = ({**custom("slime"), **own}, own)
    icepop = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}
    pairs["IcePop"] = (
        {**hooked("slime"), **icepop, "tis_mode": "mask", "mismatch_preset": None},
        {**icepop, "custom_tis_function_path": f"{_OWN}.icepop_function"},
    )
    rejecting = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.12}
    rejections: dict[str, dict[str, Any]] = {"": {}, " + rejection + veto": {**rejecting, "rs_veto_threshold": 0.3}}
    for level, mode, (name, rejection) in itertools.product(LEVELS, MODES, rejections.items()):
        keys = {**SHIPPED, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": False, "use_rs": False}
        keys |= dict(zip(("tis_lower_bound", "tis_upper_bound"), BOUNDS[level], strict=True))
        keys |= {"rs_veto_threshold": None, **rejection}
        pairs[f"mis.py {level} {mode}{name}"] = (
            {**keys, **hooked("slime")},
            {**keys, "custom_tis_function_path": _MIS},
        )
    pairs |= own_switches("slime", ("gspo", "cispo"))
    for mode in MODES:
        # A reducer that counts the masks it is given, entropy and KL over the same masks.
        name = f"mis.py token {mode} + rejection + veto"
        own = {**pairs[name][1], **TERMS, "custom_pg_loss_reducer_function_path": ACCEPTED_MEAN}
        pairs[f"{name}, reducer"] = ({**own, **hooked("slime")}, own)
    return pairs


PAIRS = _pairs()
SIDES = {(name, side): {"changes": pair[side], **pair_data(name)} for name, pair in PAIRS.items() for side in (0, 1)}
COMPARED = drawn(PAIRS, ["one", "tp2 cp2"])
DRAWN_SIDES = [(layout, (name, side)) for layout, name in COMPARED for side in (0, 1)]
BOTH = Runs(run_host, "slime", SIDES, HOST_LAYOUTS, DRAWN_SIDES)


@pytest.mark.parametrize(("layout", "name"), COMPARED)
def test_slime_s_own_loss_means_the_same(layout: str, name: str):
    # With mis.py slime averages its metrics over the masks that are left.
    mine, theirs = BOTH(layout, (name, 0)), BOTH(layout, (name, 1))
    same(mine, theirs, "all" if name.startswith("mis.py") else "")
    they_bite(name, mine, theirs)
