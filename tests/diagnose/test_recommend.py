"""Which settings are recommended, what they and all others are predicted to do, bounds from the data, and the flags
that are shown: against what training reports and the gradient of the loss."""

from __future__ import annotations

import json
import math
import shlex
from argparse import ArgumentParser
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.hooks.hosts import HOSTS
from tests.diagnose.door import RECORDS, inspect, run, samples_of

FAULTS = run(RECORDS, "--accept", "none").output.partition("choose from ")[2].rstrip(".\n").split(",")
ANYTHING = [word for fault in FAULTS for word in ("--accept", fault.strip())]
"""Whatever is found: settings are predicted all the same."""


def packed_of(samples: list[Sample]) -> mp.PackedSequences:
    """The same responses in the form that training corrects."""
    rows: dict[str, Any] = {
        "rollout_log_probs": [torch.from_numpy(one.rollout_log_probs) for one in samples],
        "old_log_probs": [torch.from_numpy(one.train_log_probs) for one in samples],
        "loss_masks": [one.loss_mask.astype(int).tolist() for one in samples],
    }
    if all(one.advantages is not None for one in samples):
        rows["advantages"] = [torch.from_numpy(np.asarray(one.advantages)) for one in samples]
    if all(one.weight_versions for one in samples):
        numbers = [[int(s.version) for s in one.weight_versions for _ in range(s.start, s.end)] for one in samples]
        rows |= {"weight_versions": numbers, "trainer_version": int(samples[0].trainer_version or 0)}
    return mp.PackedSequences.from_lists(**rows)


def random_batch(sequences: int = 40, spread: float = 0.15) -> list[Sample]:
    """Responses of 1 to 30 tokens, some of them under the mask, with the advantage of each."""
    draw, rollout, train, each = np.random.default_rng(0), [], [], []
    for length in draw.integers(1, 31, sequences):
        rollout.append(-draw.exponential(0.7, length) - 0.01)
        train.append(np.minimum(rollout[-1] + draw.normal(0, spread, length), 0.0))
        cut = int(draw.integers(0, length + 1))
        spans = [WeightSpan(version=str(v), start=s, end=e) for v, s, e in ((6, 0, cut), (8, cut, length)) if s < e]
        mask = [1, *draw.integers(0, 4, length - 1).clip(max=1)]
        each.append({"loss_mask": mask, "advantages": float(draw.normal()), "weight_versions": spans})
    return samples_of(rollout, train, each=each, trainer_version="8")


BATCH = random_batch()


OWN = (
    "--use-tis --tis-level sequence --tis-upper-bound 1.1 --tis-batch-normalize --rs-veto-threshold 0.4 "
    "--rs-criterion sequence_mean:k3:0.02"
)
BYPASS = "--use-rollout-log-probs --mismatch-objective "
OTHERS = (
    BYPASS + "cispo",
    BYPASS + "gspo",
    "--use-tis --tis-level prefix",
    "--use-tis --tis-level turn --tis-mode mask",
)


@cache
def predicted(flags: str = OWN) -> dict[str, Any]:
    return inspect(BATCH, "--flags", flags, *ANYTHING)


def by_gradient(packed: mp.PackedSequences, config: mp.MismatchConfig) -> tuple[float, float]:
    """(bias, noise) with w A taken from the gradient of the loss, and plain sums."""
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None and packed.advantages is not None
    current = packed.old_log_probs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(token_loss(current, packed, config).policy.sum(), current)
    mask = packed.loss_mask.double()
    log_ratio = torch.where(packed.loss_mask, packed.old_log_probs - packed.rollout_log_probs, 0.0)
    weighted, plain = -gradient, packed.advantages * mask
    rows: list[tuple[Any, ...]] = []
    level = config.unit.level
    for w, ratio, a, m in zip(*map(packed.unpack, (weighted, log_ratio, plain, mask)), strict=True):
        trained, starts = m.bool(), torch.cat([m[:1], (m[1:] - m[:-1]).clamp(min=0)])
        if level in ("token", "prefix"):
            logs = ratio.cumsum(0) if level == "prefix" else ratio
            rows += zip(w[trained], logs[trained], a[trained], strict=True)
            continue
        turns = starts.cumsum(0) if level == "turn" else torch.ones_like(m)
        for turn in turns[trained].unique():
            own = trained & (turns == turn)
            rows.append((w[own].sum(), ratio[own].sum(), a[own].sum()))
    x, logs, a = torch.tensor(rows, dtype=torch.float64).unbind(1)
    reference = logs.clamp(-20, 20).exp() * a
    bias = float((x - reference).sum().abs() / reference.abs().sum())
    if not x.any():
        return bias, math.inf
    noise = float((x**2).sum() / x.abs().sum() ** 2) / float((a**2).sum() / a.abs().sum() ** 2)
    return bias, noise


