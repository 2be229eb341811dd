"""Each skip in the suite says how its test is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONGEST, TESTS, how_to_run


def test_every_reason_has_its_way():
    reasons = {text for path in Path(__file__).parent.rglob("*.py") for text in skip_reasons(path)}
    assert len(reasons) > 10
    for reason in reasons:
        how_to_run(reason)
    with pytest.raises(ValueError, match="is not in"):
        how_to_run("too lazy")


def test_files_that_start_first_are_there():
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []


def skip_reasons(path: Path) -> Iterator[str]:
    """The reasons written in a file's calls of skip, skipif and importorskip."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        texts = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        if node.func.attr == "skip":
            texts += node.args[:1]
        if node.func.attr in ("skip", "skipif", "importorskip"):
            yield from (text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))
