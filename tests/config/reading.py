"""Settings as people write them, read with the warnings that reading gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import yaml

import mismatch_plugin as mp


def noted(build: Callable[..., mp.MismatchConfig], *args: Any, **kwargs: Any) -> tuple[mp.MismatchConfig, list[str]]:
    """What `build` returns, and the MismatchWarnings it gave: there may be no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = build(*args, **kwargs)
    assert all(issubclass(warning.category, mp.MismatchWarning) for warning in caught)
    return config, [str(warning.message) for warning in caught]


def read(text: str) -> mp.MismatchConfig:
    """From flags, where the text begins with one, else from YAML without its outer braces, built by hand."""
    if text.startswith("--"):
        return mp.MismatchConfig.from_words(text.split())
    return mp.MismatchConfig(**yaml.safe_load(f"{{{text}}}"))


def criteria(config: mp.MismatchConfig) -> list[tuple[Any, ...]]:
    """(aggregate, statistic, lower, upper) of each, and its condition and budget where it has them."""
    further = [[word for word in (c.condition, c.budget) if word not in ("any", "")] for c in config.criteria]
    judged = zip(config.criteria, further, strict=True)
    return [(c.aggregate, c.statistic, c.lower_bound, c.upper_bound, *words) for c, words in judged]
