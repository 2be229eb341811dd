"""Weight versions from slime's and miles's rollout data to the loss: which tokens go, and what is said where none are.

The host's part is a training class with its `train_actor`, and its iterator's choice of a micro-batch's samples.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.hooks.miles import MilesAdapter
from mismatch_plugin.hooks.slime import SlimeAdapter
from mismatch_plugin.hooks.slime.adapter import RayAdapter
from mismatch_plugin.hooks.slime.versions import Versions, validate_versions_kept
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.hooks.contracts.launch_trees import ray_tree
from tests.hooks.contracts.slime_cases import custom, hooked, ours
from tests.hooks.contracts.slime_data import arguments as host_arguments
from tests.hooks.contracts.slime_source import function, host_root, strings

ADAPTERS: dict[str, type[RayAdapter]] = {"slime": SlimeAdapter, "miles": MilesAdapter}
hosts = pytest.mark.parametrize("host", ADAPTERS)
EXACT = {"level": "token", "upper_bound": float("inf")}


def arguments(host: str, algorithm: int, most: int | None = 1, whole: bool | None = None) -> Namespace:
    """most: `rs.max_staleness`."""
    path = custom(host) if (algorithm == 3 if whole is None else whole) else hooked(host)
    rs = {} if most is None else {"rs": {"max_staleness": most}}
    init = {"custom_megatron_init_path": f"mismatch_plugin.hooks.{host}.init"}
    settings = ours(algorithm, EXACT if algorithm > 1 else None, **rs)
    return host_arguments(host, **path, **settings, **init)


def rollout(versions: list[list[str]] | None = None) -> dict[str, Any]:
    """Four samples of 2, 3, 2 and 1 response tokens; the third trains nothing, the second has a tool's token."""
    masks = [torch.tensor(mask, dtype=torch.int32) for mask in ([1, 1], [1, 0, 1], [0, 0], [1])]
    values = [-0.5 * torch.arange(1, len(mask) + 1) for mask in masks]
    data: dict[str, Any] = {
        "loss_masks": masks,
        "total_lengths": [len(mask) + 4 for mask in masks],
        "response_lengths": [len(mask) for mask in masks],
        "sample_indices": [30, 31, 32, 33],
        "rollout_log_probs": values,
        "log_probs": [value - 0.1 for value in values],
        "advantages": [torch.ones(len(mask)) for mask in masks],
        "micro_batch_indices": [[2, 1], [0, 3]],
        "num_microbatches": [2],
    }
    return data if versions is None else {**data, "weight_versions": versions}


VERSIONS = [["7"], ["7", "5"], [], ["6", "7"]]
"""The second is as old as its first call; the third trains nothing, and was never finished."""


class Training:
    """A training process of the host: `train_actor` runs `each` on every micro-batch, as the host's iterator gives
    them."""

    def __init__(self, version: int | None, each: Callable[[dict[str, Any]], Any]) -> None:
        self.weight_updater = SimpleNamespace(weight_version=version)
        self.each = each

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any], *, attempt: int = 0) -> list[Any]:
        chosen = rollout_data["micro_batch_indices"]
        keys = [key for key, value in rollout_data.items() if len(value) == 4]
        return [self.each({key: [rollout_data[key][i] for i in ids] for key in keys}) for ids in chosen]


def prepared(host: str) -> tuple[RayAdapter, type[Training]]:
    """An adapter of one process, and a training class that it watches."""
    adapter = ADAPTERS[host]()
    vars(adapter)["groups"] = ParallelGroups()
    actor = type("Training", (Training,), {"train_actor": Training.train_actor})
    adapter.versions.watch(actor)
    return adapter, actor


