"""The adapters in slime and miles: in the hosts' own `loss_function` against the hosts' own losses, from logits.

They are imported from $MISMATCH_HOST_SRC/slime and /miles, with only `ray` stubbed. What is miles's alone, padded
batches, runs without it.
"""

from __future__ import annotations

import importlib.util
import itertools
from inspect import signature
from typing import Any

import pytest
import torch
import yaml

import mismatch_plugin as mp
from mismatch_plugin.hooks import miles, slime
from tests.distributed.launch import launch
from tests.hooks.contracts.slime_cases import (
    BOUNDS,
    LEVELS,
    MODES,
    SHIPPED,
    TERMS,
    custom,
    drawn,
    hooked,
    ours,
    own_switches,
    pair_data,
    weights,
)
from tests.hooks.contracts.slime_compare import HOST_LAYOUTS, same, they_bite
from tests.hooks.contracts.slime_data import ACCEPTED_MEAN, arguments, owned, samples
from tests.hooks.contracts.slime_live import run_host
from tests.hooks.contracts.slime_worker import Case, Runs
from tests.host_source import host_source

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

ADAPTERS: dict[str, Any] = {"slime": slime, "miles": miles}
PADDED = {"qkv_format": "bshd", "padded": 40}  # longer than every sample, and cut in other chunks than their lengths
Changes = dict[str, Any]


# Against the hosts' own losses ----------------------------------------------------------------------------------------


def _pairs(host: str) -> dict[str, tuple[Changes, Changes]]:
    """(ours, the host's own) that mean the same. YAML's keys are plain attributes, for both."""
    pairs: dict[str, tuple[Changes, Changes]] = {}
    bypass: Changes = {"use_rollout_logprobs": True}
    plain: dict[str, Changes] = {"PPO": {}, "PPO, terms": TERMS}
    if host == "slime":
        plain["PPO, dual clip"] = {"eps_clip_c": 1.05, "eps_clip": 0.1, "eps_clip_high": 0.15}
        plain["PPO, top-p"] = {"rollout_top_p": 0.9}
        plain["PPO, per token"] = {"calculate_per_token_loss": True}
        plain |= {f"PPO, {kind}": {**TERMS, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")}
    for name, more in plain.items():
        pairs[name] = ({**custom(host), **more}, more)
        if host == "slime" or not more:
            pairs[f"bypass {name}"] = ({**custom(host), **bypass, **more}, {**bypass, **more})
    for name, clip in {"": {}, ", both bounds": {"tis_clip": 1.3, "tis_clip_low": 0.8}}.items():
        own = {"use_tis": True, **clip, **TERMS}
        pairs[f"built-in TIS{name}"] = ({**hooked(host), **own}, own)
        pairs[f"built-in TIS, whole loss{name}"] = ({**custom(host), **own}, own)
    return pairs | own_switches(host, ("gspo", "cispo") if host == "slime" else ("gspo",)) | _mis_pairs(host)


def _mis_pairs(host: str) -> dict[str, tuple[Changes, Changes]]:
    """slime's own examples of corrections: IcePop, and mis.py with its YAML."""
    if host != "slime":
        return {}
    icepop = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}
    theirs = {**icepop, "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}
    pairs: dict[str, tuple[Changes, Changes]] = {}
    pairs["IcePop"] = ({**hooked("slime"), **icepop, "tis_mode": "mask", "mismatch_preset": None}, theirs)
    rejecting = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.12}
    rejections: dict[str, Changes] = {"": {}, " + rejection + veto": {**rejecting, "rs_veto_threshold": 0.3}}
    for level, mode, (name, rejection) in itertools.product(LEVELS, MODES, rejections.items()):
        keys = {**SHIPPED, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": False, "use_rs": False}
        keys |= dict(zip(("tis_lower_bound", "tis_upper_bound"), BOUNDS[level], strict=True))
        keys |= {"rs_veto_threshold": None, **rejection}
        own = {**keys, "custom_tis_function_path": "slime_mis.compute_mis_weights_with_cp"}
        pairs[f"mis.py {level} {mode}{name}"] = ({**keys, **hooked("slime")}, own)
        if rejection and level == "token":
            # A reducer that counts the masks it is given, entropy and KL over the same masks.
            reduced = {**own, **TERMS, "custom_pg_loss_reducer_function_path": ACCEPTED_MEAN}
            pairs[f"mis.py {level} {mode}{name}, reducer"] = ({**reduced, **hooked("slime")}, reduced)
    return pairs


def _both(host: str) -> Runs:
    """Either side of every pair that is compared."""
    pairs = {(name, side): pair[side] for name, pair in PAIRS[host].items() for side in (0, 1)}
    sides = {(name, side): {"changes": changes, **pair_data(name)} for (name, side), changes in pairs.items()}
    wanted = [(layout, (name, side)) for layout, name in COMPARED[host] for side in (0, 1)]
    return Runs(run_host, host, sides, HOST_LAYOUTS, wanted)


PAIRS = {host: _pairs(host) for host in ADAPTERS}
COMPARED = {host: drawn(pairs, ["one", "tp2 cp2"]) for host, pairs in PAIRS.items()}
BOTH = {host: _both(host) for host in ADAPTERS}


@pytest.mark.parametrize(("host", "layout", "name"), [(host, *row) for host, rows in COMPARED.items() for row in rows])
def test_slime_s_own_loss_means_the_same(host: str, layout: str, name: str):
    """With mis.py slime averages its metrics over the masks that are left; under bypass miles compares the rollout with
    itself."""
    mine, theirs = BOTH[host](layout, (name, 0)), BOTH[host](layout, (name, 1))
    other = "train_rollout_logprob_abs_diff" if host == "miles" and name.startswith("bypass") else ""
    same(mine, theirs, "all" if name.startswith("mis.py") else other, host)
    they_bite(name, mine, theirs)


def test_the_shipped_mis_yaml_is_the_recorded_one() -> None:
    file = host_source("slime") / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
    assert yaml.safe_load(file.read_text()) == SHIPPED


# miles's padded batches, without miles --------------------------------------------------------------------------------


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
    columns = {"old_log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs", "loss_masks": "loss_masks"}
    rows: Any = {mine: [sample.rows[theirs] for sample in samples()] for mine, theirs in columns.items()}
    correction = mp.correct(mp.PackedSequences.from_lists(**rows), miles.settings(arguments("miles", **changes)))
    torch.testing.assert_close(torch.tensor(weights_here), correction.weights * correction.keep)


def test_miles_names_missing_log_probs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(vars(miles.ADAPTER), "groups", slime.ADAPTER.find_groups())
    values: dict[str, Any] = dict.fromkeys(signature(miles.tis_function).parameters)
    values |= {"args": arguments("miles", **hooked("miles"), **ours(2)), "pg_loss": torch.ones(2)}
    values |= {"loss_masks": [torch.ones(2)], "total_lengths": [4], "response_lengths": [2]}
    with pytest.raises(ValueError, match="miles passes no training log-probs"):
        miles.tis_function(**values)
    with pytest.raises(ValueError, match="rollout_log_probs is missing: algorithm 2"):
        miles.tis_function(**{**values, "train_log_probs": [torch.zeros(2)]})
