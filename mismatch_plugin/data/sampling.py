"""What the sampler was told, and what bias its settings leave in the returned log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SGLANG_TOP_K_OFF = 1 << 30
"""How SGLang itself writes "no top-k"."""
GREEDY_BELOW = 1e-6
"""Temperatures below are greedy to SGLang: it replaces them by temperature 1 and top_k 1."""
_OTHER_DISTRIBUTION = {
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag"), "constrained decoding"),
    "logit_bias": "a shift of single logits",
    "custom_params": "for a custom logit processor",
    "watermark": "a watermark",
    "beam_width": "beam search",
}
"""What tokens are drawn from then is neither in the returned log-probs nor known to the training side."""


class SamplingParameters(BaseModel):
    """What the sampler was told, in SGLang's terms and with its defaults (`seed` is its `sampling_seed`).

    None means the default, as SGLang reads it. What changes the distribution and is not a field is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="below 1e-6: greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, description="-1: off; SGLang's 2^30 is read as off")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    max_new_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_sglang_reads_it(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        for name, what in _OTHER_DISTRIBUTION.items():
            value = given.pop(name, None)
            if value and (name, value) != ("beam_width", 1):  # empty is unset, to SGLang too
                raise ValueError(
                    f"{name} is {what}: tokens are then drawn from a distribution that neither the returned log-probs "
                    f"nor the training side know, and no importance weight can repair that. Leave it out"
                )
        return given

    @field_validator("stop", "stop_regex", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

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
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the returned log-probs: 1 where it is greedy, whatever was asked for.

        With top_k 1 that holds for a server whose running requests are all greedy; next to others it is `temperature`.
        """
        return 1.0 if self.greedy else self.temperature

    @property
    def filtered(self) -> bool:
        """top-p, top-k or min-p cut the distribution, which SGLang's log-probs do not show."""
        return bool(self.filters)

    @property
    def filters(self) -> list[str]:
        """The filters that are on, as "top_p=0.9"."""
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return [f"{name}={getattr(self, name)}" for name, value in off.items() if getattr(self, name) != value]

    @property
    def penalised(self) -> bool:
        """Penalties shift the logits by what was generated before; SGLang's log-probs contain that."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def to_sglang(self) -> dict[str, Any]:
        """The `sampling_params` of a request. All are sent, so that no default of a server or model steps in."""
        sent = self.model_dump(exclude={"seed"})
        sent["sampling_seed"] = self.seed
        for name in ("stop", "stop_regex", "stop_token_ids"):
            sent[name] = list(sent[name]) or None
        # An absent max_new_tokens means 128, while null would mean "no bound".
        return {name: value for name, value in sent.items() if value is not None}


def filter_bias(
    *, top_p: float | None = 1.0, top_k: int | None = -1, min_p: float | None = 0.0, renormalised: bool | None
) -> str:
    """What a filter without the sampling mask does to the ratio, for a start-up block; empty where none is on.

    For equal engines E ρ = Σ_kept π: at least p under top-p, which keeps the fewest ids that reach p; any share of the
    whole under top-k and min-p.

    renormalised: whether the engine's log-probs are over what the filters kept, which shows in the mean ratio; taken
        before the filters they hide it. None: not known.
    """
    off = {"top_p": (None, 0, 1.0), "top_k": (None, 0, -1, SGLANG_TOP_K_OFF), "min_p": (None, 0.0)}
    given = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    on = {name: value for name, value in given.items() if value not in off[name]}
    if not on:
        return ""
    metric = "rollout_corr/rollout_is_ratio_mean"
    bound = "no bound is known (top_k and min_p may keep any share)" if on.keys() - {"top_p"} else f"in [{top_p:g}, 1]"
    shows = {
        True: f"{metric} shows it",
        False: f"{metric} does not show it, as the engine's log-probs are those before the filter: it stays near 1",
        None: f"{metric} shows it if the engine renormalises its log-probs over what was kept, and stays near 1 if not",
    }
    named = ", ".join(f"{name} {value:g}" for name, value in on.items())
    return (
        f"{named} without a sampling mask: tokens are drawn from what the filter kept, and the trainer's log-probs are "
        f"over the whole vocabulary. The mean ratio E ρ is the kept mass, for equal engines {bound}; "
        f"{shows[renormalised]}"
    )


def remaining_bias(sampling: SamplingParameters, *, renormalised: bool, replayed: bool) -> str:
    """What stays wrong with the log-probs of a response sampled so; empty if nothing does.

    renormalised: the log-probs used are over the ids that the filters kept. replayed: the training side computes its
        own over them too (`data.pack.sampling_mask`).
    """
    if sampling.greedy:
        return (
            "greedy sampling (temperature below 1e-6, or top_k 1): tokens had probability 1, their log-probs are those "
            "of sampling without filters at temperature 1, whatever temperature was asked for; no importance weight "
            "can repair a policy that never explores. Sample with temperature > 0 and top_k ≠ 1."
        )
    notes = []
    bias = filter_bias(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, renormalised=renormalised)
    if bias and not (renormalised and replayed):
        notes.append(f"{bias}. Request return_sampling_mask (SGLang 0.5.23 needs a finite top_k), or sample without.")
    if sampling.penalised:
        notes.append(
            "penalties are part of the returned log-probs, and the training side does not apply them: the weights have "
            "more variance. Sample with repetition_penalty 1, frequency_penalty 0, presence_penalty 0."
        )
    if sampling.min_new_tokens > 0:
        notes.append(
            f"min_new_tokens={sampling.min_new_tokens} forbids the end token in the first tokens; the training side "
            "does not. Sample with min_new_tokens 0."
        )
    return " ".join(notes)
