"""What the configuration models share: a setting's metadata, and pydantic's faults as plain sentences."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mismatch_plugin.config.values import MAX_SHOWN, number, short_repr, unknown

MAX_FAULTS = 10
"""Sentences of one error: a file that is no configuration has thousands of faults."""


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
    flag: str = "",
    aliases: tuple[str, ...] = (),
    unit: str = "",
    slime: str = "",
    verl: str = "",
    source: str = "",
    **constraints: Any,
) -> Any:
    """A pydantic field with the metadata that flags and documentation are generated from. flag: where it is not
    --tis-NAME, --rs-NAME or --mismatch-NAME, by its section."""
    meta: Any = {"flag": flag, "aliases": aliases, "unit": unit, "slime": slime, "verl": verl, "source": source}
    return Field(default, description=description, json_schema_extra={"mismatch": meta}, **constraints)


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
        head = prefix if prefix in ("tis.", "rs.") else "mismatch."
        flag = meta.get("flag") or f"--{head}{name}".replace(".", "-").replace("_", "-")
        leaves.append(FieldInfo(prefix + name, annotation, default, field.description or "", meta | {"flag": flag}))
    return leaves


def flag_names(model: type[BaseModel]) -> dict[str, str]:
    """Dotted path → flag, for every setting that has one."""
    return {leaf.path: leaf.meta["flag"] for leaf in leaf_fields(model)}


def value_and_default(config: BaseModel, path: str) -> tuple[Any, Any]:
    """(value, default) of the field at a dotted path; defaults that hang on other settings are in `own_defaults`."""
    part: Any = config
    *parents, name = path.split(".")
    for parent in parents:
        part = getattr(part, parent)
    default = type(part).model_fields[name].get_default(call_default_factory=True)
    return getattr(part, name), getattr(config, "own_defaults", {}).get(path, default)


class Frozen(BaseModel):
    """What cannot be changed, and has no other fields than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Frozen):
    """Fields whose numbers are read by `number`: pydantic would take "1_2" for 12 and a switch for 1.0."""

    @field_validator("*", mode="before")
    @classmethod
    def _spelled_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if float in (annotation, *get_args(annotation)) and isinstance(value, (str, bool)):
            return number(value, str(info.field_name))
        return value


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
        parent, _, name = path.rpartition(".")
        if fault["type"] == "value_error":
            sentences.append(str(fault.get("ctx", {}).get("error", fault["msg"])))
        elif fault["type"] != "extra_forbidden":
            leaf = re.sub(r"\.\d.*", "", path)  # the list that holds it, for an element of a list
            spelled = f"{flags[leaf]}'s {name}" if leaf in flags and leaf != path else flags.get(path, path)
            fix = re.sub("^Input ", "it ", fault["msg"].rstrip("."))
            sentences.append(f"{spelled} is {short_repr(fault['input'])}: {fix}.")
        elif path in known:  # one key with a dot in it
            value = str(fault["input"])[:MAX_SHOWN]
            sentences.append(f"setting {path} is one key: nest it, {parent}: {{{name}: {value}}}.")
        else:
            siblings = [name for name in known if name.startswith(f"{parent}." if parent else "")]
            sentences.append(str(unknown("setting", path, siblings)))
    if len(faults) > MAX_FAULTS:
        sentences.append(f"There are {len(faults) - MAX_FAULTS} more faults like these.")
    return ValueError(" ".join(sentences))
