"""What servers with our SGLang plugin told of their weights: those that did not move, or in part, or are others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from mismatch_plugin.data.versions import INITIAL_VERSION, version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.layers import OLD_FIX
from mismatch_plugin.diagnose.detectors.served import MOST_NAMES, Key, Piece, few, minority, pieces_of
from mismatch_plugin.diagnose.detectors.weights import BEHIND_FIX
from mismatch_plugin.diagnose.findings import FaultName, Finding, Item, Place, Undecided, called

NOT_UPDATED_FIX = (
    f"{OLD_FIX} A step that changes nothing (learning rate 0, as a warm-up may begin) is --accept weights_not_updated."
)
FIRST_SYNC_FIX = (
    f"Nothing, where this is the first sync of a run, which sends the loaded weights again. Else: {OLD_FIX}"
)
AGAIN_FIX = f"Nothing, where an update was sent a second time (a retry, a restart). Else: {OLD_FIX}"
PARTLY_FIX = (
    "Compare the names that are sent with those that the server knows; its log names the matrices that did not change. "
    "Where layers are frozen (a vision tower) or only adapters train, it is meant: --accept weights_partly_updated."
)
HALF_FIX = "Pause generation while weights are sent (mode retract), until every bucket of every rank has arrived."
LABEL_FIX = "Send a weight_version of its own with every update: staleness and a comparison of servers go by it."
OTHER_FIX = (
    "Compare what is sent with what serves, tensor by tensor: names, dtype, the step that is exported, updates that "
    "another job sends to the same servers."
)
_BY_FINGERPRINT: tuple[FaultName, ...] = (
    "weights_not_updated", "weights_partly_updated", "stale_server", "label_reused", "other_weights",
)  # fmt: skip


def find_served_weights(batch: Batch) -> Outcome:
    """Of tokens that train; each worker's faults by the rule that says most of it."""
    pieces = [piece for sample in batch for piece in pieces_of(sample)]
    found: list[Item] = []
    rest = pieces
    for rule in (_partly, _stale, _not_updated):
        items, explained = rule(batch, rest)
        found += items
        rest = [piece for piece in rest if piece.key not in explained]
    return [*found, *_half_done(batch, pieces), *_reused(batch, pieces), *_others(batch, rest)], batch


def _finding(batch: Batch, fault: FaultName, evidence: str, fix: str, pieces: Sequence[Piece], **more: Any) -> Finding:
    """About these tokens."""
    first = min(pieces, key=lambda piece: (piece.sample.index, piece.first))
    version = None if first.label is None else f"version {first.label}"
    place = Place(sample=first.sample.index, sample_id=first.sample.sample_id, position=first.first, rollout=version)
    samples = [*{piece.sample.index: piece.sample for piece in pieces}.values()]
    tokens = sum(piece.tokens for piece in pieces)
    about = {"tokens": tokens, "first": place, "confidence": "certain"} | more
    return batch.finding(fault, "rollout", evidence, fix, samples, **about)


def _counted(pieces: Sequence[Piece]) -> str:
    """How many tokens, and whose."""
    return f"{sum(piece.tokens for piece in pieces)} tokens of {_names(pieces)}"


def _names(pieces: Sequence[Piece]) -> str:
    return few(piece.served.worker for piece in pieces)


