"""What lets train_rl.py run on CPU replaces nothing of its loss, data or arguments: tests/trainers/megatron_rl/shim."""

from __future__ import annotations

import ast
from pathlib import Path

SHIM = Path(__file__).parents[2] / "trainers" / "megatron_rl" / "shim"
# All that is replaced in Megatron-LM, by the module that it is replaced in.
REPLACED = {
    "megatron.core.utils": set[str](),
    "megatron.core.datasets.utils": {"compile_helpers"},
    "megatron.core.models.gpt.gpt_model": {"GPTModel.forward"},
    "megatron.training.training": {"initialize_megatron"},
    "megatron.training.arguments": {"get_device_arch_version"},
    "megatron.rl.agent.registry": {"AGENT_REGISTRY"},
    "megatron.rl.inference.megatron": {"MegatronLocal"},
}


def _tree(name: str) -> ast.Module:
    return ast.parse((SHIM / name).read_text())


def _targets(function: ast.FunctionDef) -> set[str]:
    """What a hook assigns to below its parameter `module`."""
    found = set[str]()
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            name = ast.unparse(target)
            if name.startswith("module."):
                found.add(name.removeprefix("module."))
    return found


def test_only_what_needs_a_gpu_or_another_version_is_replaced() -> None:
    tables = [node.value for node in _tree("sitecustomize.py").body if isinstance(node, ast.Assign)]
    hooks: dict[str, str] = next(ast.literal_eval(value) for value in tables if isinstance(value, ast.Dict))
    functions = {node.name: node for node in _tree("megatron_on_cpu.py").body if isinstance(node, ast.FunctionDef)}
    assert {module: _targets(functions[name]) for module, name in hooks.items()} == REPLACED


def test_no_file_reaches_into_the_trainer_another_way() -> None:
    for file in SHIM.glob("*.py"):
        calls = [node for node in ast.walk(_tree(file.name)) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"setattr", "exec", "eval"} or file.name == "sitecustomize.py", file.name
        assert "rl_utils" not in file.read_text(), file.name


def test_it_is_short_and_says_what_it_replaces() -> None:
    assert sum(len(file.read_text().splitlines()) for file in SHIM.glob("*.py")) <= 500
    said = next(
        ast.literal_eval(node.value)
        for node in _tree("sitecustomize.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHIMMED"
    )
    text = " ".join(what for what, _ in said)
    for names in REPLACED.values():
        assert all(name.partition(".")[0] in text for name in names)
