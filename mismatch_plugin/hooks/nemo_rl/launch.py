"""NeMo-RL: our flags become the block `loss_fn.mismatch` of its configuration, and `setup` returns our loss.

```bash
python -m mismatch_plugin.launch examples/run_grpo.py --config … --use-tis
```
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.config.values import merge
from mismatch_plugin.hooks.base import Given, Host, Plan, peek
from mismatch_plugin.hooks.nemo_rl.adapter import install
from mismatch_plugin.hooks.nemo_rl.config import describe, settings
from mismatch_plugin.hooks.tree import put, read_overrides, text

_SECTION, _BLOCK = "loss_fn", "loss_fn.mismatch"
_DEFAULT_CONFIG = Path("configs", "grpo_math_1B.yaml")


FLAGS: frozenset[str] = frozenset()


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of examples/run_grpo.py, or a script like it.

    Raises: ValueError where the configuration's `loss_fn` and ours contradict each other.
    """
    args, _ = peek(given.host_argv, {"--config": {"type": str, "default": None}})
    sections = _sections(args, given, script)
    there = sections[_SECTION].get("mismatch") is not None
    if not given.flags and not there:
        return Plan.untouched(host, given)
    if given.flags and there:
        raise ValueError(f"{_BLOCK} is set next to the plugin's flags: give the settings in one of the two ways.")
    added: tuple[str, ...] = ()
    if given.flags:
        added, sections[_SECTION]["mismatch"] = (f"+{_BLOCK}={text(given.settings)}",), given.settings
    config = settings(sections)
    lines = tuple(describe(config, sections))
    return Plan((*given.host_argv, *added), added, lines, partial(install, lines), config)


def _sections(args: Namespace, given: Given, script: Path | None) -> dict[str, Any]:
    """`loss_fn` and `policy` of the YAML, its `defaults` resolved, with the overrides of the line."""
    path = Path(args.config) if args.config is not None else None
    if path is None and script is not None:
        path = script.parent / _DEFAULT_CONFIG
    if path is None or not path.is_file():
        raise ValueError(f"NeMo-RL's configuration {path} does not exist: give --config FILE.")
    sections = _read(path)
    for name, value in read_overrides(given.host_argv).items():
        if name.partition(".")[0] in sections:
            put(sections, name, value)
    return sections


def _read(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The two sections of a file, over those of the files that its `defaults` name."""
    path = path.resolve()
    if path in children:
        raise ValueError(f"configuration file {path} is among its own defaults: take it out of them.")
    data = read_mapping(path)
    defaults = data.get("defaults") or []
    sections: dict[str, Any] = {_SECTION: {}, "policy": {}}
    for parent in [defaults] if isinstance(defaults, str) else defaults:
        sections = merge(sections, _read(path.parent / str(parent), (*children, path)))
    return merge(sections, {name: data.get(name) or {} for name in sections})
