"""slime's advantages over a group's accepted responses: ranks that share groups, and what is refused."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks import slime
from tests.core.test_groups import plain
from tests.distributed.launch import launch
from tests.full import FULL
from tests.hooks.contracts.slime_data import Model, arguments, batch_of, hooked, initialize, ours, samples, weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

RAW = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.0]  # two groups of four neighbours; sample 6 trains nothing
SIZE, PATH = 4, "mismatch_plugin.hooks.slime.group_advantages"
SEVERAL = {"criteria": ["sequence_mean:ratio:0.9:1.05"]}  # samples 2 and 3 are further away
EXCLUDE = {**SEVERAL, "group": "exclude"}
LAYOUTS = {"one": (1, 1), "dp2": (1, 2), "cp4": (4, 4), "cp2 dp2": (2, 4)}


@dataclass(frozen=True)
class Case:
    """raw: rewards. replaced: what raw_reward holds after slime normalised these. versions: of the weights that sampled
    each; 5 train."""

    rs: dict[str, Any]
    cp: int = 1
    scaled: bool = True
    raw: list[float] = field(default_factory=lambda: list(RAW))
    replaced: list[float] | None = None
    versions: tuple[int | None, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


def host_arguments(case: Case) -> Namespace:
    settings = ours(2, weights("token", "truncate"), rs=case.rs)
    groups = {"n_samples_per_prompt": SIZE, "rollout_batch_size": 2, "grpo_std_normalization": case.scaled}
    own = {"custom_advantage_function_path": PATH, "custom_megatron_init_path": "mismatch_plugin.hooks.slime.init"}
    return arguments(**{**hooked("slime"), **settings, "get_mismatch_metrics": True, **own, **groups, **case.changes})


def normalised(case: Case) -> list[float]:
    """As slime's driver: float32, centred, then divided by the deviation of that."""
    table = torch.tensor(case.raw).reshape(-1, case.changes.get("n_samples_per_prompt", SIZE))
    table = table - table.mean(dim=-1, keepdim=True)
    return (table / (table.std(dim=-1, keepdim=True) + 1e-6) if case.scaled else table).flatten().tolist()


def rollout(case: Case, rank: int, ranks: int, cp_rank: int) -> dict[str, Any]:
    """What slime holds of a rollout on one rank; samples are dealt out in turn, so that every group is split."""
    places, rewards = list(range(len(RAW)))[rank::ranks], normalised(case)
    data = batch_of(places, case.cp, cp_rank)
    del data["advantages"]
    own = {"partition": places, "raw_reward": case.replaced or case.raw, "rewards": [rewards[i] for i in places]}
    return data | own | {"kl": [torch.zeros_like(part) for part in data["log_probs"]]}


def advantages_of(case: Case) -> Any:
    """({sample: its advantages here}, metrics), or the error, on one rank; then what slime's tracker gets of a step."""
    state = initialize(case.cp)
    slime.ADAPTER.__init__()
    slime.ADAPTER.log = lambda args, metrics: logged.append(metrics)
    logged: list[dict[str, float]] = []
    args, cp_rank = host_arguments(case), state.get_context_parallel_rank()
    data = rollout(case, state.get_data_parallel_rank(), state.get_data_parallel_world_size(), cp_rank)
    if case.versions:
        data["weight_versions"] = [[str(v)] if (v := case.versions[i]) is not None else [] for i in data["partition"]]
        slime.ADAPTER.versions.read(data, 5)
    try:
        slime.group_advantages(args, data)
    except ValueError as error:
        return f"{error}"
    assert all(a is b for a, b in zip(data["advantages"], data["returns"], strict=True))
    assert [a.shape for a in data["advantages"]] == [part.shape for part in data["log_probs"]]
    model = Model()
    slime.before_train_step(args, 0, 0, [model], None, None)
    slime.ADAPTER.loss(args, data, data["log_probs"], None, lambda values: values.sum())
    model.config.finalize_model_grads_func([model])
    found = slime.ADAPTER.run.metrics
    metrics = {name: found[f"rollout_corr/rollout_rs_group_{name}_fraction"] for name in ("changed", "dropped")}
    assert not logged or logged[0]["train/rollout_corr/rollout_rs_group_changed_fraction"] == metrics["changed"]
    return dict(zip(data["partition"], data["advantages"], strict=True)), metrics


