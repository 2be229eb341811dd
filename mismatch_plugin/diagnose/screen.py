"""A diagnosis in words, which the page says, too, and on a terminal, the verdict first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.detectors.run import NO_TRAINING
from mismatch_plugin.diagnose.flags import TITLES
from mismatch_plugin.diagnose.normal import SMALL_K3, UNEXPLAINED, size_class
from mismatch_plugin.diagnose.result import TOO_FEW, Diagnosis, Finding, Gate, Prediction
from mismatch_plugin.report.table import NOTHING, figure, printable, shows_unicode

USUAL = "token_is"


def share(value: float) -> str:
    """A share in percent, which is 100 % or 0 % only where it is exactly that."""
    if value in (0.0, 1.0) or 0.0005 <= value < 0.9995:
        return f"{100 * value:.3g} %"
    return "> 99.9 %" if value > 0.5 else "< 0.1 %"


def times(value: float) -> str:
    """A multiple: `×1.02`."""
    return f"×{value:.2f}" if value < 10 else f"×{figure(value)}"


def is_it_normal(diagnosis: Diagnosis) -> str:
    """The answer to "is this normal?"; "" where there is no training side."""
    if diagnosis.one_sided:
        return ""
    said = diagnosis.normality or "unknown, since there is nothing to compare."
    before = {"fault": "By its size ", "undecided": "Not decided; so far "}.get(diagnosis.verdict, "")
    said = before + said if before and diagnosis.normality else said[:1].upper() + said[1:]
    return f"Is this normal? {said}"


def without_advice(diagnosis: Diagnosis) -> str:
    """Why no setting is recommended, and what to do."""
    k3 = diagnosis.mismatch.k3_kl if diagnosis.mismatch else 0.0
    why = f": so strong a mismatch has a cause, which no weight repairs. Find it, or --accept {UNEXPLAINED} if meant"
    if diagnosis.verdict == "fault":
        why = ": fix the fault first, then inspect again"
    elif diagnosis.verdict == "undecided":
        why = ""
    elif k3 < SMALL_K3:
        why = ": so small a mismatch needs no correction, but it is larger than such a pair's"
    return f"No setting is recommended{why}. {diagnosis.next_step}".strip()


def undecided(diagnosis: Diagnosis, short: bool = False) -> list[str]:
    """What could not be looked for; without a training side that is all that compares, which is said elsewhere.

    short: in one line where it is for want of tokens.
    """
    items = [item for item in diagnosis.undecided if not (diagnosis.one_sided and item.reason == NO_TRAINING)]
    few = [item for item in items if short and item.reason.startswith(TOO_FEW)]
    said = [f"{', '.join(item.faults)}: {item.reason}" for item in items if item not in few]
    names = ", ".join(dict.fromkeys(fault for item in few for fault in item.faults))
    return [*said, f"{names}: {TOO_FEW}"] if few else said


def label(item: Finding) -> str:
    """What a finding is called."""
    return "Cause" if item.counts else "Accepted" if item.accepted else "Note"


def sentence(text: str) -> str:
    """Without the backticks of markdown, with one full stop."""
    return f"{text.replace('`', '').rstrip('. ')}."


def gate_words(gate: Gate) -> tuple[str, str]:
    """(whether it passed, the figures)."""
    why = "no k3" if math.isnan(gate.value) else "too few tokens"
    said = {True: "passed", False: "failed", None: f"not decided, {why}"}[gate.passed]
    source = gate.source.partition(": ")[0]
    return said, f"k3 {figure(gate.value)} nats per token against a bar of {figure(gate.bar)} ({source})"


def size_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(figure, value with its unit): how far apart the two sides are, the most telling first. A χ² estimated below 0,
    which it is where few tokens have all of the weight, tells nothing and is shown as none."""
    rows: list[tuple[str, str]] = []
    metrics, level = {name.removeprefix(PREFIX): value for name, value in diagnosis.metrics.items()}, diagnosis.mismatch
    if level is not None:
        rows.append(("mean |Δ log p|", f"{figure(level.abs_mean)} nats/token"))
        rows.append(("99 % of |Δ log p| <", f"{figure(level.abs_p99)} nats"))
        metrics = {"kl": level.kl, "k3_kl": level.k3_kl, **metrics}
        metrics.setdefault("rollout_is_ratio_eff_sample_size", level.effective_sample_size)
    for title, name, unit in (
        ("KL, k1", "kl", " nats/token"),
        ("KL, k3", "k3_kl", " nats/token"),
        ("ESS of token ratios", "rollout_is_ratio_eff_sample_size", ""),
        (f"ESS of {diagnosis.level} ratios", "rollout_is_ratio_unit_eff_sample_size", ""),
        ("χ² of token ratios", "chi2_token", ""),
        ("χ² of sequence ratios", "chi2_seq", ""),
    ):
        if (value := metrics.get(name)) is not None:
            text = share(value) if title.startswith("ESS") else figure(value)
            rows.append((title, NOTHING if title.startswith("χ²") and value < 0 else text + unit))
    return rows


