"""The adapters in slime and miles: their own `loss_function`, from logits, with real megatron-core groups over gloo.

They are imported from $MISMATCH_HOST_SRC/slime and /miles, with only `ray` stubbed. Loss and gradients equal
`policy_loss` in one process for every layout; and the hosts' own losses where they mean the same. What is miles's
alone, padded batches, also runs without it.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
from argparse import Namespace
from inspect import signature
from typing import Any

import pytest
import torch
import yaml

import mismatch_plugin as mp
from mismatch_plugin.hooks import miles, slime
from mismatch_plugin.hooks.slime.updates import SENDERS
from tests.distributed.launch import launch
from tests.hooks.contracts.slime_cases import (
    BOUNDS,
    LEVELS,
    MODES,
    NARROW,
    SHIPPED,
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
from tests.hooks.contracts.slime_data import ACCEPTED_MEAN, arguments, owned, samples
from tests.hooks.contracts.slime_live import run_host
from tests.hooks.contracts.slime_source import call_arguments, function, host_root, parameters, strings
from tests.hooks.contracts.slime_worker import Case, Runs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

ADAPTERS: dict[str, Any] = {"slime": slime, "miles": miles}
PADDED = {"qkv_format": "bshd", "padded": 40}  # longer than every sample, and cut in other chunks than their lengths
Changes = dict[str, Any]


def _cases(host: str) -> dict[str, dict[str, Any]]:
    """Of both hosts: the product, rollouts of several samples, and what each has of its own."""
    hook, whole = hooked(host), custom(host)
    cases: dict[str, Any] = {name: {"changes": changes} for name, changes in product(host).items()}
    masked = {**whole, **ours(2, weights("sequence", "mask")), **TERMS}
    cases["rollouts of two samples"] = {"changes": masked, "shared": True}
    contiguous = {**whole, **ours(3, weights("sequence", "clip")), "allgather_cp": True}
    cases["contiguous context"] = {"changes": contiguous}
    if host == "miles":
        cases["padded, 3"] = {"changes": {**whole, **ours(3, weights("sequence", "truncate")), **PADDED}}
        cases["padded, 2 by the hook"] = {"changes": {**hook, **ours(2, weights("geometric", "mask")), **PADDED}}
        weighted = {**whole, **ours(2, weights("token", "mask"), **WEIGHTED_KL), **TERMS}
        cases["KL with importance weights"] = {"changes": weighted}
        skipped = {**hook, **ours(2, weights("token", "clip")), "skip_actor_forward_only": True}
        # miles refuses the hooks around the step with that option
        cases["no forward pass beforehand"] = {"changes": skipped, "old": False, "hooks": False}
        return cases
    own: dict[str, Changes] = {
        "contiguous context, 2": {**hook, **ours(2, weights("geometric", "mask")), "allgather_cp": True},
        "recomputed loss": {**whole, **ours(3, weights("sequence", "clip")), "recompute_loss_function": True},
        "gspo, 0": {**whole, **ours(0), **NARROW, "advantage_estimator": "gspo", "allgather_cp": True},
        "gspo, 2": {**whole, **ours(2), **NARROW, "advantage_estimator": "gspo", "calculate_per_token_loss": True},
        "cispo, 2": {**whole, **ours(2), **NARROW, "advantage_estimator": "cispo", **TERMS},
        "reinforce by hand, 2": {**whole, **ours(2, weights("token", "clip"), objective="reinforce")},
        "distance to the sampler": {**whole, **ours(2, terms={"rollout_kl_coef": 0.1})},
    }
    normalised = ours(2, weights("sequence", "clip", batch_normalize=True))
    cases["no old log-probs, normalised"] = {"changes": {**hook, **normalised}, "old": False}
    return cases | {name: {"changes": changes} for name, changes in own.items()}


CASES = {host: _cases(host) for host in ADAPTERS}
DRAWN = {host: drawn(cases, HOST_LAYOUTS) for host, cases in CASES.items()}
IN_HOST = {host: Runs(run_host, host, CASES[host], HOST_LAYOUTS, DRAWN[host]) for host in ADAPTERS}


@pytest.mark.parametrize(("host", "layout", "name"), [(host, *row) for host, rows in DRAWN.items() for row in rows])
def test_the_host_s_loss_function_equals_one_process(host: str, layout: str, name: str):
    runs = IN_HOST[host]
    compare(runs(layout, name), runs.case(layout, name), ADAPTERS[host], by_logits=True)


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


# What of the hosts' source is relied on -------------------------------------------------------------------------------

_UPDATES = {
    "slime": {
        "UpdateWeightFromDistributed": "update_weight_from_distributed.py",
        "UpdateWeightFromTensor": "update_weight_from_tensor.py",
    },
    "miles": {
        "UpdateWeightFromDistributed": "update_weight_from_distributed/broadcast.py",
        "UpdateWeightP2P": "update_weight_from_distributed/p2p.py",
        "UpdateWeightFromTensor": "update_weight_from_tensor.py",
    },
}


@pytest.mark.parametrize("host", ADAPTERS)
def test_the_host_has_what_is_hooked(host: str) -> None:
    """Weight versions, samples, the data source, weight updates, training dumps, and slime's mis.yaml as recorded."""
    root, is_slime = host_root(host) / host, host == "slime"
    actor, update = root / "backends/megatron_utils/actor.py", root / "backends/megatron_utils/update_weight"
    train, text = function(actor, "train_actor"), actor.read_text(encoding="utf-8")
    assert [argument.arg for argument in train.args.args[:3]] == ["self", "rollout_id", "rollout_data"]
    assert "class MegatronTrainRayActor" in text and "self.weight_updater = " in text and "self.train_actor(" in text
    types = root / "utils/types.py"
    assert "self.weight_versions.append(meta_info['weight_version'])" in ast.unparse(ast.parse(types.read_text()))
    if is_slime:
        assert {"args", "tokens", "meta_info"} <= {*parameters(function(types, "append_response_tokens"))}
        shipped = host_root("slime") / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
        assert yaml.safe_load(shipped.read_text()) == SHIPPED
    else:
        assert parameters(function(types, "update_from_meta_info")) == ("self", "args", "meta_info")
        assert "weight_versions" in strings(function(root / "ray/rollout/train_data_conversion.py", "_package_shards"))
    manager = root / ("ray/rollout.py" if is_slime else "ray/rollout/rollout_manager.py")
    assert call_arguments(function(manager, "__init__"), "data_source_cls") == ("args",)
    imported = {a.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) for a in node.names}
    assert {*SENDERS[host]} <= imported
    for name, file in _UPDATES[host].items():
        sent = parameters(function(update / file, SENDERS[host][name]))[1]
        assert sent in ("converted_named_tensors", "hf_named_tensors")
    engine = function(root / "backends/sglang_utils/sglang_engine.py", "get_url" if is_slime else "get_server_info")
    assert parameters(engine) == ("self",)
    dumps = root / ("observability/train_data_utils.py" if is_slime else "utils/train_dump_utils.py")
    assert parameters(function(dumps, "save_debug_train_data")) == ("args", "rollout_id", "rollout_data")
    assert "get_gloo_group" in (root / "utils/distributed_utils.py").read_text()
    tensor = (update / "update_weight_from_tensor.py").read_text()
    for name in ("_ipc_gather_src", "use_distribute", "distributed_rollout_engines", "_is_distributed_src_rank"):
        assert f"self.{name} = " in tensor


@pytest.mark.parametrize("scaled", [True, False])
def test_slime_s_own_rewards_are_normalised_as_ours(scaled: bool) -> None:
    """Its `_post_process_rewards`, out of its source: groups are neighbours, float32, this order of operations."""
    node = function(host_root("slime") / "slime/ray/rollout.py", "_post_process_rewards")
    node.args.args[1].annotation = None
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([node], []), "rollout.py", "exec"), scope)
    args = arguments(n_samples_per_prompt=4, rollout_batch_size=2, grpo_std_normalization=scaled)
    args.rewards_normalization = True
    raw = torch.rand(8, generator=torch.Generator().manual_seed(3)).tolist()
    these = [Namespace(get_reward_value=lambda args, reward=reward: reward) for reward in raw]
    manager = Namespace(args=args, custom_reward_post_process_func=None)
    assert scope["_post_process_rewards"](manager, these) == (raw, slime._normalised(args, raw).tolist())


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
