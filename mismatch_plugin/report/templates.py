"""The templates of all pages: one look, one way of drawing a table, everything escaped. Importing this needs jinja2."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined


def environment() -> Environment:
    """Its templates are files of the package, such as `compare/report.html.j2`, which include others by such paths."""
    loader = FunctionLoader(lambda path: files("mismatch_plugin").joinpath(path).read_text(encoding="utf-8"))
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)
