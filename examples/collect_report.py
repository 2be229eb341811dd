"""One report of the runs below a folder: OUTPUT/<cluster>/<algorithm>/seed<n>, each written by --mismatch-report-dir.

python examples/collect_report.py OUTPUT

A run counts as finished where its folder holds a `done.json` with an object, as compare_four_on_a_cluster.sh writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mismatch_plugin
from mismatch_plugin.compare.report import write_report
from mismatch_plugin.files import read_json_object, write_whole
from mismatch_plugin.report.log import METRICS, SETTINGS

ABOUT = [
    "These runs were trained elsewhere, each under one algorithm, and wrote only metrics of the mismatch between "
    "rollout engine and trainer.",
    "Shown is how large the mismatch was and what each correction did about it. What was learned is not in these "
    "files: rewards are in the logs of the host.",
    "The runs sampled different responses, so a difference between two of them may be chance.",
]
NAMES = {"0": "PPO", "1": "bypass", "2:token:truncate": "token_is", "2:sequence:truncate": "seq_is",
         "3:sequence:truncate": "pg_is"}  # fmt: skip


def collect(output: Path) -> Path:
    """Give each run and the folder the description that the report reads, and write the page. Returns its path.

    Raises: ValueError where no run wrote any metrics, a run is not of the algorithm that its folder names, or the
    folder belongs to `mismatch-plugin compare`.
    """
    record = output / "run.json"
    if record.exists() and "collected" not in read_json_object(record):
        raise ValueError(
            f"{output} holds a run of `mismatch-plugin compare`, which has written its report.html itself."
        )
    runs = sorted(path.parent for path in output.glob(f"*/*/seed*/{METRICS}"))
    if not runs:
        raise ValueError(
            f"no {METRICS} below {output}: did the runs get --mismatch-report-dir, and can nodes write there? "
            f"(Delete a run's done.json to run it again.)"
        )
    labels = []
    for run in runs:
        settings = read_json_object(run / SETTINGS) if (run / SETTINGS).exists() else {}
        labels.append(label(run, settings))
        description = {"variant": labels[-1], "setting": run.parent.parent.name, "mismatch": settings}
        write_whole(run / "config.json", json.dumps(description, indent=2) + "\n")
    whole: dict[str, Any] = {
        "collected": True,
        "title": "Mismatch and corrections of runs on a cluster",
        "about": ABOUT,
        "settings": list(dict.fromkeys(run.parent.parent.name for run in runs)),
        "variants": list(dict.fromkeys(labels)),
        "seeds": sorted({int(run.name.removeprefix("seed")) for run in runs if run.name[4:].isdecimal()}),
        "versions": {"mismatch-plugin, of this report": mismatch_plugin.__version__},
    }
    write_whole(record, json.dumps(whole, indent=2) + "\n")
    write_report(output)
    return output / "report.html"


def label(run: Path, settings: dict[str, Any]) -> str:
    """The comparison's name of a run in a folder 0 to 3, else the folder's; `2:sequence:mask` where it has no other.

    Raises: ValueError where a folder 0 to 3 holds a run of another algorithm.
    """
    name, tis = run.parent.name, settings.get("tis")
    if name not in ("0", "1", "2", "3") or not isinstance(tis, dict):
        return NAMES.get(name, name)
    algorithm = int(bool(settings.get("use_rollout_log_probs"))) + 2 * int(bool(settings.get("use_tis")))
    if str(algorithm) != name:
        raise ValueError(f"{run} holds a run of algorithm {algorithm}: move it to a folder of that name.")
    label = name if algorithm < 2 else f"{name}:{tis.get('level')}:{tis.get('mode')}"
    return NAMES.get(label, label)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUTPUT")
    try:
        print(f"report: {collect(Path(sys.argv[1]))}")
    except ValueError as error:
        sys.exit(f"collect_report: {error}")
