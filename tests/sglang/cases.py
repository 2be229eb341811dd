"""What goes wrong in people's runs, done to two real SGLang servers: both sides of each case, in a folder.

Each case is there twice, mild and strong: `rollouts.jsonl`, `training.jsonl`, `reference` (the checkpoint that training
started from) and `current` (the trainer's). The servers compute in bfloat16, the trainer in float32.

    python -m tests.sglang.cases FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mismatch_plugin.check.training import TrainingSample
from mismatch_plugin.rollout.client import SGLangClient
from mismatch_plugin.rollout.files import write_records
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.sampling import SamplingParameters
from mismatch_plugin.rollout.server import start_cpu_server
from tests.sglang import stories

Size = Literal["mild", "strong"]
State = dict[str, Tensor]
Records = list[RolloutRecord]
Training = list[TrainingSample]
STEPS = 4
"""Optimizer steps that the trainer is ahead of the reference checkpoint at the end."""
LR: dict[Size, float] = {"mild": 1e-4, "strong": 1e-3}
"""Of each step: mean |difference| over all of them about 0.07 and 0.4 nats, next to 0.01 to 0.03 of bfloat16."""
PROMPTS, SAMPLES, TOKENS = 32, 4, 96


@dataclass
class World:
    """The model, how its weights moved, and two servers. moved: by size, the weights after 0 to STEPS steps."""

    tokenizer: Any
    model: Any
    moved: dict[Size, list[State]]
    urls: Sequence[str]
    seed: int = 0

    def load(self, states: Sequence[State], version: str) -> None:
        """These weights on each server, under this name, whether they differ from what it has or not."""

        async def run() -> None:
            for url, state in zip(self.urls, states, strict=True):
                async with SGLangClient(url) as client:
                    await client.update_weights_from_tensors(state, version, expect_changed="any")

        asyncio.run(run())

    def sample(self, prompts: int = PROMPTS, **sampling: Any) -> tuple[Records, list[str]]:
        """SAMPLES answers to each of new prompts, half of the prompts on each server; and the questions."""
        self.seed += 1
        draw = random.Random(self.seed)
        asked = [stories.question_and_answer(draw) for _ in range(prompts)]
        setting = SamplingParameters(max_new_tokens=TOKENS, stop_token_ids=(stories.EOS,), **sampling)

        async def run() -> Records:
            found: Records = []
            for number, url in enumerate(self.urls):
                async with SGLangClient(url, vocab_size=stories.VOCAB) as client:
                    mine = [self.encode(stories.prompt_text(text)) for text, _ in asked[number :: len(self.urls)]]
                    found += await client.generate(mine, setting, samples_per_prompt=SAMPLES)
            return found

        sampled = asyncio.run(run())
        ordered = [pair for number in range(len(self.urls)) for pair in asked[number :: len(self.urls)]]
        pairs = [pair for pair in ordered for _ in range(SAMPLES)]
        numbered = enumerate(zip(sampled, pairs, strict=True))
        return [self._named(index, record, answer) for index, (record, (_, answer)) in numbered], [q for q, _ in pairs]

    def _named(self, index: int, record: RolloutRecord, answer: str) -> RolloutRecord:
        """With the text, and with the share of the right answer's words in it for a reward."""
        text = self.tokenizer.decode(record.response_ids)
        wanted = set(answer.split())
        told = {"text": text, "reward": len(wanted & set(text.split())) / len(wanted)}
        return record.model_copy(update={"sample_id": f"{self.seed}-{index}", "request_id": None, **told})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    @torch.inference_mode()
    def log_probs(
        self,
        state: State,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """log π of each response token in float32."""
        self.model.load_state_dict(state)
        found = []
        for start in range(0, len(prompts), 64):
            part = slice(start, start + 64)
            rows = [(list(p), list(r)) for p, r in zip(prompts[part], responses[part], strict=True)]
            width = max(len(p) + len(r) for p, r in rows)
            padded = torch.tensor([[*p, *r, *[stories.PAD] * (width - len(p) - len(r))] for p, r in rows])
            logits = self.model(padded, use_cache=False).logits  # causal: padding behind changes nothing
            for row, (p, r) in zip(logits, rows, strict=True):
                values = (row[len(p) - 1 : len(p) + len(r) - 1] / temperature).log_softmax(-1)
                found.append(values.gather(1, torch.tensor(r)[:, None])[:, 0].tolist())
        return found

    def score(self, state: State, records: Records, version: str) -> Training:
        """What a trainer without a fault writes, at the temperature of the first record."""
        temperature = records[0].sampling.temperature
        values = self.log_probs(state, [r.prompt_ids for r in records], [r.response_ids for r in records], temperature)
        return [_training(record, row, version) for record, row in zip(records, values, strict=True)]

    def clean(self, size: Size = "mild", step: int = STEPS, **sampling: Any) -> tuple[Records, Training, list[str]]:
        """Both servers have the weights of this step, and so has the trainer."""
        state = self.moved[size][step]
        self.load([state] * len(self.urls), f"step-{step}")
        records, questions = self.sample(**sampling)
        return records, self.score(state, records, f"step-{step}"), questions


def _training(record: RolloutRecord, values: Sequence[float | None], version: str) -> TrainingSample:
    return TrainingSample(train_log_probs=list(values), sample_id=record.sample_id, weight_version=version)


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


def _rolled_out_with(world: World, size: Size, states: Sequence[State]) -> Pair:
    """The servers hold these, under the name of the trainer's last step."""
    world.load(states, f"step-{STEPS}")
    records, _ = world.sample()
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
    prompts = [change(list(r.prompt_ids), q) for r, q in zip(records, questions, strict=True)]
    rows = world.log_probs(world.moved["mild"][STEPS], prompts, [r.response_ids for r in records])
    return records, [_training(r, row, f"step-{STEPS}") for r, row in zip(records, rows, strict=True)]


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
        ids, record = records[index].response_ids, records[index]
        low, high = (0.5, 0.8) if size == "mild" else (0.1, 0.4)
        start = int(len(ids) * draw.uniform(low, high))
        parts = next(((at, two) for at in range(start, len(ids)) if (two := world_split(world, ids[at]))), None)
        if parts is None:
            continue
        at, two = parts
        other = [*ids[:at], *two, *ids[at + 1 :]][: len(ids)]
        (row,) = world.log_probs(world.moved["mild"][STEPS], [record.prompt_ids], [other])
        changed[index] = _training(record, row, f"step-{STEPS}")
    return records, changed


def world_split(world: World, token: int) -> list[int]:
    """Two ids that together are the same text; empty where there are none."""
    text = world.tokenizer.id_to_token(token)
    for cut in range(1, len(text)):
        two = [world.tokenizer.token_to_id(part) for part in (text[:cut], text[cut:])]
        if token > stories.PAD and None not in two:
            return two
    return []


def temperature(world: World, size: Size) -> Pair:
    """Sampled at 0.9 or 0.6, which the records say; the trainer scores at 1."""
    records, _, _ = world.clean(temperature=0.9 if size == "mild" else 0.6)
    plain = [record.model_copy(update={"sampling": SamplingParameters()}) for record in records]
    return records, world.score(world.moved["mild"][STEPS], plain, f"step-{STEPS}")


def truncation(world: World, size: Size) -> Pair:
    """Sampled with top-p 0.95 or 0.7, which the records say; log-probs are of the whole vocabulary on both sides."""
    records, training, _ = world.clean(top_p=0.95 if size == "mild" else 0.7)
    return records, training


def truncation_untold(world: World, size: Size) -> Pair:
    """The same, but the records do not say it."""
    records, training = truncation(world, size)
    return [record.model_copy(update={"sampling": SamplingParameters()}) for record in records], training


def eos_appended(world: World, size: Size) -> Pair:
    """The trainer appends <eos> to every tenth response (mild) or to each, and scores it."""
    records, training, _ = world.clean()
    longer = [[*record.response_ids, stories.EOS] for record in records]
    rows = world.log_probs(world.moved["mild"][STEPS], [r.prompt_ids for r in records], longer)
    every = 10 if size == "mild" else 1
    return records, [
        told.model_copy(update={"train_log_probs": row}) if index % every == 0 else told
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
        told.model_copy(update={"train_log_probs": row}) if index % every == 0 else told
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
SIZES: tuple[Size, ...] = get_args(Size)


def make_world(folder: Path, stack: ExitStack) -> World:
    """Train the model, move its weights, write the checkpoints into `folder`, start the servers. About two minutes."""
    tokenizer = stories.make_tokenizer()
    model = stories.make_model(tokenizer)
    _save(folder / "start", tokenizer, model)
    with ThreadPoolExecutor() as pool:
        starting = [
            pool.submit(
                stack.enter_context,
                start_cpu_server(folder / "start", dtype="bfloat16", arguments=("--skip-tokenizer-init",)),
            )
            for _ in range(2)
        ]
        moved: dict[Size, list[State]] = {size: _moved(model, tokenizer, LR[size]) for size in SIZES}
        for size, states in moved.items():
            model.load_state_dict(states[-1])
            _save(folder / size, tokenizer, model)
        return World(tokenizer, model.eval(), moved, [started.result().url for started in starting])


def _moved(model: Any, tokenizer: Any, lr: float) -> list[State]:
    """The weights after 0 to STEPS steps of a trainer, which go on from each other."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = [state]
    data = stories.stream(tokenizer, 500, 2)
    for step in range(STEPS):
        stories.train(model, data, 4, lr=lr, rows=8, warm_up=1, seed=10 + step)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(state)
    return states


def _save(folder: Path, tokenizer: Any, model: Any) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    names = {f"{word.strip('<>')}_token": word for word in stories.SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def write_case(world: World, checkpoints: Path, folder: Path, name: str, size: Size) -> None:
    """rollouts.jsonl, training.jsonl, and links to the checkpoints."""
    records, training = CASES[name](world, size)
    folder.mkdir(parents=True)
    write_records(folder / "rollouts.jsonl", records)
    lines = "".join(sample.model_dump_json(exclude_none=True) + "\n" for sample in training)
    (folder / "training.jsonl").write_text(lines)
    moved = size if name.startswith(("weights_", "stale_", "clean_steps")) else "mild"
    for link, target in (("reference", "start"), ("current", moved)):
        (folder / link).symlink_to(os.path.relpath(checkpoints / target, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    folder = options.folder
    with ExitStack() as stack:
        world = make_world(folder / "checkpoints", stack)
        told = [f"{name}: {case.__doc__}" for name, case in CASES.items()]
        (folder / "README.txt").write_text("\n".join([__doc__ or "", *told]))
        for name in options.case or CASES:
            for size in SIZES:
                write_case(world, folder / "checkpoints", folder / f"{name}-{size}", name, size)
                print(folder / f"{name}-{size}", flush=True)


if __name__ == "__main__":
    main()
