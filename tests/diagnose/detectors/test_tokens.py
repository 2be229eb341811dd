"""Where in a response, and in which samples, the gap sits: another prompt, other ids, and what is neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch, make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.detectors.tokens import find_retokenised, find_wrong_prompt
from tests.fixtures.sglang_check.by_hand import batch_of, found
from tests.fixtures.sglang_check.policies import score, training

SAMPLES, TOKENS = 24, 60
AT = np.arange(TOKENS)
DECAY = 1 + 9 * np.exp(-AT / 10)
MIXED = "mixed_versions"
Sides = tuple[np.ndarray, np.ndarray]


def _batch(rollout: np.ndarray, train: np.ndarray, **records: object) -> Batch:
    return batch_of(rollout.tolist(), train.tolist(), records=records or None)


def _scaled(scale: np.ndarray, every: int = 1, size: float = 0.04, seed: int = 0) -> Sides:
    """Noise that grows with −log p, times `scale` ([TOKENS] or [SAMPLES, 1]) in each `every`-th sample. First tokens
    are less certain than later ones, as they often are."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.0, (SAMPLES, TOKENS)) * np.where(AT < 8, 2.0, 1.0) - 0.06
    noise = generator.normal(0, size, rollout.shape) * -rollout
    noise[::every] *= scale
    return rollout, rollout + noise


