"""What `make test-miles` puts around miles's train.py replaces nothing of miles's own logic, and is small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.hooks.slime.test_trainer_shim import modules_named

TRAINERS = Path(__file__).parents[2] / "trainers"
SHIM = TRAINERS / "miles/shim"
# Loss, data, arguments, advantages, the trainer and the rollout's contents. Megatron-LM: those that miles trains with.
OWN = (
    r"miles\.backends\.training_utils\b.*",
    r"miles\.backends\.megatron_utils(\.(actor|model|model_provider|arguments|initialize|checkpoint)\b.*)?",
    r"miles\.utils(\.(arguments|data|types|misc|mask_utils|dp_schedule|seqlen_balancing|tracking_utils)\b.*)?",
    r"miles\.(rollout|ray\.rollout|ray\.train)\b.*",
    r"megatron\.training(\.(training|arguments)\b.*)?",
    r"megatron\.core\.(pipeline_parallel|optimizer|distributed|models|fusions)\b.*",
)


def source(name: str) -> ast.Module:
    return ast.parse((SHIM / name).read_text())


def test_it_is_small() -> None:
    shared = (TRAINERS / "shim", TRAINERS / "slime/shim")
    files = [path for folder in (SHIM, *shared) for path in folder.glob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 500


def test_nothing_of_the_loss_the_data_or_the_arguments_is_in_it() -> None:
    for name in ("sitecustomize.py", "miles_on_cpu.py"):
        words = set(modules_named(source(name)))
        words |= {f"miles{word}" for word in re.findall(r"(?<=miles)(?:\.\w+)+", (SHIM / name).read_text())}
        assert [word for word in words for own in OWN if re.fullmatch(own, word)] == [], name


def test_only_what_is_declared_is_hooked() -> None:
    """Modules are changed through `HOOKS` alone: each function there assigns to the module that it is handed."""
    names: dict[str, object] = {}
    for node in source("sitecustomize.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = eval(ast.unparse(node.value), {}, dict(names))
    hooks, shimmed = names["HOOKS"], names["SHIMMED"]
    assert isinstance(hooks, dict) and isinstance(shimmed, list)
    assert all(len(entry) == 2 and all(entry) for entry in shimmed) and len(shimmed) >= len(hooks)
    tree = source("miles_on_cpu.py")
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    shared = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert functions <= set(hooks.values()) <= functions | shared
    assigned = {
        ast.unparse(target).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    assert assigned <= {"module", "cuda", "engine"}