def weighed(adapter: RayAdapter, args: Namespace) -> Callable[[dict[str, Any]], Tensor]:
    """The host's own loss, 1 a token, as our weights leave it."""

    def each(batch: dict[str, Any]) -> Tensor:
        keys = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
        ones = torch.ones(sum(batch["response_lengths"]))
        loss, _, metrics = adapter.tis_function(
            args, pg_loss=ones, train_log_probs=batch["log_probs"], **{key: batch[key] for key in keys}
        )
        assert ("tis_rejected" in metrics) == adapter.config(args).rejects
        return loss

    return each


@hosts
def test_tokens_that_are_too_old_leave_the_host_s_loss(host: str) -> None:
    adapter, actor = prepared(host)
    weight = float(torch.tensor(-0.1).exp())
    expected = {
        None: [[0, 0, weight, 0, weight], [weight] * 3],
        2: [[0, 0, weight, 0, weight], [weight] * 3],
        1: [[0] * 5, [weight] * 3],
        0: [[0] * 5, [weight, weight, 0]],  # the last is as old as the older of its two calls
    }
    for most, losses in expected.items():
        args = arguments(host, 2, most)
        found = actor(7, weighed(adapter, args)).train_actor(3, rollout(VERSIONS), attempt=0)
        assert [loss.tolist() for loss in found] == [pytest.approx(row) for row in losses], most


@hosts
@pytest.mark.parametrize(("trainer", "stays"), [(0, True), (1, False)])
def test_an_engine_before_its_first_update_has_the_trainer_s_first_weights(
    host: str, trainer: int, stays: bool
) -> None:
    """SGLang calls them "default"; both hosts count updates from 1."""
    adapter, actor = prepared(host)
    data = rollout([["default"]] * 4)
    found = actor(trainer, weighed(adapter, arguments(host, 2, 0))).train_actor(0, data)
    assert [bool(value) for loss in found for value in loss] == [False, False, stays, False, *[stays] * 4]


@hosts
@pytest.mark.parametrize("algorithm", [0, 1, 2, 3])
def test_tokens_that_are_too_old_leave_our_loss_and_stay_in_the_ratios(host: str, algorithm: int) -> None:
    adapter, actor = prepared(host)
    args = arguments(host, algorithm, 1, whole=True)

    def each(batch: dict[str, Any]) -> tuple[list[list[float]], dict[str, Tensor]]:
        own = [(value - 0.1).requires_grad_() for value in batch["rollout_log_probs"]]
        loss, report = adapter.loss(args, batch, own, None, lambda values: values.sum())
        loss.backward()
        return [leaf.grad.tolist() for leaf in own if leaf.grad is not None], report

    (old, old_report), (new, _) = actor(7, each).train_actor(3, rollout(VERSIONS))
    assert [value for row in old for value in row] == [0.0] * 5
    assert all(value != 0.0 for row in new for value in row)
    assert float(old_report["tis_rejected"]) == 2.0 and float(old_report["tis"]) > 0.0