def wanted(case: Case) -> list[float]:
    """One process, the plain formula: who keeps a token, then each group."""
    if case.versions:
        kept = [version is not None and version >= 4 for version in case.versions]
    else:
        columns = {"rollout_log_probs": "rollout_log_probs", "loss_masks": "loss_masks", "old_log_probs": "log_probs"}
        rows: Any = {ours: [sample.rows[theirs] for sample in samples()] for ours, theirs in columns.items()}
        packed = mp.PackedSequences.from_lists(**rows)
        kept = (mp.correct(packed, slime.settings(host_arguments(case))).kept_N > 0).tolist()
    assert 0 < sum(kept) < len(kept)
    ids = [i // SIZE for i in range(len(RAW))]
    return plain(case.raw, ids, kept, normalize=case.scaled, least=case.rs.get("min_group", 1))


ACCEPTED = {
    "exclude": Case(EXCLUDE),
    "exclude, centred": Case(EXCLUDE, scaled=False),
    "drop": Case({**SEVERAL, "group": "drop", "min_group": 3}),
    "drop both": Case({**SEVERAL, "group": "drop", "min_group": 4}),
    # more than one version old: 2 of the first group (and 6, which trains nothing, of the second)
    "stale": Case({"max_staleness": 1, "group": "exclude"}, versions=(5, 5, 3, 4, 5, 4, 0, 5)),
    # but for 6 as slime has it
    "all that train": Case({"criteria": ["sequence_mean:ratio:0.01:100"], "group": "exclude"}),
}
DROPPED = {"drop": 0.5, "drop both": 1.0}
REFUSED = {
    # a sample's metadata may replace raw_reward after slime has normalised its rewards: here one, on one rank
    "slime's rewards are not its raw_reward": Case(EXCLUDE, replaced=[*RAW[:7], 9.0]),
    "8 samples, not --rollout-batch-size 3 groups of": Case(EXCLUDE, changes={"rollout_batch_size": 3}),
    " has no weight version|another rank cannot say which": Case(
        {"max_staleness": 1, "group": "exclude"}, versions=(5, 5, 3, 4, 5, None, 0, 5)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS if FULL else ["dp2", "cp2 dp2"])
def test_groups_split_over_ranks_equal_one_process(layout: str) -> None:
    """On every rank that holds tokens of a sample, and on each of them; every step logs what changed. What cannot be
    known on one rank is refused on every rank."""
    cp, processes = LAYOUTS[layout]
    cases = [Case(**{**vars(case), "cp": cp}) for case in (*ACCEPTED.values(), *REFUSED.values())]
    found = launch(advantages_of, cases, processes, timeout=120.0)
    for (name, case), ranks in zip(ACCEPTED.items(), found, strict=False):
        expected, seen = wanted(case), [0] * len(RAW)
        for advantages, metrics in ranks:
            assert metrics["dropped"] == DROPPED.get(name, 0.0), name
            assert metrics["changed"] > 0
            for sample, values in advantages.items():
                seen[sample] += values.numel()
                assert values.dtype == torch.float32
                torch.testing.assert_close(values, torch.full_like(values, expected[sample]), rtol=1e-5, atol=1e-6)
        assert seen == [sample.response for sample in samples()]
        assert any(expected) == (name != "drop both")
        assert name != "all that train" or expected[:4] == pytest.approx(normalised(case)[:4], abs=1e-6)
    for sentences, errors in zip(REFUSED, found[len(ACCEPTED) :], strict=True):
        parts = sentences.split("|")
        assert all(any(part in error for part in parts) for error in errors), errors
        assert sum(parts[0] in error for error in errors) == (len(errors) if len(parts) == 1 else cp)


def test_equal_rewards_are_slime_s_own_though_float32_does_not_centre_them() -> None:
    case = Case(EXCLUDE, raw=[0.1] * 8, changes={"n_samples_per_prompt": 8, "rollout_batch_size": 1})
    assert normalised(case)[0] < -1e-3
    ((advantages, _),) = launch(advantages_of, [case], 1, timeout=120.0)[0]
    assert not any(values.any() for values in advantages.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_advantage_function_path": None}, "has no effect unless mismatch_plugin.hooks.slime.group_adv"),
        ({"custom_advantage_function_path": "mine.f"}, r"--custom-advantage-function-path mine\.f makes others"),
        ({"advantage_estimator": "ppo"}, r"--advantage-estimator ppo makes others"),
        ({"rewards_normalization": False}, "--disable-rewards-normalization makes others"),
        ({"custom_reward_post_process_path": "mine.f"}, "--custom-reward-post-process-path makes others"),
        ({"get_mismatch_metrics": False}, "skips their pass where a rollout is one step: add --get-mismatch-metrics"),
    ],
)
def test_what_would_not_form_these_advantages_is_refused(changes: dict[str, Any], message: str) -> None:
    """Wherever a hook reads its settings: weights would run, and rs.group would do nothing."""
    for fine in ({}, {"advantage_estimator": "gspo"}):
        slime.check(host_arguments(Case(EXCLUDE, changes=fine)))
    with pytest.raises(ValueError, match=message):
        slime.ADAPTER.config(host_arguments(Case(EXCLUDE, changes=changes)))
    with pytest.raises(ValueError, match="group_advantages needs --rs-group exclude or drop: add it"):
        slime.check(host_arguments(Case({})))
