"""What the hosts share: wrapping a function once, settings from a door, versions, and the block on sampling filters."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks import megatron_rl, miles, slime
from mismatch_plugin.hooks.base import given_settings, wrap_once
from mismatch_plugin.hooks.hosts import HOSTS, SLIME, VERL, find_host
from mismatch_plugin.hooks.nemo_rl import config as nemo_rl
from mismatch_plugin.hooks.verl import config as verl
from mismatch_plugin.hooks.version import read_version, validate_megatron_version, version_line
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import ROOT, ray_tree
from tests.hooks.contracts.slime_data import arguments
from tests.hooks.contracts.slime_source import host_root


def test_a_function_is_wrapped_once_and_where_it_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, user, other = (ModuleType(name) for name in ("toy", "toy.user", "other"))

    def own(value: int) -> int:
        return value

    def plus_ten(own: Any, value: int) -> int:
        return own(value) + 10

    def doubled(own: Any, value: int) -> int:
        return 2 * own(value)

    for module in (toy, user, other):
        vars(module)["loss"] = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):  # idempotent
        wrap_once("toy", "loss", doubled)
        assert (toy.loss(1), user.loss(1), other.loss is own, toy.loss.__name__) == (2, 2, True, "own")
    wrap_once("toy", "loss", plus_ten)  # another one goes around it
    ours = toy.loss
    assert ours(1) == 12

    @wraps(ours)  # the host's own decorator copies the mark of ours
    def traced(value: int) -> int:
        return -ours(value)

    vars(toy)["loss"] = traced
    wrap_once("toy", "loss", plus_ten)
    assert toy.loss(1) == -12 + 10
    config = SimpleNamespace(finalize=None)
    wrap_once(config, "finalize", lambda own, model: (own, model))
    assert config.finalize("chunks") == (None, "chunks")


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_is_found_in_every_spelling(name: str) -> None:
    for spelling in (name, name.upper(), name.replace("-", "_"), *HOSTS[name].spellings):
        assert find_host(spelling).name == name
    with pytest.raises(ValueError, match=f"^host '{name}x' is unknown: did you mean {name}"):
        find_host(f"{name}x")


def test_settings_may_be_flags_a_mapping_a_file_or_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_text("use_tis: true\ntis: {level: sequence}\n")
    wanted = {"use_tis": True, "tis": {"level": "sequence"}}
    for given in ("--use-tis --tis-level sequence", wanted, str(path), mp.MismatchConfig(**wanted)):
        ours, base = given_settings(given)
        assert ours == wanted and base in ({}, wanted)
    ours, base = given_settings({"preset": "token_is", "tis": {"upper_bound": 3.0}})
    assert (ours, base["use_tis"]) == ({"tis": {"upper_bound": 3.0}}, True)
    for given, message in (("--use-tsi", "--use-tsi is no flag"), ("nowhere.yaml", "nowhere.yaml does not exist")):
        with pytest.raises(ValueError, match=message):
            given_settings(given)


# Versions -------------------------------------------------------------------------------------------------------------

# Name of the file that declares a host's version → what stands in it.
_DECLARED = {
    "setup.py": 'from setuptools import setup\n\nsetup(\n    name="slime",\n    version="0.3.0",\n)\n',
    "package_info.py": "MAJOR = 0\nMINOR = 3\nPATCH = 0\nPRE_RELEASE = ''\n",
    "version": "0.3.0\n",
    "pyproject.toml": '[project]\nname = "x"\nversion = "0.3.0"\n',
    "__init__.py": '__version__ = "0.3.0"\n',
    "VERSION": "0.3.0\n",
}


def _tree(root: Path, name: str) -> Path:
    host = HOSTS[name]
    (root / host.inside).mkdir(parents=True)
    (root / host.version_file).parent.mkdir(parents=True, exist_ok=True)
    (root / host.version_file).write_text(_DECLARED[Path(host.version_file).name])
    return root


def _git(root: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
    return subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", HOSTS)
def test_the_version_that_a_tree_declares(name: str, tmp_path: Path) -> None:
    found = read_version(HOSTS[name], _tree(tmp_path / "tree", name))
    assert (found.version, found.commit) == ("0.3.0", None)


@pytest.mark.parametrize("text", ["", "version = 3\n", "\x00"])
def test_a_version_that_cannot_be_read_is_unknown(text: str, tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "slime")
    (root / "setup.py").write_text(text)
    _git(root, "init", "-q")  # no commit yet
    assert str(read_version(SLIME, root)) == "of unknown version"


def test_the_line_says_whether_it_is_the_tested_version(tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "verl")
    tested = replace(VERL, version="0.3.0")  # a release: the number is enough
    assert version_line(tested, [tmp_path, root]) == "host: verl 0.3.0, the tested version"
    wanted = "! host: verl 0.3.0 is not the tested version, 0.9.1. Use that one, or look at"
    assert version_line(VERL, [root]).startswith(wanted)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        _git(root, *words)
    commit = _git(root, "rev-parse", "HEAD").strip()
    at = f"0.3.0 at {commit[:10]}"
    assert version_line(replace(VERL, version="x", commit=commit), [root]) == f"host: verl {at}, the tested version"
    other = replace(VERL, version="0.3.0", commit="fedcba9876543210")  # the same number by name only
    assert version_line(other, [root]).startswith(f"! host: verl {at} is not the tested version, 0.3.0 at fedcba9876. ")
    nowhere = replace(SLIME, inside="no_such_package/utils")
    assert version_line(nowhere).startswith("! host: slime is not found here; the plugin was tested with 0.3.1 at 624b")


def test_the_launcher_s_block_says_it_and_no_host_is_imported(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    assert prepare([str(script), "--use-tis"])[3].lines[-2].startswith("! host: slime of unknown version is not the ")
    assert not any("host: " in line[:8] for line in prepare([str(script)])[3].lines)
    root = _tree(tmp_path / "other", "slime")
    (root / "slime" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = "from mismatch_plugin.hooks import hosts, version; print(version.version_line(hosts.SLIME))"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("! host: slime 0.3.0 is not the tested version"), done.stderr


@pytest.mark.parametrize("name", [name for name, host in HOSTS.items() if host.commit])
def test_the_checkouts_that_the_tests_run_with_are_the_tested_ones(name: str) -> None:
    found = read_version(HOSTS[name], host_root(HOSTS[name].title))
    assert (found.version, found.commit) == (HOSTS[name].version, HOSTS[name].commit)


def test_an_old_megatron_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    validate_megatron_version()  # the tests run with a megatron-core that is new enough, or with none
    script = ray_tree(tmp_path / "tree", "slime", megatron=(0, 15))
    with pytest.raises(ValueError, match=r"megatron-core 0\.15\.0 is too old: .* 0\.16 or newer"):
        prepare([str(script), "--use-tis"])
    assert prepare([str(script)])[3].added == ()  # nothing of ours, nothing to refuse


# Sampling filters -----------------------------------------------------------------------------------------------------

METRIC = "rollout_corr/rollout_is_ratio_mean"


def _block(host: str, top_p: float | None = None, top_k: int | None = None, **more: Any) -> str:
    """What the start-up block says of filters; None: as the host has it."""
    given = {name: value for name, value in {"top_p": top_p, "top_k": top_k}.items() if value is not None}
    if host in ("slime", "miles"):
        module = {"slime": slime, "miles": miles}[host]
        args = arguments(host, **{f"rollout_{name}": value for name, value in given.items()})
        lines = module.describe(module.settings(args), args)
    elif host == "verl":
        rc = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "mismatch": {"metrics": "off"}}
        actor = {"policy_loss": {"rollout_correction": rc}}
        tree = {"algorithm": {"rollout_correction": rc}}
        tree["actor_rollout_ref"] = {"actor": actor, "rollout": {"top_p": 1.0, "top_k": -1, **given, **more}}
        lines = verl.describe(verl.settings(tree), tree)
    elif host == "nemo-rl":
        master = {"loss_fn": {"mismatch": {}}, "policy": {"generation": {"top_p": 1.0, "top_k": None, **given}}}
        lines = nemo_rl.describe(nemo_rl.settings(master), master)
    else:
        args = Namespace(**{f"rl_default_{name}": value for name, value in given.items()}, **more)
        lines = megatron_rl.describe(megatron_rl.settings(args), args)
    return "".join(line for line in lines if line.removeprefix("! ").startswith("sampling filter: "))


HIDDEN, SHOWN, REPLAYED = f"{METRIC} does not show it", f"{METRIC} shows it", "the ids that SGLang (with slime's patch)"
RAW, PROCESSED = {"name": "vllm", "logprobs_mode": "raw_logprobs"}, "inference_dynamic_batching_logprobs_mode"
FILTERS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *((host, {}, ()) for host in ("slime", "miles", "verl", "nemo-rl", "megatron-lm")),
    ("megatron-lm", {"top_p": 1.0}, ()),
    *(
        (host, {"top_p": 0.9}, ("top_p 0.9 without a sampling mask", "for equal engines in [0.9, 1]", METRIC))
        for host in ("miles", "verl", "megatron-lm")
    ),
    *((host, {"top_k": 20}, ("no bound is known", "top_k 20")) for host in ("miles", "verl", "megatron-lm")),
    ("miles", {"top_p": 0.9, "top_k": 20}, ("no bound is known",)),
    ("slime", {"top_p": 0.9}, (REPLAYED,)),
    ("slime", {"top_p": 0.9, "top_k": 20}, (REPLAYED,)),
    ("slime", {"top_k": 20}, ("no bound is known", "slime passes no mask on")),
    ("nemo-rl", {"top_p": 0.9}, ("top_p 0.9, top_k None; NeMo-RL cuts the trainer's logits", METRIC)),
    ("nemo-rl", {"top_k": 20}, ("top_k 20",)),
    # Whether the metric shows it depends on the engine's log-probs.
    ("miles", {"top_p": 0.9}, (HIDDEN,)),
    ("verl", {"top_p": 0.9, "name": "sglang"}, (HIDDEN,)),
    ("verl", {"top_p": 0.9, "name": "vllm"}, (f"; {SHOWN}. verl",)),
    ("verl", {"top_p": 0.9, **RAW}, (HIDDEN,)),
    ("verl", {"top_p": 0.9, "name": "trtllm"}, (f"{SHOWN} if the engine renormalises",)),
    ("megatron-lm", {"top_p": 0.9}, (HIDDEN,)),
    ("megatron-lm", {"top_p": 0.9, PROCESSED: "processed_logprobs"}, (f"{SHOWN}. Megatron-LM RL",)),
]


@pytest.mark.parametrize(("host", "given", "parts"), FILTERS)
def test_the_block_says_what_filters_leave_in_the_ratio(host: str, given: dict[str, Any], parts: Any) -> None:
    said = _block(host, **given)
    assert bool(said) == bool(parts) and [part for part in parts if part not in said] == []


@pytest.mark.parametrize("renormalised", [True, False])
def test_the_sentence_is_true(renormalised: bool) -> None:
    """Equal engines, every token of a top-p sampler in its exact share: the metric is the kept mass or 1, as said."""
    probabilities, top_p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64), 0.6
    kept = probabilities[:2]
    drawn = torch.tensor([0] * 4 + [1] * 3)  # 4/7 and 3/7: the kept ids' shares
    engine = (kept / kept.sum() if renormalised else kept).log()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[engine[drawn]], train_log_probs=[probabilities.log()[drawn]], loss_masks=[[1] * 7]
    )
    mean = mp.correct(packed, mp.MismatchConfig(use_tis=True)).statistics.metrics()[METRIC]
    said = filter_bias(top_p=top_p, renormalised=renormalised)
    assert f"in [{top_p:g}, 1]" in said and top_p <= float(kept.sum()) <= 1
    assert ("does not show it" in said) == (not renormalised)
    assert mean == pytest.approx(0.7 if renormalised else 1.0)
