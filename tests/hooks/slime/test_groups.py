"""slime's advantages over a group's accepted responses: ranks that share groups, slime's own code, what is refused.

With MISMATCH_HOST_SRC slime's own `compute_advantages_and_returns` calls ours, after its own normalisation of rewards.
"""

from __future__ import annotations

import ast
import importlib.util
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks import slime
from mismatch_plugin.hooks.slime.config import validate_groups
from mismatch_plugin.launch.__main__ import prepare
from tests.core.test_groups import plain
from tests.distributed.launch import launch
from tests.hooks.contracts.launch_trees import ray_tree
from tests.hooks.contracts.slime_cases import hooked, ours, weights
from tests.hooks.contracts.slime_data import arguments, owned, samples
from tests.hooks.contracts.slime_live import _import_host
from tests.hooks.contracts.slime_source import function, host_root
from tests.hooks.contracts.slime_worker import Model, initialize

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

RAW = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.0]  # two groups of four neighbours; sample 6 trains nothing
SIZE, PATH = 4, "mismatch_plugin.hooks.slime.group_advantages"
SEVERAL = {"criteria": ["sequence_mean:ratio:0.9:1.05"]}  # samples 2 and 3 are further away
LAYOUTS = {"one": (1, 1), "dp2": (1, 2), "cp2 dp2": (2, 4), "cp4": (4, 4)}


@dataclass(frozen=True)
class Case:
    rs: dict[str, Any]
    cp: int
    scaled: bool = True
    rewards: list[float] = field(default_factory=lambda: list(RAW))
    versions: tuple[int | None, ...] = ()  # of the weights that sampled each; 5 train
    changes: dict[str, Any] = field(default_factory=dict)
    root: str = ""


def host_arguments(case: Case) -> Namespace:
    settings = ours(2, weights("token", "truncate"), rs=case.rs)
    groups = {"n_samples_per_prompt": SIZE, "rollout_batch_size": 2, "grpo_std_normalization": case.scaled}
    more = {"get_mismatch_metrics": True, "custom_advantage_function_path": PATH, **groups, **case.changes}
    return arguments(**{**hooked("slime"), **settings, **more})


def normalised(raw: list[float], scaled: bool) -> list[float]:
    """As slime's driver: float32, centred, then divided by the deviation of that."""
    table = torch.tensor(raw, dtype=torch.float).reshape(-1, SIZE)
    table = table - table.mean(dim=-1, keepdim=True)
    return (table / (table.std(dim=-1, keepdim=True) + 1e-6) if scaled else table).flatten().tolist()


def rollout(case: Case, rank: int, ranks: int, cp_rank: int) -> dict[str, Any]:
    """What slime holds of a rollout on one rank; samples are dealt out in turn, so that every group is split."""
    places = list(range(len(RAW)))[rank::ranks]
    chosen, rewards = [samples()[i] for i in places], normalised(RAW, case.scaled)
    at = [owned(sample.total, sample.prompt, case.cp, cp_rank) for sample in chosen]
    local = {
        name: [sample.rows[name][mine] for sample, mine in zip(chosen, at, strict=True)]
        for name in ("log_probs", "rollout_log_probs")
    }
    return local | {
        "partition": places,
        "raw_reward": case.rewards,
        "rewards": [rewards[i] for i in places],
        "loss_masks": [sample.rows["loss_masks"] for sample in chosen],
        "total_lengths": [sample.total for sample in chosen],
        "response_lengths": [sample.response for sample in chosen],
        "kl": [torch.zeros_like(part) for part in local["log_probs"]],
    }


def advantages_of(case: Case) -> Any:
    """({sample: its advantages here}, metrics), or the error, on one rank."""
    if case.root:
        host = _import_host("slime", case.root, 1, case.cp)
    state = initialize(1, case.cp)
    args = host_arguments(case)
    data = rollout(case, state.get_data_parallel_rank(), state.get_data_parallel_world_size(), _cp_rank(state))
    if case.versions:
        data["weight_versions"] = [[str(v)] if (v := case.versions[i]) is not None else [] for i in data["partition"]]
        slime.ADAPTER.versions.read(data, 5)
    try:
        if case.root:
            host.compute_advantages_and_returns(args, data)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            slime.group_advantages(args, data)
    except ValueError as error:
        return f"{error}"
    assert all(a is b for a, b in zip(data["advantages"], data["returns"], strict=True))
    assert [a.shape for a in data["advantages"]] == [part.shape for part in data["log_probs"]]
    return dict(zip(data["partition"], data["advantages"], strict=True)), slime.ADAPTER.run.rollout_metrics


def _cp_rank(state: Any) -> int:
    return state.get_context_parallel_rank()


