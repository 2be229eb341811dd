"""The adapters in slime and miles: in the hosts' own `loss_function` against the hosts' own losses, from logits.

They are imported from $MISMATCH_HOST_SRC/slime and /miles, with only `ray` stubbed. Each rank gets its rows and columns
of the logits, cut as the host's data pipeline cuts them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import types
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.distributed.launch import launch
from tests.full import FULL
from tests.hooks.contracts.slime_data import (
    BOUNDS,
    LEVELS,
    MODES,
    NARROW,
    REDUCER,
    SHIPPED,
    TERMS,
    VOCAB,
    arguments,
    batch_of,
    custom,
    hooked,
    initialize,
    ours,
    samples,
    schedule,
    weights,
)
from tests.host_source import host_source

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

Changes = dict[str, Any]
Pairs = dict[str, tuple[Changes, Changes]]
LAYOUTS = {"one": (1, 1, 1), "tp2 cp2": (2, 2, 4)}  # tp, cp, processes
GRADIENT_TOLERANCE = {"slime": (2e-5, 2e-7), "miles": (8e-3, 2e-6)}
"""Relative, absolute. miles takes megatron's fused cross entropy, whose gradient by logits is rounded to bfloat16."""


def pairs_of(host: str) -> Pairs:
    """(ours, the host's own) that mean the same. YAML's keys are plain attributes, for both."""
    bypass: Changes = {"use_rollout_logprobs": True}
    estimators = ("gspo", "cispo") if host == "slime" else ("gspo",)
    plain: dict[str, Changes] = {"PPO": {}, "PPO, terms": TERMS}
    if host == "slime":
        plain["PPO, dual clip"] = {"eps_clip_c": 1.05, "eps_clip": 0.1, "eps_clip_high": 0.15}
        plain["PPO, top-p"] = {"rollout_top_p": 0.9}
        plain["PPO, per token"] = {"calculate_per_token_loss": True}
        plain |= {f"PPO, {kind}": {**TERMS, "kl_loss_type": kind} for kind in ("k1", "k2", "low_var_kl")}
        plain["cispo, no lower bound, terms"] = {"advantage_estimator": "cispo", **NARROW, "eps_clip": 3.0, **TERMS}
    for estimator, dual in itertools.product(estimators, ({}, {"eps_clip_c": 1.005})):
        plain[f"{estimator}{', dual clip' * bool(dual)}"] = {"advantage_estimator": estimator, **NARROW, **dual}
    plain["gspo, per token"] = {"advantage_estimator": "gspo", **NARROW, "calculate_per_token_loss": True}
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        plain[f"unbiased KL {kind}"] = {**TERMS, "kl_loss_type": kind, "use_unbiased_kl": True}
    if host == "slime":
        plain |= {f"bypass {name}": {**bypass, **more} for name, more in plain.items()}
    else:
        plain |= {"bypass PPO": bypass, "bypass unbiased KL k3": {**bypass, **plain["unbiased KL k3"]}}
    masking = {"use_opsm": True, "opsm_delta": 0.02}
    plain |= {"bypass masking": {**bypass, **masking}, "sampled masking": masking, "reducer": {**TERMS, **REDUCER}}
    pairs: Pairs = {name: ({**custom(host), **more}, more) for name, more in plain.items()}
    for name, clip in {"": {}, ", both bounds": {"tis_clip": 1.3, "tis_clip_low": 0.8}}.items():
        own = {"use_tis": True, **clip, **TERMS}
        pairs[f"built-in TIS{name}"] = ({**hooked(host), **own}, own)
        pairs[f"built-in TIS, whole loss{name}"] = ({**custom(host), **own}, own)
    # Our weights on the host's own GSPO and CISPO, against our weights in our whole loss.
    for estimator, level in zip(estimators, ("sequence", "token"), strict=False):
        changes = {**ours(2, weights(level, "mask")), **NARROW, "advantage_estimator": estimator}
        pairs[f"{estimator} weighed"] = ({**changes, **custom(host)}, {**changes, **hooked(host)})
    return pairs | (mis_pairs() if host == "slime" else {})


