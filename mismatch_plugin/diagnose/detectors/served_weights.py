"""The rules of `served.py` on weights: those that did not move, or in part, or are others than were sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from mismatch_plugin.data.served import LastUpdate
from mismatch_plugin.data.versions import INITIAL_VERSION, version_number
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.populations import FIX as BEHIND_FIX
from mismatch_plugin.diagnose.detectors.populations import called
from mismatch_plugin.diagnose.detectors.served_pieces import MOST_NAMES, Key, Piece, counted, few, finding, names_of
from mismatch_plugin.diagnose.findings import FaultName, Item, Severity, Undecided

_OLD_FIX = (
    "The servers still compute with old weights: read what the update returned on every rank and the server's log, "
    "which has a line for each update, look for names that the server does not know (a `module.` prefix) and for "
    "tensors that are empty or views of freed memory at the moment of sending; /server_info has the digest of each "
    "tensor that serves."
)
NOT_UPDATED_FIX = (
    f"{_OLD_FIX} A step that changes nothing (learning rate 0, as a warm-up may begin) is --accept weights_not_updated."
)
FIRST_SYNC_FIX = (
    f"Nothing, where this is the first sync of a run, which sends the loaded weights again. Else: {_OLD_FIX}"
)
AGAIN_FIX = f"Nothing, where an update was sent a second time (a retry, a restart). Else: {_OLD_FIX}"
PARTLY_FIX = (
    "Compare the names that the trainer sends with those that the server knows (it leaves out others without a word); "
    "the server's log names the matrices that did not change. Where layers are frozen (a vision tower, a router), or "
    "only adapters train (LoRA), it is meant: --accept weights_partly_updated."
)
HALF_FIX = (
    "Pause generation while weights are sent (pause_generation, mode retract), and resume it once every bucket of "
    "every rank has arrived."
)
LABEL_FIX = (
    "Send a weight_version of its own with every update: versions of tokens, staleness and a comparison of servers go "
    "by it."
)
OTHER_FIX = (
    "Compare what is sent with what serves tensor by tensor (fingerprints of each): names, dtype, the checkpoint or "
    "step that is exported, updates that another job sends to the same servers."
)


def find_weights(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """Each worker's faults by the one that says most of it."""
    found: list[Item] = []
    rest = pieces
    for rule in (_partly, _stale, _not_updated):
        items, explained = rule(batch, rest)
        found += items
        rest = [piece for piece in rest if piece.key not in explained]
    return [*found, *_half_done(batch, pieces), *_reused(batch, pieces), *_others(batch, rest)]


