"""What the sampler was told, and what bias its settings leave in the returned log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

SGLANG_TOP_K_OFF = 1 << 30
"""How SGLang itself writes "no top-k"."""


class SamplingParameters(BaseModel):
    """What the sampler was told, in SGLang's terms and with its defaults (`seed` is its `sampling_seed`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, description="-1: off; SGLang's 2^30 is read as off")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    max_new_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == SGLANG_TOP_K_OFF:
            return -1
        if value != -1 and value < 1:
            raise ValueError(f"top_k={value} must be at least 1, or -1 for off")
        return value

    @property
    def greedy(self) -> bool:
        """No chance in it: the sampler takes the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """top-p, top-k or min-p cut the distribution, which SGLang's log-probs do not show."""
        return self.top_p < 1.0 or self.top_k != -1 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Penalties shift the logits by what was generated before; SGLang's log-probs contain that."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def to_sglang(self) -> dict[str, Any]:
        """The `sampling_params` of a request. All are sent, so that no default of a server or model steps in."""
        sent = self.model_dump(exclude={"seed", "stop_token_ids"})
        if self.stop_token_ids:
            sent["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            sent["sampling_seed"] = self.seed
        if sent["max_new_tokens"] is None:
            del sent["max_new_tokens"]  # null would mean "no bound" there, absent means 128
        return sent

    @classmethod
    def from_sglang(cls, sampling_params: Mapping[str, Any] | None) -> SamplingParameters:
        """Read the `sampling_params` of a request. Raises ValidationError for what changes the distribution in a way
        that is not known here (`logit_bias`, grammars, …)."""
        given = {key: value for key, value in (sampling_params or {}).items() if value is not None}
        if "sampling_seed" in given:
            given["seed"] = given.pop("sampling_seed")
        return cls(**given)


def remaining_bias(sampling: SamplingParameters, *, has_kept_ids: bool) -> str:
    """What stays wrong with the log-probs of a response sampled so; empty if nothing does.

    has_kept_ids: the log-probs used are those renormalised over the sampling mask, and the training side computes its
    own over the kept ids too (`packing.sampling_mask`).
    """
    if sampling.greedy:
        return (
            "greedy sampling: the behaviour policy gives its token probability 1, the returned log-prob is that of "
            "sampling at temperature 1 (temperature 0) or of the unfiltered distribution (top_k 1), and no importance "
            "weight can repair a policy that never explores. Sample with temperature > 0 and top_k ≠ 1."
        )
    notes = []
    filters = [
        f"{name}={getattr(sampling, name)}"
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0))
        if getattr(sampling, name) != off
    ]
    if filters and not has_kept_ids:
        notes.append(
            f"{', '.join(filters)} without the sampling mask: tokens were drawn from what the filters kept, but their "
            "log-probs are over the full vocabulary. Each is too low by −log(kept mass), so that every ratio "
            "π_train/π_rollout is too high by 1/(kept mass) and grows with the response length at sequence level. "
            "Request return_sampling_mask (SGLang needs a finite top_k for it), or sample with top_p 1, top_k −1, "
            "min_p 0. And what the training policy gives to tokens outside the kept set cannot be reweighted."
        )
    if sampling.penalised:
        notes.append(
            "penalties are part of the returned log-probs and depend on the tokens before: the training side, which "
            "does not apply them, is compared with another distribution. Importance weights correct it, with more "
            "variance; sample with repetition_penalty 1, frequency_penalty 0, presence_penalty 0."
        )
    if sampling.min_new_tokens > 0:
        notes.append(
            f"min_new_tokens={sampling.min_new_tokens} forbids the end token in the first tokens, as the training side "
            "does not: their log-probs are over a vocabulary without it. Sample with min_new_tokens 0."
        )
    return " ".join(notes)
