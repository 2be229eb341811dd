"""The page of a comparison: a conclusion made from the numbers, the table, the pictures, and `summary.json`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

import mismatch_plugin
from mismatch_plugin.compare.statistics import (
    BASELINE,
    KL,
    LEVEL,
    OUTCOMES,
    Array,
    Folder,
    Results,
    Run,
    Variant,
    mapping,
    read_folder,
    summarise,
)
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.files import encodable, write_whole
from mismatch_plugin.report.log import to_json
from mismatch_plugin.report.presets import as_flags
from mismatch_plugin.report.table import NOTHING, Table, figure, number, p_value, signed, terminal
from mismatch_plugin.report.templates import environment

PALETTE = ("#000000", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#6B3A00", "#7F7F7F")
DASHES = ("", "6 1.5", "1.5 1", "6 1.5 1 1.5", "3 1.2", "6 1 1 1 1 1", "10 3", "2 3")
"""Of the variants in order: colours of Okabe and Ito, which any colour vision tells apart, dashes for a grey print."""
How = tuple[Callable[..., Any], Callable[..., Any], bool]
MEANS: How = (np.mean, np.mean, False)
"""What is drawn of neighbouring steps, what over seeds, and whether the scale is logarithmic."""
PANELS: tuple[tuple[str, str, How], ...] = (
    ("grad_norm", "Largest gradient norm before clipping, median over seeds (log scale)", (np.max, np.median, True)),
    (KL, "KL(rollout‖trainer), nats per token (log scale)", (np.mean, np.mean, True)),
    ("impossible_tokens", "Share of sampled tokens to which the trainer gives less than 1e-4", MEANS),
)


def write_report(folder: Path) -> str:
    """Write FOLDER/report.html, summary.json and collapse.png of what there is; returns the table for a terminal.

    Raises OSError or ValueError where no run.json says what the folder holds."""
    found = read_folder(folder)
    results, measure = summarise(found), found.measure()
    table = final_table(results)
    names = [row[0] for row in table.rows]
    compared = any(v.finals for variants in results.values() for v in variants.values())
    chosen = focus(results) if compared else ""
    panel = partial(_panel, folder=found, names=names)
    outcomes = {s: _svg(partial(panel, setting=s, column=measure)) for s in results} if measure else {}
    measured = [
        (setting, caption, svg)
        for setting in ([chosen] if chosen else results)
        for column, caption, how in PANELS
        if (svg := _svg(partial(panel, setting=setting, column=column, how=how)))
    ]
    picture = _all_outcomes(list(results), panel, measure) if measure else b""
    if picture:
        (folder / "collapse.png").write_bytes(picture)
    write_whole(folder / "summary.json", to_json(_summary(found, results, picture), indent=2) + "\n")
    made = environment()
    made.filters |= {"number": number, "signed": signed, "p_value": p_value, "figure": figure}
    page = made.get_template("compare/report.html.j2").render(
        folder=found,
        title=str(found.info.get("title", "Comparison of mismatch corrections")),
        about=_about(found, measure),
        results=results,
        settings={setting: found.about(setting) for setting in results},
        flags={name: flags_of(found, name) for name in names},
        swatches={name: (PALETTE[i % 8], DASHES[i % 8]) for i, name in enumerate(names)},
        conclusion=conclusion(results) if compared else [],
        cell=cell,
        outcomes=outcomes,
        chosen=chosen,
        measured=measured,
        version=mismatch_plugin.__version__,
    )
    write_whole(folder / "report.html", encodable(page))
    console = terminal()
    with console.capture() as text:
        console.print(table.to_rich(), *table.notes, sep="\n")
    return text.get()


def cell(variant: Variant | None) -> str:
    """Mean final value, ▲ or ▼ where it differs significantly from PPO, and (c/n) where c of n runs collapsed."""
    if variant is None or not variant.finals:
        return NOTHING
    mark = {"better": " ▲", "worse": " ▼"}.get(variant.verdict, "")
    return f"{variant.mean:.2f}{mark}" + (f" ({variant.fell}/{len(variant.collapsed)})" if variant.fell else "")


def final_table(results: Results) -> Table:
    """Final values, one row a variant, PPO first, and one column a setting."""
    names = dict.fromkeys(name for variants in results.values() for name in variants)
    rows = [(name, *(cell(of.get(name)) for of in results.values())) for name in names]
    rows.sort(key=lambda row: row[0] != BASELINE)
    note = "▲ ▼: significantly above or below PPO in that setting (Holm). (c/n): c of n runs collapsed. –: not run."
    return Table("Final value, mean over seeds", ("algorithm", *results), tuple(rows), notes=(note,))


def focus(results: Results) -> str:
    """The setting to look into: where most runs of PPO collapsed."""
    base = {s: of[BASELINE] for s, of in results.items() if BASELINE in of and of[BASELINE].finals}
    return max(base, key=lambda s: base[s].fell / len(base[s].finals), default=next(iter(results)))


def conclusion(results: Results) -> list[str]:
    """What a reader takes home, a sentence each: how PPO did, and where each variant gained or lost significantly."""
    base = {s: of[BASELINE] for s, of in results.items() if BASELINE in of and of[BASELINE].finals}
    if not base:
        return ["No run of PPO has finished: nothing is compared."]
    fell = [f"{s} {v.fell}/{len(v.collapsed)}" for s, v in base.items() if v.fell]
    told = [f"Runs of PPO without correction collapsed in {_of(fell, base)}."]
    pairs = [[v.difference.n for v in results[s].values() if v.difference and v.difference.n] for s in base]
    if all(2.0 ** (1 - max(ns)) * len(ns) >= LEVEL for ns in pairs if ns):
        return [*told, "With so few seeds no difference can be significant: nothing else is concluded."]
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name in dict.fromkeys(name for s in base for name in results[s] if name != BASELINE):
        verdicts = {s: results[s][name].verdict for s in base if name in results[s]}
        ran = tuple(s for s, verdict in verdicts.items() if verdict not in ("", "too few seeds"))
        better, worse = (tuple(s for s in ran if verdicts[s] == kind) for kind in ("better", "worse"))
        if ran:
            groups.setdefault((ran, better, worse), []).append(name)
    for (ran, better, worse), names in sorted(groups.items(), key=lambda group: (-len(group[0][0]), len(group[0][2]))):
        who, were = listed(names), "was" if len(names) == 1 else "were"
        if len(ran) == 1:
            what = "gained" if better else f"{were} significantly worse" if worse else "made no significant difference"
            told.append(f"{who} ran in {ran[0]} alone and {what} there.")
            continue
        ends = [f"{s} ({number(results[s][names[0]].mean, 2)}, PPO {number(base[s].mean, 2)})" for s in worse]
        lost = f"{len(worse)}: {listed(ends if len(names) == 1 else worse)}" if worse else "none"
        told.append(f"{who} gained in {_of(better, ran)} and {were} significantly worse in {lost}.")
    means = {s: [v.mean for v in results[s].values() if v.finals] for s in base}
    alike = [f"{s} ({number(base[s].mean, 2)})" for s, of in means.items() if len(of) > 1 and max(of) - min(of) <= 0.02]
    return [*told, *([f"All algorithms end within 0.02 of each other in {listed(alike)}."] if alike else [])]


def _about(folder: Folder, measure: str | None) -> list[str]:
    """What the page is about: sentences of run.json, else the task that the settings share, and the seeds."""
    if isinstance(given := folder.info.get("about"), list):
        return [str(sentence) for sentence in given]
    tasks = {folder.about(setting)["task"] for setting in folder.variants} - {""}
    what = "exact match" if "exact" in (measure or "") else "reward"
    where = "on held-out prompts" if "held_out" in (measure or "") else "on the training batches"
    seeds = f"; seeds {min(folder.seeds)} to {max(folder.seeds)}" if folder.seeds else ""
    return [*(tasks if len(tasks) == 1 else ()), f"Numbers are the mean {what} at the end, {where}{seeds}."]


def flags_of(folder: Folder, name: str) -> str:
    """A variant's settings as launch flags; empty where its configuration was not kept or cannot be read."""
    settings = next((mapping(run.config.get("mismatch")) for key, run in folder.runs.items() if key[1] == name), {})
    try:
        with ignore_mismatch_warnings():
            config = MismatchConfig.build({**settings, "metrics": "basic", "report_dir": None})
    except (ValueError, TypeError):
        return ""
    return " ".join(as_flags(config)) or "no flag" if settings else ""