def _half_done(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """Tokens without a fingerprint: of a half done update, or of a server that cannot take any."""
    able = {piece.served.worker for piece in pieces if piece.weights.fingerprint is not None or piece.served.update}
    none = [piece for piece in pieces if piece.weights.fingerprint is None]
    found: list[Item] = []
    if half := [piece for piece in none if piece.served.worker in able]:
        evidence = (
            f"{counted(half)} were sampled while a weight update was half done, or the server could not take a "
            f"fingerprint (then its log says so)."
        )
        found.append(finding(batch, "weights_partly_updated", evidence, HALF_FIX, half))
    if unable := [piece for piece in none if piece.served.worker not in able]:
        reason = f"{names_of(unable)} took no fingerprints of weights"
        found.append(Undecided(faults=(*_BY_FINGERPRINT,), reason=reason))
    return found


_BY_FINGERPRINT: tuple[FaultName, ...] = (
    "weights_not_updated", "weights_partly_updated", "stale_server", "label_reused", "other_weights",
)  # fmt: skip


def _partly(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """The last update changed some matrices and not the others."""
    updated = [(piece, piece.update) for piece in pieces if piece.update is not None]
    wrong = [(p, update) for p, update in updated if update.changed > 0 and update.changed_matrices < update.matrices]
    if not wrong:
        return [], set()
    of = dict.fromkeys((piece.served.worker, update) for piece, update in wrong)
    shown = "; ".join(
        f"{called(worker)}: update {update.number} changed {update.changed_matrices} of {update.matrices} matrices "
        f"({update.changed} of {update.tensors} tensors)"
        for worker, update in [*of][:MOST_NAMES]
    )
    evidence = f"Only a part of the weights changed in the last update of {few(worker for worker, _ in of)}. {shown}."
    chosen, update = [piece for piece, _ in wrong], wrong[0][1]
    statistics = {"changed_matrices": float(update.changed_matrices), "matrices": float(update.matrices)}
    item = finding(batch, "weights_partly_updated", evidence, PARTLY_FIX, chosen, statistics=statistics)
    return [item], {piece.key for piece in chosen}


def _stale(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """One label, and other weights on other workers, of those that hold weights in the same form."""
    of: dict[Hashable, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        if piece.label is not None and piece.weights.fingerprint is not None:
            told = piece.served
            # Servers that shard otherwise may repeat or split tensors; a resumed run counts versions anew.
            form = told.dtype, told.quantization, told.sglang, told.tp_size, told.pp_size, told.ep_size
            of[piece.label, piece.sample.step, form][piece.weights.fingerprint].append(piece)
    odd: list[Piece] = []
    explained: set[Key] = set()
    evidence = ""
    for by in of.values():
        workers = {name: dict.fromkeys(piece.served.worker for piece in group) for name, group in by.items()}
        if len(by) < 2 or max(Counter(name for names in workers.values() for name in names).values()) > 1:
            continue  # of a worker with several weights under this label nothing tells which are the label's
        why = "Behind"
        chosen = [fingerprint for fingerprint, group in by.items() if any(map(_behind, group))]
        if len(chosen) in (0, len(by)):
            why, most = "In the minority", max(map(len, workers.values()))
            fewer = [fingerprint for fingerprint, names in workers.items() if len(names) < most]
            chosen = fewer if len(by) - len(fewer) == 1 else []
        wrong = [piece for fingerprint in chosen or by for piece in by[fingerprint]]
        if not odd:
            shown = "; ".join(f"{fingerprint} on {few(names)}" for fingerprint, names in workers.items())
            which = f"{why}: {names_of(wrong)}." if chosen else "Nothing here tells which of them are right."
            evidence = f"Under one label, {wrong[0].label!r}, servers hold other weights: {shown}. {which}"
        odd += wrong
        explained |= {piece.key for piece in wrong if chosen}
    if not odd:
        return [], set()
    # A trainer that names no version: the servers may have been asked before and after an update.
    severity: Severity = "note" if all(piece.label == INITIAL_VERSION for piece in odd) else "fault"
    fix = BEHIND_FIX.format(which=names_of(odd))
    return [
        finding(batch, "stale_server", evidence, fix, odd, severity=severity)
    ], explained if severity == "fault" else set()


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
    """The trainer sent other weights as this version. What a server quantises is not what was sent."""
    sent, fingerprint = piece.sample.trainer_fingerprint, piece.weights.fingerprint
    if None in (sent, fingerprint):
        return False
    if piece.served.quantization is not None or piece.served.kv_heads_repeated:
        return False
    return _same_version(piece.sample.trainer_version, piece.label) and sent != fingerprint


def _same_version(trainer: str | None, label: str | None) -> bool:
    """False where one is not told (rollouts may be older than the trainer); a trainer's 5 is the servers' step-5."""
    if trainer is None or label is None:
        return False
    number = version_number(trainer)
    return trainer == label or (number is not None and number == version_number(label))


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
        earliest = min(labels, key=_rank, default=None)
        # Weights that come back later are told anew, so that each token's own `since` counts.
        sinces = [(piece, piece.weights.since or earliest) for piece in group]
        late = [(piece, since) for piece, since in sinces if since is not None and _moved(piece, since)]
        once = len(labels - {INITIAL_VERSION}) == 1 and all(since == INITIAL_VERSION for _, since in late)
        loaded = not any(_not_loaded(update) for piece in group if (update := piece.update) is not None)
        (first_sync if once and loaded else moved).extend(late)
    later = [piece for piece in pieces if piece.idle is not None and piece.idle.number > 1]
    idle, again = [piece for piece in later if not _again(piece)], [piece for piece in later if _again(piece)]
    late_ids = {id(piece) for piece in (*(piece for piece, _ in moved), *idle)}
    wrong = [piece for piece in pieces if id(piece) in late_ids]
    said = [_said(moved)] if moved else []
    said += [f"{_brought_nothing(idle)}: every step of RL changes them."] if idle else []
    loaded_again = f"{_said(first_sync)} They are the weights that it had loaded." if first_sync else ""
    sent_again = f"{_brought_nothing(again)}, under the version that they had, {again[0].label!r}." if again else ""
    told: list[tuple[str, str, list[Piece], Severity]] = [
        (" ".join(said), NOT_UPDATED_FIX, wrong, "fault"),
        (loaded_again, FIRST_SYNC_FIX, [piece for piece, _ in first_sync], "note"),
        (sent_again, AGAIN_FIX, again, "note"),
    ]
    found: list[Item] = [
        finding(batch, "weights_not_updated", evidence, fix, chosen, severity=severity)
        for evidence, fix, chosen, severity in told
        if chosen
    ]
    return found, {piece.key for piece in wrong}


def _brought_nothing(pieces: Sequence[Piece]) -> str:
    update = pieces[0].idle
    assert update is not None
    return f"Update {update.number} of {names_of(pieces)} changed none of {update.tensors} tensors"


def _not_loaded(update: LastUpdate) -> bool:
    """After it there are other weights than the loaded ones, or it brought none. Of a later one that changed something
    nothing follows: it may have come after the tokens of a response that it ended."""
    return (update.changed > 0) == (update.number == 1)


def _rank(label: str) -> tuple[int, str]:
    number = version_number(label)
    return -1 if number is None else number, label


def _said(moved: Sequence[tuple[Piece, str]]) -> str:
    piece, since = moved[0]
    return (
        f"{counted([piece for piece, _ in moved])} came from the same weights (fingerprint {piece.weights.fingerprint})"
        f" under {piece.label!r} as under {since!r}: the version moved, the weights did not."
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
    severity: Severity = "note" if unnamed else "fault"
    told = {"weights": float(len(by))}
    return [finding(batch, "label_reused", evidence, LABEL_FIX, later, severity=severity, statistics=told)]


def _others(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """The last token that trains of each sample: other weights than those that the trainer sent as this version."""
    last = {piece.sample.index: piece for piece in pieces}
    wrong = [piece for piece in last.values() if _not_as_sent(piece)]
    if not wrong:
        return []
    sent = wrong[0].sample.trainer_fingerprint
    evidence = (
        f"{names_of(wrong)} sampled from weights {wrong[0].weights.fingerprint}"
        + ("" if wrong[0].label is None else f" under {wrong[0].label!r}")
        + f", the trainer sent {sent}: other weights serve than those that train."
    )
    return [finding(batch, "other_weights", evidence, OTHER_FIX, wrong)]
