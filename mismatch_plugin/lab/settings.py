"""The settings of one RL run of the lab. Importing this imports neither megatron-core nor transformers."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

import mismatch_plugin
from mismatch_plugin.lab.engines import BITS, EngineName, RolloutDtype
from mismatch_plugin.lab.tasks import get_task


class LabSettings(BaseModel):
    """One run: task, model, rollout engine, optimizer. The defaults are those of the measured starting point."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str = "reverse"
    """Name of a task: see `tasks.get_task`."""
    seed: int = 0
    """Everything random follows from it: initial weights, prompts, sampling."""

    layers: int = Field(2, ge=1)
    """Transformer layers."""
    hidden: int = Field(64, ge=1)
    """Width."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_groups: int = Field(4, ge=1)
    """Key and value heads."""
    ffn: int = Field(192, ge=1)
    """Width of the MLP; of each expert."""
    experts: int = Field(0, ge=0)
    """Experts of each layer's MLP, of which a token takes one; 0 is a dense model. Goes with the engine batched."""
    position: Literal["rope", "learned_absolute"] = "rope"
    """How the model knows positions. learned_absolute goes with the engine batched, rope with the others."""

    engine: EngineName = "transformers"
    """What samples: transformers in this process; an SGLang server, whose sampling follows no seed on CPU; or the
    batched lab's own model."""
    rollout_dtype: RolloutDtype = "float32"
    """Numerical form of the rollout engine; the trainer is float32."""
    expert_flips: float = Field(0.0, ge=0.0, le=1.0)
    """Share of tokens, in each layer, that the rollout engine gives to another expert than the router's, at random."""
    staleness: int = Field(0, ge=0)
    """Optimizer steps by which the weights of a rollout batch lag behind those that train on it first."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus filter of the rollout engine."""
    top_p_log_probs: Literal["behaviour", "full", "masked"] = "behaviour"
    """What the trainer gets under top-p: of the filtered distribution, or, as SGLang returns them, of the full one; or
    of the filtered one with the kept ids, over which it then computes its own."""
    temperature: float = Field(1.0, gt=0.0)
    """Of the rollout engine and of the trainer's log-probs."""

    steps: int = Field(320, ge=1)
    """Optimizer steps."""
    prompts_per_batch: int = Field(32, ge=1)
    """Prompts of a rollout batch."""
    samples_per_prompt: int = Field(8, ge=2)
    """Responses to each; GRPO's group."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps on a rollout batch, each on its share of every group. With 1, algorithms 2 and 3 are the same
    update."""
    micro_batches: int = Field(1, ge=1)
    """Parts of a mini-batch on each data-parallel rank; gradients do not depend on it."""
    lr: float = Field(5e-4, gt=0.0)
    """AdamW's learning rate, constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0.0)
    """AdamW's weight decay."""
    clip_grad: float = Field(1.0, gt=0.0)
    """Gradient norm above which gradients are scaled down."""

    warm_up_target: float = Field(0.65, gt=0.0, le=1.0)
    """Dense held-out reward at which the supervised warm-up stops: a competence, not a number of steps."""
    warm_up_steps: int = Field(400, ge=0)
    """Warm-up steps after which it stops in any case; 0: no warm-up."""
    warm_up_batch: int = Field(128, ge=1)
    """Examples of a warm-up step."""
    warm_up_lr: float = Field(2e-3, gt=0.0)
    """Its learning rate."""

    eval_every: int = Field(20, ge=0)
    """Optimizer steps between evaluations on held-out prompts; 0: only before the first and after the last."""
    eval_prompts: int = Field(256, ge=1)
    """Held-out prompts, the same at every evaluation."""
    eval_temperature: float = Field(1.0, ge=0.0)
    """At which the float32 policy itself answers them, once each; 0 is greedy."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks."""
    pp: int = Field(1, ge=1)
    """Pipeline stages."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks; what remains of the world is data-parallel."""

    @field_validator("task")
    @classmethod
    def _known(cls, name: str) -> str:
        return get_task(name).name

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas is {list(betas)}: each is at least 0 and below 1.")
        return betas

    @model_validator(mode="after")
    def _divides(self) -> LabSettings:
        if self.samples_per_prompt % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} must divide the {self.samples_per_prompt} samples of a prompt."
            )
        if self.hidden % self.heads:
            raise ValueError(f"heads {self.heads} must divide hidden, which is {self.hidden}.")
        for name, size, split in (
            ("tp", self.tp, {"kv_groups": self.kv_groups, "ffn": self.ffn}),
            ("pp", self.pp, {"layers": self.layers}),
        ):
            for part, whole in split.items():
                if whole % size:
                    raise ValueError(f"{name} is {size} and must divide {part}, which is {whole}.")
        return self

    @model_validator(mode="after")
    def _engine_has_dtype(self) -> LabSettings:
        if self.engine == "sglang" and self.rollout_dtype in BITS:
            raise ValueError(
                f"rollout_dtype {self.rollout_dtype} is not made by the engine sglang: choose float32, bfloat16 or "
                f"float16."
            )
        if self.engine == "batched" and self.rollout_dtype in ("bfloat16", "float16"):
            raise ValueError(
                f"rollout_dtype {self.rollout_dtype} is not made by the engine batched: choose float32, "
                f"{', '.join(BITS)}."
            )
        if (self.engine == "batched") != (self.position == "learned_absolute"):
            raise ValueError(
                f"position {self.position} is not the engine {self.engine}'s: learned_absolute goes with batched, rope "
                f"with transformers and sglang."
            )
        return self

    @model_validator(mode="after")
    def _acts(self) -> LabSettings:
        """A field that would be ignored is refused: who sets it believes that it was tried."""
        if self.top_p == 1.0 and self.top_p_log_probs != "behaviour":
            raise ValueError(f"top_p_log_probs {self.top_p_log_probs} goes with top_p below 1: set both or none.")
        if self.engine != "batched":
            return self
        if self.top_p != 1.0:
            raise ValueError(f"top_p {self.top_p:g}: the engine batched has no top_p; choose transformers or sglang.")
        if self.eval_temperature != 1.0:
            raise ValueError("eval_temperature: with the engine batched exact match is computed, not sampled.")
        if len({len(prompt) for prompt in get_task(self.task).prompts(16, 0)}) > 1:
            raise ValueError(f"task {self.task} has prompts of several lengths, which the engine batched does not.")
        return self

    @model_validator(mode="after")
    def _engine_has_experts(self) -> LabSettings:
        if self.experts and self.engine != "batched":
            raise ValueError(f"experts {self.experts}: the engine {self.engine} serves a dense Llama; choose batched.")
        if self.experts == 1 or (self.expert_flips and not self.experts):
            raise ValueError(
                f"experts {self.experts}, expert_flips {self.expert_flips}: a router chooses from at least 2 experts; "
                f"0 is a dense model, in which nothing flips."
            )
        return self

    @property
    def samples(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_batch * self.samples_per_prompt

    def version_for(self, step: int) -> int:
        """The optimizer step whose weights sample the rollout batch that is first trained on after `step`."""
        return max(0, step - self.staleness)

    def samples_later(self, step: int) -> bool:
        """Whether a rollout batch samples from the weights after `step` optimizer steps."""
        return step == 0 or (step + self.staleness) % self.mini_batches == 0

    def evaluates(self, step: int) -> bool:
        """Whether held-out prompts are asked after `step` optimizer steps."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    def seed_for(self, *purpose: object) -> int:
        """A seed for one purpose: independent of every other, and the same in every variant of the run."""
        return zlib.crc32(".".join(map(str, (self.seed, *purpose))).encode())

    @property
    def warm_up_key(self) -> str:
        """A file name for the warm weights: equal for all runs that start from the same ones."""
        shared = ("task", "seed", "layers", "hidden", "heads", "kv_groups", "ffn", "position", "betas", "clip_grad")
        shared += ("eval_prompts", "experts")
        values = {name: value for name, value in self.model_dump().items() if name in shared or "warm_up" in name}
        values["version"] = mismatch_plugin.__version__  # another release may draw other initial weights
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task}-seed{self.seed}-{digest}.pt"
