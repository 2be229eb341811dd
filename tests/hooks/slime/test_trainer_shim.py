"""What `make test-slime` puts around slime's train.py replaces nothing of slime's own logic, and is small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SHIM = Path(__file__).parents[2] / "trainers/slime/shim"
# Loss, data, arguments, advantages, the trainer and the rollout's contents. Megatron-LM: those that slime trains with.
OWN = (
    r"slime\.backends\.megatron_utils(\.(loss|data|cp_utils|actor|model|arguments|initialize|checkpoint)\b.*)?",
    r"slime\.utils(\.(arguments|ppo_utils|data|types|misc|mask_utils|seqlen_balancing)\b.*)?",
    r"slime\.(rollout|ray|observability)\b.*",
    r"megatron\.training(\.(training|arguments)\b.*)?",
    r"megatron\.core\.(pipeline_parallel|optimizer|distributed|models)\b.*",
)
HOOKED = {
    "slime.utils.accelerator",
    "slime.utils.reloadable_process_group",
    "slime.backends.sglang_utils.sglang_engine",
    "megatron.training.utils",
}


def modules_named(tree: ast.AST) -> Iterator[str]:
    """What it imports, and every text that reads as a dotted module of slime or Megatron-LM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?:slime|megatron)(?:\.\w+)+", node.value)


def sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(SHIM.rglob("*.py"))}


def test_it_is_small() -> None:
    shared = [path.read_text() for path in (SHIM.parents[1] / "shim").glob("*.py")]
    assert sum(len(text.splitlines()) for text in (*sources().values(), *shared)) <= 500


def test_nothing_of_the_loss_the_data_or_the_arguments_is_in_it() -> None:
    for file, text in sources().items():
        found = [name for name in modules_named(ast.parse(text)) for own in OWN if re.fullmatch(own, name)]
        assert found == [], file


def test_only_what_is_declared_is_hooked() -> None:
    """Modules are changed through `HOOKS` alone: each function there assigns to the module that it is handed."""
    values: dict[str, object] = {}
    for node in ast.parse(sources()["sitecustomize.py"]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    hooks, shimmed = values["HOOKS"], values["SHIMMED"]
    assert isinstance(hooks, dict) and isinstance(shimmed, list)
    assert set(hooks) == HOOKED
    assert all(len(entry) == 2 and all(entry) for entry in shimmed) and len(shimmed) >= len(hooks)
    functions = {
        node.name: node for node in ast.parse(sources()["slime_on_cpu.py"]).body if isinstance(node, ast.FunctionDef)
    }
    assert set(hooks.values()) == {name for name in functions if not name.startswith("_")}
    assigned = {
        ast.unparse(target).rpartition(".")[0]
        for node in ast.walk(ast.parse(sources()["slime_on_cpu.py"]))
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }
    assert assigned <= {"module", "module.ReloadableProcessGroup", "module.SGLangEngine", "_local", "torch.cuda"}