def _half_done(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """Tokens without a fingerprint: of a half done update, or of a server that cannot take any."""
    able = {piece.served.worker for piece in pieces if piece.weights.fingerprint is not None or piece.served.update}
    none = [piece for piece in pieces if piece.weights.fingerprint is None]
    found: list[Item] = []
    if half := [piece for piece in none if piece.served.worker in able]:
        evidence = (
            f"{_counted(half)} were sampled while a weight update was half done, or the server could not take a "
            f"fingerprint (then its log says so)."
        )
        found.append(_finding(batch, "weights_partly_updated", evidence, HALF_FIX, half))
    if unable := [piece for piece in none if piece.served.worker not in able]:
        found.append(Undecided(faults=_BY_FINGERPRINT, reason=f"{_names(unable)} took no fingerprints of weights"))
    return found


def _partly(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """The last update changed some matrices and not the others."""
    wrong = [(p, u) for p in pieces if (u := p.update) is not None and u.changed and u.changed_matrices < u.matrices]
    if not wrong:
        return [], set()
    said = {}
    for piece, update in wrong:
        more = update.matrices - update.changed_matrices - len(update.unchanged)
        names = ", ".join(update.unchanged) + (f" and {more} more" if more > 0 else "")
        said[piece.served.worker, update] = (
            f"{called(piece.served.worker)}: update {update.number} changed {update.changed_matrices} of "
            f"{update.matrices} matrices ({update.changed} of {update.tensors} tensors"
            f"{f'; not {names}' if update.unchanged else ''})"
        )
    shown, workers = "; ".join([*said.values()][:MOST_NAMES]), few(worker for worker, _ in said)
    evidence = f"Only a part of the weights changed in the last update of {workers}. {shown}."
    told = [piece for piece, _ in wrong]
    found = _finding(batch, "weights_partly_updated", evidence, PARTLY_FIX, told, confidence="likely")
    return [found], {piece.key for piece in told}


def _stale(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """One label, and other weights on other workers, of those that hold weights in the same form."""
    of: dict[Hashable, dict[str, dict[Any, list[Piece]]]] = defaultdict(lambda: defaultdict(dict))
    for piece in pieces:
        if piece.label is not None and piece.weights.fingerprint is not None:
            told = piece.served
            # Servers that shard otherwise may repeat or split tensors; a resumed run counts versions anew.
            form = told.dtype, told.quantization, told.sglang, told.tp_size, told.pp_size, told.ep_size
            by_worker = of[piece.label, piece.sample.step, form][piece.weights.fingerprint]
            by_worker.setdefault(told.worker, []).append(piece)
    odd: list[Piece] = []
    explained: set[Key] = set()
    evidence = ""
    for by in of.values():
        workers = [worker for by_worker in by.values() for worker in by_worker]
        if len(by) < 2 or len(workers) > len({*workers}):
            continue  # of a worker with several weights under this label nothing tells which are the label's
        groups = {print_: _all(by_worker) for print_, by_worker in by.items()}
        why, chosen = "Behind", [group for group in groups.values() if any(map(_behind, group))]
        if len(chosen) in (0, len(by)):
            why, chosen = "In the minority", [_all(by_worker) for by_worker in minority(by)]
        wrong = [piece for group in chosen or groups.values() for piece in group]
        if not odd:
            shown = "; ".join(f"{print_} on {few(by_worker)}" for print_, by_worker in by.items())
            which = f"{why}: {_names(wrong)}." if chosen else "Nothing here tells which of them are right."
            evidence = f"Under one label, {wrong[0].label!r}, servers hold other weights: {shown}. {which}"
        odd += wrong
        explained |= {piece.key for piece in wrong if chosen}
    if not odd:
        return [], set()
    # A trainer that names no version: the servers may have been asked before and after an update.
    unnamed = all(piece.label == INITIAL_VERSION for piece in odd)
    fix = BEHIND_FIX.format(which=_names(odd))
    found = _finding(batch, "stale_server", evidence, fix, odd, severity="note" if unnamed else "fault")
    return [found], set() if unnamed else explained


def _all(by_worker: dict[Any, list[Piece]]) -> list[Piece]:
    return [piece for pieces in by_worker.values() for piece in pieces]


def _behind(piece: Piece) -> bool:
    """The label is not the one that its weights came with, its update brought nothing, or the trainer sent others."""
    return _moved(piece) or _not_as_sent(piece) or (piece.idle is not None and not _again(piece))


def _again(piece: Piece) -> bool:
    """Its update left the weights and their version as they were: it was sent a second time."""
    named = piece.label not in (None, INITIAL_VERSION)
    return piece.idle is not None and piece.idle.number > 1 and named and piece.label == piece.weights.since


def _moved(piece: Piece, since: str | None = None) -> bool:
    """The label is a later one than that of the weights. An earlier one came before them: they were named late, or the
    trainer started anew."""
    since = since or piece.weights.since
    if piece.label is None or since is None or piece.label == since:
        return False
    label, first = version_number(piece.label), version_number(since)
    return label is None or first is None or label > first


def _not_as_sent(piece: Piece) -> bool:
    """The trainer sent other weights as this version (its 5 is the servers' step-5; rollouts may be older than it).
    What a server quantises is not what was sent."""
    sent, trainer = piece.sample.trainer_fingerprint, piece.sample.trainer_version
    if None in (sent, piece.weights.fingerprint, trainer, piece.label):
        return False
    if piece.served.quantization is not None or piece.served.kv_heads_repeated:
        return False
    number = version_number(trainer)
    same = trainer == piece.label or (number is not None and number == version_number(piece.label))
    return same and sent != piece.weights.fingerprint


def _not_updated(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """The label moved and the weights did not, or an update after the first one changed nothing."""
    of: dict[Hashable, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.weights.fingerprint is not None:
            of[piece.served.worker, piece.weights.fingerprint].append(piece)
    moved: list[tuple[Piece, str]] = []
    first_sync: list[tuple[Piece, str]] = []
    for group in of.values():
        labels = {piece.label for piece in group if piece.label is not None}
        earliest = min(labels, key=lambda label: (-1 if (n := version_number(label)) is None else n, label), default="")
        # Weights that come back later are told anew, so that each token's own `since` counts.
        sinces = [(piece, piece.weights.since or earliest) for piece in group]
        late = [(piece, since) for piece, since in sinces if since and _moved(piece, since)]
        once = len(labels - {INITIAL_VERSION}) == 1 and all(since == INITIAL_VERSION for _, since in late)
        # Other weights than the loaded ones are those of a first update that changed something, or of a later one that
        # changed nothing. A later one that did may have come after the tokens of a response that it ended.
        updates = [update for piece in group if (update := piece.update) is not None]
        loaded = not any((update.changed > 0) == (update.number == 1) for update in updates)
        (first_sync if once and loaded else moved).extend(late)
    later = [piece for piece in pieces if piece.idle is not None and piece.idle.number > 1]
    idle, again = [piece for piece in later if not _again(piece)], [piece for piece in later if _again(piece)]
    late_ids = {id(piece) for piece in (*(piece for piece, _ in moved), *idle)}
    wrong = [piece for piece in pieces if id(piece) in late_ids]
    found: list[Item] = []
    if wrong:
        said = [_said(moved)] if moved else []
        said += [f"{_brought_nothing(idle)}: every step of RL changes them."] if idle else []
        found.append(_finding(batch, "weights_not_updated", " ".join(said), NOT_UPDATED_FIX, wrong))
    if first_sync:
        evidence, chosen = (
            f"{_said(first_sync)} They are the weights that it had loaded.",
            [one for one, _ in first_sync],
        )
        found.append(_finding(batch, "weights_not_updated", evidence, FIRST_SYNC_FIX, chosen, severity="note"))
    if again:
        evidence = f"{_brought_nothing(again)}, under the version that they had, {again[0].label!r}."
        found.append(_finding(batch, "weights_not_updated", evidence, AGAIN_FIX, again, severity="note"))
    return found, {piece.key for piece in wrong}


def _brought_nothing(pieces: Sequence[Piece]) -> str:
    update = pieces[0].idle
    assert update is not None
    return f"Update {update.number} of {_names(pieces)} changed none of {update.tensors} tensors"


def _said(moved: Sequence[tuple[Piece, str]]) -> str:
    piece, since = moved[0]
    return (
        f"{_counted([piece for piece, _ in moved])} came from the same weights (fingerprint "
        f"{piece.weights.fingerprint}) under {piece.label!r} as under {since!r}: the version moved, the weights did "
        f"not."
    )


def _reused(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """One worker, one label, several weights."""
    of: dict[Key, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        if piece.label is not None and piece.weights.fingerprint is not None:
            of[piece.key][piece.weights.fingerprint].append(piece)
    wrong = {key: by for key, by in of.items() if len(by) > 1}
    if not wrong:
        return []
    (worker, label), by = next(iter(wrong.items()))
    later = [piece for by in wrong.values() for group in [*by.values()][1:] for piece in group]
    evidence = (
        f"Weights changed under the same label: {called(worker)} sampled from {len(by)} different ones under {label!r} "
        f"({', '.join([*by][:MOST_NAMES])})" + (f", and so on for {len(wrong) - 1} more." if len(wrong) > 1 else ".")
    )
    unnamed = all(name == INITIAL_VERSION for _, name in wrong)  # a trainer that names no version
    return [_finding(batch, "label_reused", evidence, LABEL_FIX, later, severity="note" if unnamed else "fault")]


def _others(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """The last token that trains of each sample: other weights than those that the trainer sent as this version."""
    last = {piece.sample.index: piece for piece in pieces}
    wrong = [piece for piece in last.values() if _not_as_sent(piece)]
    if not wrong:
        return []
    evidence = (
        f"{_names(wrong)} sampled from weights {wrong[0].weights.fingerprint}"
        + ("" if wrong[0].label is None else f" under {wrong[0].label!r}")
        + f", the trainer sent {wrong[0].sample.trainer_fingerprint}: other weights serve than those that train."
    )
    return [_finding(batch, "other_weights", evidence, OTHER_FIX, wrong)]