def mis_pairs() -> Pairs:
    """slime's own examples of corrections: IcePop, and mis.py with its YAML."""
    icepop = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}
    theirs = {**icepop, "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}
    pairs: Pairs = {"IcePop": ({**hooked("slime"), **icepop, "tis_mode": "mask", "mismatch_preset": None}, theirs)}
    rejecting = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.12}
    rejections: dict[str, Changes] = {"": {}, " + rejection + veto": {**rejecting, "rs_veto_threshold": 0.3}}
    for level, mode, (name, rejection) in itertools.product(LEVELS, MODES, rejections.items()):
        keys = {**SHIPPED, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": False, "use_rs": False}
        keys |= dict(zip(("tis_lower_bound", "tis_upper_bound"), BOUNDS[level], strict=True))
        keys |= {"rs_veto_threshold": None, **rejection}
        own = {**keys, "custom_tis_function_path": "slime_mis.compute_mis_weights_with_cp"}
        pairs[f"mis.py {level} {mode}{name}"] = ({**keys, **hooked("slime")}, own)
    return pairs


# In the host ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """constant: every response has one advantage: the hosts' GSPO has its gradient through the mean, ours through each
    token, and their masking takes each token's advantage. sampled: the rollout's log-probs are those of π_old."""

    host: str
    root: str
    tp: int
    cp: int
    changes: Changes
    constant: bool = False
    sampled: bool = False


class _Anything(types.ModuleType):
    """A module whose every attribute is a function that does nothing: what `ray` is to the loss."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@cache
def import_host(host: str, root: str, tp: int, cp: int) -> Any:
    """The host's module with `loss_function`, its parallel state set up where it keeps one of its own."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch._dynamo

    torch._dynamo.config.disable = True
    sys.path.insert(0, root)
    sys.modules.update({name: _Anything(name) for name in ("ray", "ray.actor", "ray.util")})
    state = initialize(cp, tp)
    if host == "slime":
        script = f"{root}/examples/train_infer_mismatch_helper/mis.py"
        spec = importlib.util.spec_from_file_location("slime_mis", script)
        assert spec is not None and spec.loader is not None
        sys.modules["slime_mis"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["slime_mis"])
        return importlib.import_module("slime.backends.megatron_utils.loss")
    parallel = importlib.import_module("miles.backends.training_utils.parallel")
    info = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo
    groups = {
        "intra_dp": state.get_data_parallel_group(),
        "intra_dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "cp": state.get_context_parallel_group(),
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    infos = {name: info(rank=group.rank(), size=group.size(), group=group) for name, group in groups.items()}
    alone = {name: info(rank=0, size=1, group=None) for name in ("ep", "etp", "indep_dp")}
    parallel.set_parallel_state(parallel.ParallelState(**infos, **alone))
    return importlib.import_module("miles.backends.training_utils.loss")


def run(case: Case) -> list[tuple[float, Tensor, dict[str, float]]]:
    """(loss, its gradient by this rank's logits, what is reported) of each micro-batch on this rank."""
    host, state = import_host(case.host, case.root, case.tp, case.cp), initialize(case.cp, case.tp)
    return [step_of(host, state, case, ids) for step in schedule(0, 1) for ids in step]


def step_of(host: Any, state: Any, case: Case, ids: list[int]) -> tuple[float, Tensor, dict[str, float]]:
    args, cp_rank, width = arguments(case.host, **case.changes), state.get_context_parallel_rank(), VOCAB // case.tp
    batch = batch_of(ids, case.cp, cp_rank) | {"unconcat_tokens": [samples()[i].tokens for i in ids]}
    del batch["max_seq_lens"]
    if case.constant:
        first = [float(samples()[i].rows["advantages"][0]) for i in ids]
        batch["advantages"] = [torch.full_like(row, one) for row, one in zip(batch["advantages"], first, strict=True)]
    if case.sampled:
        batch["rollout_log_probs"] = batch["log_probs"]
    batch["rollout_mask_sums"] = [mask.sum().float() for mask in batch["loss_masks"]]
    if args.rollout_top_p != 1.0:
        kept = [nuclei(ids) for ids in batch["unconcat_tokens"]]
        kept = [row[samples()[i].prompt :] for row, i in zip(kept, ids, strict=True)]
        batch["rollout_top_p_token_ids"] = [[token for at in row for token in at] for row in kept]
        batch["rollout_top_p_token_offsets"] = [[0, *itertools.accumulate(map(len, row))] for row in kept]
    rows = torch.cat([chunks(samples()[i].logits, case.cp, cp_rank) for i in ids])
    logits = rows.chunk(case.tp, dim=1)[state.get_tensor_model_parallel_rank()]
    leaf = torch.cat([logits, torch.zeros(-len(logits) % 8, width)]).requires_grad_()
    given = leaf[None] * 1.0
    if case.host == "slime":
        loss, _, log = host.loss_function(args, batch, 2, len(ids), given)
    else:
        loss, _, log = host.loss_function(
            args, batch, 2, given, apply_megatron_loss_scaling=True, num_rollouts=len(ids)
        )
    loss.backward()  # not autograd.grad: a rank without a response's tokens would leave the others in its all-reduce
    assert leaf.grad is not None and not leaf.grad[len(logits) :].any(), "padding has a gradient"
    return float(loss.detach()), leaf.grad, dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))