def _panel(axis: Any, folder: Folder, names: Sequence[str], setting: str, column: str, how: How = MEANS) -> bool:
    """Draw a column of every variant over the steps. False where nothing but zeros was recorded."""
    (of_steps, over_seeds, log), drawn = how, False
    for place, name in enumerate(names):
        steps, values = _curve(folder.of(setting, name).values(), column, of_steps)
        if not values.size:
            continue
        drawn |= bool(np.abs(values).max() > 1e-6)
        dashes = tuple(map(float, DASHES[place % 8].split()))
        middle = over_seeds(values, axis=0)
        style: Any = {"color": PALETTE[place % 8], "linestyle": (0, dashes) if dashes else "solid", "label": name}
        style["linewidth"] = 2.2 if name == BASELINE else 1.5
        axis.plot(steps, np.maximum(middle, 1e-4) if log else middle, **style)
        if name == BASELINE and column in OUTCOMES:
            axis.plot(steps, values.T, color=PALETTE[place % 8], linewidth=0.5, alpha=0.35)
    if column in OUTCOMES:
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(f"{setting}: {folder.about(setting)['title']}", fontsize=10, loc="left")
    axis.set_yscale("log" if log else "linear")
    axis.set_xlabel("optimizer step", fontsize=9)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)
    return drawn


