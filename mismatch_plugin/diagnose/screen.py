"""A diagnosis on a terminal: verdict, cause, size, what to set, and what that would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mismatch_plugin.diagnose import words
from mismatch_plugin.diagnose.flags import HOSTS, trainer_of
from mismatch_plugin.diagnose.normal import size_class
from mismatch_plugin.diagnose.result import Diagnosis, Finding, Verdict
from mismatch_plugin.report.table import NOTHING, figure, printable, shows_unicode

STYLES: dict[Verdict, str] = {
    "fault": "bold red",
    "large": "bold yellow",
    "normal": "bold green",
    "undecided": "bold cyan",
}
_BIAS = (
    "bias: what bounds and rejection change against the setting's own ratios. Token weights have one of their own, "
    "which is not in it."
)


class _Screen:
    """Lines on a terminal: words are wrapped, and hold no commands of the terminal, whatever a file holds."""

    def __init__(self, console: Console) -> None:
        self.console, self.unicode = console, shows_unicode(console.encoding)

    def say(self, text: str, style: str = "", indent: int = 0, whole: bool = False) -> None:
        """whole: for what is copied, it is left to the terminal to wrap it."""
        shown = Text(printable(text.replace("`", ""), self.unicode), style=style)
        if whole:
            self.console.print(shown, soft_wrap=True)
        else:
            self.console.print(Padding(shown, (0, 0, 0, indent), expand=False))

    def step(self, text: str) -> None:
        """A command in it stays whole, on a line of its own."""
        said, command, rest = text.partition("mismatch-plugin inspect ")
        if said:
            self.say(said)
        if command:
            self.say(command + rest, "cyan", whole=True)

    def finding(self, item: Finding) -> None:
        self.console.print()
        self.say(f"{words.label(item)}: {item.fault} ({item.confidence}). {item.evidence}", "bold")
        if item.first is not None:
            self.say(f"first: {item.first}", indent=2)
        self.say(f"fix: {item.fix}", indent=2)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns without lines, numbers to the right; the first column wraps; a row that begins with > is bold."""

        def text(cell: str) -> Text:
            return Text("\n".join(printable(line, self.unicode) for line in cell.split("\n")))

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for place, header in enumerate(headers):
            table.add_column(text(header), justify="right" if place else "left", no_wrap=bool(place))
        for row in rows:
            table.add_row(*map(text, row), style="bold" if row[0].startswith(">") else "")
        self.console.print(table)


def show(
    diagnosis: Diagnosis,
    console: Console,
    *,
    host: str | None = None,
    report: Path | None = None,
    brief: bool = False,
) -> None:
    """Print the summary, the verdict first.

    host: whose launch line is shown; default: the trainer whose dump it is, else our flags alone. report: where the
    page is. brief: the findings, all of them whole, and nothing of settings.
    """
    screen = _Screen(console)
    verdict, _, rest = diagnosis.headline.partition(": ")
    screen.say(f"{verdict.upper()}: {rest}", STYLES[diagnosis.verdict])
    if normal := words.is_it_normal(diagnosis):
        screen.say(normal)
    if (gate := diagnosis.gate) is not None:
        said, figures = words.gate_words(gate)
        screen.say(f"Gate {said.upper()}: {figures}.")
    counted = f"{diagnosis.samples:,} samples, {diagnosis.tokens:,} tokens"
    screen.say(f"{counted} of {diagnosis.source} ({diagnosis.format}).")
    for place, item in enumerate(diagnosis.findings):
        if not place or brief:
            screen.finding(item)
        else:
            also = "also" if item.counts else words.label(item).lower()
            screen.say(f"{also} {item.fault} ({item.confidence}): {item.evidence}")
    if (level := diagnosis.fixed) is not None:
        figures = f"mean |Δ log p| {figure(level.abs_mean)}, k3 {figure(level.k3_kl)}"
        screen.say(f"once fixed: {figures}, which is {size_class(level)}")
    for reason in words.undecided(diagnosis, short=not brief):
        screen.say(f"not decided: {reason}")
    if brief:
        for note in diagnosis.notes:
            screen.say(f"note: {note}", whole=True)
        screen.step(f"Next: {diagnosis.next_step}" if diagnosis.next_step else "")
        return
    for note in diagnosis.notes[1:]:  # the first says what was read
        screen.say(f"note: {note}", "dim")
    if rows := [row for row in words.size_rows(diagnosis) if not row[0].startswith("χ²")]:
        console.print()
        screen.table(("size", "measured"), [(title, f"{value} {unit}".strip()) for title, value, unit in rows])
    console.print()
    if diagnosis.recommendation is None:
        screen.step(words.without_advice(diagnosis))
    else:
        _advice(screen, diagnosis, host or trainer_of(diagnosis.format))
    if report is not None:
        screen.say(f"Report: {report}", whole=True)


def _advice(screen: _Screen, diagnosis: Diagnosis, host: str | None) -> None:
    advice = diagnosis.recommendation
    assert advice is not None
    why = ". ".join(reason[:1].upper() + reason[1:] for reason in advice.reasons[:2])
    screen.say(f"Recommended: {advice.setting}. {words.sentence(why)}", "bold")
    others = ", ".join(name for name in advice.flags if name != host)
    if host is None:
        screen.say(f"Flags, for any trainer (--host {others} prints a launch line):")
    else:
        screen.say(f"{HOSTS.get(host, host)} (--host {others} for the others):")
    for line in (words.neutral_flags(advice.settings) if host is None else advice.flags[host]).splitlines():
        screen.say(line, "cyan", whole=True)
    for watched in advice.watch[:1]:
        screen.say(f"Watch in the first ten steps: {watched}.")
    rows: list[tuple[str, ...]] = []
    for mark, item in words.chosen_predictions(diagnosis):
        sign = ">" if "recommended" in mark else "*" if mark else " "
        shares = map(words.share, (item.kept, item.ess))
        figures = (figure(item.mean_weight), words.times(item.noise), figure(item.bias, 2))
        rows.append((f"{sign} {item.setting}", *shares, *figures, "yes" if item.second_pass else NOTHING))
    screen.console.print()
    headers = ("> recommended  * yours", "kept", "ESS of\nweights", "mean w", "noise", "bounds'\nbias", "2nd\npass")
    screen.table(headers, rows)
    screen.say(_BIAS, "dim")
    if diagnosis.next_step:
        screen.console.print()
        screen.step(diagnosis.next_step)
