"""What goes wrong in people's runs, done to two real SGLang servers: both sides of each case, in a folder.

Each case is there twice, mild and strong: `rollouts.jsonl`, `training.jsonl`, `reference` (the checkpoint that training
started from) and `current` (the trainer's). The servers compute in bfloat16, the trainer in float32.

    python -m tests.sglang.cases FOLDER [--demo mismatch_plugin/diagnose/demo.jsonl.xz]
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sampling import SamplingParameters
from tests.sglang import stories
from tests.sglang.world import PROMPTS, SIZES, STEPS, Records, Size, State, Training, World, make_world, training_sample

Pair = tuple[Records, Training]
Case = Callable[[World, Size], Pair]


def clean(world: World, size: Size) -> Pair:
    """mild: the same weights on both sides. strong: the trainer is one step ahead, and says so."""
    records, training, _ = world.clean(step=STEPS if size == "mild" else STEPS - 1)
    return records, training if size == "mild" else world.score(world.moved["mild"][STEPS], records, f"step-{STEPS}")


def clean_steps(world: World, size: Size) -> Pair:
    """The batches of several steps, each sampled from the weights that score it. size: of the steps."""
    return _steps(world, size, updated=True)


def _steps(world: World, size: Size, updated: bool) -> Pair:
    records: Records = []
    training: Training = []
    for step in range(STEPS + 1):
        held = world.moved[size][step if updated else 0]
        world.load([held] * 2, f"step-{step}")
        found, _ = world.sample(PROMPTS // 4)
        records += found
        training += world.score(world.moved[size][step], found, f"step-{step}")
    return records, training


def weights_not_updated(world: World, size: Size) -> Pair:
    """The servers keep the weights of step 0 and name them step-0, step-1, …; the trainer's move on."""
    return _steps(world, size, updated=False)


def _rolled_out_with(world: World, size: Size, states: Sequence[State], prompts: int = PROMPTS) -> Pair:
    """The servers hold these, under the name of the trainer's last step."""
    world.load(states, f"step-{STEPS}")
    records, _ = world.sample(prompts)
    return records, world.score(world.moved[size][STEPS], records, f"step-{STEPS}")


def weights_not_updated_one_step(world: World, size: Size) -> Pair:
    """The same, seen in the batch of the last step alone."""
    return _rolled_out_with(world, size, [world.moved[size][0]] * 2)


def weights_partly_updated(world: World, size: Size, layer: int = 1, others: bool = False) -> Pair:
    """Of the last step's weights the servers took those of one layer, and else have the reference's."""
    old, new = world.moved[size][0], world.moved[size][STEPS]
    state = {name: (new if (f".layers.{layer}." in name) != others else old)[name] for name in new}
    return _rolled_out_with(world, size, [state] * 2)


def weights_partly_updated_but_one(world: World, size: Size) -> Pair:
    """The servers took all but those of one layer."""
    return weights_partly_updated(world, size, layer=2, others=True)


def stale_server(world: World, size: Size) -> Pair:
    """The second server is behind: two steps (mild) or all of them (strong); both name the last step."""
    behind = world.moved[size][STEPS - 2 if size == "mild" else 0]
    return _rolled_out_with(world, size, [world.moved[size][STEPS], behind])


def _with_prompt(world: World, change: Callable[[list[int], str], list[int]]) -> Pair:
    records, _, questions = world.clean()
    prompts = [change(r.prompt_ids.tolist(), q) for r, q in zip(records, questions, strict=True)]
    rows = world.log_probs(world.moved["mild"][STEPS], prompts, [r.response_ids for r in records])
    return records, [training_sample(r, row, f"step-{STEPS}") for r, row in zip(records, rows, strict=True)]


def wrong_prompt(world: World, size: Size) -> Pair:
    """mild: the trainer's prompt is in another template. strong: it lacks its last two tokens."""
    if size == "mild":
        return _with_prompt(world, lambda _, question: world.encode(stories.other_prompt_text(question)))
    return _with_prompt(world, lambda ids, _: ids[:-2])


def wrong_prompt_bos(world: World, size: Size) -> Pair:
    """mild: the trainer adds <bos>. strong: it adds a system prompt."""
    if size == "mild":
        return _with_prompt(world, lambda ids, _: [stories.BOS, *ids])
    return _with_prompt(world, lambda ids, _: [*world.encode("Max has 20 lemons. The answer is 31.\n"), *ids])


def retokenised(world: World, size: Size) -> Pair:
    """In a third of samples the trainer's ids are others from some position on: behind the half (mild) or before it.

    There a token is two, as by a tokenizer that lacks a merge, so what follows is late by one and the end is cut.
    """
    records, training, _ = world.clean()
    draw = random.Random(3)
    changed = list(training)
    for index in range(0, len(records), 3):
        ids, record = records[index].response_ids.tolist(), records[index]
        low, high = (0.5, 0.8) if size == "mild" else (0.1, 0.4)
        start = int(len(ids) * draw.uniform(low, high))
        found = ((at, stories.split_token(world.tokenizer, ids[at])) for at in range(start, len(ids)))
        at, two = next(((at, two) for at, two in found if two), (len(ids), []))
        other = [*ids[:at], *two, *ids[at + 1 :]][: len(ids)]
        (row,) = world.log_probs(world.moved["mild"][STEPS], [record.prompt_ids], [other])
        changed[index] = training_sample(record, row, f"step-{STEPS}")
    return records, changed


