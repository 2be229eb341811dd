"""Settings that the tests of slime's and miles's adapters run: arguments as a launch line or YAML would set them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from tests.full import FULL
from tests.hooks.contracts.slime_data import ACCEPTED_MEAN

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
PARTS = ("turn", "prefix")
BOUNDS = {
    "token": (0.7, 1.4),
    "sequence": (0.3, 2.5),
    "geometric": (0.9, 1.1),
    "turn": (0.6, 1.7),
    "prefix": (0.6, 1.7),
}
CRITERIA = ["sequence_mean:ratio:0.85:1.12", "token:k2:0.3"]
TERMS = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
# What slime's own mis.yaml sets: see test_the_shipped_mis_yaml_is_the_recorded_one.
SHIPPED: dict[str, Any] = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1e-4,
    "tis_batch_normalize": True,
}
NARROW = {"eps_clip": 0.01, "eps_clip_high": 0.02}
"""ε that clips some of the sequences."""
WEIGHTED_KL = {"terms": {"kl_importance_weighted": True}}


def drawn(names: Iterable[Any], layouts: Iterable[str]) -> list[tuple[str, Any]]:
    """(layout, case) pairs to run: with MISMATCH_FULL=1 all, else so few that every two words of the names of product
    cases, and every such word with a layout, occur together, and every other case in one layout."""
    layouts, names = list(layouts), list(names)
    everything = list(itertools.product(layouts, names))
    if FULL:
        return everything
    products = [(layout, name) for layout, name in everything if name[0].isdigit()]
    others = [name for name in names if not name[0].isdigit()]
    chosen = [(layouts[number % len(layouts)], name) for number, name in enumerate(others)]
    words = {one: {*itertools.combinations(sorted({one[0], *one[1].split()}), 2)} for one in products}
    left = set[tuple[str, ...]]().union(*words.values())
    while left:
        best = max(products, key=lambda one: len(words[one] & left))
        chosen.append(best)
        left -= words[best]
    return chosen


def custom(host: str) -> dict[str, Any]:
    return {"loss_type": "custom_loss", "custom_loss_function_path": f"mismatch_plugin.hooks.{host}.policy_loss"}


def hooked(host: str) -> dict[str, Any]:
    return {"custom_tis_function_path": f"mismatch_plugin.hooks.{host}.tis_function"}


def ours(algorithm: int, tis: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The host's two switches as the launcher leaves them, and our settings with them."""
    bypass, weighted = algorithm in (1, 3), algorithm in (2, 3)
    settings = {"use_rollout_log_probs": bypass, "use_tis": weighted, "metrics": "full", **more}
    if tis:
        settings["tis"] = tis
    host = {"use_rollout_logprobs": bypass, "use_tis": weighted and not bypass, "mismatch_settings": settings}
    return host | {"get_mismatch_metrics": algorithm == 0}


def weights(level: str, mode: str, **more: Any) -> dict[str, Any]:
    lower, upper = BOUNDS[level]
    bounds = {"upper_bound": upper} | ({} if mode == "truncate" else {"lower_bound": lower})
    return {"level": level, "mode": mode, **bounds, **more}


def product(host: str) -> dict[str, dict[str, Any]]:
    """Algorithms × levels × modes × way in; rejection, normalisation, terms and per-token loss take turns over it."""
    cases: dict[str, dict[str, Any]] = {}
    ways = {"hook": hooked(host), "custom": custom(host)}
    points = [(0, way, "-", "-") for way in ways] + [(1, "custom", "-", "-")]
    points += [(2, way, *rest) for way, *rest in itertools.product(ways, LEVELS, MODES)]
    points += [(3, "custom", *rest) for rest in itertools.product(LEVELS, MODES)] + [(3, "custom", "none", "-")]
    points += [(2, "hook", *rest) for rest in itertools.product(PARTS, MODES)]
    points += [(3, "custom", *rest) for rest in itertools.product(PARTS, MODES)]
    for number, (algorithm, way, level, mode) in enumerate(points):
        for turn in range(2):
            rejects = (number + turn) % 2 == 1
            normalizes = level in BOUNDS and (number // 2 + turn) % 2 == 1
            terms = (number // 3 + turn) % 2 == 1 and not (normalizes and (algorithm == 3 or host == "miles"))
            per_token = (number // 5 + turn) % 2 == 1
            tis: dict[str, Any] | None = (
                weights(level, mode) if level in BOUNDS else {"level": "none"} if level == "none" else None
            )
            if tis is not None and normalizes:
                tis["batch_normalize"] = True
            more: dict[str, Any] = {"rs": {"criteria": CRITERIA, "veto_threshold": 0.3}} if rejects else {}
            name = f"{algorithm} {way} {level} {mode}"
            name += " rejects" * rejects + " normalised" * normalizes + " terms" * terms + " per-token" * per_token
            cases[name] = {
                **ways[way],
                **ours(algorithm, tis, **more),
                **(TERMS if terms else {}),
                "calculate_per_token_loss": per_token,
            }
    return cases


def own_switches(host: str, estimators: tuple[str, ...]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(ours, the host's own) for its switches: GSPO, CISPO, off-policy sequence masking, the unbiased KL, reducers."""
    bypass, masking = {"use_rollout_logprobs": True}, {"use_opsm": True, "opsm_delta": 0.02}
    own: dict[str, dict[str, Any]] = {}
    for estimator, more in itertools.product(estimators, (NARROW, {**NARROW, "eps_clip_c": 1.005})):
        name = estimator + ", dual clip" * ("eps_clip_c" in more)
        own[name] = {"advantage_estimator": estimator, **more}
        own[f"bypass {name}"] = {**own[name], **bypass}
    if "cispo" in estimators:
        own["cispo, no lower bound, terms"] = {**own["cispo"], "eps_clip": 3.0, **TERMS}
    own["gspo, per token"] = {"advantage_estimator": "gspo", **NARROW, "calculate_per_token_loss": True}
    own["bypass masking"] = {**bypass, **masking}
    own["bypass gspo masking"] = {**own["bypass gspo"], **masking}
    own["sampled masking"] = masking  # where π_old is the sampler
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        own[f"unbiased KL {kind}"] = {**TERMS, "kl_loss_type": kind, "use_unbiased_kl": True}
        own[f"bypass unbiased KL {kind}"] = {**own[f"unbiased KL {kind}"], **bypass}
    own["reducer"] = {**TERMS, "custom_pg_loss_reducer_function_path": ACCEPTED_MEAN}
    pairs = {name: ({**custom(host), **changes}, changes) for name, changes in own.items()}
    # Our weights on the host's own GSPO and CISPO, against our weights in our whole loss.
    for estimator, level in zip(estimators, ("sequence", "token"), strict=False):
        changes = {**ours(2, weights(level, "mask")), **NARROW, "advantage_estimator": estimator}
        pairs[f"{estimator} weighed"] = ({**changes, **custom(host)}, {**changes, **hooked(host)})
    changes = {**ours(2, weights("sequence", "mask")), "custom_pg_loss_reducer_function_path": ACCEPTED_MEAN}
    pairs["reducer of what is accepted"] = ({**changes, **custom(host)}, {**changes, **hooked(host)})
    return pairs


def pair_data(name: str) -> dict[str, Any]:
    """What a pair's data must be. The hosts' GSPO has its gradient through the mean, ours through each token; their
    masking takes each token's advantage, ours the mean; and it compares with π_old where that is not the sampler."""
    return {"hooks": False, "constant": "gspo" in name or "masking" in name, "sampled": "sampled" in name}
