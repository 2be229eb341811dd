"""What the configuration models share: a setting's metadata, and pydantic's faults as plain sentences."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mismatch_plugin.config.values import number, short_repr, unknown


@dataclass(frozen=True)
class FieldInfo:
    """One leaf setting as the flags and the documentation see it."""

    path: str  # dotted: "tis.mode"
    annotation: Any
    default: Any
    description: str
    meta: dict[str, Any]


def described(
    default: Any, description: str, *, flag: str = "", aliases: tuple[str, ...] = (), unit: str = "", **constraints: Any
) -> Any:
    """A pydantic field with what flags and documentation are generated from. flag: where it is not --SECTION-NAME."""
    meta: Any = {"flag": flag, "aliases": aliases, "unit": unit}
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


class Section(BaseModel):
    """Settings that cannot be changed. Numbers are read by `number`: pydantic would take "1_2" for 12, true for 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = (annotation, *get_args(annotation))
        if (float in kinds and isinstance(value, (str, bool))) or (int in kinds and isinstance(value, bool)):
            return number(value, str(info.field_name))
        # YAML 1.1 reads a bare off as false.
        return "off" if value is False and "off" in kinds else value


def plain_error(error: ValidationError, model: type[BaseModel], typed: Collection[str] = ()) -> ValueError:
    """pydantic's report as one sentence a fault: setting, value, fix. Paths in `typed` are named as flags."""
    known = [leaf.path for leaf in leaf_fields(model)]
    flags = {path: flag for path, flag in flag_names(model).items() if path in typed}
    sentences: list[str] = []
    for fault in error.errors(include_url=False):
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
            sentences.append(f"setting {path} is one key: nest it, {parent}: {{{name}: …}}.")
        else:
            siblings = [name for name in known if name.startswith(f"{parent}." if parent else "")]
            sentences.append(str(unknown("setting", path, siblings)))
    return ValueError(" ".join(sentences))