def wanted(case: Case) -> list[float]:
    """One process, the plain formula: who keeps a token, then each group."""
    config = slime.settings(host_arguments(case))
    rows: dict[str, Any] = {
        name: [sample.rows[name] for sample in samples()] for name in ("rollout_log_probs", "loss_masks")
    }
    old = [sample.rows["log_probs"] for sample in samples()]
    kept = (mp.correct(mp.PackedSequences.from_lists(**rows, old_log_probs=old), config).kept_N > 0).tolist()
    assert 0 < sum(kept) < len(kept)
    ids = [i // SIZE for i in range(len(RAW))]
    return plain(RAW, ids, kept, normalize=case.scaled, least=config.rs.min_group or 1)


CASES: dict[str, dict[str, Any]] = {
    "exclude": {"rs": {**SEVERAL, "group": "exclude"}},
    "exclude, centred": {"rs": {**SEVERAL, "group": "exclude"}, "scaled": False},
    "drop": {"rs": {**SEVERAL, "group": "drop", "min_group": 3}},
    "drop both": {"rs": {**SEVERAL, "group": "drop", "min_group": 4}},
}


def check(case: Case, ranks: list[Any]) -> list[float]:
    """The advantage of each sample: the same on all that hold its tokens, and on every token."""
    expected, seen = wanted(case), [0] * len(RAW)
    for found, metrics in ranks:
        assert metrics == ranks[0][1] and len(metrics) == 3
        for sample, values in found.items():
            seen[sample] += values.numel()
            assert values.dtype == torch.float32
            torch.testing.assert_close(values, torch.full_like(values, expected[sample]), rtol=1e-5, atol=1e-6)
    assert seen == [sample.response for sample in samples()]
    return expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_split_over_ranks_equal_one_process(layout: str) -> None:
    cp, processes = LAYOUTS[layout]
    cases = [Case(**changes, cp=cp) for changes in CASES.values()]
    found = launch(advantages_of, cases, processes, timeout=120.0)
    expected = [check(case, ranks) for case, ranks in zip(cases, found, strict=True)]
    assert any(expected[0]) and not any(expected[3])
    assert expected[2] != expected[0], "one group has two accepted responses"
    dropped = "rollout_corr/rollout_rs_group_dropped_fraction"
    assert [ranks[0][1][dropped] for ranks in found] == [0.0, 0.0, 0.5, 1.0]


def test_all_accepted_is_what_slime_has() -> None:
    case = Case(rs={"criteria": ["sequence_mean:ratio:0.01:100"], "group": "exclude"}, cp=1)
    ((found, metrics),) = launch(advantages_of, [case], 1, timeout=120.0)[0]
    own = normalised(RAW, True)
    for sample in range(4):
        assert found[sample].tolist() == pytest.approx([own[sample]] * samples()[sample].response, abs=1e-6)
    assert metrics["rollout_corr/rollout_rs_group_changed_fraction"] == 0.5  # by the sample that trains nothing


def test_rewards_that_slime_did_not_use_are_refused_on_every_rank() -> None:
    """A sample's metadata may replace raw_reward after slime has normalised its rewards: here one, on one rank."""
    cases = [
        Case(rs={**SEVERAL, "group": "exclude"}, cp=1, rewards=[*RAW[:7], 9.0]),
        Case(rs={**SEVERAL, "group": "exclude"}, cp=1, changes={"rollout_batch_size": 3}),
        Case(rs={**SEVERAL, "group": "exclude"}, cp=1, changes={"get_mismatch_metrics": False}),
    ]
    others, count, skipped = launch(advantages_of, cases, 2, timeout=120.0)
    assert all("slime's rewards are not its raw_reward" in error for error in others)
    assert all("8 samples, not --rollout-batch-size 3 groups of --n-samples-per-prompt 4" in error for error in count)
    assert all("add --get-mismatch-metrics" in error for error in skipped)


def logged_of(case: Case) -> list[dict[str, float]]:
    """What slime's tracker gets of two steps on a rollout."""
    initialize(1, case.cp)
    args, logged = host_arguments(case), []
    slime.ADAPTER.log = lambda args, metrics: logged.append(metrics)
    data = rollout(case, 0, 1, 0)
    slime.group_advantages(args, data)
    for step in range(2):
        model = Model()
        slime.before_train_step(args, 0, step, [model], None, None)
        slime.ADAPTER.loss(args, data, [sample.log_probs for sample in samples()], None, lambda values: values.sum())
        model.config.finalize_model_grads_func([model])
    return logged


def test_every_step_of_the_rollout_logs_what_changed() -> None:
    ((first, second),) = launch(logged_of, [Case(**CASES["drop"], cp=1)], 1, timeout=120.0)[0]
    for metrics in (first, second):
        assert metrics["train/rollout_corr/rollout_rs_group_dropped_fraction"] == 0.5
        assert metrics["train/rollout_corr/rollout_rs_group_changed_fraction"] == 1.0
        assert "train/rollout_corr/kl" in metrics


def test_stale_responses_are_in_no_baseline() -> None:
    """More than one version old: 2 of the first group (and 6, which trains nothing, of the second)."""
    stale = {"max_staleness": 1, "group": "exclude"}
    cases = [
        Case(rs=stale, cp=2, versions=(5, 5, 3, 4, 5, 4, 0, 5)),
        Case(rs=stale, cp=2, versions=(5, 5, 3, 4, 5, None, 0, 5)),
    ]
    found, missing = launch(advantages_of, cases, 4, timeout=120.0)
    expected = plain(RAW, [i // SIZE for i in range(len(RAW))], [i not in (2, 6) for i in range(len(RAW))])
    for values, _ in found:
        for sample, part in values.items():
            torch.testing.assert_close(part, torch.full_like(part, expected[sample]), rtol=1e-5, atol=1e-6)
    assert sum("sample 2 has no weight version" in error for error in missing) == 2, "on the ranks that hold sample 5"
    assert sum("another rank cannot say which of its responses are accepted" in error for error in missing) == 2


# In slime -------------------------------------------------------------------------------------------------------------


def test_slime_calls_it_in_the_place_of_its_own() -> None:
    root = str(host_root("slime"))
    more = {"kl_coef": 0, "use_opd": False, "normalize_advantages": False}
    for layout in ("one", "cp2 dp2"):
        cp, processes = LAYOUTS[layout]
        cases = [Case(**changes, cp=cp, root=root, changes=more) for changes in CASES.values()]
        for case, ranks in zip(cases, launch(advantages_of, cases, processes, timeout=240.0), strict=True):
            check(case, ranks)


@pytest.mark.parametrize("scaled", [True, False])
def test_slime_s_own_rewards_are_made_so(scaled: bool) -> None:
    """Its `_post_process_rewards`, out of its source: groups are neighbours, float32, this order of operations."""
    node = function(host_root("slime") / "slime/ray/rollout.py", "_post_process_rewards")
    node.args.args[1].annotation = None
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([node], []), "rollout.py", "exec"), scope)
    args = host_arguments(Case(rs={}, cp=1, scaled=scaled))
    args.rewards_normalization = True
    raw = torch.rand(2 * SIZE, generator=torch.Generator().manual_seed(3)).tolist()
    these = [Namespace(get_reward_value=lambda args, reward=reward: reward) for reward in raw]
    manager = Namespace(args=args, custom_reward_post_process_func=None)
    assert scope["_post_process_rewards"](manager, these) == (raw, normalised(raw, scaled))


# What is set and refused ----------------------------------------------------------------------------------------------

EXCLUDE = MismatchConfig.build({"rs": {**SEVERAL, "group": "exclude"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_advantage_function_path": None}, "has no effect unless mismatch_plugin.hooks.slime.group_adv"),
        ({"custom_advantage_function_path": "mine.f"}, r"--custom-advantage-function-path mine\.f makes others"),
        ({"advantage_estimator": "ppo"}, r"--advantage-estimator ppo makes others"),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, r"reinforce_plus_plus_baseline makes others"),
        ({"rewards_normalization": False}, "--disable-rewards-normalization makes others"),
        ({"custom_reward_post_process_path": "mine.g"}, "--custom-reward-post-process-path makes others"),
        ({"compute_advantages_and_returns": False}, "--disable-compute-advantages-and-returns makes others"),
        ({"get_mismatch_metrics": False}, "skips their pass where a rollout is one step: add --get-mismatch-metrics"),
    ],
)
def test_what_would_not_form_these_advantages_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"custom_advantage_function_path": PATH, "get_mismatch_metrics": True}
    validate_groups(Namespace(**good), EXCLUDE, "slime")
    validate_groups(Namespace(**good, advantage_estimator="gspo"), EXCLUDE, "slime")
    with pytest.raises(ValueError, match=message):
        validate_groups(Namespace(**{**good, **changes}), EXCLUDE, "slime")


