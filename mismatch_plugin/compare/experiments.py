"""What `compare` runs, as data: the problem with its tasks, the settings of mismatch, and the variants of the loss.

The problem and the settings were chosen on the seeds CHOSEN_ON and are reported on others.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

import mismatch_plugin
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.presets import COMPLETE, find_preset, preset_names
from mismatch_plugin.config.values import ignore_mismatch_warnings

BOS, SEP, EOS, PAD, FILL = 10, 11, 12, 13, 14  # 0 to 9 are the digits
Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Task:
    """A task on digits, learned in seconds and not at once: partial answers earn partial reward. Ids are below `vocab`.

    Prompts are of one length. Answers may differ in length, where they end with an `eos`.
    """

    name: str
    draw: Callable[[random.Random], list[int]]  # the digits of a prompt
    solve: Callable[[list[int]], list[int]]  # the digits of the right answer
    max_response: int  # tokens of the longest right answer, `eos` included
    vocab: int = 14
    eos: int | None = EOS  # ends a response and is part of it; None: all responses have `max_response` tokens
    about: str = ""

    def prompts(self, count: int, seed: int, split: Split = "train") -> list[list[int]]:
        """`count` prompts [BOS, digits, SEP]. None is in both splits: the split is the prompt's, not the draw's."""
        generator = random.Random(f"{self.name}.{split}.{seed}")
        found: list[list[int]] = []
        while len(found) < count:
            prompt = [BOS, *self.draw(generator), SEP]
            held_out = zlib.crc32(bytes(prompt)) % 8 == 0  # one in eight
            if held_out == (split == "held_out"):
                found.append(prompt)
        return found

    def target(self, prompt: Sequence[int]) -> list[int]:
        """The right answer, `eos` included."""
        answer = self.solve(list(prompt[1:-1]))
        return answer if self.eos is None else [*answer, self.eos]


def _six(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=6)


def _three_to_nine(generator: random.Random) -> list[int]:
    length = generator.randint(3, 9)
    return [*[FILL] * (9 - length), *generator.choices(range(10), k=length)]


def _reversed(digits: list[int]) -> list[int]:
    return [digit for digit in digits if digit != FILL][::-1]


_ABOUT = "The model is given {} and answers with the same digits backwards{}; its reward: the share of right positions."
TASKS = {
    task.name: task
    for task in (
        Task("reverse6", _six, _reversed, 6, eos=None, about=_ABOUT.format("six digits", ", in six tokens")),
        Task("reverse", _six, _reversed, 7, about=_ABOUT.format("six digits", " and an end token")),
        Task("reverse3to9", _three_to_nine, _reversed, 10, 15,
             about=_ABOUT.format("three to nine digits, filled in front to nine,", " and an end token")),
    )
}  # fmt: skip


def get_task(name: str) -> Task:
    """The task of that name. Raises ValueError if there is none."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASKS)}.")
    return TASKS[name]


class Settings(BaseModel):
    """What the runs of one setting share: task, model, rollout engine, optimizer. The defaults are the problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str = "reverse6"  # a name in TASKS
    layers: int = Field(2, ge=1)
    hidden: int = Field(32, ge=1)
    heads: int = Field(4, ge=1)
    ffn: int = Field(64, ge=1)  # width of the MLP; of each expert
    experts: int = Field(0, ge=0)  # of each layer's MLP, of which a token takes one; 0 is a dense model

    # The rollout engine: its numbers (the trainer is float32), the optimizer steps by which its weights lag, and the
    # share of tokens that it gives to another expert than the router's.
    rollout_dtype: Literal["float32", "int8", "int4", "int3", "int2"] = "float32"
    staleness: int = Field(0, ge=0)
    expert_flips: float = Field(0.0, ge=0.0, le=1.0)
    temperature: float = Field(1.0, gt=0.0)  # of the rollout engine and of the trainer's log-probs

    steps: int = Field(360, ge=1)  # optimizer steps
    prompts_per_batch: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=2)  # GRPO's group
    mini_batches: int = Field(4, ge=1)  # optimizer steps on a rollout batch, each on its share of every group
    lr: float = Field(3e-3, gt=0.0)  # AdamW's, constant
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0.0)
    clip_grad: float = Field(1.0, gt=0.0)  # gradient norm above which gradients are scaled down

    warm_up_target: float = Field(0.6, gt=0.0, le=1.0)  # probability of the right token at which the warm-up stops
    warm_up_steps: int = Field(1000, ge=0)  # after which it stops in any case
    warm_up_batch: int = Field(128, ge=1)
    warm_up_lr: float = Field(3e-3, gt=0.0)
    eval_every: int = Field(20, ge=0)  # optimizer steps; 0: only before the first and after the last
    eval_prompts: int = Field(128, ge=1)  # held out, the same at every evaluation

    @model_validator(mode="after")
    def _fit(self) -> Settings:
        get_task(self.task)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas is {list(self.betas)}: each is at least 0 and below 1.")
        if self.samples_per_prompt % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} must divide {self.samples_per_prompt}, samples_per_prompt."
            )
        if self.hidden % self.heads:
            raise ValueError(f"heads {self.heads} must divide hidden, which is {self.hidden}.")
        if self.experts == 1 or (self.expert_flips and not self.experts):
            raise ValueError(
                f"experts {self.experts}, expert_flips {self.expert_flips}: give 2 experts or more, or none."
            )
        return self

    @property
    def samples(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_batch * self.samples_per_prompt

    def warm_up_key(self, seed: int) -> str:
        """A file name for a seed's warm weights: equal for all settings that start from the same ones."""
        shared = ("task", "layers", "hidden", "heads", "ffn", "experts", "betas", "clip_grad", "eval_prompts")
        values = {name: value for name, value in self.model_dump().items() if name in shared or "warm_up" in name}
        values["version"] = mismatch_plugin.__version__  # another release may draw other initial weights
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task}-seed{seed}-{digest}.pt"