def temperature(world: World, size: Size) -> Pair:
    """Sampled at 0.9 or 0.6, which the records say; the trainer scores at 1."""
    records, _, _ = world.clean(temperature=0.9 if size == "mild" else 0.6)
    plain = [record.with_fields(sampling=SamplingParameters()) for record in records]
    return records, world.score(world.moved["mild"][STEPS], plain, f"step-{STEPS}")


def truncation(world: World, size: Size) -> Pair:
    """Sampled with top-p 0.95 or 0.7, which the records say; log-probs are of the whole vocabulary on both sides."""
    records, training, _ = world.clean(top_p=0.95 if size == "mild" else 0.7)
    return records, training


def truncation_untold(world: World, size: Size) -> Pair:
    """The same, but the records do not say it."""
    records, training = truncation(world, size)
    return [record.with_fields(sampling=SamplingParameters()) for record in records], training


def eos_appended(world: World, size: Size) -> Pair:
    """The trainer appends <eos> to every tenth response (mild) or to each, and scores it."""
    records, training, _ = world.clean()
    longer = [[*record.response_ids, stories.EOS] for record in records]
    rows = world.log_probs(world.moved["mild"][STEPS], [r.prompt_ids for r in records], longer)
    every = 10 if size == "mild" else 1
    return records, [
        {**told, "train_log_probs": row} if index % every == 0 else told
        for index, (told, row) in enumerate(zip(training, rows, strict=True))
    ]


def shift_by_one(world: World, size: Size) -> Pair:
    """The trainer's log-probs are late by one token: in every tenth response (mild) or in each."""
    records, training, _ = world.clean()
    every = 10 if size == "mild" else 1
    rows = world.log_probs(
        world.moved["mild"][STEPS],
        [record.prompt_ids[:-1] for record in records],
        [[record.prompt_ids[-1], *record.response_ids[:-1]] for record in records],
    )
    return records, [
        {**told, "train_log_probs": row} if index % every == 0 else told
        for index, (told, row) in enumerate(zip(training, rows, strict=True))
    ]


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        clean,
        clean_steps,
        weights_not_updated,
        weights_not_updated_one_step,
        weights_partly_updated,
        weights_partly_updated_but_one,
        stale_server,
        wrong_prompt,
        wrong_prompt_bos,
        retokenised,
        temperature,
        truncation,
        truncation_untold,
        eos_appended,
        shift_by_one,
    )
}


def write_case(world: World, checkpoints: Path, folder: Path, name: str, size: Size) -> None:
    """rollouts.jsonl, training.jsonl, and links to the checkpoints."""
    records, training = CASES[name](world, size)
    folder.mkdir(parents=True)
    write_samples(folder / "rollouts.jsonl", records)
    lines = "".join(json.dumps(told) + "\n" for told in training)
    (folder / "training.jsonl").write_text(lines)
    moved = size if name.startswith(("weights_", "stale_", "clean_steps")) else "mild"
    for link, target in (("reference", "start"), ("current", moved)):
        (folder / link).symlink_to(os.path.relpath(checkpoints / target, folder))


def write_demo(world: World, file: Path) -> None:
    """The dump of `mismatch-plugin demo`: the second of two servers is two steps behind; other addresses, no text."""
    records, _ = _rolled_out_with(world, "strong", [world.moved["strong"][STEPS], world.moved["strong"][STEPS - 2]], 96)
    values = world.log_probs(
        world.moved["strong"][STEPS], [r.prompt_ids for r in records], [r.response_ids for r in records]
    )
    samples = [
        record.with_fields(
            text=None,
            server=f"http://rollout-{world.urls.index(str(record.server))}:30000",
            trainer_version=f"step-{STEPS}",
            rollout_log_probs=_shortest(record.rollout_log_probs),
            train_log_probs=_shortest(row),
        )
        for record, row in zip(records, values, strict=True)
    ]
    write_samples(plain := file.with_name("demo.jsonl"), samples)
    file.write_bytes(lzma.compress(plain.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    plain.unlink()


def _shortest(values: Any) -> Floats:
    """float32 numbers with as few digits as name them."""
    return np.array([float(str(np.float32(value))) for value in values])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--demo", type=Path, help="Write the dump of `mismatch-plugin demo` there, and no case.")
    options = parser.parse_args()
    folder = options.folder
    with ExitStack() as stack:
        world = make_world(folder / "checkpoints", stack)
        if options.demo:
            write_demo(world, options.demo)
            return
        told = [f"{name}: {case.__doc__}" for name, case in CASES.items()]
        (folder / "README.txt").write_text("\n".join([__doc__ or "", *told]))
        for name in options.case or CASES:
            for size in SIZES:
                write_case(world, folder / "checkpoints", folder / f"{name}-{size}", name, size)
                print(folder / f"{name}-{size}", flush=True)


if __name__ == "__main__":
    main()