def chosen_predictions(diagnosis: Diagnosis) -> list[tuple[str, Prediction]]:
    """(mark, prediction): the recommended setting, the user's own, token weights, which most start with, and the best
    preset of each other algorithm by kept · ESS · (1 − bias)."""
    advice, every = diagnosis.recommendation, diagnosis.predictions
    best = next((item for item in every if advice and item.setting == advice.setting), None)
    own = next((item for item in every if item.own), None)
    same = best is not None and own is not None and best.settings == own.settings
    marked = [("recommended" + ", yours" * same, best)] if best else []
    if own is not None and not same:
        marked.append(("yours", own))
    marked += [("", item) for item in every if item.setting == USUAL and item is not best]
    for item in sorted(every, key=lambda item: -item.kept * item.ess * (1.0 - min(item.bias, 1.0))):
        if "--" not in item.setting and item.algorithm not in {one.algorithm for _, one in marked}:
            marked.append(("", item))
    return marked


# The terminal's summary -----------------------------------------------------------------------------------------------

STYLES = {"fault": "bold red", "large": "bold yellow", "normal": "bold green", "undecided": "bold cyan"}
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
        self.say(f"{label(item)}: {item.fault} ({item.confidence}). {item.evidence}", "bold")
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


def show(diagnosis: Diagnosis, console: Console, *, report: Path | None = None, brief: bool = False) -> None:
    """Print the summary, the verdict first. report: where the page is. brief: the findings, all of them whole, and
    nothing of settings."""
    screen = _Screen(console)
    verdict, _, rest = diagnosis.headline.partition(": ")
    screen.say(f"{verdict.upper()}: {rest}", STYLES[diagnosis.verdict])
    if normal := is_it_normal(diagnosis):
        screen.say(normal)
    if (gate := diagnosis.gate) is not None:
        said, figures = gate_words(gate)
        screen.say(f"Gate {said.upper()}: {figures}.")
    counted = f"{diagnosis.samples:,} samples, {diagnosis.tokens:,} tokens"
    screen.say(f"{counted} of {diagnosis.source} ({diagnosis.format}).")
    for place, item in enumerate(diagnosis.findings):
        if not place or brief:
            screen.finding(item)
        else:
            also = "also" if item.counts else label(item).lower()
            screen.say(f"{also} {item.fault} ({item.confidence}): {item.evidence}")
    if (level := diagnosis.fixed) is not None:
        screen.say(f"once fixed: {level}, which is {size_class(level)}")
    for reason in undecided(diagnosis, short=not brief):
        screen.say(f"not decided: {reason}")
    if brief:
        for note in diagnosis.notes:
            screen.say(f"note: {note}", whole=True)
        screen.step(f"Next: {diagnosis.next_step}" if diagnosis.next_step else "")
        return
    for note in diagnosis.notes[1:]:  # the first says what was read
        screen.say(f"note: {note}", "dim")
    if rows := [row for row in size_rows(diagnosis) if not row[0].startswith("χ²")]:
        console.print()
        screen.table(("size", "measured"), rows)
    console.print()
    if diagnosis.recommendation is None:
        screen.step(without_advice(diagnosis))
    else:
        _advice(screen, diagnosis)
    if report is not None:
        screen.say(f"Report: {report}", whole=True)


def _advice(screen: _Screen, diagnosis: Diagnosis) -> None:
    advice, host = diagnosis.recommendation, diagnosis.host
    assert advice is not None
    why = ". ".join(reason[:1].upper() + reason[1:] for reason in advice.reasons[:2])
    screen.say(f"Recommended: {advice.setting}. {sentence(why)}", "bold")
    others = ", ".join(name for name in advice.flags if name != host)
    screen.say(f"Flags for {TITLES[host]} (--host {others} prints theirs):")
    for line in advice.flags[host].splitlines():
        screen.say(line, "cyan", whole=True)
    for watched in advice.watch[:1]:
        screen.say(f"Watch in the first ten steps: {watched}.")
    rows: list[tuple[str, ...]] = []
    for mark, item in chosen_predictions(diagnosis):
        sign = {"": " ", "yours": "*", "recommended": ">"}.get(mark, ">*")
        shares = map(share, (item.kept, item.ess))
        figures = (figure(item.mean_weight), times(item.noise), figure(item.bias, 2))
        rows.append((f"{sign} {item.setting}", *shares, *figures, "yes" if item.second_pass else NOTHING))
    screen.console.print()
    headers = ("> recommended  * yours", "kept", "ESS of\nweights", "mean w", "noise", "bounds'\nbias", "2nd\npass")
    screen.table(headers, rows)
    screen.say(_BIAS, "dim")
    if diagnosis.next_step:
        screen.console.print()
        screen.step(diagnosis.next_step)
