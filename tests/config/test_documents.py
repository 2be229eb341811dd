"""Configuration files that are odd, huge or not files at all."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

import mismatch_plugin as mp
from mismatch_plugin.config.documents import MAX_VALUES, read_file, read_mapping


def write(folder: Path, text: str, name: str = "mismatch.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_aliases_are_the_values_that_they_name(tmp_path: Path) -> None:
    text = "use_tis: &on true\nuse_rollout_log_probs: *on\ntis: {upper_bound: &two 2.5}\nppo: {dual_clip: *two}\n"
    with pytest.raises(ValueError, match=r"dual_clip 2\.5 changes nothing in algorithm 3"):
        mp.MismatchConfig.from_file(write(tmp_path, text))
    config = mp.MismatchConfig.from_file(write(tmp_path, text.replace("use_rollout_log_probs: *on\n", "")))
    assert config.tis.upper_bound == config.ppo.dual_clip == 2.5


def test_merge_keys_are_merged_and_what_is_written_out_wins(tmp_path: Path) -> None:
    text = (
        "use_tis: true\n"
        "tis: &base {level: sequence, upper_bound: 3.0}\n"
        "ppo: {<<: {eps_clip_low: 0.1, eps_clip_high: 0.3}, eps_clip_high: 0.4}\n"
    )
    config = mp.MismatchConfig.from_file(write(tmp_path, text))
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.tis.level) == (0.1, 0.4, "sequence")
    lists = read_mapping(write(tmp_path, "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\n"))
    assert lists["c"] == {"x": 1, "y": 1, "z": 3}  # YAML 1.1: the earlier mapping of a list wins
    again = read_mapping(write(tmp_path, "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\nd: *b\n"))
    assert again["c"] == {"x": 2, "y": 3} and again["d"] == {"x": 2}


@pytest.mark.parametrize(
    "text", ["a: {x: 1, x: 2}", "a:\n  x: 1\nb: 2\na: 3\n", "a: {<<: {x: 1}, <<: {y: 2}}", "{a: 1, 'a': 2}"]
)
def test_a_key_that_is_there_twice_is_refused_next_to_merge_keys_too(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="is there twice: keep one of them"):
        read_mapping(write(tmp_path, text))
    with pytest.raises(ValueError, match="'use_tis' is there twice"):
        read_mapping(write(tmp_path, '{"use_tis": true, "use_tis": false}', "a.json"))


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MANY = f"more than {MAX_VALUES} keys and values, each alias .* counted in full"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, MANY),
        ("".join(f"key{i}: 1\n" for i in range(30_000)), MANY),
        ("&a\ntis: *a", MANY),
        ("tis: &a [*a]", MANY),
        ("tis: " + "[" * 15_000, "nested too deeply"),
        ("use_tis: true\n" + "#" * (1 << 20), "is larger than 1 MiB"),
        ("? [a]\n: 1", "unhashable key"),
        ("x: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        mp.MismatchConfig.from_file(write(tmp_path, text))
    assert "mismatch.yaml" in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"tis": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"tis": {"upper_bound": 1' + "0" * 400 + "}}", "upper_bound"),
        ('{"tis": {"upper_bound": "1' + "0" * 5000 + 'x"}}', "upper_bound is '1000.*… *, which is not a number"),
        ("{" + ", ".join(f'"key{i}": 1' for i in range(5000)) + "}", "There are 4990 more faults like these"),
    ],
)
def test_json_of_any_shape_ends_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        mp.MismatchConfig.from_file(write(tmp_path, text, "mismatch.json"))
    assert len(str(error.value)) < 10_000


def test_devices_and_pipes_are_no_configuration(tmp_path: Path) -> None:
    """A pipe without a writer would block for ever, a device would be read without end."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path, kind in ((Path("/dev/zero"), "a device"), (pipe, "a pipe")):
        with pytest.raises(ValueError, match=f"{path} is {kind}, not a regular file: save what it holds in a file"):
            read_file(path)


def test_a_configuration_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mismatch\.yaml is not valid YAML or JSON: .*can't decode"):
        read_file(path)


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    """1.1 reads 1:30 as 90, 010 as 8, 1_000 as 1000, 0x10 as 16, and 1e-4 as text."""
    text = "a: [1:30, 1_000, 0x10, 1:2.5]\nb: [010, -7, +3, 0]\nc: [1e-4, 1.5, .5, 1., -2E3]\nd: [.inf, -.INF, .nan]\n"
    data = read_mapping(write(tmp_path, text))
    assert data["a"] == ["1:30", "1_000", "0x10", "1:2.5"]
    assert (data["b"], data["c"]) == ([10, -7, 3, 0], [1e-4, 1.5, 0.5, 1.0, -2000.0])
    assert {type(value) for value in data["b"]} == {int} and {type(value) for value in data["c"]} == {float}
    assert data["d"][:2] == [math.inf, -math.inf] and math.isnan(data["d"][2])
    with pytest.raises(ValueError, match="upper_bound is '1:30', which is not a number"):
        mp.MismatchConfig.from_file(write(tmp_path, "use_tis: true\ntis: {upper_bound: 1:30}\n"))
    config = mp.MismatchConfig.from_file(write(tmp_path, "use_tis: true\ntis: {upper_bound: 010}\n"))
    assert config.tis.upper_bound == 10.0