def seed_for(seed: int, *purpose: object) -> int:
    """A seed for one purpose: independent of every other, and the same in every variant of the run."""
    return zlib.crc32(".".join(map(str, (seed, *purpose))).encode())


CHOSEN_ON = tuple(range(10))
"""Seeds on which learning rate, staleness and precision were chosen."""
SEEDS = 12

VARIANTS = ("PPO", "dual_clip", "bypass", "token_is", "token_icepop", "seq_is", "pg_is", "geo_rs_token_tis")
"""`--full` runs them all in each setting."""
_THREE = ("PPO", "bypass", "token_is")
_FOUR = (*_THREE, "geo_rs_token_tis")


@dataclass(frozen=True)
class Setting:
    """One kind of mismatch. what: a sentence; changes: of the problem; variants: those that run by default."""

    title: str
    what: str
    changes: Mapping[str, Any]
    variants: tuple[str, ...]


# fmt: off
SETTINGS: dict[str, Setting] = {
    "control": Setting("Engines in sync",
        "The rollout engine computes in the trainer's precision with the trainer's newest weights.",
        {}, _THREE),
    "int2": Setting("A persistent engine mismatch",
        "The rollout engine always has the newest weights, rounded to integers of two bits.",
        {"rollout_dtype": "int2"}, _FOUR),
    "stale24": Setting("Stale rollouts",
        "The rollout engine's weights are 24 optimizer steps old (6 rollout batches).",
        {"staleness": 24}, _THREE),
    "stale32": Setting("Very stale rollouts",
        "The rollout engine's weights are 32 optimizer steps old (8 rollout batches).",
        {"staleness": 32}, VARIANTS),
    "int2_stale8": Setting("Both at once",
        "The rollout engine's weights are rounded to two bits and 8 optimizer steps old.",
        {"rollout_dtype": "int2", "staleness": 8}, _FOUR),
    "moe_flips": Setting("Experts chosen differently, in sync",
        "A mixture of four experts; the rollout engine, with the newest weights, gives six tokens in ten of each layer "
        "to another expert at random, and gradients are not clipped.",
        {"experts": 4, "ffn": 32, "expert_flips": 0.6, "lr": 6e-3, "clip_grad": 1e9}, VARIANTS[:4]),
}
MORE_SETTINGS: dict[str, Setting] = {
    "int2_long": Setting("Longer answers, a persistent engine mismatch",
        "Answers have four to ten tokens; the rollout engine has the newest weights, rounded to two bits.",
        {"task": "reverse3to9", "rollout_dtype": "int2"}, ("PPO", "token_is", "seq_is", "2:geometric:truncate")),
}
"""These run where they are named."""
# fmt: on
QUICK, QUICK_SEEDS = ("control", "int2", "stale32"), 8
"""The settings of `--quick`, with the first three variants of the others."""


_NAMED: dict[str, dict[str, Any]] = {
    "PPO": {},
    "bypass": {"use_rollout_log_probs": True},
    "dual_clip": {"ppo": {"dual_clip": 3.0}},
    # The preset with bounds that fit policies as far apart as these.
    "geo_rs_token_tis": find_preset("geo_rs_token_tis").settings(rs_threshold="0.8_1.25"),
}


def variant_config(label: str) -> MismatchConfig:
    """The configuration of a label: PPO, bypass, dual_clip; a preset, with parameters behind it as in
    `token_is:threshold=5`; an algorithm 0 to 3, or ALGORITHM:LEVEL:MODE as in `2:sequence:mask`.

    2 and 3 alone are token and sequence level, truncate. Raises ValueError naming what exists.
    """
    name, *parts = label.split(":")
    data: dict[str, Any]
    if label in _NAMED:
        data = _NAMED[label]
    elif name in preset_names() and all("=" in part for part in parts):
        data = find_preset(name).settings(**dict(part.split("=", 1) for part in parts))
    elif name in ("0", "1", "2", "3") and len(parts) <= (2 if name in "23" else 0):
        data = {"use_rollout_log_probs": name in "13", "use_tis": name in "23"}
        if name in "23":
            level, mode = (*parts, *("token" if name == "2" else "sequence", "truncate")[len(parts) :])
            data["tis"] = {"level": level, "mode": mode}
    else:
        raise ValueError(
            f"algorithm {label!r} is unknown: write {', '.join(_NAMED)}, a preset (mismatch-plugin presets), 0 to 3 or "
            f"ALGORITHM:LEVEL:MODE, as 2:sequence:mask."
        )
    with ignore_mismatch_warnings():  # bounds far from 1 are meant: so are the policies
        return MismatchConfig.build({**data, "metrics": "full"})


def variant_name(label: str) -> str:
    """The one name of a variant, however it is spelt: one of _NAMED, or the short name of a preset."""
    config = variant_config(label).model_dump()
    names = (*_NAMED, *(record.short for record in COMPLETE))
    return next((name for name in names if variant_config(name).model_dump() == config), label)
