"""What slime and miles call, as recorded: our hooks take it, and a checkout's source still says it."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

import pytest

from mismatch_plugin.hooks import miles, slime
from tests.hooks.contracts import miles as miles_contract
from tests.hooks.contracts import slime as slime_contract
from tests.hooks.contracts import slime_source as source

HOSTS = {"slime": (slime, slime_contract), "miles": (miles, miles_contract)}
hosts = pytest.mark.parametrize(("host", "adapter", "contract"), [(name, *pair) for name, pair in HOSTS.items()])


@hosts
def test_hooks_take_what_the_host_passes(host: str, adapter: ModuleType, contract: Any):
    inspect.signature(adapter.tis_function).bind(**dict.fromkeys(contract.TIS_KEYWORDS))
    for name, (*_, arguments) in contract.CALLS.items():
        inspect.signature(getattr(adapter, name)).bind(*arguments)


@hosts
def test_host_still_calls_the_hooks_so(host: str, adapter: ModuleType, contract: Any):
    root = source.host_root(host)
    losses = root / (contract.LOSS if host == "slime" else contract.LOSSES)
    keys = source.dict_keys(source.function(losses, "policy_loss_function"), "tis_kwargs")
    assert keys == contract.TIS_KEYWORDS
    for file, caller, called, arguments in contract.CALLS.values():
        assert source.call_arguments(source.function(root / file, caller), called) == arguments
    caller = source.function(losses, "policy_loss_function")
    assert source.call_arguments(caller, "custom_pg_loss_reducer_func") == slime_contract.REDUCER
    assert "modified_response_masks if args.get_mismatch_metrics or args.use_tis" in ast.unparse(caller)


@hosts
def test_host_still_hands_over_the_batch_s_keys(host: str, adapter: ModuleType, contract: Any):
    root = source.host_root(host)
    assert set(contract.BATCH_KEYS) <= source.strings(source.function(root / contract.MODEL, "train_one_step"))


@hosts
def test_host_s_functions_still_take_what_the_adapter_passes(host: str, adapter: ModuleType, contract: Any):
    root = source.host_root(host)
    for file, name, passed in contract.CALLED:
        assert set(passed) <= set(source.parameters(source.function(root / file, name))), name
    file, name, _ = contract.CALLED[0]
    returned = [node for node in ast.walk(source.function(root / file, name)) if isinstance(node, ast.Return)]
    assert [ast.unparse(node.value) for node in returned if node.value] in (
        [contract.LOG_PROB_RESULT],
        [f"({contract.LOG_PROB_RESULT})"],
    )


def test_miles_still_keeps_the_groups_so():
    tree = ast.parse((source.host_root("miles") / miles_contract.PARALLEL).read_text(encoding="utf-8"))
    state = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ParallelState")
    fields = {ast.unparse(node.target) for node in state.body if isinstance(node, ast.AnnAssign)}
    assert set(miles_contract.PARALLEL_FIELDS) <= fields
