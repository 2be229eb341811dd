"""Configuration files: what YAML and JSON mean, the layers over each other, and what is no configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.config.documents import read_mapping
from tests.config.reading import noted


def write(folder: Path, text: str, name: str = "mismatch.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("# nothing\n", {}),
    ("a: [1e-4, 1.5, .5, 1., -2E3, .5e+2, .inf, 7]", {"a": [1e-4, 1.5, 0.5, 1.0, -2000.0, 50.0, math.inf, 7]}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MEANINGS)
def test_a_document_means(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = read_mapping(write(tmp_path, text))
    assert found == expected
    assert [*map(type, found.get("a", ()))] == [*map(type, expected.get("a", ()))]


LAYERS = [
    ("--mismatch-preset seq_is", "tis: {upper_bound: 5}", ("sequence", 5.0, "truncate")),
    ("--mismatch-preset seq_is --tis-upper-bound 7", "tis: {upper_bound: 5, mode: clip}", ("sequence", 7.0, "clip")),
    ("--tis-mode mask", "preset: seq_is\ntis: {upper_bound: 5, mode: clip}", ("sequence", 5.0, "mask")),
    ("--use-tis --tis-level geometric", "tis: {upper_bound: 1.5}", ("geometric", 1.5, "truncate")),
]


@pytest.mark.parametrize(("flags", "file", "expected"), LAYERS)
def test_flag_over_file_over_preset(flags: str, file: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    words = [*flags.split(), "--mismatch-config", str(write(tmp_path, file))]
    tis = mp.MismatchConfig.from_words(words).tis
    assert (tis.level, tis.upper, tis.mode) == expected


def test_a_preset_s_criteria_are_replaced_and_its_veto_stays(tmp_path: Path) -> None:
    text = '{"preset": "geo_rs", "rs": {"criteria": ["token:ratio:3"]}}'
    config = mp.MismatchConfig.from_file(write(tmp_path, text, "mismatch.json"))
    assert [criterion.name for criterion in config.criteria] == ["token_ratio"]
    assert config.rs.veto_threshold == 1e-4


def test_a_setting_of_the_file_is_named_as_a_field_beside_flags(tmp_path: Path) -> None:
    words = ["--mismatch-config", str(write(tmp_path, "tis: {mode: clip}")), "--mismatch-metrics", "full"]
    with pytest.raises(ValueError, match=r"^tis\.mode clip changes no weight without use_tis"):
        mp.MismatchConfig.from_words(words)


# What is no configuration ---------------------------------------------------------------------------------------------

REFUSED = {
    "a list": ("- use_tis", "holds a list, not a mapping of settings"),
    "half a list": ("use_tis: [", "cannot be read as YAML or JSON"),
    "a key twice": ("tis: {mode: clip, mode: mask}", "'mode' is there twice: keep one of them"),
    "an alias": ("tis: &a {x: [*a]}", r"it has an alias \(\*\): write out"),
    "too large": ("use_tis: true\n" + "#" * (1 << 20), "is larger than 1 MiB"),
    "JSON key twice": ('{"use_tis": true, "use_tis": false}', "'use_tis' is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_configuration_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    path = write(tmp_path, text, "mismatch.json" if "JSON" in name else "mismatch.yaml")
    with pytest.raises(ValueError, match=reason):
        noted(mp.MismatchConfig.from_file, path)
