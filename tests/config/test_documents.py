"""Configuration files: what YAML and JSON mean, the layers over each other, and what is no configuration."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.config.documents import MAX_VALUES, read_file, read_mapping
from tests.config.reading import noted


def write(folder: Path, text: str, name: str = "mismatch.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("# nothing\n", {}),
    ("c: &on true\nb: *on", {"c": True, "b": True}),
    ("a: {<<: {x: 1, y: 3}, y: 4}", {"a": {"x": 1, "y": 4}}),  # what is written out wins
    ("a: &a {x: 1, y: 1}\nc: {<<: [*a, {y: 2}]}", {"a": {"x": 1, "y": 1}, "c": {"x": 1, "y": 1}}),  # the earlier wins
    ("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b}", {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 2}}),
    # numbers are those of YAML 1.2; 1.1 reads 1:30 as 90, 010 as 8, 1_000 as 1000, 0x10 as 16, and 1e-4 as text
    ("a: [1:30, 1_000, 0x10, 1:2.5]", {"a": ["1:30", "1_000", "0x10", "1:2.5"]}),
    ("a: [010, -7, +3, 0]", {"a": [10, -7, 3, 0]}),
    ("a: [1e-4, 1.5, .5, 1., -2E3, .inf, -.INF]", {"a": [1e-4, 1.5, 0.5, 1.0, -2000.0, math.inf, -math.inf]}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MEANINGS)
def test_a_document_means(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = read_mapping(write(tmp_path, text))
    assert found == expected
    assert [*map(type, found.get("a", ()))] == [*map(type, expected.get("a", ()))]


def test_a_configuration_from_yaml_and_from_json(tmp_path: Path) -> None:
    text = """
    use_tis: true
    tis: {mode: mask, level: geometric, lower_bound: 0.999, upper_bound: 1.001}
    rs: {criteria: ["sequence_max:k2:5e-1"], veto_threshold: 1e-4}
    terms: {entropy_coef: 1e-3}
    """
    config = mp.MismatchConfig.from_file(write(tmp_path, text))
    assert (config.algorithm, config.tis.mode, config.tis.upper) == (2, "mask", 1.001)
    assert (config.rs.veto_threshold, config.terms.entropy_coef, config.criteria[0].upper_bound) == (1e-4, 1e-3, 0.5)
    text = json.dumps(config.model_dump(exclude_defaults=True))
    assert mp.MismatchConfig.from_file(write(tmp_path, text, "mismatch.json")) == config


LAYERS = [
    ("--mismatch-preset token_is", "", ("token", 2.0, "truncate")),
    ("--mismatch-preset seq_is", "tis: {upper_bound: 5}", ("sequence", 5.0, "truncate")),
    ("--mismatch-preset seq_is --tis-upper-bound 7", "tis: {upper_bound: 5, mode: clip}", ("sequence", 7.0, "clip")),
    ("--tis-mode mask", "preset: seq_is\ntis: {upper_bound: 5, mode: clip}", ("sequence", 5.0, "mask")),
    ("--mismatch-preset token_is", "preset: seq_is\ntis: {upper_bound: 5}", ("token", 5.0, "truncate")),
    ("--use-tis --tis-level geometric", "tis: {upper_bound: 1.5}", ("geometric", 1.5, "truncate")),
]


@pytest.mark.parametrize(("flags", "file", "expected"), LAYERS)
def test_flag_over_file_over_preset(flags: str, file: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    words = [*flags.split(), "--mismatch-config", str(write(tmp_path, file))]
    tis = mp.MismatchConfig.from_words(words).tis
    assert (tis.level, tis.upper, tis.mode) == expected


def test_a_preset_s_criteria_are_replaced_and_its_veto_stays(tmp_path: Path) -> None:
    config = mp.MismatchConfig.from_file(write(tmp_path, "preset: geo_rs\nrs: {criteria: ['token:ratio:3']}"))
    assert [criterion.name for criterion in config.criteria] == ["token_ratio"]
    assert config.rs.veto_threshold == 1e-4


def test_a_setting_of_the_file_is_named_as_a_field_beside_flags(tmp_path: Path) -> None:
    words = ["--mismatch-config", str(write(tmp_path, "tis: {mode: clip}")), "--mismatch-metrics", "full"]
    with pytest.raises(ValueError, match=r"^tis\.mode clip changes no weight without use_tis: add use_tis, or leave"):
        mp.MismatchConfig.from_words(words)


# What is no configuration ---------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MANY = f"more than {MAX_VALUES} keys and values, each alias .* counted in full"
REFUSED = {
    "a list": ("- use_tis", "holds a list, not a mapping of settings"),
    "half a list": ("use_tis: [", "is not valid YAML or JSON"),
    "slime's form": ("tis_mode: clip", r"is in slime's form: read it with mismatch_plugin.compat.from_slime"),
    "slime's switch": ("use_rs: true", "is in slime's form"),
    "verl's form": ("rollout_is: token", "is in verl's form: read it with mismatch_plugin.compat.from_verl"),
    "verl's tree": ("algorithm: {rollout_correction: {}}", "is in verl's form"),
    "a preset": ("preset: tokn_is", "preset 'tokn_is' is unknown"),
    "a number": ("use_tis: true\ntis: {upper_bound: 1:30}", "upper_bound is '1:30', which is not a number"),
    "a key twice": ("tis: {mode: clip, mode: mask}", "'mode' is there twice: keep one of them"),
    "a section twice": ("tis:\n  mode: clip\nrs: {}\ntis: {}\n", "'tis' is there twice"),
    "two merges": ("tis: {<<: {mode: clip}, <<: {level: turn}}", "is there twice"),
    "a quoted key twice": ("{use_tis: true, 'use_tis': true}", "'use_tis' is there twice"),
    "aliases of aliases": (BOMB, MANY),
    "a loop": ("tis: &a [*a]", MANY),
    "brackets": ("tis: " + "[" * 2_000, "nested too deeply"),
    "too large": ("use_tis: true\n" + "#" * (1 << 20), "is larger than 1 MiB"),
    "a list as key": ("? [a]\n: 1", "unhashable key"),
    "code": ("x: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "JSON brackets": ('{"tis": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "JSON digits": ('{"tis": {"upper_bound": 1' + "0" * 400 + "}}", "upper_bound"),
    "JSON text": ('{"tis": {"upper_bound": "1' + "0" * 5000 + 'x"}}', "is '1000.*… *, which is not a number"),
    "JSON faults": ("{" + ", ".join(f'"key{i}": 1' for i in range(5000)) + "}", "There are 4990 more faults"),
    "JSON key twice": ('{"use_tis": true, "use_tis": false}', "'use_tis' is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_configuration_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    path = write(tmp_path, text, "mismatch.json" if "JSON" in name else "mismatch.yaml")
    with pytest.raises(ValueError, match=reason) as error:
        noted(mp.MismatchConfig.from_file, path)
    assert len(str(error.value)) < 10_000


def test_what_is_no_text_file_is_named_and_not_read(tmp_path: Path) -> None:
    """A pipe without a writer would block for ever, a device would be read without end."""
    pipe, binary = tmp_path / "pipe.yaml", tmp_path / "mismatch.yaml"
    os.mkfifo(pipe)
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in {
        Path("/dev/zero"): "is a device, not a regular file: save what it holds in a file",
        pipe: "is a pipe, not a regular file: save what it holds in a file",
        binary: "is not valid YAML or JSON: .*can't decode",
        tmp_path: "does not exist: check the path given",
    }.items():
        with pytest.raises(ValueError, match=f"{path} {reason}"):
            read_file(path)
