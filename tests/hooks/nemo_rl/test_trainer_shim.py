"""What lets run_grpo.py run on CPU replaces nothing of its loss, data or arguments: tests/trainers/nemo_rl/shim."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

SHIM = Path(__file__).parents[2] / "trainers" / "nemo_rl" / "shim"
# All that is replaced, by the module of NeMo-RL after whose import it is.
REPLACED = {
    "nemo_rl.algorithms.grpo": {"module.Policy", "module.VllmGeneration"},
    "nemo_rl.distributed.model_utils": {"tensor.cuda"},
}


def _tree(name: str) -> ast.Module:
    return ast.parse((SHIM / name).read_text())


def _table(name: str) -> Any:
    assigned = [node for node in _tree("sitecustomize.py").body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == name)


def _targets(function: ast.FunctionDef) -> set[str]:
    """What a hook assigns to that is not a name of its own."""
    assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    targets = [
        target for node in assigned for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {ast.unparse(target) for target in targets if not isinstance(target, ast.Name)}


def test_only_what_needs_a_gpu_is_replaced() -> None:
    functions = {node.name: node for node in _tree("nemo_rl_on_cpu.py").body if isinstance(node, ast.FunctionDef)}
    assert {module: _targets(functions[name]) for module, name in _table("HOOKS").items()} == REPLACED


def test_no_file_reaches_into_the_trainer_another_way() -> None:
    for file in SHIM.glob("*.py"):
        calls = [node for node in ast.walk(_tree(file.name)) if isinstance(node, ast.Call)]
        assert (
            not {ast.unparse(call.func) for call in calls} & {"setattr", "exec", "eval"}
            or file.name == "sitecustomize.py"
        )
        imported = [node for node in ast.walk(_tree(file.name)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imported if (node.module or "").startswith("nemo_rl") for alias in node.names}
        abstract = {"ColocatablePolicyInterface", "GenerationInterface", "WeightSynchronizer"}
        assert names <= {*abstract, "BatchedDataDict", "prepare_loss_input"}, file.name


def test_it_is_short_and_says_what_it_replaces() -> None:
    files = [*SHIM.glob("*.py"), SHIM.parents[1] / "shim/import_hooks.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 500
    said = " ".join(what for what, _ in _table("SHIMMED"))
    assert all(name.partition(".")[2] in said for names in REPLACED.values() for name in names)
