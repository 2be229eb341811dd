"""Advantages of a group over what is accepted: against a direct loop, the gradient by enumeration."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.core.groups import EPSILON, GROUP_METRICS, group_metrics

REWARDS, SAME = [1.0, 1.0, 0.0, 0.0], [5, 5, 5, 5]


def plain(
    rewards: Sequence[float],
    ids: Sequence[Hashable],
    accepted: Sequence[bool],
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    least: int = 1,
) -> list[float]:
    """The formula, one response at a time."""
    found = []
    for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        members = [j for j, other in enumerate(ids) if other == group and accepted[j]]
        if i not in members or len(members) < max(least, 2):
            found.append(0.0)
            continue
        baseline = [rewards[j] for j in members if j != i or not leave_one_out]
        scale = statistics.stdev([rewards[j] for j in members]) + EPSILON if normalize else 1.0
        found.append((reward - statistics.fmean(baseline)) / scale)
    return found


def test_equal_rewards_give_exactly_nothing() -> None:
    """0.1 + 0.1 + 0.1 is not 3 · 0.1, and the difference divided by a deviation of as little is 1."""
    for reward in (0.1, 0.7, 1e6 + 0.1):
        assert not mp.group_advantages([reward] * 3, [0] * 3).any()
        assert not mp.group_advantages(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, math.nan], [0, 0]), r"rewards\[1\] is nan: every response of a group needs a finite reward"),
        (([1.0, 2.0], [0]), "group_ids has 1 values, rewards 2"),
        (([1.0, 2.0], [0, 0], [True]), "accepted has 1 values, rewards 2"),
        ((torch.zeros(2, 3), [0, 0]), r"rewards has shape \(2, 3\)"),
    ],
)
def test_bad_input_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mp.group_advantages(*arguments)
    with pytest.raises(ValueError, match="min_accepted 0 is below 1"):
        mp.group_advantages(REWARDS, SAME, min_accepted=0)


RESPONSES = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3), st.booleans()), min_size=1, max_size=14)
HOW = [{"normalize": n, "leave_one_out": o} for n in (True, False) for o in (True, False)]


@given(RESPONSES, st.sampled_from(HOW), st.integers(1, 4))
def test_equals_the_plain_loop(responses: list[tuple[int, int, bool]], how: dict[str, bool], least: int) -> None:
    quarters, ids, accepted = (list(each) for each in zip(*responses, strict=True))
    rewards = [quarter / 4 for quarter in quarters]
    wanted = plain(rewards, ids, accepted, least=least, **how)
    values = torch.tensor(rewards, dtype=torch.float64)
    for groups in (ids, torch.tensor(ids), list(torch.tensor(ids)), [f"prompt {i}" for i in ids]):
        found = mp.group_advantages(values, groups, accepted, min_accepted=least, **how)
        assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def measured(accepted: list[int], least: int = 1) -> list[float]:
    """Two groups of three and one of two."""
    found = group_metrics([1, 0, 0, 1, 1, 0, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2], accepted, least)
    return [found[f"rollout_corr/{name}"] for name in GROUP_METRICS]


def test_the_gradient_by_enumeration() -> None:
    """Every group of 3 responses out of 4 that a policy can give, some of which are always rejected.

    Leave-one-out over the accepted: E Σ A ∇log π = E[m, m ≥ 2] · ∇ E[R | accepted], m the number accepted; the group's
    mean costs (m − 1)/m of it. With the rejected ones in the baseline, leave-one-out gives
    E[m] · (∇ E[R | accepted] + (E[R | accepted] − E[R]) ∇ log P(accepted)): it pushes towards being accepted.
    """
    logits = torch.tensor([0.3, -0.4, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    rewards, accepted = torch.tensor([1.0, 0.0, 3.0, 2.0], dtype=torch.float64), [True, True, False, True]
    mask, size = torch.tensor(accepted), 3
    log_policy = logits.log_softmax(0)
    policy = log_policy.exp()
    share = policy[mask].sum()
    mean_accepted = (policy * rewards)[mask].sum() / share
    (towards,) = torch.autograd.grad(mean_accepted, logits, retain_graph=True)
    (being_accepted,) = torch.autograd.grad(share.log(), logits, retain_graph=True)
    score = torch.eye(4, dtype=torch.float64) - policy.detach()  # ∇ log π of each response

    found = {name: torch.zeros(4, dtype=torch.float64) for name in ("others", "group", "kept in")}
    several, shrunk = 0.0, 0.0
    for drawn in itertools.product(range(4), repeat=size):
        chance = float(policy.detach()[list(drawn)].prod())
        given_, kept = rewards[list(drawn)], [accepted[i] for i in drawn]
        m = sum(kept)
        several += chance * m * (m >= 2)
        shrunk += chance * (m - 1) * (m >= 2)
        ways = {
            "others": mp.group_advantages(given_, [0] * size, kept, False, leave_one_out=True),
            "group": mp.group_advantages(given_, [0] * size, kept, False),
            "kept in": mp.group_advantages(given_, [0] * size, None, False, leave_one_out=True) * torch.tensor(kept),
        }
        for name, advantages in ways.items():
            found[name] += chance * advantages @ score[list(drawn)]
    torch.testing.assert_close(found["others"], several * towards, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["group"], shrunk * towards, rtol=1e-10, atol=1e-12)
    gap = (mean_accepted - (policy * rewards).sum()).detach()
    biased = size * share.detach() * (towards + gap * being_accepted)
    torch.testing.assert_close(found["kept in"], biased, rtol=1e-10, atol=1e-12)
    assert (gap * being_accepted).abs().max() > 0.05


def test_shares_of_groups_and_advantages() -> None:
    assert measured([1] * 8) == [0, 0, 0]
    assert measured([1, 1, 0, 1, 1, 1, 1, 1]) == pytest.approx([1 / 3, 2 / 7, 0])
    # The third group's rewards are equal: without one of them it is left without a baseline, and nothing changes.
    assert measured([1, 1, 1, 1, 1, 1, 1, 0]) == pytest.approx([0, 0, 1 / 3])
    # One of three is left (its advantage becomes 0), and two of three, which a smallest group of 3 drops as well.
    assert measured([1, 0, 0, 1, 0, 1, 1, 1]) == pytest.approx([2 / 3, 3 / 5, 1 / 3])
    assert measured([1, 0, 0, 1, 0, 1, 1, 1], 3) == pytest.approx([2 / 3, 3 / 5, 1])
    assert measured([0] * 8) == [0, 0, 1]
    assert list(group_metrics([], [], []).values()) == [0, 0, 0]
    # Of 1 1 0 0 one of each is rejected: the mean stays ½, the deviation goes from .577 to .707, which is a change.
    found = group_metrics(REWARDS, SAME, [1, 0, 1, 0])
    assert found["rollout_corr/rollout_rs_advantage_changed_fraction"] == 1