def as_ray_sends_it(actor: type[Training]) -> type[Training]:
    """Ray's `_inject_tracing_into_class`: the actor is of a subclass with each method again, wrapped."""
    own = actor.train_actor

    @wraps(own)
    def resume_span(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    return type(actor.__name__, (actor,), {"train_actor": resume_span})


@hosts
def test_ray_s_actors_tell_their_rollouts(host: str) -> None:
    adapter = ADAPTERS[host]()
    vars(adapter)["groups"] = ParallelGroups()
    base = type("Training", (Training,), {"train_actor": Training.train_actor})
    actor = as_ray_sends_it(base)
    derived = type("Derived", (base,), {"train_actor": lambda self, *args: super(derived, self).train_actor(*args)})  # pyright: ignore
    deeper = as_ray_sends_it(derived)
    adapter.versions.watch(base)
    for kind in (actor, deeper, derived, base):
        found = kind(7, weighed(adapter, arguments(host, 2))).train_actor(3, rollout(VERSIONS))
        assert [bool(value) for loss in found for value in loss] == [False] * 5 + [True] * 3


@hosts
def test_slime_s_own_logging_does_not_meet_the_versions(host: str) -> None:
    _, actor = prepared(host)
    data = rollout(VERSIONS)
    actor(7, lambda batch: None).train_actor(3, data)
    assert ("weight_versions" in data) == (host == "miles")  # which passes over them itself


@hosts
def test_a_missing_version_names_the_sample_and_the_fix(host: str) -> None:
    args = arguments(host, 2)
    for versions, name in ((None, 30), ([["7"], [], [], ["7"]], 31)):
        adapter, actor = prepared(host)
        with pytest.raises(
            ValueError, match=f"sample {name} has no weight version .*leave --rs-max-staleness"
        ) as found:
            actor(7, weighed(adapter, args)).train_actor(3, rollout(versions))
        assert ("--file slime/ray/rollout.py" in str(found.value)) == (host == "slime")
        assert "Sample.update_from_meta_info" in str(found.value)
    adapter, actor = prepared(host)
    with pytest.raises(ValueError, match="sample 30: weight version 'f3' is not the number of an update"):
        actor(7, weighed(adapter, args)).train_actor(3, rollout([["f3"], *VERSIONS[1:]]))
    with pytest.raises(ValueError, match=f"{host}'s training process has none"):
        actor(None, weighed(adapter, args)).train_actor(3, rollout(VERSIONS))


@hosts
def test_all_ranks_hear_of_it_before_the_first_step(host: str) -> None:
    """Where the host's hooks compare ranks: a rank that raised alone would leave the others in a collective."""
    adapter, actor = prepared(host)
    args, data = arguments(host, 2), rollout()
    actor(7, lambda batch: None).train_actor(3, data)

    def begin() -> None:
        if host == "slime":
            adapter.rollout_data_postprocess(args, 3, data)
        else:
            config, failure = adapter.config(args), adapter.versions.failure
            adapter.run.begin(args, config, adapter.groups, SimpleNamespace(), 3, failure=failure)

    with pytest.raises(ValueError, match="sample 30 has no weight version"):
        begin()


@hosts
def test_versions_that_nobody_read_are_missed(host: str) -> None:
    adapter, _ = prepared(host)
    with pytest.raises(ValueError, match=rf"--custom-megatron-init-path mismatch_plugin\.hooks\.{host}\.init"):
        Training(7, weighed(adapter, arguments(host, 2))).train_actor(3, rollout(VERSIONS))
    args = arguments(host, 2)
    args.custom_megatron_init_path = "mine.init"
    with pytest.raises(ValueError, match=rf"--custom-megatron-init-path mismatch_plugin\.hooks\.{host}\.init"):
        adapter.check(args)


def test_a_class_is_watched_once() -> None:
    told = Versions("miles")
    actor = type("Training", (Training,), {"train_actor": Training.train_actor})
    for _ in range(2):
        told.watch(actor)
    assert vars(actor.train_actor)["mismatch_plugin_wraps"][1] is Training.train_actor


def test_a_share_of_each_sample_under_context_parallelism() -> None:
    told, data = Versions("miles"), rollout(VERSIONS)
    told.read(data, 7)
    packed = mp.PackedSequences(loss_mask=torch.ones(3, dtype=torch.bool), lengths=(1, 0, 0, 2))
    config = mp.MismatchConfig(use_tis=True, rs=mp.Rejection(max_staleness=1))
    found = told.on(packed, config, data["loss_masks"])
    assert found.trainer_version == 7
    assert found.weight_versions is not None and found.weight_versions.tolist() == [7, 6, 6]


def test_the_mean_weight_before_the_step_needs_the_versions_too() -> None:
    """It is made by the same correction, in which a rejection changes no weight: tokens that are too old are in it."""
    args = arguments("slime", 2, 0)
    tis = {"level": "token", "mode": "mask", "upper_bound": 100.0, "batch_normalize": True}
    args.mismatch_settings = {**args.mismatch_settings, "tis": tis}
    data = rollout([["7"], ["5"], [], ["7"]])
    data["log_probs"] = [
        value + shift for value, shift in zip(data["rollout_log_probs"], (0.0, -2.0, 0.0, -1.0), strict=True)
    ]
    adapter, actor = prepared("slime")
    args.rollout_data_postprocess_path = "mismatch_plugin.hooks.slime.rollout_data_postprocess"
    args.custom_megatron_before_train_step_hook_path = "mismatch_plugin.hooks.slime.before_train_step"
    actor(7, lambda batch: None).train_actor(3, data)
    adapter.rollout_data_postprocess(args, 3, data)
    (step,) = adapter.run._prepared
    assert step.batch_factor is not None
    assert float(step.batch_factor) == pytest.approx((1 + 1 + 2 * 0.13533528 + 0.36787944) / 5, rel=1e-6)


def test_a_response_that_is_too_old_leaves_its_group_s_baseline() -> None:
    """Rewards 1, 0, 1, 3, of which the first and the last are accepted: their mean is 2."""
    raw = [1.0, 0.0, 1.0, 3.0]
    args = arguments("slime", 2, 1)
    vars(args).update(
        {
            "n_samples_per_prompt": 4,
            "rollout_batch_size": 1,
            "grpo_std_normalization": False,
            "get_mismatch_metrics": True,
            "rewards_normalization": True,
            "custom_advantage_function_path": "mismatch_plugin.hooks.slime.group_advantages",
            "mismatch_settings": {**args.mismatch_settings, "rs": {"max_staleness": 1, "group": "exclude"}},
        }
    )
    data = rollout(VERSIONS) | {"raw_reward": raw, "rewards": [-0.25, -1.25, -0.25, 1.75], "partition": [0, 1, 2, 3]}
    data["kl"] = [torch.zeros(len(mask)) for mask in data["loss_masks"]]
    adapter, actor = prepared("slime")
    assert isinstance(adapter, SlimeAdapter)
    actor(7, lambda batch: None).train_actor(3, data)
    adapter.group_advantages(args, data)
    assert [row.tolist() for row in data["advantages"]] == [[-1.0, -1.0], [0.0] * 3, [0.0] * 2, [1.0]]


# slime's tree ---------------------------------------------------------------------------------------------------------


def test_a_slime_that_drops_versions_is_refused_at_the_start(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    rollouts = script.parent / "slime" / "ray" / "rollout.py"
    rollouts.parent.mkdir(parents=True, exist_ok=True)
    rollouts.write_text('KEYS = ["tokens"]\n')
    line = [str(script), "--use-tis", "--rs-max-staleness", "2"]
    with pytest.raises(ValueError, match="which slime drops on the way to the trainer: apply the patch"):
        prepare(line)
    validate_versions_kept("miles", script)
    rollouts.write_text('KEYS = ["tokens", "weight_versions"]\n')
    plan = prepare(line)[3]
    assert any("2 weight versions" in text for text in plan.lines)
    assert "mismatch_plugin.hooks.slime.init" in plan.added


@hosts
def test_the_host_still_keeps_versions_so(host: str) -> None:
    root = host_root(host)
    actor = root / host / "backends/megatron_utils/actor.py"
    train = function(actor, "train_actor")
    assert [argument.arg for argument in train.args.args[:3]] == ["self", "rollout_id", "rollout_data"]
    text = actor.read_text(encoding="utf-8")
    assert "class MegatronTrainRayActor" in text and "self.weight_updater = " in text and "self.train_actor(" in text
    assert "self.weight_versions.append(meta_info['weight_version'])" in ast.unparse(
        ast.parse((root / host / "utils/types.py").read_text(encoding="utf-8"))
    )
    if host == "miles":
        assert "weight_versions" in strings(
            function(root / "miles/ray/rollout/train_data_conversion.py", "_package_shards")
        )
