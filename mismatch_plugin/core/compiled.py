"""`policy_loss` and `correct` as one compiled graph, whatever the numbers of tokens and sequences are (torch.compile).

The graph is a function of tensors alone: names, lengths and settings are fixed in Python while it is traced. Sizes are
symbols. A dummy sequence is appended to every batch, so that one sequence is no special case; it holds no token, but
for batches of fewer than two, which get two that the loss mask hides. Neither is seen in the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mismatch_plugin.core.correction import Correction, SequenceGroups, correct, refuse_missing, training_side
from mismatch_plugin.core.loss import TERMS, PolicyLoss, anchors, policy_loss, refuse_unfit
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.stage import locators
from mismatch_plugin.core.statistics import Statistics
from mismatch_plugin.core.tokens import Tokens

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

_INPUTS = (
    "loss_mask",
    "rollout_log_probs",
    "train_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "entropy",
)
_FULL_INPUTS = ("positions", "weight_versions")
_PER_TOKEN = ("mask", "padding", "train", "rollout", "log_ratio", "code")

_Names = dict[str, tuple[str, ...]]
"""Of a graph's statistics: sums, maxima, and the sums of the loss."""

_Key = tuple[bool | tuple[str, torch.dtype, bool], ...]
"""Whether gradients are enabled; name, dtype and requires_grad of every tensor."""


def compile_policy_loss(
    config: MismatchConfig, groups: SequenceGroups | None = None, **options: Any
) -> CompiledPolicyLoss:
    """`policy_loss` of one configuration, compiled at its first call; called as compiled(log_probs, packed, factor).

    One graph for all batches that have the same fields, dtypes and device: other numbers of tokens and sequences do not
    compile again. Results equal the eager ones up to rounding; the context-parallel collectives are part of the graph.
    options: of torch.compile, over dynamic=True and fullgraph=True: backend, mode, … With mode="reduce-overhead" (CUDA
    graphs) torch records once for each pair of sizes, so pad micro-batches to few of them; and a result is overwritten
    by the next call, so clone what you keep, statistics among it.
    Errors, host syncs (none) and gradients: as `policy_loss`; but one backward pass, since the graph gives its memory
    away in the first (no retain_graph).
    """
    return CompiledPolicyLoss(config, groups, options)


def compile_correct(config: MismatchConfig, groups: SequenceGroups | None = None, **options: Any) -> CompiledCorrect:
    """`correct` of one configuration, compiled as by `compile_policy_loss`; called as compiled(packed, factor)."""
    return CompiledCorrect(config, groups, options)


class CompiledPolicyLoss:
    """What `compile_policy_loss` returns."""

    def __init__(self, config: MismatchConfig, groups: SequenceGroups | None, options: dict[str, Any]) -> None:
        self.config, self.groups = config, groups
        self._graphs = _Graphs(self._trace, options)

    def __call__(
        self, log_probs: Tensor, packed: PackedSequences, batch_factor: Tensor | float | None = None
    ) -> PolicyLoss:
        """As `policy_loss`."""
        refuse_unfit(log_probs, packed, self.config)
        refuse_missing(packed, self.config)
        out, names = self._graphs(_inputs(packed, self.config, batch_factor, log_probs))
        out["sums"] = out["loss sums"][: len(names["sums"])]
        correction = _correction(out, names, packed, self.config, anchors(log_probs, packed, self.config)[1])
        terms = {name: out[f"term {name}"] for name in TERMS if f"term {name}" in out}
        loss_sum, denominator, original = (out[name] for name in ("loss_sum", "denominator", "terms_denominator"))
        statistics = Statistics(
            out["loss sums"], out["maxima"], names["loss"], names["maxima"], self.config, correction.statistics.locators
        )
        return PolicyLoss(loss_sum, denominator, terms, original, correction, statistics)

    def _trace(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor | None], _Names]:
        result = policy_loss(inputs["log_probs"], _traced(inputs), self.config, self.groups, inputs.get("batch_factor"))
        out, names = _flat(result.correction)
        del out["sums"]  # the loss's begin with them
        out |= {f"term {name}": term for name, term in result.terms.items()}
        out |= {"loss_sum": result.loss_sum, "denominator": result.denominator, "loss sums": result.statistics.sums}
        out["terms_denominator"] = result.terms_denominator
        return out, {**names, "loss": result.statistics.sum_names}


class CompiledCorrect:
    """What `compile_correct` returns."""

    def __init__(self, config: MismatchConfig, groups: SequenceGroups | None, options: dict[str, Any]) -> None:
        self.config, self.groups = config, groups
        self._graphs = _Graphs(self._trace, options)

    def __call__(self, packed: PackedSequences, batch_factor: Tensor | float | None = None) -> Correction:
        """As `correct`."""
        refuse_missing(packed, self.config)
        train = training_side(packed)
        out, names = self._graphs(_inputs(packed, self.config, batch_factor))
        return _correction(out, names, packed, self.config, train)

    def _trace(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor | None], _Names]:
        return _flat(correct(_traced(inputs), self.config, self.groups, inputs.get("batch_factor")))


