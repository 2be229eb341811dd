"""Small trees that parse their command line as the hosts do, and scripts that print what they were given.

What is reproduced of each: which parser it has, what it does with a flag it does not know, its own check of the pair of
switches, and when its YAML is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_plugin.patching import patches_of

ROOT = Path(__file__).parents[3]

# The flags about the loss that slime and miles declare, with plain add_argument: a second declaration would raise.
_RAY_ARGUMENTS = """
import argparse
import sys
import yaml

CALLS = []


def add_arguments(parser):
    for flag in ("use-rollout-logprobs", "use-tis", "get-mismatch-metrics", "calculate-per-token-loss", "use-kl-loss",
                 "use-opsm", "use-unbiased-kl"):
        parser.add_argument(f"--{flag}", action="store_true", default=False)
    for flag, default in {"tis-clip": 2.0, "tis-clip-low": 0, "eps-clip": 0.2, "eps-clip-high": None,
                          "eps-clip-c": None, "entropy-coef": 0.0, "kl-loss-coef": 0.0, "opsm-delta": 1e-4}.items():
        parser.add_argument(f"--{flag}", type=float, default=default)
    for flag, default in {"loss-type": "policy_loss", "kl-loss-type": "k1", "advantage-estimator": "grpo"}.items():
        parser.add_argument(f"--{flag}", default=default)
    for flag in ("loss-function", "tis-function", "config", "megatron-init", "megatron-before-train-step-hook",
                 "pg-loss-reducer-function", "advantage-function"):
        parser.add_argument(f"--custom-{flag}-path", default=None)
    parser.add_argument("--rollout-data-postprocess-path", default=None)
    parser.add_argument("--num-rollout", type=int, default=1)
    return parser


def parse_args(add_custom_arguments=None):
    CALLS.append(add_custom_arguments)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser)
    add_arguments(parser)
    args = PARSE(parser)
    if args.use_rollout_logprobs:
        assert not args.use_tis, "use_rollout_logprobs and use_tis cannot be set at the same time."
    if args.get_mismatch_metrics:
        assert args.custom_tis_function_path is not None
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.custom_config_path:
        with open(args.custom_config_path) as file:
            for name, value in (yaml.safe_load(file) or {}).items():
                setattr(args, name, value)
    return args
"""
_PARSE = {  # slime passes over what it does not know, miles stops
    "slime": "PARSE = lambda parser: parser.parse_known_args()[0]\n",
    "miles": "PARSE = lambda parser: parser.parse_args()\n",
}
_RAY_SCRIPT = """
import json
import sys
from HOST.utils.arguments import parse_args


if __name__ == "__main__":
    print("BEFORE PARSING")
    args = parse_args()
    print("GIVEN " + json.dumps({"args": vars(args), "argv": sys.argv, "path": sys.path[0], "name": __name__}))
"""
_MEGATRON_INFERENCE = """
def add_inference_args(parser):
    parser.add_argument("--model-provider", default="gpt")
    return parser
"""
_MEGATRON_SCRIPT = """
import argparse
import json
import sys
from megatron.rl.rl_utils import (
    calculate_grpo_loss,
    get_logprobs,
    get_rl_runtime_state,
    load_packed_data_by_index,
)


def forward_step(loss_mask, seq_lengths):
    if True:
        if True:
            loss = (
                calculate_grpo_loss(
                    seq_lengths=seq_lengths,
                )
            )
            output_tensor = loss


def parse_and_validate_args(extra_args_provider, args_defaults):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--rl-inference-logprobs-is-correction", action=on_off, default=False)
    parser.add_argument("--rl-importance-sampling-truncation-coef", type=float, default=None)
    parser.add_argument("--grpo-clamp-eps-lower", type=float, default=0.01)
    parser.add_argument("--grpo-clamp-eps-upper", type=float, default=0.01)
    parser.add_argument("--grpo-kl-beta", type=float, default=0.001)
    parser.add_argument("--bf16", action="store_true")
    return extra_args_provider(parser).parse_args()


if __name__ == "__main__":
    from megatron.inference.utils import add_inference_args

    args = parse_and_validate_args(
        extra_args_provider=add_inference_args,
        args_defaults={},
    )
    functions = [calculate_grpo_loss.__module__, get_logprobs.__module__]
    print("GIVEN " + json.dumps({"args": vars(args), "argv": sys.argv, "functions": functions}))
"""


@dataclass(frozen=True)
class Outcome:
    """Exit status, what was printed, and what the script says it was given (None where it did not come to it)."""

    status: int
    printed: str
    errors: str
    given: dict[str, Any] | None


def ray_tree(folder: Path, host: str, patched: bool = False) -> Path:
    """A tree of slime or miles; returns its train.py. patched: as the patch of its arguments.py leaves it."""
    arguments = _RAY_ARGUMENTS + _PARSE[host]
    if patched:
        ours = f'from mismatch_plugin.launch.patched import with_our_flags\n\n\n@with_our_flags("{host}")\n'
        arguments = arguments.replace("def parse_args", ours + "def parse_args")
    _write(folder / host / "__init__.py", "")
    _write(folder / host / "utils" / "__init__.py", "")
    _write(folder / host / "utils" / "arguments.py", arguments)
    return _write(folder / "train.py", _RAY_SCRIPT.replace("HOST", host))


def megatron_tree(folder: Path, patched: bool = False) -> Path:
    """A tree of Megatron-LM RL; returns its train_rl.py. patched: as the patch leaves it."""
    _write(folder / "megatron" / "core" / "package_info.py", "MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    names = ("get_logprobs", "calculate_grpo_loss", "get_rl_runtime_state", "load_packed_data_by_index")
    _write(folder / "megatron" / "rl" / "rl_utils.py", "".join(f"def {name}():\n    pass\n\n" for name in names))
    _write(folder / "megatron" / "inference" / "utils.py", _MEGATRON_INFERENCE)
    (patch,) = patches_of("megatron-lm", ["train_rl.py"])
    return _write(folder / "train_rl.py", (patch.changed(_MEGATRON_SCRIPT) or "") if patched else _MEGATRON_SCRIPT)


def launch(script: Path, line: str, *more: str, env: dict[str, str] | None = None) -> Outcome:
    """`python -m mismatch_plugin.launch SCRIPT LINE` from another folder."""
    return _started(script, ["-m", "mismatch_plugin.launch", str(script), *line.split(), *more], env)


def run(script: Path, line: str) -> Outcome:
    """`python SCRIPT LINE`, without the launcher."""
    return _started(script, [str(script), *line.split()])


def _started(script: Path, arguments: list[str], env: dict[str, str] | None = None) -> Outcome:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", **(env or {})}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=script.parent.parent, check=False)
    marked = [row for row in done.stdout.splitlines() if row.startswith("GIVEN ")]
    given = json.loads(marked[0].removeprefix("GIVEN ")) if marked else None
    return Outcome(done.returncode, done.stdout, done.stderr, given)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