def nuclei(tokens: Tensor) -> list[list[int]]:
    """Ids that a sampler with top-p would have kept at each token: it and some more."""
    return [sorted({token, *(i for i in range(VOCAB) if i % 3)}) for token in tokens.tolist()]


def chunks(rows: Tensor, cp: int, rank: int) -> Tensor:
    """The two chunks of a sequence that a rank is fed, filled up with 0."""
    chunk = -(-len(rows) // (2 * cp))
    filled = torch.cat([rows, torch.zeros(2 * cp * chunk - len(rows), *rows.shape[1:])]).split(chunk)
    return rows if cp == 1 else torch.cat([filled[rank], filled[2 * cp - 1 - rank]])


# The comparison -------------------------------------------------------------------------------------------------------

PAIRS = {host: pairs_of(host) for host in ("slime", "miles")}
# The others may be had with MISMATCH_FULL=1; the user's reducer knows no context parallelism.
COMPARED = [
    (host, layout, name)
    for host, pairs in PAIRS.items()
    for at, name in enumerate(pairs)
    for turn, layout in enumerate(LAYOUTS)
    if (turn == 0 if name == "reducer" else FULL or at % 2 == turn)
]


@cache
def found_in(host: str, layout: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Of each pair what all ranks got, with ours and with the host's own."""
    (tp, cp, processes), root = LAYOUTS[layout], str(host_source(host))
    names = [name for of, place, name in COMPARED if (of, place) == (host, layout)]
    data = {name: ("gspo" in name or "masking" in name, "sampled" in name) for name in names}
    cases = [Case(host, root, tp, cp, PAIRS[host][name][side], *data[name]) for name in names for side in (0, 1)]
    found = launch(run, cases, processes, timeout=240.0)
    return dict(zip(names, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize(("host", "layout", "name"), COMPARED)
def test_slime_s_own_loss_means_the_same(host: str, layout: str, name: str) -> None:
    """On every rank by itself. With mis.py slime averages its metrics over the masks that are left; under bypass miles
    compares the rollout with itself."""
    mine, theirs = found_in(host, layout)[name]
    relative, absolute = GRADIENT_TOLERANCE[host]
    for rank, other in zip(mine, theirs, strict=True):
        for (loss, gradient, report), (own_loss, own_gradient, own) in zip(rank, other, strict=True):
            torch.testing.assert_close(gradient, own_gradient, rtol=relative, atol=absolute)
            assert loss == pytest.approx(own_loss, rel=1e-5, abs=1e-6)
            shared = {*report} & {*own} if not name.startswith("mis.py") else {"loss", "pg_loss"}
            assert {"loss", "pg_loss"} <= shared
            other_metric = "train_rollout_logprob_abs_diff" if host == "miles" and "bypass" in name else ""
            for metric in shared - {other_metric}:
                assert report[metric] == pytest.approx(own[metric], rel=1e-5, abs=1e-6), metric
    bites = [(mine, "pg_clipfrac")] * ("gspo" in name or "cispo" in name)
    bites += [(theirs, "opsm_clipfrac"), (mine, "tis_rejected")] * ("masking" in name)
    for side, metric in bites:
        assert sum(report[metric] for rank in side for _, _, report in rank) > 0, metric
    assert any(gradient.any() for rank in theirs for _, gradient, _ in rank)


def test_the_shipped_mis_yaml_is_the_recorded_one() -> None:
    file = host_source("slime") / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
    assert yaml.safe_load(file.read_text()) == SHIPPED
