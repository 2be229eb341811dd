"""What the configuration models share: field metadata, nested dicts, numbers as people write them, error sentences.

The rules for combinations that mean nothing stand here too (`without_effect`), so that the models hold settings only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

MAX_FAULTS, MAX_SHOWN = 10, 200
"""Sentences of one error, and characters of a value in it: a file that is no configuration has thousands of faults."""


@dataclass(frozen=True)
class FieldInfo:
    """One leaf setting as the flags and the documentation see it."""

    path: str  # dotted: "tis.mode"
    annotation: Any
    default: Any
    description: str
    meta: dict[str, Any]


def described(
    default: Any,
    description: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    unit: str = "",
    slime: str = "",
    verl: str = "",
    source: str = "",
    **constraints: Any,
) -> Any:
    """A pydantic field with the metadata that flags and documentation are generated from."""
    meta = {"flag": flag, "aliases": aliases, "unit": unit, "slime": slime, "verl": verl, "source": source}
    extra: dict[str, Any] = {"mismatch": meta}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def leaf_fields(model: type[BaseModel], prefix: str = "") -> list[FieldInfo]:
    """Every leaf setting of a model in order of declaration, nested models flattened to dotted paths."""
    leaves = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        # On Python 3.10 tuple[X, ...] is an instance of type, too.
        if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            leaves += leaf_fields(annotation, f"{prefix}{name}.")
            continue
        extra = field.json_schema_extra
        meta: Any = extra.get("mismatch", {}) if isinstance(extra, dict) else {}
        default = field.get_default(call_default_factory=True)
        leaves.append(FieldInfo(prefix + name, annotation, default, field.description or "", meta))
    return leaves


def flag_names(model: type[BaseModel]) -> dict[str, str]:
    """Dotted path → flag, for every setting that has one."""
    return {leaf.path: leaf.meta["flag"] for leaf in leaf_fields(model) if leaf.meta.get("flag")}


# Nested dicts ---------------------------------------------------------------------------------------------------------


def dotted_fields_set(data: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Dotted paths of every leaf of a nested dict."""
    paths: set[str] = set()
    for name, value in data.items():
        paths |= dotted_fields_set(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return paths


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on top, nested dicts merged key by key. Neither argument is changed."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def value_and_default(config: BaseModel, path: str) -> tuple[Any, Any]:
    """(value, default) of the field at a dotted path."""
    part: Any = config
    *parents, name = path.split(".")
    for parent in parents:
        part = getattr(part, parent)
    return getattr(part, name), type(part).model_fields[name].get_default(call_default_factory=True)


# Numbers and switches as people write them ----------------------------------------------------------------------------


def number(value: Any, name: str = "the value") -> float:
    """A number, or a string that spells one: YAML reads `1e-4` as a string.

    Python would read "1_2" as 12, where verl means the bounds 1 and 2, so an underscore is refused.
    Raises: ValueError naming `name` and the value.
    """
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain or (isinstance(value, str) and "_" not in value):
        try:
            return float(value)
        except (ValueError, OverflowError):  # an integer of 400 digits
            pass
    raise ValueError(f"{name} is {shown(value)}, which is not a number: write one, for example 2.0.")


class Section(BaseModel):
    """Fields whose numbers are read by `number`: pydantic would take "1_2" for 12 and a switch for 1.0."""

    @field_validator("*", mode="before")
    @classmethod
    def _spelled_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if float in (annotation, *get_args(annotation)) and isinstance(value, (str, bool)):
            return number(value, str(info.field_name))
        return value


def bounds(value: Any, name: str) -> tuple[float | None, float]:
    """(lower, upper) of a number, which is the upper bound, or of verl's "lower_upper" string, such as "0.5_2.0"."""
    if isinstance(value, str) and "_" in value:
        lower, upper = (number(part, name) for part in value.split("_", 1))
        return lower, upper
    return None, number(value, name)


def switch(value: Any, name: str) -> bool:
    """True or false, also as 1 and 0 or as a string; None is false. Raises ValueError naming `name` and the value."""
    if value is None or value in (0, 1):
        return bool(value)
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError(f"{name} is {value!r}: write true or false.")


# Sentences ------------------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """The value as an error names it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def unknown(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """A one-sentence error for a name that does not exist: the close ones, or else all there are."""
    names = list(known)
    close = difflib.get_close_matches(str(given)[:MAX_SHOWN], names, n=3, cutoff=0.6)
    fix = f"did you mean {' or '.join(close)}?" if close else f"there is {', '.join(names)}."
    if not names:
        fix = "leave it out, or check its spelling."
    return ValueError(f"{kind} {shown(str(given))} is unknown: {fix}")


def spell(template: str, info: ValidationInfo, *about: str) -> str:
    """`template` with every `<dotted.path>` spelled as that setting's flag if one of `about` was typed as a flag.

    The validation context says so: `typed` holds the paths given as flags, `flags` every path's flag.
    """
    context = info.context or {}
    flags = context["flags"] if any(path in context.get("typed", ()) for path in about) else {}
    return re.sub(r"<([a-z_.]+)>", lambda match: flags.get(match[1], match[1]), template)


def plain_error(error: ValidationError, model: type[BaseModel], typed: Collection[str] = ()) -> ValueError:
    """pydantic's report as one sentence a fault: setting, value, fix. Paths in `typed` are named as flags."""
    known = [leaf.path for leaf in leaf_fields(model)]
    flags = {path: flag for path, flag in flag_names(model).items() if path in typed}
    sentences: list[str] = []
    faults = error.errors(include_url=False)
    for fault in faults[:MAX_FAULTS]:
        path = ".".join(str(part) for part in fault["loc"])
        leaf = re.sub(r"\.\d.*", "", path)  # the list that holds it, for an element of a list
        if fault["type"] == "value_error":
            sentences.append(str(fault.get("ctx", {}).get("error", fault["msg"])))
        elif fault["type"] == "extra_forbidden":
            parent, _, name = path.rpartition(".")
            if path in known:  # one key with a dot in it
                sentences.append(
                    f"setting {path} is one key: nest it, {parent}: {{{name}: {str(fault['input'])[:MAX_SHOWN]}}}."
                )
                continue
            siblings = [name for name in known if name.startswith(f"{parent}." if parent else "")]
            sentences.append(str(unknown("setting", path, siblings)))
        else:
            message = fault["msg"].rstrip(".")
            fix = re.sub("^Input ", "it ", message)
            name = (
                f"{flags[leaf]}'s {path.rpartition('.')[2]}"
                if leaf in flags and leaf != path
                else flags.get(path, path)
            )
            sentences.append(f"{name} is {shown(fault['input'])}: {fix}.")
    if len(faults) > MAX_FAULTS:
        sentences.append(f"There are {len(faults) - MAX_FAULTS} more faults like these.")
    return ValueError(" ".join(sentences))


# Combinations that mean nothing ---------------------------------------------------------------------------------------


def notes_on(config: MismatchConfig, info: ValidationInfo) -> list[str]:
    """Sentences on settings that have no effect or are outside their known range.

    The validation context's `by_hand` holds the dotted paths that a person asked for; without it, whatever is not at
    its default counts as asked for.
    Raises: ValueError for the first setting that was asked for and has no effect.
    """
    by_hand, typed = (info.context or {}).get("by_hand"), (info.context or {}).get("typed", ())
    notes: dict[str, str] = {}
    for path, rest in without_effect(config):
        value, default = value_and_default(config, path)
        asked = value is not None and value is not False  # switching off what is off is no mistake
        # A flag that was typed is asked for; in a file, which may list every setting, what differs from its default.
        refused = value != default if by_hand is None or path not in typed else asked
        refused = refused and (by_hand is None or path in by_hand)
        if refused or value != default:
            shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
            sentence = spell(f"<{path}>{shown} {rest}", info, path)
            if refused:
                raise ValueError(sentence)
            notes.setdefault(path, sentence)
    return [*notes.values(), *outside_known_range(config)]


def without_effect(config: MismatchConfig) -> Iterable[tuple[str, str]]:
    """(path, what follows its name in a sentence) of every setting that this combination would not use.

    `<path>` in the sentence stands for a setting: see `spell`.
    """
    tis = ("mode", "lower_bound", "upper_bound", "batch_normalize", "batch_normalize_scope")
    if not config.use_tis:
        for name in ("level", *tis):
            yield f"tis.{name}", "changes no weight without <use_tis>: add <use_tis>, or leave it out."
    elif config.tis.level == "none":
        for name in tis:
            yield f"tis.{name}", "changes nothing at <tis.level> none (every weight is 1): leave it out."
    else:
        if config.tis.mode == "truncate":
            yield (
                "tis.lower_bound",
                "bounds no weight under <tis.mode> truncate (it only sets a metric's fraction): choose clip or mask, "
                "or leave it out.",
            )
        if not config.tis.batch_normalize:
            yield (
                "tis.batch_normalize_scope",
                "changes nothing without <tis.batch_normalize>: add it, or leave the scope out.",
            )
    if config.algorithm == 3:
        for name in ("eps_clip_low", "eps_clip_high", "dual_clip"):
            yield f"ppo.{name}", "changes nothing in algorithm 3 (REINFORCE has no clip): leave it out."
    if config.aggregation != "seq-mean-token-sum":
        yield "length_norm", "needs <aggregation> seq-mean-token-sum: choose it, or leave the norm out."
    if not config.terms.kl_coef:
        for name in ("kl_type", "kl_importance_weighted"):
            yield f"terms.{name}", "changes nothing without <terms.kl_coef>: set it, or leave this out."
    if not config.weighted:
        yield "terms.kl_importance_weighted", "needs importance weights: add <use_tis>, or leave it out."
    if not config.weighted and not config.rs.criteria and config.rs.veto_threshold is None:
        yield "dry_run", "has nothing to try: add <use_tis>, a criterion or a veto, or leave it out."


def outside_known_range(config: MismatchConfig) -> list[str]:
    """Sentences for settings that are legal and used, but not where they are known to work."""
    notes = []
    geometric = "the geometric mean of a response moves by hundredths of a percent: within 0.01 to 0.1 % of 1 is usual"
    if config.weighted and config.tis.level == "geometric" and config.tis.mode == "mask" and config.tis.upper > 1.1:
        notes.append(f"tis.upper_bound {config.tis.upper:g} at geometric level masks hardly anything: {geometric}.")
    for criterion in config.criteria:
        upper = criterion.upper_bound
        if criterion.aggregate == "sequence_mean" and criterion.in_log_space and upper is not None and upper > 1.1:
            notes.append(
                f"rs criterion {criterion.name} with upper bound {upper:g} rejects hardly anything: {geometric}."
            )
    if config.algorithm == 3 and config.tis.level == "token":
        notes.append("algorithm 3 at token level is biased: sequence level is what the method's page recommends.")
    if config.algorithm == 3 and not config.weighted and not config.criteria and config.rs.veto_threshold is None:
        notes.append(
            "algorithm 3 without weights and without rejection is plain REINFORCE: nothing corrects the mismatch. "
            "Choose a tis.level (verl: rollout_is), or add a criterion or a veto (verl: rollout_rs)."
        )
    return notes
