"""The settings of one RL run of the lab. Importing this imports neither megatron-core nor transformers."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

import mismatch_plugin
from mismatch_plugin.lab.engines import EngineName, RolloutDtype
from mismatch_plugin.lab.tasks import get_task


class LabSettings(BaseModel):
    """One run: task, model, rollout engine, optimizer. The defaults are those of the measured starting point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = "reverse"
    """Name of a task: reverse, swap."""
    seed: int = 0
    """Everything random follows from it: initial weights, prompts, sampling, order of samples."""

    layers: int = Field(2, ge=1)
    """Transformer layers."""
    hidden: int = Field(64, ge=1)
    """Width."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_groups: int = Field(4, ge=1)
    """Key and value heads."""
    ffn: int = Field(192, ge=1)
    """Width of the MLP."""

    engine: EngineName = "transformers"
    """What samples: transformers in this process, or an SGLang server, whose sampling follows no seed on CPU."""
    rollout_dtype: RolloutDtype = "float32"
    """Numerical form of the rollout engine; the trainer is float32."""
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
    """Optimizer steps taken on a rollout batch. With 1, algorithms 2 and 3 are the same update."""
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

    @model_validator(mode="after")
    def _divides(self) -> LabSettings:
        if self.samples % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} must divide the {self.samples} samples of a rollout batch."
            )
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
        if self.engine == "sglang" and self.rollout_dtype in ("int8", "int4"):
            raise ValueError(
                f"rollout_dtype {self.rollout_dtype} is made by the engine transformers alone: choose float32, "
                f"bfloat16 or float16 with the engine sglang."
            )
        return self

    @property
    def samples(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_batch * self.samples_per_prompt

    def seed_for(self, *purpose: object) -> int:
        """A seed for one purpose: independent of every other, and the same in every variant of the run."""
        return zlib.crc32(".".join(map(str, (self.seed, *purpose))).encode())

    @property
    def warm_up_key(self) -> str:
        """A file name for the warm weights: equal for all runs that start from the same ones."""
        shared = ("task", "seed", "layers", "hidden", "heads", "kv_groups", "ffn", "betas", "clip_grad", "eval_prompts")
        values = {name: value for name, value in self.model_dump().items() if name in shared or "warm_up" in name}
        values["version"] = mismatch_plugin.__version__  # another release may draw other initial weights
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task}-seed{self.seed}-{digest}.pt"
