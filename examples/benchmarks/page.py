"""From a benchmark's results to `bench.html`: one file that opens anywhere, without a network."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import mismatch_plugin
from examples.benchmarks.findings import findings
from examples.benchmarks.results import load
from examples.benchmarks.tables import tables
from mismatch_plugin.files import write_whole

TEMPLATE = "bench.html.j2"


def build_page(folder: Path) -> Path:
    """Write `bench.html` and `plots/bench_*.png` from the folder's results, and return the page's path.

    Raises ImportError where matplotlib or jinja2 is missing, naming the extra.
    """
    try:
        from examples.benchmarks.pictures import pictures
        from mismatch_plugin.report.plots import save
        from mismatch_plugin.report.templates import environment
    except ImportError as error:
        raise ImportError(f"{error}: a page needs the extra: pip install 'mismatch-plugin[lab]'") from error
    sections = load(folder)
    drawn = {section.name: pictures(section) for section in sections}
    for made in drawn.values():
        save(made, folder / "plots")
    template = environment().from_string(Path(__file__).with_name(TEMPLATE).read_text("utf-8"))
    html = template.render(
        sections=sections,
        tables={section.name: tables(section) for section in sections},
        findings={section.name: findings(section) for section in sections},
        pictures=drawn,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=mismatch_plugin.__version__,
    )
    write_whole(folder / "bench.html", html)
    return folder / "bench.html"
