"""One report of the runs below a folder: OUTPUT/<cluster>/<algorithm>/seed<n>, each written by --mismatch-report-dir.

python examples/collect_report.py OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mismatch_plugin.report.log import METRICS, SETTINGS
from mismatch_plugin.report.page import build_report


def collect(output: Path) -> Path:
    """Give each run the description that the report reads, and write the page. Returns its path.

    Raises: ValueError where no run wrote any metrics.
    """
    runs = sorted(path.parent for path in output.glob(f"*/*/seed*/{METRICS}"))
    if not runs:
        raise ValueError(
            f"no {METRICS} below {output}: did the runs get --mismatch-report-dir, and can nodes write there? "
            f"(Delete a run's done.json to run it again.)"
        )
    for run in runs:
        settings = json.loads((run / SETTINGS).read_text(encoding="utf-8")) if (run / SETTINGS).exists() else {}
        description = {"variant": run.parent.name, "setting": run.parent.parent.name, "mismatch": settings}
        (run / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return build_report(output, exact=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUTPUT")
    try:
        print(f"report: {collect(Path(sys.argv[1]))}")
    except ValueError as error:
        sys.exit(f"collect_report: {error}")
