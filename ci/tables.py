"""The generated tables of docs/.

Settings come from the fields of `MismatchConfig` and the argparse group, metrics from their declarations, health
findings from the check itself. Only advice (recommended bounds) is written here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import get_args

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig
from mismatch_plugin.config.fields import FieldInfo, leaf_fields
from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import METRICS, PREFIX
from mismatch_plugin.data.columns import NAMES
from mismatch_plugin.diagnose.normal import KNOWN, LOOSE, span
from mismatch_plugin.diagnose.recommend import ADDITIONS, LEAST_KEPT, RULES
from mismatch_plugin.hooks.base import METHODS
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.report.presets import presets_table, show
from mismatch_plugin.report.table import NOTHING, Table


def config_table() -> Table:
    """Every setting: its field, flag, default, unit, what it means, the peers' names for it.

    Flags that stand for no single field (`--mismatch-preset`, `--rs-level`, …) follow at the end.
    """
    rows = [_setting(field) for field in leaf_fields(MismatchConfig)]
    assert ELSEWHERE.keys() <= {row[0] for row in rows}
    described = {flag for row in rows for flag in row[1].split(", ")}
    for action in _actions():
        if action.help != argparse.SUPPRESS and described.isdisjoint(action.option_strings):
            choices = ", ".join(action.choices or ())
            rows.append((NOTHING, ", ".join(action.option_strings), choices or NOTHING, "", action.help or "", "", ""))
    headers = ("field", "flag", "default (other values)", "unit", "meaning", "slime", "verl")
    return Table("Settings", headers, tuple(rows), code=frozenset({"field", "flag", "slime", "verl"}))


def metrics_table() -> Table:
    """Every metric: name, formula, unit, what it averages over, how it merges, and the level that reports it."""
    headers = ("metric", "formula", "unit", "over", "merges by", "level")
    rows = tuple((m.name, m.formula, m.unit, m.over, m.merges, m.level) for m in METRICS)
    notes = (
        f"All names begin with `{PREFIX}`. A name with braces stands for several metrics.",
        "ρ = exp(l) is the ratio π_train/π_rollout, of a token or, at sequence and geometric level, of a sequence.",
    )
    return Table("Metrics", headers, rows, code=frozenset({"metric"}), notes=notes)


def normal_table() -> Table:
    """The known gaps, for docs/inspect.md."""
    rows = tuple((row.pair, row.figure, span(row.low, row.high), row.what, row.source, row.noted) for row in KNOWN)
    notes = (
        "k3 is the mean of ρ − 1 − log ρ, nats per token; KL is named so by its source. Most figures are of one run "
        f"and model: up to {LOOSE:g} times the largest of a kind counts as its size.",
        "this project: measured here on tiny models, not published. Reported as faults, so that nothing is normal by "
        "them: mean |Δ log p| 0.369 of a MoE model without routing replay (miles #2722), 0.2 to 0.4 and growing to "
        "0.036 of dense ones (OpenClaw-RL #69, vime #64); k3 0.0087 of fp8 quantised unlike (xtuner #2044).",
        "Bars of others: slime's CI mean |Δ log p| 0.1 (THUDM/slime#1968), SkyRL's CI for dense models 0.09 "
        "(NovaSky-AI/SkyRL#1408), NeMo-RL's recipes a mean KL of 0.0006 (routing replayed) to 0.004 (fp8).",
    )
    headers = ("pair", "figure", "range", "model and engines", "source", "how")
    return Table("What gap is normal", headers, rows, notes=notes)


def rules_table() -> Table:
    """Which setting to choose, for docs/settings.md."""
    rows: list[tuple[str, ...]] = []
    for rule in RULES:
        low, high = rule.kl
        kl = f"{low:g} to {high:g}" if low else f"below {high:g}" if high < math.inf else "any"
        parts = [f"to {rule.length:g} tokens"] if rule.length < math.inf else []
        parts += [f"KL × length to {rule.kl_length:g}"] if rule.kl_length < math.inf else []
        more = f"{rule.setting.removeprefix(rule.preset)}{', bounds from `inspect`' * rule.data_bounds}"
        keeps = f"≥ {LEAST_KEPT:.0%}" if rule.config.rejects else "all"
        rows.append((rule.run, kl, ", ".join(parts) or "any", f"`{rule.preset}`{more}", keeps, rule.reason))
    added = [(f"in addition: {item.run}", "any", "any", item.flag, NOTHING, item.reason) for item in ADDITIONS]
    headers = ("your run", "KL, nats per token", "longest response", "setting", "tokens kept", "why")
    notes = (
        "The first row that fits is taken, by k3 as the estimate of KL. mismatch-plugin inspect does it, predicts what "
        "the setting keeps of your own tokens, and takes bounds from them, or the next row, where that is below 90 %.",
        "For every row the tests make data in its range, and fail where less is kept or another is taken.",
    )
    return Table("Which setting to choose", headers, (*rows, *added), notes=notes)


def algorithms_table() -> Table:
    """The four algorithms that the two flags choose."""
    details = (
        ("2: π_θ, π_old", "PPO-clip(π_θ/π_old)", "π_old, Megatron", "none", "yes", "no", "none"),
        (
            "2: π_θ, π_rollout",
            "PPO-clip(π_θ/π_rollout)",
            "π_rollout",
            "none: the clip's ratio has it already",
            "not needed",
            "no",
            "none",
        ),
        (
            "3: π_θ, π_old, π_rollout",
            "w · PPO-clip(π_θ/π_old)",
            "π_old, Megatron",
            "π_old",
            "yes",
            "yes",
            "token; sequence for short responses, geometric for rejection",
        ),
        ("2: π_θ, π_rollout", "−sg(w) · A · log π_θ", "none", "π_θ, detached", "not needed", "no", "sequence"),
    )
    rows = []
    for number, (name, detail) in enumerate(zip(ALGORITHM_NAMES, details, strict=True)):
        bypass, tis = ("yes" if number & bit else NOTHING for bit in (1, 2))
        rows.append((str(number), name, bypass, tis, *detail))
    flags = ("--use-rollout-log-probs", "--use-tis")
    headers = (
        "#",
        "algorithm",
        *flags,
        "policies",
        "loss per token",
        "clip anchor",
        "weight's numerator",
        "second forward pass",
        "batch invariant",
        "weights at level",
    )
    notes = (
        "Batch invariant (Hilton et al. 2021): π_old alone says how far an update may go, and a weight corrects for "
        "whichever policy sampled. So it does not matter how many workers and weight versions a batch comes from. "
        "Algorithm 0 has no such weight; 1 and 3 have no clip around π_old.",
        "Cost of the second forward pass: one forward of three passes' worth (forward and backward; four with full "
        "recomputation), so a quarter to a third on top of the training part of a step. The correction itself is about "
        "a hundred kernels on a few floats a token.",
    )
    return Table("Algorithms", headers, tuple(rows), notes=notes)


def bounds_table() -> Table:
    """Recommended upper bounds for each level, and why."""
    headers = ("where", "upper bound", "start with", "why")
    rows = (
        (
            "token",
            "1.5 to 5",
            "2",
            "One token's ratio seldom leaves this range unless something is wrong with it. Lower it when the deviation "
            "of the weights grows; raise it when many ratios are cut.",
        ),
        (
            "sequence",
            "2 to 10",
            "2 for short responses, 5 to 10 for long ones",
            "The product of many ratios spreads with the length of the response: a tight bound cuts nearly every long "
            "one.",
        ),
        (
            "geometric",
            "1.0001 to 1.001 in the guide, so within 0.01 to 0.1 % of 1",
            "the bounds that inspect takes from your data",
            "A mean over the whole response is near −KL and hardly moves otherwise: 1.001 keeps 90 % of the tokens "
            "only to KL 0.0002 at 1,000 tokens. Used to reject, seldom to weigh.",
        ),
        (
            "veto (a lower bound)",
            "1e-6 to 1e-4",
            "off; 1e-4 with geometric rejection",
            "A token ten thousand times less likely in training than when it was sampled is rarely drift: look for "
            "filters, fills and lost precision.",
        ),
    )
    notes = ("The lower bound is 1/upper unless given. Only clip, mask and rejection use it.",)
    return Table("Recommended bounds", headers, rows, notes=notes)


def health_table() -> Table:
    """The rules of `check_health`: when each warns and for what, what it means, what to do."""
    headers = ("about", "metric", "warns", "judged for", "it means", "what to do")
    rows = tuple(
        (rule.about, rule.metric, rule.when, rule.only or "every setting", rule.meaning, rule.advice)
        for rule in health.ALL_RULES
    )
    notes = (
        "About `data`: how large the mismatch is, which no correction changes. `correction`: what is left of it after "
        "this one. `fault`: numbers that cannot be trusted.",
        "Not judged: `rollout_is_std` and `rollout_is_eff_sample_size`, of the ratio clamped to [1/hi, hi]: at hi = 2 "
        "they cannot leave 0.75 and 0.64.",
    )
    return Table("Health", headers, rows, frozenset({"metric"}), notes)


def versions_table() -> Table:
    """The host versions that the tests ran with."""
    rows = tuple((host.name, host.version, host.commit or "the release") for host in HOSTS.values())
    notes = (
        "The start-up block says where yours is another one. Tested are the hosts' own functions; which trainers ran "
        "as a whole is in [trainers](trainers.md).",
    )
    return Table("Tested versions", ("host", "version", "commit"), rows, notes=notes)


def hosts_table() -> Table:
    """How each host takes the plugin, and what divides its loss."""
    rows = tuple(
        (host.title, host.door, host.denominator, ", ".join(f"`{name}`" for name in host.dumps) or NOTHING)
        for host in HOSTS.values()
    )
    return Table("Hosts", ("trainer", "without the launcher", "denominator", "dumps that `inspect` reads"), rows)


def methods_of_hosts_table() -> Table:
    """What each host takes of the methods, and why not."""
    rows = []
    for key, method in METHODS.items():
        cells = [host.lacks.get(key) for host in HOSTS.values()]
        if any(cells):
            only = [f"only with {lack.unless}" if lack and lack.unless else "no" for lack in cells]
            said = (f"{how}: {lack.why}" if lack else "yes" for how, lack in zip(only, cells, strict=True))
            rows.append((method.title, *said))
    return Table("Methods", ("method", *(host.title for host in HOSTS.values())), tuple(rows))


def owned_table() -> Table:
    """The settings that a host decides, and what sets them there."""
    paths = dict.fromkeys(path for host in HOSTS.values() for path in host.owns)
    rows = tuple(
        (f"{path}*" if path.endswith((".", "kl")) else path, *(_where(host.owns, path) for host in HOSTS.values()))
        for path in paths
    )
    return Table("Owned", ("setting", *(host.title for host in HOSTS.values())), rows, code=frozenset({"setting"}))


def _where(owns: Mapping[str, str], path: str) -> str:
    found = owns.get(path)
    return "ours" if found is None else f"`{found}`" if found else NOTHING


def names_table() -> Table:
    """Every name of a column that dumps may have."""
    rows = tuple((what, ", ".join(f"`{name}`" for name in spellings)) for what, spellings in NAMES.items())
    notes = (
        "`logprobs` are the sampler's next to `train_log_probs` or `train_logprobs`; `mask` is the loss mask next to "
        "response ids. Elsewhere both may mean several things and are not read.",
    )
    return Table("Names", ("what", "names; where a dump has several, the first"), rows, notes=notes)


TABLES: dict[str, Callable[[], Table]] = {
    "algorithms": algorithms_table,
    "bounds": bounds_table,
    "health": health_table,
    "hosts": hosts_table,
    "hosts-methods": methods_of_hosts_table,
    "hosts-owned": owned_table,
    "metrics": metrics_table,
    "names": names_table,
    "normal": normal_table,
    "presets": presets_table,
    "settings": config_table,
    "versions": versions_table,
    "which": rules_table,
}


ELSEWHERE = {
    "use_rollout_log_probs": ("use_rollout_logprobs", "bypass_mode, bypass_old_logprob_for_rollout"),
    "use_tis": ("use_tis", "rollout_is (not null)"),
    "objective": ("advantage_estimator", "loss_mode"),
    "tis.mode": ("tis_mode", 'rollout_is_threshold ("lo_hi" = mask)'),
    "tis.level": ("tis_level", "rollout_is"),
    "tis.lower_bound": ("tis_lower_bound, tis_clip_low", 'rollout_is_threshold ("lo_hi")'),
    "tis.upper_bound": ("tis_upper_bound, tis_clip", "rollout_is_threshold"),
    "tis.batch_normalize": ("tis_batch_normalize", "rollout_is_batch_normalize"),
    "rs.criteria": ("use_rs, rs_level, rs_lower_bound, rs_upper_bound", "rollout_rs, rollout_rs_threshold"),
    "rs.veto_threshold": ("rs_veto_threshold", "rollout_token_veto_threshold"),
    "ppo.eps_clip_low": ("eps_clip", "clip_ratio_low"),
    "ppo.eps_clip_high": ("eps_clip_high", "clip_ratio_high"),
    "ppo.dual_clip": ("eps_clip_c", "clip_ratio_c"),
    "ppo.tau_positive": ("", "tau_pos"),
    "ppo.tau_negative": ("", "tau_neg"),
    "terms.entropy_coef": ("entropy_coef", "entropy_coeff"),
    "terms.kl_coef": ("kl_loss_coef", "kl_loss_coef"),
    "terms.kl_type": ("kl_loss_type", "kl_loss_type"),
    "aggregation": ("calculate_per_token_loss", "loss_agg_mode"),
    "length_norm": ("", "seq-mean-token-sum-norm"),
    "fused_head": ("", "use_fused_kernels"),
}
"""Setting → what slime and verl call it."""


def _setting(field: FieldInfo) -> tuple[str, ...]:
    meta = field.meta
    flags = ", ".join((meta["flag"], *meta["aliases"])) if meta.get("flag") else NOTHING
    others = [show(value) for value in get_args(field.annotation) if isinstance(value, str) and value != field.default]
    default = show(field.default) + (f" ({', '.join(others)})" if others else "")
    return (field.path, flags, default, meta["unit"], field.description, *ELSEWHERE.get(field.path, ("", "")))


def _actions() -> list[argparse.Action]:
    """The flags that `add_arguments` adds to an empty parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return parser._actions