def test_the_hook_alone_is_refused_without_the_advantage_function() -> None:
    """A user who sets --custom-tis-function-path by hand: weights would run, and rs.group would do nothing."""
    case = Case(rs={**SEVERAL, "group": "exclude"}, cp=1, changes={"custom_advantage_function_path": None})
    given: dict[str, Any] = {name: [samples()[0].rows[name]] for name in ("rollout_log_probs", "loss_masks")}
    given |= {"total_lengths": [samples()[0].total], "response_lengths": [samples()[0].response]}
    given |= {"train_log_probs": [samples()[0].rows["log_probs"]], "pg_loss": torch.zeros(samples()[0].response)}
    with pytest.raises(ValueError, match="--rs-group exclude has no effect unless"):
        slime.tis_function(host_arguments(case), **given)


LINE = "--use-tis --rs-criterion sequence_mean:k3:0.1"


def test_the_launcher_sets_what_it_takes(tmp_path: Path) -> None:
    def added(line: str, host: str = "slime") -> tuple[str, ...]:
        return prepare([str(ray_tree(tmp_path / host, host)), *line.split()])[3].added

    found = added(f"{LINE} --rs-group exclude")
    assert found[found.index("--custom-advantage-function-path") + 1] == PATH
    assert "--get-mismatch-metrics" in found
    assert not {"--custom-advantage-function-path", "--get-mismatch-metrics"} & set(added(LINE))
    with pytest.raises(ValueError, match=r"mine\.f makes others"):
        added(f"{LINE} --rs-group exclude --custom-advantage-function-path mine.f")
    with pytest.raises(ValueError, match="needs --rs-group exclude or drop"):
        added(f"{LINE} --custom-advantage-function-path {PATH}")
