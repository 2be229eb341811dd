"""A diagnosis of each verdict, as the command makes it of responses whose training side is noisy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import mismatch_plugin as mp
from mismatch_plugin.diagnose.diagnosis import diagnose_files
from mismatch_plugin.diagnose.findings import FaultName, Finding
from mismatch_plugin.diagnose.result import Diagnosis, Recommendation, Verdict

SPREAD: dict[Verdict, float] = {"fault": 0.8, "large": 0.06, "normal": 0.01, "undecided": 0.01}


@cache
def _made(verdict: Verdict) -> Diagnosis:
    made, rows = np.random.default_rng(7), []
    for _ in range(2 if verdict == "undecided" else 60):
        rollout = -made.exponential(0.7, made.integers(20, 48)) - 1e-3
        trained = np.minimum(rollout + made.normal(0, SPREAD[verdict], len(rollout)), 0.0)
        ids, advantages = made.integers(5, 9000, len(rollout)), np.full(len(rollout), made.choice([-1.0, 1.5]))
        columns = {"response_ids": ids, "rollout_log_probs": rollout, "log_probs": trained, "advantages": advantages}
        rows.append({name: column.tolist() for name, column in columns.items()})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rollout.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return diagnose_files(path, own=mp.MismatchConfig(), gate_kl=0.01, gate=True)


def diagnosis(verdict: Verdict, **changes: Any) -> Diagnosis:
    """One of each verdict, as of a dump of slime's; the user's own settings are none."""
    source = f"runs/debug/rollout_{verdict}.pt"
    return _made(verdict).model_copy(update={"source": source, "format": "slime", **changes})


def advised(verdict: Verdict = "large") -> Recommendation:
    found = diagnosis(verdict).recommendation
    assert found is not None
    return found


def cause(fault: FaultName, **told: Any) -> Finding:
    """One finding of ten samples."""
    return Finding(**{"fault": fault, "samples": 1, "of_samples": 10, "tokens": 5, "of_tokens": 50, **told})
