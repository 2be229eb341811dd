"""Rollout engines of the lab: the trainer's weights in another numerical form, behind one small interface.

    engine = TransformersEngine(llama_config(settings), dtype="int8", eos=12, pad=13)
    engine.load_weights(llama_state_dict(gather_parameters(model), settings), version=0)
    records = engine.generate(prompts, samples_per_prompt=8, max_new_tokens=7, seed=0)

Another engine (a server, say) needs the same two methods and nothing else; weights arrive under Hugging Face's names.
Importing this imports neither megatron-core nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan
from mismatch_plugin.rollout.sampling import SamplingParameters

EngineName = Literal["transformers", "sglang", "batched"]
RolloutDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "int3", "int2"]
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
"""Of the forms that round the linear layers' weights to integers."""


class RolloutEngine(Protocol):
    """Samples responses from weights that it was given."""

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Take over weights under Hugging Face's names; what is sampled from now on carries `version`."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int,
    ) -> list[RolloutRecord]:
        """`samples_per_prompt` responses to each prompt, prompt by prompt. temperature 0 is greedy.

        Under top_p records have `kept_ids` and `behaviour_log_probs`, renormalised over them; without it they do not.
        """
        ...


class Drawn(NamedTuple):
    """Each [B]: token ids, their log-probs over the whole vocabulary, and over what they were drawn from; and that,
    [B, V] bool."""

    ids: Tensor
    log_probs: Tensor
    behaviour: Tensor
    kept: Tensor


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Drawn:
    """One token per row of `logits` [B, V].

    top-p keeps the fewest most likely tokens whose probability reaches it, and at least one. Log-probs are float32.
    """
    log_probs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    behaviour = log_probs
    if top_p < 1.0:
        ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        behaviour = log_probs.masked_fill(dropped, float("-inf")).log_softmax(-1)
    if temperature:
        # argmax of p / E with exponential E draws from p (the Gumbel trick), in one pass.
        noise = torch.empty_like(behaviour).exponential_(generator=generator)
        ids = (behaviour.exp() / noise).argmax(-1)
    else:
        ids = logits.argmax(-1)
    chosen = ids[:, None]
    return Drawn(ids, log_probs.gather(-1, chosen)[:, 0], behaviour.gather(-1, chosen)[:, 0], behaviour.isfinite())


def quantised(weight: Tensor, bits: int) -> Tensor:
    """`weight` [out, in] rounded to symmetric integers of `bits` with one scale per output channel, as floats again."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / largest
    return (weight / scale).round().clamp(-largest, largest) * scale


class TransformersEngine:
    """transformers' LlamaForCausalLM with a KV cache.

    Args:
        config: fields of LlamaConfig (`export.llama_config`).
        dtype: of weights, activations and cache. int8 to int2 round the linear layers' weights (not the embeddings)
            and compute in float32.
        eos, pad: ids.
    """

    def __init__(self, config: Mapping[str, Any], dtype: RolloutDtype = "float32", *, eos: int, pad: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.eos, self.pad, self.version = eos, pad, -1
        self.bits = BITS.get(dtype)
        compute = torch.float32 if self.bits else getattr(torch, dtype)
        model: Any = LlamaForCausalLM(LlamaConfig(**config))
        self.model = model.to(compute).eval().requires_grad_(False)

    @torch.no_grad()
    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Copy the weights in this engine's numerical form. Raises ValueError if a name is missing or too much."""
        own = self.model.state_dict()
        if own.keys() != state_dict.keys():
            names = ", ".join(sorted(own.keys() ^ state_dict.keys()))
            raise ValueError(f"weights do not fit the model, missing or unknown: {names}.")
        for name, target in own.items():
            weight = state_dict[name]
            if self.bits and weight.dim() == 2 and "embed" not in name:
                weight = quantised(weight, self.bits)
            target.copy_(weight)
        self.version = version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int,
    ) -> list[RolloutRecord]:
        """All prompts as one batch, each prefilled once for all its samples."""
        generator = torch.Generator().manual_seed(seed)
        steps: list[Drawn] = []
        # On CPU the megatron shim looks at every torch call of the process; nothing in here needs it to.
        with torch._C.DisableTorchFunction():
            logits, cache, mask = self._prefill(prompts, samples_per_prompt)
            done = torch.zeros(logits.shape[0], dtype=torch.bool)
            while True:
                steps.append(draw(logits, temperature, top_p, generator))
                done |= steps[-1].ids == self.eos
                if len(steps) == max_new_tokens or bool(done.all()):
                    break
                positions = None
                if mask is not None:
                    positions = mask.sum(-1, keepdim=True)
                    mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=-1)
                logits = self._forward(steps[-1].ids[:, None], cache, mask, positions)
        sampling = SamplingParameters(
            temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, stop_token_ids=(self.eos,), seed=seed
        )
        return self._records(prompts, samples_per_prompt, steps, sampling)

    def _prefill(self, prompts: Sequence[Sequence[int]], samples: int) -> tuple[Tensor, Any, Tensor | None]:
        """(logits of the first token, cache, attention mask or None), for every sample."""
        from transformers import DynamicCache

        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = positions = None
        if any(len(prompt) < width for prompt in prompts):  # padding on the left, so that all end at the same column
            lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
            mask = (torch.arange(width) >= width - lengths).long()
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache()
        logits = self._forward(ids, cache, mask, positions)
        if samples > 1:
            cache.batch_repeat_interleave(samples)
            logits = logits.repeat_interleave(samples, dim=0)
            mask = None if mask is None else mask.repeat_interleave(samples, dim=0)
        return logits, cache, mask

    def _forward(self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _records(
        self, prompts: Sequence[Sequence[int]], samples: int, steps: list[Drawn], sampling: SamplingParameters
    ) -> list[RolloutRecord]:
        ids, log_probs, behaviour = (
            torch.stack(column, dim=1).tolist() for column in list(zip(*steps, strict=True))[:3]
        )
        records = []
        for row, response in enumerate(ids):
            stopped = self.eos in response
            length = response.index(self.eos) + 1 if stopped else len(response)
            record = RolloutRecord(
                prompt_ids=list(prompts[row // samples]),
                response_ids=response[:length],
                rollout_log_probs=log_probs[row][:length],
                loss_mask=[1] * length,
                sampling=sampling,
                finish_reason="stop" if stopped else "length",
                weight_versions=[WeightSpan(version=str(self.version), start=0, end=length)],
                behaviour_log_probs=behaviour[row][:length] if sampling.filtered else None,
                kept_ids=[step.kept[row].nonzero()[:, 0].tolist() for step in steps[:length]]
                if sampling.filtered
                else None,
            )
            records.append(record)
        return records