class _Graphs:
    """A Python function of named tensors as compiled graphs, one for every `_Key`.

    torch would compile for each of these again by itself, up to a number at which it refuses.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor | None], _Names]],
        options: dict[str, Any],
    ) -> None:
        self.function = function
        self.options = {"dynamic": True, "fullgraph": True, **options}
        self.compiled: dict[_Key, Callable[..., tuple[Tensor, ...]]] = {}
        self.traced: dict[_Key, tuple[tuple[str, ...], _Names]] = {}

    def __call__(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], _Names]:
        kinds = ((name, value.dtype, value.requires_grad) for name, value in inputs.items())
        key = (torch.is_grad_enabled(), *kinds)
        if key not in self.compiled:
            self.compiled[key] = self._compile(key, tuple(inputs))
        values = self.compiled[key](*inputs.values())
        outputs, names = self.traced[key]
        return dict(zip(outputs, values, strict=True)), names

    def _compile(self, key: _Key, given: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
        def stage(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs, names = self.function(dict(zip(given, tensors, strict=True)))
            present = {name: value for name, value in outputs.items() if value is not None}
            self.traced[key] = tuple(present), names
            return tuple(present.values())

        # Its Python (dataclasses, pydantic) is run once per trace, not read as bytecode: only its tensors matter.
        torch.compiler.allow_in_graph(stage)

        def graph(*tensors: Tensor) -> tuple[Tensor, ...]:
            return stage(*tensors)

        # torch counts recompilations by code object, and this one would be shared by all configurations.
        graph.__code__ = graph.__code__.replace()
        return torch.compile(graph, **self.options)


def _inputs(
    packed: PackedSequences,
    config: MismatchConfig,
    batch_factor: Tensor | float | None,
    log_probs: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors of a batch, by name, none of a size that compilers treat as special (0 and 1)."""
    names = _INPUTS + (_FULL_INPUTS if config.metrics == "full" else ())
    inputs = {name: value for name in names if (value := getattr(packed, name)) is not None}
    if log_probs is not None:
        inputs["log_probs"] = log_probs
    inputs["sequence_index"] = packed.sequence_index
    if packed.loss_mask.shape[0] < 2:
        inputs = {name: torch.cat([value, value.new_zeros(2)]) for name, value in inputs.items()}
        inputs["sequence_index"][-2:] = max(1, len(packed.lengths))
    inputs["offsets"] = packed.offsets if packed.lengths else packed.offsets.new_zeros(2)
    if isinstance(batch_factor, Tensor):
        inputs["batch_factor"] = batch_factor
    elif batch_factor is not None:  # a tensor, lest another number be another graph
        device = packed.loss_mask.device
        inputs["batch_factor"] = torch.full((), batch_factor, dtype=torch.float64, device=device)
    return inputs


def _traced(inputs: dict[str, Tensor]) -> PackedSequences:
    """The batch inside a graph, with its dummy sequence. It has no lengths on the host, and so none of the checks."""
    packed = object.__new__(PackedSequences)
    values: dict[str, Any] = {item.name: inputs.get(item.name) for item in fields(PackedSequences)}
    offsets, tokens = inputs["offsets"], inputs["loss_mask"].shape[0]
    place = torch.arange(offsets.shape[0] + 1, device=offsets.device)
    last = offsets.shape[0] - 1
    offsets = torch.where(place <= last, offsets[place.clamp(max=last)], offsets.new_full((), tokens))
    values |= {"lengths": (), "sequence_ids": (), "invalid": (), "sequence_index": inputs["sequence_index"]}
    packed.__dict__.update(values, offsets=offsets)
    return packed


def _flat(c: Correction) -> tuple[dict[str, Tensor | None], _Names]:
    out: dict[str, Tensor | None] = {name: getattr(c.tokens, name) for name in _PER_TOKEN}
    out |= {"weights": c.weights, "keep": c.keep, "tokens_N": c.tokens_N, "kept_N": c.kept_N}
    out |= {"sums": c.statistics.sums, "maxima": c.statistics.maxima}
    out["factor"] = c.factor if isinstance(c.factor, Tensor) else None
    return out, {"sums": c.statistics.sum_names, "maxima": c.statistics.maximum_names}


def _forget_padding(sums: Tensor, names: tuple[str, ...], packed: PackedSequences) -> None:
    """Take the tokens that `_inputs` added out of the only sum that counts what the loss mask hides."""
    if packed.loss_mask.shape[0] < 2 and "invalid_padding" in names:
        sums[names.index("invalid_padding")] -= 2.0


def _correction(
    out: dict[str, Tensor],
    names: _Names,
    packed: PackedSequences,
    config: MismatchConfig,
    train_T: Tensor,
) -> Correction:
    count, sequences = packed.loss_mask.shape[0], len(packed.lengths)
    _forget_padding(out["sums"], names["sums"], packed)
    if count < 2:
        out = {**out, **{name: out[name][:count] for name in (*_PER_TOKEN, "weights", "keep") if name in out}}
    tokens = Tokens(*(out.get(name) for name in _PER_TOKEN))  # type: ignore[arg-type]  # only `code` may be None
    where = locators(config, packed, train_T)
    statistics = Statistics(out["sums"], out["maxima"], names["sums"], names["maxima"], config, where)
    return Correction(
        out["weights"],
        out["keep"],
        statistics,
        tokens,
        out["tokens_N"][:sequences],
        out["kept_N"][:sequences],
        out.get("factor"),
    )
