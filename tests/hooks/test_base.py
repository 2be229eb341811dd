"""What hosts share."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.hooks import megatron_rl, miles
from mismatch_plugin.hooks.base import replace_function
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.parallel.groups import ParallelGroups

_EXCLUDE = {"rs": {"criteria": ["sequence_mean:k3:0.1"], "group": "exclude"}}
_MODEL = SimpleNamespace(calculate_per_token_loss=True, finalize_model_grads_func=None)
_AFTER_ADVANTAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "miles": (
        lambda given: miles.check(Namespace(mismatch_settings=given, loss_type="policy_loss")),
        "it computes advantages itself and takes no function for them",
    ),
    "Megatron-LM RL": (
        lambda given: megatron_rl.settings(
            Namespace(mismatch_settings=given, rl_inference_logprobs_is_correction=True)
        ),
        "it computes advantages before any log-prob of the training side",
    ),
    "the megatron-core hook": (
        lambda given: MegatronLoss(mp.MismatchConfig.build(given), _MODEL, ParallelGroups()),
        "a batch brings its advantages",
    ),
}


@pytest.mark.parametrize("host", _AFTER_ADVANTAGES)
def test_hosts_that_reject_after_the_advantages_refuse_groups(host: str) -> None:
    """They would train with rejected responses in the baseline, whatever the flag says."""
    start, why = _AFTER_ADVANTAGES[host]
    with pytest.raises(ValueError, match=rf"--rs-group exclude cannot be had in {host}: {why}.*Leave it out"):
        start(_EXCLUDE)


def test_a_replaced_function_is_replaced_where_it_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> str:
        return "own"

    def other() -> str:
        return "other"

    modules = {name: ModuleType(name) for name in ("toy", "toy.loss", "toy.trainer", "toyish.trainer")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        module.policy_loss = own  # pyright: ignore[reportAttributeAccessIssue]
    modules["toy.trainer"].policy_loss = other  # pyright: ignore[reportAttributeAccessIssue]
    assert replace_function("toy.loss", "policy_loss", lambda: "ours") is own
    found = {name: module.policy_loss() for name, module in modules.items()}
    assert found == {"toy": "ours", "toy.loss": "ours", "toy.trainer": "other", "toyish.trainer": "own"}