def test_every_prediction_is_what_training_reports_and_the_gradient_does(tmp_path: Path) -> None:
    packed, file = packed_of(BATCH), tmp_path / "mismatch.json"
    assert packed.old_log_probs is not None
    items = [*predicted()["predictions"], *(predicted(flags)["predictions"][0] for flags in OTHERS)]
    for item in items:
        file.write_text(json.dumps(item["settings"]))
        with ignore_mismatch_warnings():
            config = mp.MismatchConfig.from_file(file)
            config = config.replace(metrics="full")
        metrics = mp.policy_loss(packed.old_log_probs.clone().requires_grad_(), packed, config).statistics.metrics()
        told = {"accepted_token_fraction": item["kept"]}
        if config.weighted:
            ess = {"token": "", "unit": "unit_", "sequence": "seq_"}[item["unit"]] + "eff_sample_size"
            figures = {"mean": item["mean_weight"], "max": item["max_weight"], ess: item["ess"]}
            told |= {f"rollout_is_weight_after_{name}": value for name, value in figures.items()}
        told |= {f"accepted_by_advantage_{sign}": item[f"kept_{sign}"] for sign in ("negative", "positive")}
        for name, value in told.items():
            assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-9), (item["setting"], name)
        by_hand = pytest.approx(by_gradient(packed, config), rel=1e-9)
        assert (item["bias"], float(item["noise"])) == by_hand, item["setting"]
        assert item["algorithm"] == config.algorithm and item["second_pass"] == (config.algorithm in (0, 2))


def test_the_own_settings_come_first_then_every_preset() -> None:
    items = predicted()["predictions"]
    names = [item["setting"] for item in items]
    presets = [name.split(":")[0] for name in names[1 : 1 + len(PRESETS)]]
    assert [item["own"] for item in items[:2]] == [True, False] and presets == [preset.short for preset in PRESETS]
    own = mp.MismatchConfig.build(items[0]["settings"])
    assert own.tis.batch_normalize and own.rs.veto_threshold == 0.4 and len(names) == len({*names})
    cispo, gspo = (predicted(flags)["predictions"][0]["ess"] for flags in OTHERS[:2])
    assert cispo > gspo, "the clip of an objective acts in the first step of bypass"
    for item in items:
        name, _, flags = item["setting"].rpartition(": ")
        if name in ("trm", "opsm"):  # parameters from the data
            assert 0.9 < item["kept"] <= 1.0, item
        if flags.startswith("--"):  # to be pasted
            assert read(flags.split()) == settings_of(item), item
    assert all(item["bias"] == 0.0 or item["bias"] > 1e-12 for item in items)


def test_what_the_data_cannot_decide_is_left_out_and_said() -> None:
    bare = [one.with_fields(advantages=None, weight_versions=()) for one in BATCH]
    conditional = {"opsm", "dppo_tv", "dppo_kl"}
    assert conditional <= {item["setting"].split(":")[0] for item in predicted()["predictions"]}
    for flags, lack in (
        ("--rs-criterion token:tv:0.1@away", "advantages"),
        ("--rs-max-staleness 1", "weight versions of all tokens and of the trainer"),
    ):
        found = inspect(bare, "--flags", flags, *ANYTHING)
        names = {item["setting"].split(":")[0] for item in found["predictions"]}
        assert not conditional & names and not any(item["own"] for item in found["predictions"])
        assert f"your settings are not measured, nor predicted: the dump lacks {lack}" in found["notes"]


