"""What hosts share."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mismatch_plugin.hooks.base import replace_function


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
