"""What the terminal's summary and the page both say of a diagnosis, in words and in rows."""

from __future__ import annotations

from collections.abc import Mapping

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.detectors.run import NO_TRAINING
from mismatch_plugin.diagnose.flags import config_of, shortest_flags
from mismatch_plugin.diagnose.normal import SMALL_K3, UNEXPLAINED
from mismatch_plugin.diagnose.result import TOO_FEW, Diagnosis, Finding, Gate, Prediction
from mismatch_plugin.report.table import NOTHING, figure

USUAL = "token_is"


def neutral_flags(settings: Mapping[str, object]) -> str:
    """Our flags alone, which every trainer's launch line takes."""
    return " ".join(shortest_flags(config_of(settings)))


def share(value: float) -> str:
    """A share in percent, which is 100 % or 0 % only where it is exactly that."""
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    for digits in (1, 2, 3, 4):
        if float(text := f"{100 * value:.{digits}f}") not in (0.0, 100.0):
            return f"{text} %"
    return "> 99.9999 %" if value > 0.5 else "< 0.0001 %"


def times(value: float) -> str:
    """A multiple: `×1.02`."""
    return f"×{value:.2f}" if value < 10 else f"×{figure(value)}"


def is_it_normal(diagnosis: Diagnosis) -> str:
    """The answer to "is this normal?"; "" where there is no training side."""
    if diagnosis.one_sided:
        return ""
    if not (said := diagnosis.normality):
        return "Is this normal? Unknown, since there is nothing to compare."
    before = {"fault": "By its size ", "undecided": "Not decided; so far "}.get(diagnosis.verdict, "")
    for start, answer in (("normal, ", "yes, "), ("not normal for ", "no: for ")):
        said = answer + said.removeprefix(start) if said.startswith(start) else said
    return f"Is this normal? {before}{said if before else said[:1].upper() + said[1:]}"


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
    said = {True: "passed", False: "failed", None: "not decided, too few tokens"}[gate.passed]
    source = gate.source.partition(": ")[0]
    return said, f"k3 {figure(gate.value)} nats per token against a bar of {figure(gate.bar)} ({source})"


def size_rows(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """(figure, value, unit): how far apart the two sides are, the most telling first. A χ² estimated below 0, which it
    is where few tokens have all of the weight, tells nothing and is shown as none."""
    rows: list[tuple[str, str, str]] = []
    metrics, level = {name.removeprefix(PREFIX): value for name, value in diagnosis.metrics.items()}, diagnosis.mismatch
    if level is not None:
        rows.append(("mean |Δ log p|", figure(level.abs_mean), "nats/token"))
        rows.append(("99 % of |Δ log p| <", figure(level.abs_p99), "nats"))
        metrics = {"kl": level.kl, "k3_kl": level.k3_kl, **metrics}
        metrics.setdefault("rollout_is_ratio_eff_sample_size", level.effective_sample_size)
    for title, name, unit in (
        ("KL, k1", "kl", "nats/token"),
        ("KL, k3", "k3_kl", "nats/token"),
        ("ESS of token ratios", "rollout_is_ratio_eff_sample_size", ""),
        (f"ESS of {diagnosis.level} ratios", "rollout_is_ratio_unit_eff_sample_size", ""),
        ("χ² of token ratios", "chi2_token", ""),
        ("χ² of sequence ratios", "chi2_seq", ""),
    ):
        if (value := metrics.get(name)) is not None:
            text = share(value) if title.startswith("ESS") else figure(value)
            rows.append((title, NOTHING if title.startswith("χ²") and value < 0 else text, unit))
    return rows


def chosen_predictions(diagnosis: Diagnosis) -> list[tuple[str, Prediction]]:
    """(mark, prediction): the recommended setting, the user's own, token weights, which most start with, and the best
    preset of each other algorithm by kept · ESS · (1 − bias)."""
    advice, every = diagnosis.recommendation, diagnosis.predictions
    best = next((item for item in every if advice and item.setting == advice.setting), None)
    own = next((item for item in every if item.own), None)
    marked = [("recommended" + ", yours" * (best is own), best)] if best else []
    if own is not None and own is not best:
        marked.append(("yours", own))
    marked += [("", item) for item in every if item.setting == USUAL and item is not best]
    for item in sorted(every, key=lambda item: -item.kept * item.ess * (1.0 - min(item.bias, 1.0))):
        if "--" not in item.setting and item.algorithm not in {one.algorithm for _, one in marked}:
            marked.append(("", item))
    return marked
