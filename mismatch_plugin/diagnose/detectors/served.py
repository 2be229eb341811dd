"""What servers with our SGLang plugin told of the weights that made the tokens: no statistics, one record is enough."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.served_pieces import MOST_NAMES, Piece, few, pieces_of
from mismatch_plugin.diagnose.detectors.served_settings import find_settings
from mismatch_plugin.diagnose.detectors.served_weights import find_weights


def find_served(batch: Batch) -> Outcome:
    """Of tokens that train. Faults of weights first, each worker's by the one that says most of it."""
    if all(sample.served is None for sample in batch):
        return [], batch
    pieces = [piece for sample in batch for piece in pieces_of(sample)]
    return [*find_weights(batch, pieces), *find_settings(batch)], batch


def note(batch: Batch) -> str | None:
    """One sentence on who told what; None without the plugin."""
    told = [sample.served for sample in batch if sample.served is not None]
    if not told:
        return None
    found = {weights.fingerprint: None for served in told for weights in served.weights if weights.fingerprint}
    which = f"weights {', '.join([*found][:MOST_NAMES])}" + (", …" if len(found) > MOST_NAMES else "")
    sent = ", which are what the trainer sent" if weights_agree(batch) else ""
    return (
        f"the SGLang plugin told of {len(told)} of {len(batch)} samples: "
        f"{few(served.worker for served in told)}; {which if found else 'no fingerprint of weights'}{sent}."
    )


def weights_agree(batch: Batch) -> bool:
    """All tokens that train were sampled from the very weights that the trainer sent, by the fingerprints of both."""
    trained = [sample for sample in batch if sample.mask.any()]
    return bool(trained) and all(_agrees(sample, [*pieces_of(sample)]) for sample in trained)


def _agrees(sample: Sample, pieces: Sequence[Piece]) -> bool:
    sent = sample.trainer_fingerprint
    whole = sum(piece.tokens for piece in pieces) == int(sample.mask.sum())
    return sent is not None and whole and all(piece.weights.fingerprint == sent for piece in pieces)