def test_what_excluding_the_rejected_changes_in_their_groups_by_hand() -> None:
    """Of groups of four and two the second response is rejected."""
    rewards, groups = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1]
    each = [{"reward": rewards[at % 6], "group": 2 * (at // 6) + groups[at % 6]} for at in range(120)]
    samples = samples_of([[-1.0]] * 120, [[-3.0] if at % 6 == 1 else [-1.0] for at in range(120)], each=each)
    flags = [f"--rs-criterion token:k2:0.5 --rs-group {group}" for group in ("keep", "exclude")]
    keep, exclude = (inspect(samples, "--flags", words, *ANYTHING)["predictions"][0] for words in flags)
    assert keep["groups_changed"] == 0.5
    assert (keep["kept_positive"], keep["kept_negative"]) == pytest.approx((2 / 3, 1.0))
    # Advantages 1.155, 0, −0.577, −0.577 and ±0.707: what is rejected has none to lose.
    found = (exclude["kept_positive"], exclude["kept_negative"], exclude["noise"])
    assert found == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)


def kept(packed: mp.PackedSequences, level: str, lower: float, upper: float) -> float:
    """Share of the level's units within these bounds, as training reports it."""
    tis = {"level": level, "mode": "mask", "lower_bound": lower, "upper_bound": upper}
    with ignore_mismatch_warnings():
        metrics = mp.correct(packed, mp.MismatchConfig.build({"use_tis": True, "tis": tis})).statistics.metrics()
    return 1.0 - sum(metrics[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("high", "low"))


def test_bounds_keep_the_wished_share_and_hardly_more() -> None:
    """Rounding outwards and whole units let in a little more."""
    packed, bounds = packed_of(BATCH), predicted()["bounds"]
    assert {"token", "turn", "prefix", "sequence", "geometric"} <= {*bounds}
    turns = sum(int((np.diff(one.loss_mask.astype(int), prepend=0) == 1).sum()) for one in BATCH)
    units = {"token": sum(int(one.loss_mask.sum()) for one in BATCH), "turn": turns}
    units["prefix"] = units["token"]
    for name, (lower, upper) in bounds.items():
        if name.startswith(("sequence_mean_", "sequence_max_")):
            aggregate, _, statistic = name.rpartition("_")
            rule = {"aggregate": aggregate, "statistic": statistic, "upper_bound": upper}
            with ignore_mismatch_warnings():
                config = mp.MismatchConfig.build({"rs": {"criteria": [rule]}})
            metrics = mp.correct(packed, config).statistics.metrics()
            assert lower == 0.0 and metrics["rollout_corr/accepted_seq_fraction"] >= 0.99 - 1e-12
            continue
        found = kept(packed, name, lower, upper)
        assert 0.99 - 1e-12 <= found <= 0.99 + 2 / units.get(name, len(BATCH)) + 0.003, name
        if name in ("token", "prefix"):
            assert kept(packed, name, lower ** (1 / 1.2), upper ** (1 / 1.2)) < found


def noise(
    kl: float, length: int, *, tail: float = 0.0, drift: float = 0.0, stale: bool = False, old: float = 0.0,
    turns: int = 1, credit: bool = False, responses: int = 30, groups: int = 0,
) -> list[Sample]:  # fmt: skip
    """l ~ N(−KL, 2 KL) a token, in responses of length/2 to `length` tokens.

    tail: share of tokens with l ~ N(−4.5, 9) instead, as a router that chooses otherwise. drift: share of responses
    whose KL is ten times larger, at least 0.1, as of other weights. stale: the first half is two versions behind. old:
    share of tokens seven versions behind the others (which are one behind the trainer), with the spread of 20 `kl`.
    turns: of each response. credit: an advantage of its own for each token. groups: how many, with rewards of 0 and 1.
    """
    draw = np.random.default_rng(0)
    count = max(responses, 12_000 // length)
    rollout, train, each = [], [], []
    for at in range(count):
        n = length if at == 0 else int(draw.integers(max(1, length // 2), length + 1))
        own = max(0.1, 10 * kl) if at < round(drift * count) else kl
        spread = draw.standard_normal(n)
        gap = -own + math.sqrt(2 * own) * spread
        gap = np.where(draw.random(n) < tail, -4.5 + 3 * spread, gap)
        ancient = draw.random(n) < old
        gap = np.where(ancient, -20 * kl + math.sqrt(40 * kl) * spread, gap)
        fields: dict[str, Any] = {"advantages": draw.standard_normal(n)} if credit else {}
        if stale:
            version = "0" if at < count / 2 else "2"
            fields["weight_versions"] = [WeightSpan(version=version, start=0, end=n)]
        if old:
            labels = np.where(ancient, "2", "9")
            ends = [*np.flatnonzero(labels[1:] != labels[:-1]) + 1, n]
            starts = [0, *ends[:-1]]
            spans = [WeightSpan(version=str(labels[s]), start=s, end=e) for s, e in zip(starts, ends, strict=True)]
            fields |= {"weight_versions": spans, "trainer_version": "10"}
        if turns > 1:
            fields["loss_mask"] = [int(place * turns * 20 // n % 20 != 0 or n < 40) for place in range(n)]
        if groups:
            fields |= {"reward": float(draw.integers(0, 2)), "group": at % groups}
        rollout.append(-15.5 - np.modf(0.618 * np.arange(n) + 0.37 * at)[0])
        train.append(rollout[-1] + gap)
        each.append(fields)
    ids = [draw.integers(5, 10**6, len(row)) for row in rollout]
    return samples_of(rollout, train, ids, each=each)


PASS, STEP, BOUNDED = "--expensive-pass", "--one-step", "geo_rs_token_tis, bounds from your data"
ADVICE: list[tuple[list[Sample], tuple[str, ...], str | None]] = [
    (noise(2e-4, 800), (), "disabled"),
    (noise(2e-4, 800), (PASS,), "ppo_is_bypass"),
    (noise(1.5e-3, 2000), (), "token_is"),
    (noise(0.01, 2000), (PASS,), "token_is"),
    (noise(0.01, 50), (), "seq_is"),
    (noise(0.05, 50), (), "token_is"),  # a product of ratios would spread too far
    (noise(0.01, 50), (STEP, PASS), "pg_is"),
    (noise(0.01, 50, stale=True), (), "token_is"),
    (noise(0.005, 400, turns=8), (), "seq_is, tis.level turn"),
    (noise(0.08, 400, turns=8), (), "token_is"),  # each turn is too long
    (noise(0.005, 50, credit=True), (), "prefix_is"),
    (noise(1e-3, 800, tail=0.01), (), "token_icepop"),
    (noise(0.003, 120, drift=0.02, responses=300), (), BOUNDED),
    (noise(0.005, 400, old=0.03), (), "token_is, max_staleness 1"),
    (noise(0.005, 400, old=0.2), (), "token_is"),  # too many
    (noise(0.01, 120, drift=0.02, responses=300, groups=20), (), f"{BOUNDED}, group exclude"),
    (noise(0.2, 400), (), "token_is"),  # only where it is meant
]


@cache
def advised(number: int) -> dict[str, Any]:
    samples, options, _ = ADVICE[number]
    return inspect(samples, *options, *ANYTHING)


@pytest.mark.parametrize("number", range(len(ADVICE)))
def test_the_setting_fits_the_run_and_keeps_what_it_says(number: int) -> None:
    found, expected = advised(number), ADVICE[number][2]
    advice = found["recommendation"]
    assert advice is not None and expected is not None, found["headline"]
    assert advice["setting"] == expected or advice["setting"].startswith(f"{expected},"), advice["setting"]
    assert ("max_staleness" in advice["setting"]) == ("max_staleness" in expected)
    item = next(item for item in found["predictions"] if item["setting"] == advice["setting"])
    packed, config = packed_of(ADVICE[number][0]), settings_of(advice)
    share = mp.correct(packed, config).statistics.metrics()["rollout_corr/accepted_token_fraction"]
    assert item["kept"] == pytest.approx(share, abs=1e-9) and share >= (0.9 if config.rejects else 1.0)
    if expected in ("seq_is", "pg_is", "prefix_is"):
        assert item["ess"] >= 0.5, "a product of ratios leaves half of the data"
    if "group exclude" in expected:
        assert any("moves the advantages" in reason for reason in advice["reasons"])
        assert "--rs-group exclude" in advice["flags"]["verl"] and "rs.group" in advice["flags"]["miles"]
    if "max_staleness" in expected:
        assert "--rs-max-staleness 1" in advice["flags"]["slime"]
        assert "--rs-max-staleness" not in advice["flags"]["megatron-lm"]


def test_a_strong_mismatch_has_no_setting_unless_it_is_meant_and_advice_says_what_to_watch() -> None:
    strong = noise(0.2, 400)
    assert inspect(strong)["recommendation"] is None
    assert "only where it is meant" in advised(len(ADVICE) - 1)["recommendation"]["reasons"][1]
    number = next(at for at, row in enumerate(ADVICE) if row[2] == "token_icepop")
    advice, packed = advised(number)["recommendation"], packed_of(ADVICE[number][0])
    assert "single tokens far off" in " ".join(advice["reasons"])
    metrics = dict(line.split(" near ") for line in advice["watch"])
    assert {*metrics} >= {"rollout_corr/accepted_token_fraction", "rollout_corr/k3_kl"}
    reported = mp.correct(packed, settings_of(advice)).statistics.metrics()
    for name, said in metrics.items():
        assert float(said.split(";")[0]) == pytest.approx(reported[name], rel=0.06), name


@pytest.mark.parametrize(
    ("kl", "length", "setting"),
    [
        (2e-4, 800, "ppo_is_bypass"),  # algorithm 0 elsewhere
        (0.01, 50, "pg_is"),
        (0.01, 2000, "pg_is, tis.level token"),  # token_is elsewhere, algorithm 2
    ],
)
def test_a_trainer_is_recommended_what_it_can_run(kl: float, length: int, setting: str) -> None:
    """prime-rl has no log-probs of π_old, so neither algorithm 0 nor 2."""
    found = inspect(noise(kl, length), "--host", "prime-rl", *ANYTHING)
    advice = found["recommendation"]
    assert advice["setting"] == setting and settings_of(advice).use_rollout_log_probs
    assert "mismatch_plugin.hooks.prime_rl.policy_loss" in advice["flags"]["prime-rl"]
    assert any(item["setting"] == setting for item in found["predictions"])
    told = inspect(noise(kl, length), "--host", "prime-rl", "--preset", "sapo", *ANYTHING)["notes"]
    assert any(note.startswith("algorithm") and "cannot be had on prime-rl" in note for note in told), told


SHOWN = [*{row[2]: number for number, row in enumerate(ADVICE)}.values()]
"""One of each setting."""


def settings_of(advice: dict[str, Any]) -> mp.MismatchConfig:
    with ignore_mismatch_warnings():
        return mp.MismatchConfig.build(advice["settings"])


def words_of(text: str) -> list[str]:
    """Our flags: what is behind the host's own words."""
    (command,) = [line for line in text.splitlines() if not line.startswith("#")]
    return shlex.split(command.rpartition("…")[2])


def read(words: list[str]) -> mp.MismatchConfig:
    parser = ArgumentParser()
    mp.add_arguments(parser)
    with ignore_mismatch_warnings():
        arguments, overrides = parser.parse_known_args(words)
        assert not overrides
        return mp.MismatchConfig.from_args(arguments)


@pytest.mark.parametrize("number", SHOWN, ids=lambda number: str(ADVICE[number][2]))
def test_the_flags_give_the_settings_back(number: int) -> None:
    advice = advised(number)["recommendation"]
    config = settings_of(advice)
    with ignore_mismatch_warnings():
        assert eval(advice["flags"]["python"], {"mp": mp, "inf": math.inf}) == config
        for host in (name for name, host in HOSTS.items() if host.launch):
            text = advice["flags"][host]
            if not any("cannot be had" in line or "'s own:" in line for line in text.splitlines()):
                assert read(words_of(text)) == config, host
    for name in ("trl", "skyrl", "prime-rl"):  # those have doors of their own
        assert advice["flags"][name]
