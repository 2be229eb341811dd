"""What the terminal's summary and the page both say of a diagnosis, in words and in rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.units import acting_bounds
from mismatch_plugin.diagnose.detectors.run import NO_TRAINING
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.diagnose.flags import HOSTS, config_of
from mismatch_plugin.diagnose.normal import UNEXPLAINED, span
from mismatch_plugin.diagnose.result import VERDICTS, Comparable, Diagnosis, Gate, Prediction
from mismatch_plugin.report.table import NOTHING, figure

ALTERNATIVES = 3


@dataclass(frozen=True)
class Controls:
    """Where a setting is among the page's controls. mode: of the weights; `reject` where ratios are only rejected by.
    lower, upper: bounds on ρ; None: there is none."""

    level: str
    mode: str
    lower: float | None
    upper: float | None


def headline(diagnosis: Diagnosis) -> tuple[str, str]:
    """(the verdict in two words, the rest of the sentence)."""
    verdict = VERDICTS[diagnosis.verdict]
    return verdict, diagnosis.headline.removeprefix(f"{verdict}: ")


def host_names(flags: dict[str, str]) -> dict[str, str]:
    """Host → its name as people write it, of the hosts that have flags; hosts unknown here come last."""
    names: dict[str, str] = {**HOSTS}
    return {host: names.get(host, host) for host in (*names, *sorted(flags.keys() - names.keys())) if host in flags}


def count(number: int) -> str:
    """`43,002`."""
    return f"{number:,}"


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
    why = f": so strong a mismatch has a cause, which no weight repairs. Find it, or --accept {UNEXPLAINED} if meant"
    if diagnosis.verdict == "fault":
        why = ": fix the fault first, then inspect again"
    elif diagnosis.verdict == "undecided":
        why = ""
    return f"No setting is recommended{why}. {diagnosis.next_step}".strip()


def undecided(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What could not be looked for; without a training side that is all that compares, which is said elsewhere."""
    return tuple(
        f"{', '.join(item.faults)}: {item.reason}"
        for item in diagnosis.undecided
        if not (diagnosis.one_sided and item.reason == NO_TRAINING)
    )


def label(item: Finding) -> str:
    """What a finding is called."""
    return "Cause" if item.counts else "Accepted" if item.accepted else "Note"


_SEPARATED = {
    "engine_abs": "mean |Δ log p| of the engines alone",
    "engine_k3": "k3 of the engines alone",
    "stale_abs": "mean |Δ log p| of stale tokens",
    "stale_k3": "k3 of stale tokens",
    "staleness_k3": "k3 that fresh weights would save",
    "k3_per_step": "k3 added by each step of staleness",
    "sampled_abs": "mean |Δ log p| of sampling against one pass of the same server",
    "sampled_k3": "k3 of that",
    "trainer_abs": "mean |Δ log p| of the server's pass against the trainer",
    "trainer_k3": "k3 of that",
}


def separated(diagnosis: Diagnosis) -> str:
    """What of the gap is whose, in words; "" where that is not known, or a fault makes it meaningless."""
    if diagnosis.verdict == "fault" or diagnosis.size is None or not diagnosis.size.separated:
        return ""
    parts = [f"{_SEPARATED.get(name, name)} {figure(value)}" for name, value in diagnosis.size.separated.items()]
    return f"Of the gap, nats per token: {', '.join(parts)}."


def sentence(text: str) -> str:
    """Plain, with one full stop."""
    return f"{plain(text).rstrip('. ')}."


def plain(text: str) -> str:
    """Without the backticks of markdown."""
    return text.replace("`", "")


def published(diagnosis: Diagnosis) -> dict[str, str]:
    """Figure of `size_rows` → the range known of the nearest kind of pair, with its name; what is ours is called so."""
    found: dict[str, list[Comparable]] = {}
    for item in diagnosis.normal:
        if item.pair == diagnosis.normal[0].pair:
            found.setdefault("KL, k3" if item.figure != "mean |Δ log p|" else item.figure, []).append(item)
    told: dict[str, str] = {}
    for title, every in found.items():
        rows = [row for row in every if not row.ours] or every
        ours = " (ours)" if rows[0].ours else ""
        told[title] = f"{span(min(r.low for r in rows), max(r.high for r in rows))}{ours}: {rows[0].pair}"
    return told


