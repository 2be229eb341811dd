"""An account as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import UNITS
from mismatch_plugin.explain.account import Account, Token
from mismatch_plugin.report.table import NOTHING, Table, figure

PADDING = "·"


def tables(account: Account, config: MismatchConfig) -> Iterator[Table]:
    """From log-probs to weights; from weights to the loss; its sums."""
    yield _weights(account, config)
    yield _losses(account, config)
    yield _sums(account)


def _weights(account: Account, config: MismatchConfig) -> Table:
    side = "π_θ" if config.use_rollout_log_probs else "π_old"
    of_unit = f"{account.level} ρ"
    headers = ("token", f"log {side}", "log π_rollout", "l", "ρ", of_unit, "lower", "upper", "weight")
    rows = []
    for token in account.tokens:
        train = token.log_prob if config.use_rollout_log_probs else token.old_log_prob
        values = (train, token.rollout_log_prob, token.log_ratio, token.ratio, token.unit_ratio, token.lower)
        rows.append((token.name, *_cells(token, *values, token.upper, token.weight)))
    notes = [f"l = log {side} − log π_rollout, ρ = e^l: how much likelier the trainer finds a token than the sampler."]
    unit = UNITS.get(account.level)
    if unit is not None and not unit.per_token:
        notes.append(f"{of_unit}: {unit.ratio}.")
    if not config.weighted:
        notes.append("Without importance weights every weight is 1.")
    if account.batch_factor is not None:
        notes.append(f"The bounded weights were divided by their mean, {figure(account.batch_factor, 4)}.")
    if not all(token.trains for token in account.tokens):
        notes.append(f"{PADDING} is under the loss mask: it counts nowhere.")
    table = Table("From log-probs to weights", headers, tuple(rows), notes=tuple(notes))
    empty = {header for header in headers if set(table.column(header)) <= {NOTHING, PADDING}}
    hidden = empty | ({of_unit} if unit is None or unit.per_token else set())
    return table.only(*(header for header in headers if header not in hidden))


def _losses(account: Account, config: MismatchConfig) -> Table:
    rows = []
    for token in account.tokens:
        kept, by = "yes" if token.kept else "no", ", ".join(token.rejected_by) or NOTHING
        judged = (kept, by) if token.trains else (PADDING, PADDING)
        numbers = _cells(token, token.log_prob, token.objective_ratio, token.advantage)
        rows.append((token.name, *numbers, *judged, *_cells(token, token.objective, token.loss, token.gradient)))
    headers = ("token", "log π_θ", "r", "A", "kept", "rejected by", "objective", "loss", "gradient")
    notes = [
        f"objective: {config.policy_objective}, {_formula(config)}; loss = weight · kept · objective.",
        "gradient = d loss / d log π_θ of the whole loss below. Negative: the step makes the token likelier.",
    ]
    if config.dry_run:
        notes.append("A dry run: the rules judge, and nothing is applied.")
    table = Table("From weights to the loss", headers, tuple(rows), notes=tuple(notes))
    return table.only(*(header for header in headers if set(table.column(header)) - {NOTHING, PADDING}))


_FORMULAS = {
    "ppo": "−min(r A, clip(r) A)",
    "gspo": "−min(r A, clip(r) A), r of the whole sequence: its geometric mean",
    "cispo": "−clip(r) A log π_θ, clip(r) without gradient",
    "sapo": "−(4/τ) σ(τ (r − 1)) A",
    "gmpo": "−A times the geometric mean of the response's clipped r",
    "reinforce": "−A log π_θ",
}


def _formula(config: MismatchConfig) -> str:
    formula, clip = _FORMULAS[config.policy_objective], config.ppo
    if config.policy_objective == "reinforce":
        return formula
    anchor = "π_rollout" if config.use_rollout_log_probs else "π_old"
    if config.ratio_bounds is None:
        taus = f"τ {clip.tau_positive:g} where A > 0, else {clip.tau_negative:g}"
        return f"{formula} with r = π_θ / {anchor}, {taus}"
    between = f"{config.ratio_bounds[0]:.7g} to {config.ratio_bounds[1]:.7g}"
    dual = "" if clip.dual_clip is None else f", at most {clip.dual_clip:g} |A| where A < 0"
    return f"{formula} with r = π_θ / {anchor}, clipped to {between}{dual}"


def _sums(account: Account) -> Table:
    sums = account.sums
    rows = [("policy", figure(sums.policy, 6), f"{sums.denominator} {sums.counted}")]
    of = sums.counted.removeprefix("accepted ")
    rows += [(name, figure(term, 6), f"{sums.terms_denominator} {of}") for name, term in sums.terms.items()]
    rows.append(("loss", figure(sums.loss, 6), NOTHING))
    notes = ("loss: each sum divided by its number, added up.",)
    return Table("Sums", ("", "sum", "divided by"), tuple(rows), notes=notes)


def _cells(token: Token, *values: float | None) -> tuple[str, ...]:
    if not token.trains:
        return (PADDING,) * len(values)
    return tuple(NOTHING if value is None else figure(value, 4).replace("-", "−", value < 0) for value in values)
