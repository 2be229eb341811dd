"""Every command on a page runs, or the page says in front of the reader what it needs."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from ci.docs import PAGES, ROOT
from mismatch_plugin import MismatchConfig, preset
from mismatch_plugin.cli import app
from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.data.read import read
from mismatch_plugin.launch.__main__ import main as launch_main
from mismatch_plugin.report.log import write_step
from tests.data.dumps import PROMPTS, RESPONSES, ROLLOUT, TRAIN, save
from tests.hooks.contracts.launch_trees import megatron_tree, ray_tree

EVERY_PAGE = (*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*.md")))
OURS = re.compile(r"(?<![\w-])--(?:use-tis|use-rollout-log-probs|(?:tis|rs|mismatch|rollout-log-prob)-[a-z][a-z0-9-]*)")
THEIRS = {"--mismatch-host", "--mismatch-fused-head"}


class Block(NamedTuple):
    """A fenced block. needs: the paragraph above says what it needs, and that is not here."""

    language: str
    text: str
    needs: bool


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        above = text[: found.start()].rstrip().rpartition("\n\n")[2]
        yield Block(found[1], found[2], "needs" in above.lower() and not above.endswith("```"))


def commands(block: Block) -> Iterator[tuple[list[str], bool]]:
    """Each line's words, and whether its comment or the paragraph above says what it needs."""
    for line in block.text.replace("\\\n", " ").splitlines():
        code, _, comment = line.partition(" #")
        for part in code.split("&&"):
            words = shlex.split(part, comments=True)
            if words:
                yield words, block.needs or "needs" in comment


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a launch line of a page with --mismatch-explain-only in a bare checkout, each once; returns the block."""
    folder, printed = tmp_path_factory.mktemp("checkouts"), {}
    for script, package in (("verl/trainer/main_ppo.py", "verl"), ("examples/run_grpo.py", "nemo_rl.algorithms.grpo")):
        (folder / script).parent.mkdir(parents=True)
        (folder / script).write_text(f"import {package}\n")
    save(folder / "examples" / "configs" / "grpo_math_1B.yaml", {"loss_fn": {"token_level_loss": True}})  # NeMo-RL's
    checkouts = {
        "train.py": ray_tree(folder / "slime", "slime").parent,
        "train_rl.py": megatron_tree(folder / "megatron").parent,
        "verl.trainer.main_ppo": folder,
        "examples/run_grpo.py": folder,
    }

    def launch(words: list[str]) -> str:
        line = tuple(word for word in words[words.index("mismatch_plugin.launch") + 1 :] if word != "…")
        if line not in printed:
            said = io.StringIO()
            explained = [*line, *["--mismatch-explain-only"] * ("--mismatch-explain-only" not in line)]
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
                patch.chdir(checkouts[next(word for word in line if word in checkouts)])
                patch.syspath_prepend(".")
                launch_main(explained)
            for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
                del sys.modules[name]  # of the bare checkout
            printed[line] = said.getvalue()
        return printed[line]

    return launch


def run(words: list[str], needs: bool, launcher: Any) -> str:
    """Run a command, or read its flags alone where it needs something; returns what it prints."""
    if "mismatch_plugin.launch" in words:
        return launcher(words)
    if words[0] == "make":  # its recipes are not run: they take minutes, and CI runs them
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return ""
    if words[0] == "mismatch-plugin":  # options are read before --help acts
        done = CliRunner().invoke(app, [*words[1:], *["--help"] * needs], env={"COLUMNS": "400", "TERM": "dumb"})
        ends = (0, 1, 3) if words[1] == "inspect" else (0,)  # a fault, or too few tokens
        assert done.exit_code in ends, (words, done.output)
        return done.output
    assert needs or words == ["cd", "slime"], f"no test runs {words}, and nothing says what it needs"
    read_flags(words)
    return ""


def read_flags(words: list[str]) -> None:
    """Our flags, behind the … or from the first of ours on to the end of the line, mean something together."""
    ours = words[words.index("…") + 1 :] if "…" in words else words
    first = next((place for place, word in enumerate(ours) if OURS.fullmatch(word) or "…" in words), len(ours))
    MismatchConfig.from_words(ours[first:])


def what_pages_name(folder: Path) -> dict[str, Any]:
    """Files that the commands take, in `folder`; what the recipe for a dump of one's own loop takes as given."""
    columns = {"prompt_ids": PROMPTS, "response_ids": RESPONSES, "rollout_log_probs": ROLLOUT}
    save(folder / "rollouts.jsonl", columns)
    save(folder / "training.jsonl", [{"train_log_probs": row} for row in TRAIN])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    own: dict[str, Any] = {"response_ids": 11 * mask, "response_mask": mask}
    own |= {"rollout_log_probs": -1.0 * mask, "old_log_probs": -1.25 * mask}
    save(folder / "rollouts.pt", own)
    for _ in range(3):
        write_step(folder / "DIR", preset("token_is"), {"rollout_corr/kl": 0.001, "rollout_corr/k3_kl": 0.001})
    prompts = {"prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    return {"torch": torch, **own, **prompts, "advantages": torch.tensor([1.0, -1.0])}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda path: path.parent.name * (path.name == "README.md") + path.stem)
def test_every_block_runs_or_says_what_it_needs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names, printed = what_pages_name(tmp_path), ""
    for block in blocks(page):
        if block.language == "sh":
            printed += "".join(run(words, needs, launcher) for words, needs in commands(block))
        elif block.language == "yaml":
            (tmp_path / "settings.yaml").write_text(block.text)
            MismatchConfig.from_file(tmp_path / "settings.yaml")
        elif block.language == "python" and not block.needs:
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language == "" and page.name == "README.md":  # a screen, with … where something is left out
            for part in filter(None, map(str.strip, block.text.split("…"))):
                assert " ".join(part.split()) in " ".join(printed.split()), part
        else:
            assert block.needs or block.language == "", f"nothing says what this needs:\n{block.text}"
            for flags in re.findall(r'"(--[^"]+)"', block.text):
                MismatchConfig.from_words(flags.split())
    assert page != ROOT / "README.md" or (tmp_path / "mismatch-demo" / "rollouts_inspect" / "report.html").exists()


def test_the_recipe_for_a_dump_of_one_s_own_loop_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = next(block.text for block in blocks(ROOT / "docs" / "inspect.md") if block.language == "python")
    exec(recipe, what_pages_name(tmp_path))
    dump = read("dump.pt")
    assert dump.has_training and not any("not read" in note for note in dump.notes)
    lengths = [(len(row.prompt_ids), len(row.response_ids), len(row.loss_mask)) for row in dump.samples]
    assert lengths == [(2, 4, 4), (3, 2, 2)]
    advantages = [row.advantages.tolist() for row in dump.samples if row.advantages is not None]
    assert advantages == [[1.0] * 4, [-1.0] * 2]


def test_flags_and_commands_in_the_text_exist() -> None:
    for page in PAGES:
        for line in re.findall(r"`mismatch-plugin ([^`|…]+)`", page.read_text(encoding="utf-8")):
            done = CliRunner().invoke(app, [*shlex.split(line), "--help"])
            assert done.exit_code == 0, (page.name, line, done.output)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = THEIRS | {option.replace("_", "-") for action in parser._actions for option in action.option_strings}
    found = {(page.name, flag) for page in EVERY_PAGE for flag in OURS.findall(page.read_text(encoding="utf-8"))}
    assert len(found) > 50 and [each for each in sorted(found) if each[1].rstrip("-") not in known] == []


def test_a_demo_writes_into_a_new_folder_and_its_dump_is_small(tmp_path: Path) -> None:
    for again in ("", "or look at it again: mismatch-plugin inspect"):
        done = CliRunner().invoke(app, ["demo", str(tmp_path)], env={"COLUMNS": "400", "TERM": "dumb"})
        assert done.exit_code == 2 and "is there already: name a new folder" in done.output and again in done.output
        (tmp_path / "rollouts.jsonl").touch()
    assert (ROOT / "mismatch_plugin" / "diagnose" / "demo.jsonl.xz").stat().st_size < 400_000