def _curve(runs: Iterable[Run], column: str, of_steps: Callable[..., Any]) -> tuple[Array, Array]:
    """(steps [K], values [runs, K]) at the steps that all runs have; more than 60 are put together in 40 windows."""
    curves = [curve for run in runs if len((curve := run.curve(column))[0])]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    steps = reduce(np.intersect1d, [at for at, _ in curves])
    values = np.array([of[np.isin(at, steps)] for at, of in curves])
    if len(steps) > 60:
        parts = np.array_split(np.arange(len(steps)), 40)
        values = np.stack([of_steps(values[:, part], axis=1) for part in parts], axis=1)
        steps = np.array([steps[part].mean() for part in parts])
    return steps, values


def _svg(draw: Callable[[Any], bool]) -> str:
    """A picture of one panel as the base64 of its SVG; empty where nothing was drawn."""
    out, drawn = io.BytesIO(), Figure(figsize=(4.6, 2.9), layout="constrained")
    if not draw(drawn.subplots()):
        return ""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "compare"}):
        drawn.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue()).decode("ascii")


def _all_outcomes(settings: Sequence[str], panel: Callable[..., bool], measure: str) -> bytes:
    """The outcome of every setting in one PNG with its legend, for pages elsewhere."""
    out, rows = io.BytesIO(), math.ceil(len(settings) / 3)
    drawn = Figure(figsize=(10.5, 0.7 + 2.5 * rows), layout="constrained")
    axes = drawn.subplots(rows, 3, sharex=True, sharey=True, squeeze=False).ravel()
    for axis, setting in zip(axes, settings, strict=False):
        panel(axis, setting=setting, column=measure)
    for axis in axes[len(settings) :]:
        axis.set_visible(False)
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"}
    drawn.legend([*lines.values()], [*lines], loc="outside upper center", ncols=4, frameon=False, handlelength=3.5)
    drawn.savefig(out, dpi=110)
    small = io.BytesIO()
    Image.open(out).convert("RGB").quantize(colors=64).save(small, format="png", optimize=True)
    return small.getvalue()


def _summary(folder: Folder, results: Results, picture: bytes) -> dict[str, Any]:
    """The numbers, for pages that cite the run. picture: its SHA-256, so that a copy is known to be of this run."""
    summary = {
        "command": str(folder.info.get("command") or ""),
        "version": mismatch_plugin.__version__,
        "seeds": list(folder.seeds),
        "complete": not folder.missing,
        "settings": {
            setting: {
                **{key: folder.about(setting)[key] for key in ("title", "what")},
                "measure": "exact" if "exact" in (folder.measure() or "") else "reward",
                "variants": {name: _figures(variant) for name, variant in variants.items()},
            }
            for setting, variants in results.items()
        },
        "diverged": [list(key) for key, run in sorted(folder.runs.items()) if run.diverged],
        "picture": hashlib.sha256(picture).hexdigest() if picture else None,
    }
    return json.loads(  # six digits, and null where there is no number
        json.dumps(summary), parse_float=lambda text: float(f"{float(text):.6g}"), parse_constant=lambda _: None
    )


def _figures(of: Variant) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": len(of.finals), "mean": of.mean, "error": of.error}
    area = float(np.mean([*of.areas.values()])) if of.areas else math.nan
    found |= {"collapsed": of.fell, "runs": len(of.collapsed), "area": area}
    if (d := of.difference) is not None and d.n:
        found |= {"difference": d.mean, "interval": [d.low, d.high], "p": d.p, "p_holm": d.p_holm}
        found |= {"effect_size": d.effect_size, "verdict": d.verdict}
    measured = {k: of.figures[k] for k in ("grad_norm", "kl", "impossible", "rejected") if k in of.figures}
    return {**found, "mechanism": measured}


def _of(some: Sequence[str], among: Mapping[str, Any] | Sequence[str]) -> str:
    """`2 of 6 settings (a and b)`."""
    return f"{len(some) or 'none'} of {len(among)} settings" + (f" ({listed(some)})" if some else "")


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
