"""Ragged sequences as flat tensors with offsets: the form in which everything here computes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.core.units import SequenceParts, chunk_parts, number_runs, unit_parts
from mismatch_plugin.core.validity import InvalidLogProb, find_invalid

if TYPE_CHECKING:
    from mismatch_plugin.config.units import Unit

_INTEGER_FIELDS = ("positions", "weight_versions", "unit_ids")
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that are widened to float32: sums over a response would lose all digits."""
_TOKEN_FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy", *_INTEGER_FIELDS)
_ONE_POLICY = (
    "old_log_probs and train_log_probs are two names of log π_old, the policy before the step: give one of them. "
    "π_θ goes to policy_loss as log_probs."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequences:
    """N sequences, one after the other, T tokens in all. Build with `from_lists` or `from_padded`, or directly.

    loss_mask [T] bool: response tokens that train. lengths: tokens of each sequence on this rank, on the host.
    The rest is optional, [T], floating point of at least float32:

    * rollout_log_probs: log π_rollout
    * old_log_probs: log π_old; its other spelling, where packing functions and `replace` take it, is train_log_probs
    * ref_log_probs, advantages
    * entropy: in nats; may carry gradient
    * positions: index of the token in its response, integer; under context parallelism the global one
    * weight_versions: integer
    * unit_ids: number of the token's unit (turn, tool call, paragraph) in its sequence, integer, from 0 and never
      falling; without them units are the runs of `loss_mask`. Under context parallelism they and unit_counts are those
      of the whole sequences

    trainer_version: number of the weights that train, counted as weight_versions are; an int on the host.
    unit_counts: units of each sequence, the same on every rank that holds a part of it (some may be empty).
    chunk_lengths: under context parallelism, of each sequence this rank's tokens in each of the chunks it is cut into,
    in order, 0 in those of other ranks (`parallel.context` makes both).
    rewards: [N]. sequence_ids: names for error messages. padded_width: S of the [B, S] tensors of `from_padded`.
    invalid, invalid_counts: the first invalid log-probs of each kind found on the CPU, and how many there are.
    """

    loss_mask: Tensor
    lengths: tuple[int, ...]
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None
    positions: Tensor | None = None
    weight_versions: Tensor | None = None
    trainer_version: int | None = None
    unit_ids: Tensor | None = None
    unit_counts: tuple[int, ...] | None = None
    chunk_lengths: tuple[tuple[int, ...], ...] | None = None
    rewards: Tensor | None = None
    sequence_ids: tuple[object, ...] = ()
    padded_width: int | None = None
    invalid: tuple[InvalidLogProb, ...] = ()
    invalid_counts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = sum(self.lengths)
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask has dtype {self.loss_mask.dtype}: pass a bool tensor (mask != 0).")
        for name in ("loss_mask", *_TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None and value.shape != (tokens,):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, but lengths add up to {tokens} tokens: pass one flat "
                    f"value a token."
                )
            if value is not None and name in _INTEGER_FIELDS and value.is_floating_point():
                raise ValueError(f"{name} has dtype {value.dtype}: pass whole numbers, such as int64.")
            if value is not None and name.endswith("log_probs") and value.dtype == torch.bool:
                raise ValueError(f"{name} has dtype torch.bool: pass log-probs, such as float32 (is it a mask?).")
            if value is not None and name in _TOKEN_FIELDS and value.dtype in HALF:
                object.__setattr__(self, name, value.float())
        version = self.trainer_version
        if version is not None:
            if isinstance(version, bool) or operator.index(version) < 0:
                raise ValueError(f"trainer_version is {version!r}: pass the number of the weights that train.")
            object.__setattr__(self, "trainer_version", operator.index(version))
        if not self.sequence_ids:
            object.__setattr__(self, "sequence_ids", tuple(range(len(self.lengths))))
        for name in ("sequence_ids", "unit_counts", "chunk_lengths"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.lengths):
                raise ValueError(f"{name} has {len(value)} entries for {len(self.lengths)} sequences.")

    def __repr__(self) -> str:
        held = ", ".join(name for name in _TOKEN_FIELDS if getattr(self, name) is not None)
        trained = int(self.loss_mask.sum())
        return f"PackedSequences({len(self.lengths)} sequences, {sum(self.lengths)} tokens, {trained} train; {held})"

    @property
    def train_log_probs(self) -> Tensor | None:
        """`old_log_probs` by its other name."""
        return self.old_log_probs

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1] int64: sequence i holds tokens offsets[i] to offsets[i + 1]."""
        return torch.tensor([0, *self.lengths], device=self.loss_mask.device).cumsum(0)

    @cached_property
    def sequence_index(self) -> Tensor:
        """[T] int32: the sequence of each token."""
        order = torch.arange(len(self.lengths), dtype=torch.int32, device=self.loss_mask.device)
        return torch.repeat_interleave(order, self.offsets.diff(), output_size=sum(self.lengths))

    @cached_property
    def response_positions(self) -> Tensor:
        """[T] integer: `positions`, or the index inside the local sequence."""
        if self.positions is not None:
            return self.positions
        tokens = torch.arange(self.loss_mask.shape[0], device=self.loss_mask.device)
        return tokens - self.offsets.index_select(0, self.sequence_index)

    def unit_numbers(self) -> tuple[Tensor, tuple[int, ...]]:
        """([T] number of each token's unit, units of each sequence): as given, else the runs of `loss_mask`. Host
        syncs: none, but for unit_ids on a device without unit_counts. ValueError for CPU unit_ids that are none."""
        if self.unit_ids is None:
            return number_runs(self.loss_mask, self.lengths, self.sequence_index)
        return self.unit_ids, checked_units(self.unit_ids, self.unit_counts, self.lengths, self.sequence_ids)

    @cached_property
    def units(self) -> SequenceParts:
        """What `unit_ids` number in every sequence, or its turns."""
        return unit_parts(*self.unit_numbers(), self.sequence_index)

    @cached_property
    def chunks(self) -> SequenceParts:
        """The chunks of every sequence, one where `chunk_lengths` was not given."""
        whole = tuple((length,) for length in self.lengths)
        return chunk_parts(whole if self.chunk_lengths is None else self.chunk_lengths, self.loss_mask.device)

    @property
    def whole(self) -> SequenceParts:
        """Every sequence as one part."""
        return SequenceParts(self.offsets, self.sequence_index, self.offsets, self.sequence_index, width=1)

    def parts(self, unit: Unit) -> SequenceParts:
        """Over which log-ratios and tokens are summed for a unit."""
        return self.units if unit.cut == "ids" else self.chunks if unit.aggregate == "running" else self.whole

    def replace(self, **changes: Any) -> PackedSequences:
        """A copy with some fields changed; offsets made once stay, so that this costs no copy to the device.
        Raises ValueError where old_log_probs is given in both spellings."""
        if "train_log_probs" in changes:
            if "old_log_probs" in changes:
                raise ValueError(_ONE_POLICY)
            changes["old_log_probs"] = changes.pop("train_log_probs")
        if changes.keys() & {"loss_mask", "lengths", "rollout_log_probs", "old_log_probs"}:
            # What was found belongs to the values before.
            changes = {"invalid": (), "invalid_counts": {}, **changes}
        if "lengths" in changes:
            changes = {"padded_width": None, **changes}
        copy = replace(self, **changes)
        if copy.lengths == self.lengths:
            same = ["offsets", "sequence_index", "padded_index"]
            same += [] if changes.keys() & {"loss_mask", "unit_ids", "unit_counts"} else ["units"]
            same += [] if "chunk_lengths" in changes else ["chunks"]
            copy.__dict__.update({name: self.__dict__[name] for name in same if name in self.__dict__})
        return copy

    def prepared(self) -> PackedSequences:
        """This batch with its offsets made now, at data preparation, and not in the middle of the loss."""
        assert self.offsets is not None and self.sequence_index is not None
        assert self.padded_index is None or self.padded_width is not None
        assert self.unit_ids is None or self.units
        assert self.chunk_lengths is None or self.chunks
        return self

    def to(self, device: torch.device | str) -> PackedSequences:
        """A copy with every tensor on `device`; this one where they are there already."""
        if self.loss_mask.device == torch.device(device):
            return self
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in tensors.items() if isinstance(v, Tensor)})

    @cached_property
    def padded_index(self) -> Tensor | None:
        """[T] int64: the place of each token in the flattened [B, S] tensors; None where every place is a token."""
        width = self.padded_width
        if width is None or all(length == width for length in self.lengths):
            return None
        return self._places(width)

    def flatten(self, values: Tensor, name: str = "values") -> Tensor:
        """[B, S], laid out as the tensors of `from_padded` were, → [T]; [T] stays. Padding gets zero gradient.
        Raises ValueError for another shape. Host syncs: none."""
        if values.shape == self.loss_mask.shape:
            return values
        if self.padded_width is None or values.shape != (len(self.lengths), self.padded_width):
            count, tokens, width = len(self.lengths), sum(self.lengths), self.padded_width
            rows = "pack with from_padded, which takes [B, S]" if width is None else f"{(count, width)} as before"
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, the packed batch {tokens} tokens of {count} sequences: pass "
                f"({tokens},), one value a token, or {rows}."
            )
        flat = values.reshape(-1)
        return flat if self.padded_index is None else flat.index_select(0, self.padded_index)

    def unpack(self, values_T: Tensor) -> list[Tensor]:
        """[T] (or [T, …]) → one tensor a sequence (views)."""
        return list(values_T.split(list(self.lengths)))

    def to_padded(self, values_T: Tensor, padding: float = 0.0) -> Tensor:
        """[T] (or [T, …]) → [N, longest], or [B, S] for a batch from `from_padded`, filled up with `padding`."""
        width = max(self.lengths, default=0) if self.padded_width is None else self.padded_width
        places = self._places(width) if self.padded_width is None else self.padded_index
        if places is None:
            return values_T.reshape(len(self.lengths), width, *values_T.shape[1:]).clone()
        flat = values_T.new_full((len(self.lengths) * width, *values_T.shape[1:]), padding)
        return flat.index_copy_(0, places, values_T).view(len(self.lengths), width, *values_T.shape[1:])

    def _places(self, width: int) -> Tensor:
        tokens = torch.arange(self.loss_mask.shape[0], device=self.loss_mask.device)
        index = self.sequence_index.long()
        return index * width + tokens - self.offsets.index_select(0, index)

    @classmethod
    def from_lists(
        cls,
        *,
        loss_masks: Sequence[Any],
        rollout_log_probs: Sequence[Any] | None = None,
        old_log_probs: Sequence[Any] | None = None,
        train_log_probs: Sequence[Any] | None = None,
        advantages: Sequence[Any] | None = None,
        ref_log_probs: Sequence[Any] | None = None,
        entropy: Sequence[Any] | None = None,
        positions: Sequence[Any] | None = None,
        weight_versions: Sequence[Any] | None = None,
        trainer_version: int | None = None,
        unit_ids: Sequence[Any] | None = None,
        rewards: Sequence[Any] | None = None,
        sequence_ids: Sequence[object] | None = None,
    ) -> PackedSequences:
        """Pack one entry a sequence: 1-D tensors or lists of numbers (`None` in a list stands for "not returned").

        train_log_probs is the other spelling of old_log_probs. advantages may hold one number a sequence. Half
        precision becomes float32, float64 stays. On the CPU the log-probs are checked: `.invalid` has what was found.
        Raises ValueError naming the sample where two entries disagree, and for advantages, reference log-probs and
        entropies on the CPU that are not finite where a token trains.
        """
        given = locals()
        ids = tuple(sequence_ids) if sequence_ids is not None else tuple(range(len(loss_masks)))
        for name, values in (("sequence_ids", ids), ("rewards", rewards)):
            if values is not None and len(values) != len(loss_masks):
                raise ValueError(
                    f"{name} has {len(values)} entries, loss_masks {len(loss_masks)}: pass one entry a sequence."
                )
        lengths = tuple(len(mask) for mask in loss_masks)
        if train_log_probs is not None and old_log_probs is not None:
            raise ValueError(_ONE_POLICY)
        given["old_log_probs"] = old_log_probs if train_log_probs is None else train_log_probs
        fields: dict[str, Any] = {
            name: flatten_entries(name, given[name], lengths, ids, integer=name in _INTEGER_FIELDS)
            for name in _TOKEN_FIELDS
            if given[name] is not None
        }
        mask = flatten_entries("loss_masks", loss_masks, lengths, ids)
        trained = mask != 0
        if mask.device.type == "cpu" and not (mask == trained).all():
            odd = mask[(mask != 0) & (mask != 1)][0]
            raise ValueError(f"loss_masks holds {odd:g}: a mask is 1 where a token trains and 0 elsewhere.")
        for name in ("advantages", "ref_log_probs", "entropy"):
            if name in fields and mask.device.type == "cpu":
                validate_finite(name, fields[name].cpu(), trained, lengths, ids)
        fields = {name: value.to(mask.device) for name, value in fields.items()}
        if rewards is not None:
            fields["rewards"] = torch.as_tensor(rewards, dtype=torch.float32)
        packed = cls(loss_mask=trained, lengths=lengths, sequence_ids=ids, trainer_version=trainer_version, **fields)
        rollout, old = packed.rollout_log_probs, packed.old_log_probs
        if rollout is not None and rollout.device.type == "cpu":
            train = torch.zeros_like(rollout) if old is None else old.detach()
            found, counts = find_invalid(train, rollout, trained, lengths, ids)
            object.__setattr__(packed, "invalid", found)
            object.__setattr__(packed, "invalid_counts", counts)
        return packed

    @classmethod
    def from_padded(cls, *, loss_masks: Tensor, lengths: Sequence[int] | None = None, **fields: Any) -> PackedSequences:
        """Pack [B, S] tensors (same keywords as `from_lists`). `lengths` cuts padding off; without it every row is S
        long and padding must have loss_mask 0. advantages and rewards may be [B]. `policy_loss` then takes log_probs
        [B, S], and `to_padded` gives [B, S] back.
        Raises ValueError for what is no tensor and for shapes that do not fit.
        """
        if not isinstance(loss_masks, Tensor) or loss_masks.dim() != 2:
            raise ValueError("from_padded takes [batch, length] tensors; from_lists one list or 1-D tensor a sequence.")
        batch, width = loss_masks.shape
        keep = [width] * batch if lengths is None else [operator.index(length) for length in lengths]
        if len(keep) != batch or any(not 0 <= length <= width for length in keep):
            raise ValueError(f"lengths {keep} do not fit loss_masks of shape {tuple(loss_masks.shape)}.")
        rows = dict(fields)
        for name in (*_TOKEN_FIELDS, "train_log_probs"):
            value = fields.get(name)
            if isinstance(value, Tensor) and value.shape == (batch, width):
                rows[name] = [row[:length] for row, length in zip(value, keep, strict=True)]
            elif name == "advantages" and isinstance(value, Tensor) and value.dim() == 1:
                rows[name] = list(value)
            elif value is not None:
                found = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is no tensor"
                raise ValueError(
                    f"{name} {found}: from_padded takes tensors of the shape of loss_masks, {(batch, width)} "
                    f"(advantages may be [batch])."
                )
        packed = cls.from_lists(loss_masks=[row[:n] for row, n in zip(loss_masks, keep, strict=True)], **rows)
        object.__setattr__(packed, "padded_width", width)
        return packed


# What data preparation hands over, one entry a sequence; what is refused names the sequence ------------------------

_MOST_UNITS = 1000  # or a response's tokens: memory is set aside for every unit, and a number above is an id


def flatten_entries(
    name: str, values: Sequence[Any], lengths: tuple[int, ...], ids: tuple[object, ...], integer: bool = False
) -> Tensor:
    """One entry a sequence as one flat tensor: [T] float32 or float64, or int64. Raises ValueError naming the sequence
    where an entry is missing, no list of numbers, or of another length."""
    if len(values) != len(lengths):
        raise ValueError(f"{name} has {len(values)} sequences, loss_masks {len(lengths)}: pass one entry a sequence.")
    rows = [_entry(name, row, length, label, integer) for row, length, label in zip(values, lengths, ids, strict=True)]
    flat = torch.cat(rows) if rows else torch.zeros(0)
    if not integer:
        return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    if flat.is_floating_point() and flat.device.type == "cpu":
        odd = (flat.frac() != 0) | (flat.abs() >= 2**53)  # NaN and infinities as well
        if odd.any():
            token, sequence, position = _first(odd, lengths)
            raise ValueError(
                f"{name} of sequence {ids[sequence]} is {float(flat[token]):g} at position {position}: pass whole "
                f"numbers."
            )
    return flat.long()


def _entry(name: str, row: Any, length: int, label: object, integer: bool) -> Tensor:
    """One sequence's values, [length]; NaN for None in a list."""
    try:
        if name.endswith("log_probs"):
            values = row if isinstance(row, Tensor) else np.asarray(row[:1])
            if values.dtype in (torch.bool, np.bool_):
                raise ValueError("it holds bools: is it a mask?")
        if isinstance(row, (list, tuple)):
            tensor = torch.as_tensor(np.array(row, dtype=np.float64))
            tensor = tensor if integer else tensor.to(torch.get_default_dtype())
        else:
            tensor = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of sequence {label} is no list of numbers ({str(error).splitlines()[0]}): pass one number a "
            f"response token, None for one that was not returned."
        ) from None
    if tensor.dim() == 0 and name == "advantages":
        tensor = tensor.expand(length)
    if tensor.shape != (length,):
        raise ValueError(
            f"{name} of sequence {label} has shape {tuple(tensor.shape)}, its loss mask {length} tokens: the two must "
            f"cover the same response tokens (advantages may be one number a sequence)."
        )
    return tensor


