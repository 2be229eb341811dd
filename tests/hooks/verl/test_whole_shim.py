"""What `make test-verl-whole` puts between verl and a machine without a GPU touches nothing of verl's training."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SHIM = Path(__file__).parents[2] / "trainers" / "verl" / "shim"
FILES = sorted(SHIM.glob("*.py"))
# Modules of verl in which the shim may put something: process group, and the adapter to SGLang's server.
REPLACED_IN = (
    "verl.utils.distributed",
    "verl.workers.rollout.base",
    "verl.workers.rollout.sglang_rollout.async_sglang_server",
    "verl.workers.rollout.sglang_rollout.sglang_rollout",
)
# Classes of verl that it may derive from; what they override is what SHIMMED lists.
DERIVED = ("PlatformBase", "FSDPEngineWithLMHead", "SGLangHttpServer", "SGLangReplica", "AsyncHttpServerAdapter")


def imported(tree: ast.Module) -> dict[str, str]:
    """Name in the file → the module or object that it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def written_to(tree: ast.Module) -> set[str]:
    """Modules and objects of others in which the file assigns or calls setattr."""
    names, found = imported(tree), set()
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in ast.walk(tree) if isinstance(node, (ast.AugAssign, ast.AnnAssign))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "vars"):
            targets.append(ast.Attribute(value=node.args[0], attr="x", ctx=ast.Store()))
    for target in targets:
        root = target
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if root is not target and isinstance(root, ast.Name) and root.id in names:
            found.add(names[root.id])
    return found


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_shim_writes_into_nothing_of_the_hosts_training(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert written_to(tree) <= {*REPLACED_IN}
    bases = [
        ast.unparse(base).rpartition(".")[2] for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for base in n.bases
    ]
    assert {*bases} <= {*DERIVED, "ServerAdapter"}


def test_the_check_sees_what_it_looks_for() -> None:
    wrong = "import verl.workers.utils.losses as losses\nlosses.ppo_loss = None\nsetattr(losses, 'a', 1)"
    assert written_to(ast.parse(wrong)) == {"verl.workers.utils.losses"}
    assert written_to(ast.parse("from verl.trainer.ppo import core_algos as c\nc.REGISTRY['a'] = 1")) == {
        "verl.trainer.ppo.core_algos"
    }


def test_the_shim_is_small() -> None:
    assert FILES and sum(len(file.read_text().splitlines()) for file in FILES) <= 500