def gate_words(gate: Gate, brief: bool = False) -> tuple[str, str]:
    """(whether it passed, the figures). brief: without why this bar."""
    source = gate.source.partition(": ")[0] if brief else gate.source
    said = {True: "passed", False: "failed", None: "not decided, too few tokens"}[gate.passed]
    return said, f"k3 {figure(gate.value)} nats per token against a bar of {figure(gate.bar)} ({source})"


def size_rows(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """(figure, value, unit): how far apart the two sides are, the most telling first. A χ² estimated below 0, which it
    is where few tokens have all of the weight, tells nothing and is shown as none."""
    rows: list[tuple[str, str, str]] = []
    metrics, level = {name.removeprefix(PREFIX): value for name, value in diagnosis.metrics.items()}, diagnosis.mismatch
    if level is not None:
        rows.append(("mean |Δ log p|", figure(level.abs_mean), "nat/token"))
        rows.append(("99 % of |Δ log p| <", figure(level.abs_p99), "nat"))
        metrics = {"kl": level.kl, "k3_kl": level.k3_kl, **metrics}
        metrics.setdefault("rollout_is_ratio_eff_sample_size", level.effective_sample_size)
    for title, name, unit in (
        ("KL, k1", "kl", "nat/token"),
        ("KL, k3", "k3_kl", "nat/token"),
        ("ESS of token ratios", "rollout_is_ratio_eff_sample_size", ""),
        (f"ESS of {diagnosis.level} ratios", "rollout_is_ratio_unit_eff_sample_size", ""),
        ("χ² of token ratios", "chi2_token", ""),
        ("χ² of sequence ratios", "chi2_seq", ""),
    ):
        if (value := metrics.get(name)) is not None:
            text = share(value) if title.startswith("ESS") else figure(value)
            rows.append((title, NOTHING if title.startswith("χ²") and value < 0 else text, unit))
    return rows


def recommended(diagnosis: Diagnosis) -> Prediction | None:
    """What the recommended setting would do."""
    advice = diagnosis.recommendation
    return next((item for item in diagnosis.predictions if advice and item.setting == advice.setting), None)


def chosen_predictions(diagnosis: Diagnosis) -> list[tuple[str, Prediction]]:
    """(mark, prediction): the recommended setting, the user's own, and the best of each other algorithm by
    kept · ESS · (1 − bias), filled up by that to `ALTERNATIVES`."""
    best, own = recommended(diagnosis), next((item for item in diagnosis.predictions if item.own), None)
    marked = [("recommended" + ", yours" * (best is own), best)] if best else []
    if own is not None and own is not best:
        marked.append(("yours", own))
    others = [item for item in diagnosis.predictions if item is not best and item is not own]
    others.sort(key=lambda item: -item.kept * item.ess * (1.0 - min(item.bias, 1.0)))
    used = {item.algorithm for _, item in marked}
    first = [item for item in others if not (item.algorithm in used or used.add(item.algorithm))]
    rest = [item for item in others if item not in first]
    return [*marked, *(("", item) for item in [*first, *rest][:ALTERNATIVES])]


def controls_of(settings: Mapping[str, object]) -> Controls | None:
    """Which of the page's controls a setting is; None where it bounds no ratio, where its bounds grow with the length,
    or where it is not understood."""
    try:
        config = config_of(settings)
    except ValueError:
        return None
    bounds = acting_bounds(config)
    if bounds is None or bounds.growth or not (config.weighted or config.rejects):
        return None
    mode = config.tis.mode if config.weighted else "reject"
    lower = bounds.lower if mode != "truncate" and bounds.lower > 0 else None
    return Controls(bounds.unit.level, mode, lower, bounds.upper if bounds.log_upper < 20 else None)