def validate_finite(
    name: str, values_T: Tensor, trained_T: Tensor, lengths: tuple[int, ...], ids: tuple[object, ...]
) -> None:
    """Raise ValueError if a trained token's value is NaN or inf. What the loss mask hides may be anything."""
    if values_T.sum().isfinite():  # then every value is
        return
    bad = trained_T & ~values_T.isfinite()
    if bad.any():
        token, sequence, position = _first(bad, lengths)
        raise ValueError(
            f"{name} of sequence {ids[sequence]} is {float(values_T[token])} at position {position}, a token that "
            f"trains: find where it comes from, or set its loss mask to 0."
        )


def checked_units(
    unit_ids_T: Tensor, counts: tuple[int, ...] | None, lengths: tuple[int, ...], ids: tuple[object, ...]
) -> tuple[int, ...]:
    """Units of each sequence: as given, else one more than its last number. Only what is on the CPU is checked."""
    if counts is not None and unit_ids_T.device.type != "cpu":
        return counts
    rows = unit_ids_T.cpu().split(list(lengths)) if lengths else ()
    known = tuple(int(row[-1]) + 1 if len(row) else 1 for row in rows) if counts is None else counts
    for row, count, label in zip(rows, known, ids, strict=True):
        wrong = torch.cat([row.new_zeros(1), row])[:-1] > row
        wrong |= (row < 0) | (row >= (count if counts is not None else max(len(row), _MOST_UNITS)))
        if wrong.any():
            position = int(wrong.nonzero()[0])
            raise ValueError(
                f"unit_ids of sequence {label} is {int(row[position])} at position {position}: number its units from "
                f"0 upwards (below unit_counts), and give the tokens between two of them the number of either."
            )
    return known


def _first(bad_T: Tensor, lengths: tuple[int, ...]) -> tuple[int, int, int]:
    """(token, sequence, position in it) of the first True."""
    token = int(bad_T.nonzero()[0])
    ends = torch.tensor(lengths).cumsum(0)
    sequence = int((ends <= token).sum())
    return token, sequence, token - int(ends[sequence]) + lengths[sequence]