def _sides(seed: int = 0, samples: int = 12) -> Sides:
    """[samples, TOKENS] of log-probs, and the same with noise of .02 nats."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.5, (samples, TOKENS)) - 0.06
    return rollout, rollout + generator.normal(0, 0.02, rollout.shape)


def _others(seed: int = 9) -> np.ndarray:
    """[TOKENS] log-probs of other ids: unlikely ones."""
    return -np.random.default_rng(seed).exponential(4.0, TOKENS) - 0.06


def _spans(*borders: int) -> tuple[WeightSpan, ...]:
    ends = (0, *borders, TOKENS)
    return tuple(WeightSpan(version=str(at), start=ends[at], end=ends[at + 1]) for at in range(len(ends) - 1))


def test_a_decay_is_another_prompt_unless_prompt_ids_are_equal():
    (finding,) = found(find_wrong_prompt(_batch(*_scaled(DECAY)))[0])
    assert (finding.fault, finding.confidence, finding.samples) == ("wrong_prompt", "likely", SAMPLES)
    assert finding.statistics["ratio"] > 3 and finding.statistics["larger"] > 2 * finding.statistics["smaller"]
    assert "prompt_ids" in finding.fix and "BOS" in finding.fix
    (finding,) = found(find_wrong_prompt(_batch(*_scaled(DECAY), trained_prompt_ids=[1, 2, 3]))[0])
    assert finding.confidence == "possible" and "flush_cache" in finding.fix


@pytest.mark.parametrize("scale", [np.ones(TOKENS), 1 + 3 * AT / TOKENS, np.full(TOKENS, 9.0), DECAY / 40])
def test_even_growing_and_tiny_gaps_are_no_other_prompt(scale: np.ndarray):
    assert found(find_wrong_prompt(_batch(*_scaled(scale)))[0]) == []


def test_a_template_that_concerns_some_samples():
    (finding,) = found(find_wrong_prompt(_batch(*_scaled(8 + 40 * np.exp(-AT / 10), every=3)))[0])
    assert finding.samples == SAMPLES // 3 and finding.first is not None and finding.first.sample == 0
    assert found(find_wrong_prompt(_batch(*_scaled(np.full(TOKENS, 20.0), every=3)))[0]) == []


@pytest.mark.parametrize(("system", "told"), [(30, False), (0, False), (30, True)])
def test_a_system_prompt_that_one_side_lacks_shows_in_prompt_lengths(system: int, told: bool):
    """The part of a context that it is decides how far it moves a token."""
    lengths = np.linspace(20, 120, SAMPLES).astype(int)
    scale = 10 * system / (system + lengths)[:, None] if system else np.full((SAMPLES, 1), 4.0)
    batch = _batch(*_scaled(scale), **({"trained_prompt_ids": [1]} if told else {}))
    prompts = {index: {"prompt_ids": np.arange(length)} for index, length in enumerate(lengths)}
    findings = found(find_wrong_prompt(batch.with_values(prompts))[0])
    assert [item.confidence for item in findings] == (["possible"] if system and not told else [])
    if findings:
        assert "after shorter prompts" in findings[0].evidence and "lack a system prompt" in findings[0].evidence
        assert found(find_wrong_prompt(batch)[0]) == []  # prompts of one length tell nothing


@pytest.mark.parametrize("start", [15, 40])
def test_ids_that_are_others_from_some_position_on(start: int):
    rollout, train = _sides()
    train[3, start:] = _others()[start:]
    items, after = find_retokenised(_batch(rollout, train))
    (finding,) = found(items)
    assert (finding.fault, finding.samples) == ("retokenised", 1)
    assert finding.first is not None and finding.first.sample == 3
    assert finding.first.position in range(start, start + 3)  # its first tokens may be unlikely on both sides
    assert finding.statistics["mean_before"] < 0.05 < 1 < finding.statistics["mean_inside"]
    assert len(after.tokens) in range(train.size - TOKENS + start, train.size - TOKENS + start + 3)


def test_what_follows_a_changed_id_is_told():
    rollout, train = _sides()
    train[0, 21:] = train[0, 20:-1]
    (finding,) = found(find_retokenised(_batch(rollout, train))[0])
    assert finding.statistics["moved"] == 1 and "fits +1 on" in finding.evidence
    rollout, train = _sides()
    train[5, 20:36] = _others()[20:36]
    (finding,) = found(find_retokenised(_batch(rollout, train))[0])
    assert finding.statistics["to_the_end"] == 0 and "for a stretch" in finding.evidence


def test_once_one_sample_is_clear_shorter_ones_are_seen_too():
    rollout, train = _sides()
    train[3, 20:] = _others()[20:]
    train[7, -5:] = rollout[7, -5:] - 4.0
    assert [item.samples for item in found(find_retokenised(_batch(rollout, train))[0])] == [2]
    train[3] = rollout[3]
    assert found(find_retokenised(_batch(rollout, train))[0]) == []


def _shift(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full((len(train), 1), -1.0), train[:, :-1]], axis=1)


def _routers(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(1)
    return np.where(generator.random(train.shape) < 0.02, train - generator.exponential(2.0, train.shape), train)


def _far_from_the_first_token(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(train))[:, None] == 4, _others(), train)


def _zero_filled(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.where((np.arange(len(train)) % 4 == 0)[:, None] & (AT >= 30), 0.0, train)


def _decaying(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return train - 3.0 * np.exp(-AT / 5)


@pytest.mark.parametrize("change", [_shift, _routers, _far_from_the_first_token, _zero_filled, _decaying])
def test_other_faults_are_no_change_of_ids(change: Callable[[np.ndarray, np.ndarray], np.ndarray]):
    for seed in range(5):
        rollout, train = _sides(seed)
        assert found(find_retokenised(_batch(rollout, change(rollout, train)))[0]) == []


def test_a_penalty_on_what_was_drawn_before_is_no_change_of_ids():
    """Ever more tokens, the further a response goes."""
    rollout, train = _sides()
    ids = np.random.default_rng(2).integers(0, 25, rollout.shape)
    again = [[token in row[:at] for at, token in enumerate(row)] for row in ids.tolist()]
    batch = batch_of(rollout.tolist(), (train + 0.5 * np.array(again)).tolist(), ids=ids.tolist())
    assert found(find_retokenised(batch)[0]) == []


def test_a_change_of_weights_is_no_change_of_ids_and_hides_none():
    rollout, train = _sides()
    train[:, 30:] = np.stack([_others(seed)[30:] for seed in range(len(train))])
    assert found(find_retokenised(_batch(rollout, train, weight_versions=_spans(30)))[0]) == []
    assert len(found(find_retokenised(_batch(rollout, train, weight_versions=_spans()))[0])) == 1
    train = rollout + np.where(AT < 30, 0.2, 0.01) * np.random.default_rng(1).normal(0, 1, rollout.shape)
    train[3, 40:] = _others()[40:]
    (finding,) = found(find_retokenised(_batch(rollout, train, weight_versions=_spans(30)))[0])
    assert finding.samples == 1 and finding.first is not None and finding.first.position in range(40, 43)


def _partial_rollout(
    seed: int, change: Callable[[Sample], Sample] = lambda one: one, drift: float = 0.03
) -> list[Sample]:
    """Each response began with weights some steps old and went on with the trainer's. change: of what it scores."""
    samples = [*training("float32", "bfloat16_temperature_1.0")]
    old, now = score(f"drift-{drift}-{seed}", samples), score("float32", [change(one) for one in samples])
    generator = np.random.default_rng(seed)
    partial = []
    for one, before, trained in zip(samples, old, now, strict=True):
        border = int(generator.integers(len(one) // 3, len(one)))
        versions = (WeightSpan(version="4", start=0, end=border), WeightSpan(version="5", start=border, end=len(one)))
        values = np.where(np.arange(len(one)) < border, before.train_log_probs, one.rollout_log_probs)
        given = {"rollout_log_probs": values, "weight_versions": versions, "trainer_version": "5"}
        partial.append(one.with_fields(train_log_probs=trained.train_log_probs, **given))
    return partial


@pytest.mark.parametrize("seed", range(5))
def test_a_partial_rollout_is_no_wrong_prompt_and_hides_none(seed: int):
    named = {item.fault for item in check_batch(make_batch(_partial_rollout(seed))).findings}
    assert "mixed_versions" in named and not named & {"wrong_prompt", "retokenised", "stale_server"}
    cut = _partial_rollout(seed, lambda one: one.with_fields(prompt_ids=one.prompt_ids[2:]))
    assert check_batch(make_batch(cut)).findings[0].fault == "wrong_prompt"


@pytest.mark.parametrize("seed", range(2))
def test_an_accepted_partial_rollout_is_not_reported_under_another_name(tmp_path: Path, seed: int):
    """Nor is the size of the older weights' gap, k3 .2 and more."""
    samples = _partial_rollout(seed, drift=0.06)
    new = training("float32", "bfloat16_temperature_1.0")[::4]  # of the trainer's version alone: no second population
    whole = [(WeightSpan(version="5", start=0, end=len(one)),) for one in new]
    samples[::4] = [one.with_fields(weight_versions=spans) for one, spans in zip(new, whole, strict=True)]
    write_samples(tmp_path / "rollouts.jsonl", samples)
    lines = [{"train_log_probs": one.train_log_probs.tolist(), "trainer_version": "5"} for one in samples]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["inspect", str(tmp_path / "rollouts.jsonl"), str(tmp_path / "training.jsonl"), "--brief", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and [item["fault"] for item in json.loads(result.stdout)["findings"]] == [MIXED]
    result = CliRunner().invoke(app, [*words, "--accept", MIXED])
    assert result.exit_code == 0 and [item["accepted"] for item in json.loads(result.stdout)["findings"]] == [True]
