"""Weight versions under `--rs-max-staleness`: from the hosts' rollout data to the loss, and what is refused."""

from __future__ import annotations

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
from mismatch_plugin.hooks.slime.adapter import RayAdapter, Versions
from mismatch_plugin.hooks.slime.config import validate_versions_kept
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.hooks.contracts.launch_trees import ray_tree
from tests.hooks.contracts.slime_data import arguments as host_arguments
from tests.hooks.contracts.slime_data import custom, hooked, ours

ADAPTERS: dict[str, type[RayAdapter]] = {"slime": SlimeAdapter, "miles": MilesAdapter}
hosts = pytest.mark.parametrize("host", ADAPTERS)
EXACT = {"level": "token", "upper_bound": float("inf")}
VERSIONS = [["7"], ["7", "5"], [], ["6", "7"]]
"""The second is as old as its first call; the third trains nothing, and was never finished."""


def arguments(host: str, algorithm: int, most: int = 1, **more: Any) -> Namespace:
    """most: `rs.max_staleness`."""
    path = custom(host) if algorithm == 3 else hooked(host)
    init = {"custom_megatron_init_path": f"mismatch_plugin.hooks.{host}.init"}
    return host_arguments(host, **{**path, **ours(algorithm, EXACT, rs={"max_staleness": most}), **init, **more})


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


def prepared(host: str) -> tuple[RayAdapter, list[type[Training]]]:
    """An adapter of one process, and what it watches: a training class, and its actor: Ray's
    `_inject_tracing_into_class` makes a subclass with each method again, wrapped."""
    adapter = ADAPTERS[host]()
    vars(adapter)["groups"] = ParallelGroups()
    actor: Any = type("Training", (Training,), {"train_actor": Training.train_actor})
    own = actor.train_actor

    @wraps(own)
    def resume_span(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    kinds = [actor, type("Training", (actor,), {"train_actor": resume_span})]
    for _ in range(2):  # once is enough
        adapter.versions.watch(actor)
    assert vars(actor.train_actor)["mismatch_plugin_wraps"][1] is Training.train_actor
    return adapter, kinds


def weighed(adapter: RayAdapter, args: Namespace) -> Callable[[dict[str, Any]], Tensor]:
    """The host's own loss, 1 a token, as our weights leave it."""

    def each(batch: dict[str, Any]) -> Tensor:
        keys = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
        ones = torch.ones(sum(batch["response_lengths"]))
        loss, _, metrics = adapter.tis_function(
            args, pg_loss=ones, train_log_probs=batch["log_probs"], **{key: batch[key] for key in keys}
        )
        assert "tis_rejected" in metrics
        return loss

    return each


W = float(torch.tensor(-0.1).exp())
INITIAL = [["default"]] * 4
STALE: list[tuple[int, int, list[list[str]], list[list[float]]]] = [
    (2, 7, VERSIONS, [[0, 0, W, 0, W], [W] * 3]),
    (0, 7, VERSIONS, [[0] * 5, [W, W, 0]]),  # the last is as old as the older of its two calls
    (0, 0, INITIAL, [[0, 0, W, 0, W], [W] * 3]),  # SGLang's name before the first update; hosts count from 1
    (0, 1, INITIAL, [[0] * 5, [0] * 3]),
]


@hosts
@pytest.mark.parametrize(("most", "trainer", "versions", "losses"), STALE)
def test_tokens_that_are_too_old_leave_the_host_s_loss(
    host: str, most: int, trainer: int, versions: list[list[str]], losses: list[list[float]]
) -> None:
    adapter, kinds = prepared(host)
    for kind in kinds:
        data = rollout(versions)
        found = kind(trainer, weighed(adapter, arguments(host, 2, most))).train_actor(3, data)
        assert [loss.tolist() for loss in found] == [pytest.approx(row) for row in losses]
        assert ("weight_versions" in data) == (host == "miles"), "slime's own logging does not meet them"


def test_tokens_that_are_too_old_leave_our_loss_and_stay_in_the_ratios() -> None:
    adapter, (actor, _) = prepared("miles")
    args = arguments("miles", 3)

    def each(batch: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        own = [(value - 0.1).requires_grad_() for value in batch["rollout_log_probs"]]
        loss, report = adapter.loss(args, batch, own, None, lambda values: values.sum())
        loss.backward()
        return torch.cat([leaf.grad for leaf in own if leaf.grad is not None]).tolist(), report

    (old, old_report), (new, _) = actor(7, each).train_actor(3, rollout(VERSIONS))
    assert old == [0.0] * 5 and all(value != 0.0 for value in new)
    assert float(old_report["tis_rejected"]) == 2.0 and float(old_report["tis"]) > 0.0


MISSING: list[tuple[int | None, list[list[str]] | None, str]] = [
    (7, None, r"sample 30 has no weight version .*Sample.update_from_meta_info.*leave --rs-max-staleness"),
    (7, [["7"], [], [], ["7"]], "sample 31 has no weight version"),
    (None, VERSIONS, "'s training process has none"),
]


@hosts
@pytest.mark.parametrize(("trainer", "versions", "sentence"), MISSING)
def test_a_missing_version_names_the_sample_and_the_fix_on_all_ranks(
    host: str, trainer: int | None, versions: list[list[str]] | None, sentence: str
) -> None:
    """Before the first step where the host's hooks compare ranks: one that raised alone would leave the others."""
    adapter, (actor, *_) = prepared(host)
    args, data = arguments(host, 2), rollout(versions)
    with pytest.raises(ValueError, match=sentence) as found:
        actor(trainer, weighed(adapter, args)).train_actor(3, {**data})
    patch = host == "slime" and "has no weight version" in sentence
    assert ("--file slime/ray/rollout.py" in str(found.value)) == patch
    actor(trainer, lambda batch: None).train_actor(3, data)
    failure, begin = adapter.versions.failure, adapter.run.begin
    with pytest.raises(ValueError, match=sentence):
        begin(args, adapter.config(args), adapter.groups, SimpleNamespace(), 3, failure=failure)
    if host == "slime":
        with pytest.raises(ValueError, match=sentence):
            adapter.rollout_data_postprocess(args, 3, data)


@hosts
def test_versions_that_nobody_read_are_missed(host: str) -> None:
    adapter, _ = prepared(host)
    hook = rf"--custom-megatron-init-path mismatch_plugin\.hooks\.{host}\.init"
    with pytest.raises(ValueError, match=hook):
        Training(7, weighed(adapter, arguments(host, 2))).train_actor(3, rollout(VERSIONS))
    with pytest.raises(ValueError, match=hook):
        adapter.check(arguments(host, 2, custom_megatron_init_path="mine.init"))


def test_a_share_of_each_sample_under_context_parallelism() -> None:
    told, data = Versions("miles"), rollout(VERSIONS)
    told.read(data, 7)
    packed = mp.PackedSequences(loss_mask=torch.ones(3, dtype=torch.bool), lengths=(1, 0, 0, 2))
    found = told.on(packed, mp.MismatchConfig(use_tis=True, rs=mp.Rejection(max_staleness=1)), data["loss_masks"])
    assert found.trainer_version == 7
    assert found.weight_versions is not None and found.weight_versions.tolist() == [7, 6, 6]


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
