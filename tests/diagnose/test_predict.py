"""What settings are predicted to do: by hand, against the gradient of the loss, and against what training reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import mismatch_plugin as mp
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.diagnose.levels import bounds_for
from mismatch_plugin.diagnose.packing import Groups, subset
from mismatch_plugin.diagnose.predict import OWN, left_out, measurable, predict, predict_one, settings_for
from mismatch_plugin.diagnose.result import Prediction
from tests import ragged

OURS = mp.MismatchConfig(
    use_tis=True,
    tis=mp.ImportanceSampling(level="sequence", upper_bound=1.1, batch_normalize=True),
    rs=mp.Rejection.model_validate({"criteria": ["sequence_mean:k3:0.02"], "veto_threshold": 0.4}),
)


def random_batch(sequences: int = 12, spread: float = 0.15, seed: int = 0, **fields: Any) -> mp.PackedSequences:
    """Responses of 1 to 30 tokens, some of them under the mask, with the advantage of each."""
    generator = np.random.default_rng(seed)
    names = ("rollout_log_probs", "old_log_probs", "loss_masks", "advantages", "weight_versions")
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for length in generator.integers(1, 31, sequences):
        rollout = -generator.exponential(0.7, length) - 0.01
        rows["rollout_log_probs"].append(torch.from_numpy(rollout))
        rows["old_log_probs"].append(torch.from_numpy(np.minimum(rollout + generator.normal(0, spread, length), 0.0)))
        rows["loss_masks"].append([1, *generator.integers(0, 4, length - 1).clip(max=1)])
        rows["advantages"].append(torch.full((length,), float(generator.normal()), dtype=torch.float64))
        rows["weight_versions"].append(generator.integers(5, 9, length).tolist())
    given: dict[str, Any] = {**rows, "trainer_version": 8, **fields}
    return mp.PackedSequences.from_lists(**given)


def agrees(item: Prediction, metrics: dict[str, float], config: mp.MismatchConfig) -> None:
    """What training reports under these names is what was predicted."""
    after = "rollout_is_weight_after_"
    told: dict[str, float] = {"accepted_token_fraction": item.kept}
    if config.weighted:
        ess = {"token": "", "unit": "unit_", "sequence": "seq_"}[item.unit] + "eff_sample_size"
        told |= {f"{after}mean": item.mean_weight, f"{after}max": item.max_weight, f"{after}{ess}": item.ess}
    signs = {"negative": item.kept_negative, "positive": item.kept_positive}
    told |= {f"accepted_by_advantage_{sign}": kept for sign, kept in signs.items() if kept is not None}
    for name, value in told.items():
        assert metrics[f"rollout_corr/{name}"] == value, name


PACKED = random_batch()
SETTINGS = [*settings_for(PACKED, OURS, bounds_for(PACKED))]


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


def test_every_setting_is_a_file_and_equals_what_training_reports_and_the_gradient(tmp_path: Path):
    assert PACKED.old_log_probs is not None
    predicted, file = predict(PACKED, OURS), tmp_path / "mismatch.json"
    assert [item.setting for item in predicted] == [name for name, _, _ in SETTINGS]
    for item, (_, _, config) in zip(predicted, SETTINGS, strict=True):
        file.write_text(json.dumps(item.settings))
        with ignore_mismatch_warnings():
            assert mp.MismatchConfig.from_file(file) == config
            config = config.replace(metrics="full")
        result = mp.policy_loss(PACKED.old_log_probs.clone().requires_grad_(), PACKED, config)
        agrees(item, result.statistics.metrics(), config)
        assert (item.bias, item.noise) == pytest.approx(by_gradient(PACKED, config), rel=1e-9), item
        assert item.algorithm == config.algorithm and item.second_pass == (config.algorithm in (0, 2))
    # The user's own settings come first, then the presets, those without defaults with parameters from the data.
    names = [item.setting for item in predicted]
    presets = [name.split(",")[0] for name in names[1 : 1 + len(PRESETS)]]
    assert names[0] == OWN and presets == [preset.short for preset in PRESETS]
    assert len(names) == len({*names}) and OWN not in [item.setting for item in predict(PACKED)]
    for item in predict(random_batch(300)):
        if item.setting.startswith(("trm", "opsm")):
            assert "keeps 99%)" in item.setting and 0.9 < item.kept < 1.0, item
    # The clip of an objective acts in the first step of bypass.
    found = {item.setting: item for item in predicted}
    assert found["algorithm 1, objective cispo"].ess > found["algorithm 1, objective gspo"].ess


@settings(max_examples=60, deadline=None)
@given(ragged.batches(torch.float64, min_tokens=1), ragged.configs())
def test_any_configuration_equals_what_training_reports(batch: ragged.Batch, config: mp.MismatchConfig):
    packed = batch.packed()
    assert packed.old_log_probs is not None and packed.advantages is not None
    item = predict_one(packed, config)
    with ignore_mismatch_warnings():
        config = config.replace(metrics="full", dry_run=False)
    result = mp.policy_loss(packed.old_log_probs.clone().requires_grad_(), packed, config)
    agrees(item, result.statistics.metrics(), config)
    assert 0.0 <= item.kept <= 1.0 and 0.0 <= item.ess <= 1.0 + 1e-12
    assert (item.kept == 0.0) <= (item.ess == 0.0) and item.bias >= 0.0
    if not math.isinf(item.noise) and (packed.advantages[packed.loss_mask].abs() > 1e-3).all():
        assert (item.bias, item.noise) == pytest.approx(by_gradient(packed, config), rel=1e-6, abs=1e-9)


HAND = mp.PackedSequences.from_lists(
    rollout_log_probs=[torch.tensor([-1.0, -1.0, -1.0]).double(), torch.tensor([-2.0]).double()],
    old_log_probs=[
        torch.tensor([-1.0, -1.0 + math.log(1.5), -1.0 - math.log(2.0)]).double(),
        torch.tensor([-2.0 + math.log(4.0)]).double(),
    ],
    loss_masks=[[1, 1, 1], [1]],
    advantages=[1.0, -2.0],
)
"""ρ = 1, 1.5, 0.5 with A = 1, and 4 with A = −2; the products are 0.75 and 4."""


def of_hand(packed: mp.PackedSequences = HAND, **fields: Any) -> Prediction:
    return predict_one(packed, mp.MismatchConfig(**fields))


def test_token_weights_by_hand():
    item = of_hand(use_tis=True, tis={"level": "token", "mode": "truncate", "upper_bound": 2.0})
    # w = 1, 1.5, 0.5, 2; w A = 1, 1.5, 0.5, −4; ρ A = 1, 1.5, 0.5, −8
    assert (item.kept, item.kept_positive, item.kept_negative, item.unit) == (1.0, 1.0, 1.0, "token")
    assert (item.mean_weight, item.max_weight) == pytest.approx((1.25, 2.0))
    assert item.ess == pytest.approx(5.0**2 / (4 * (1 + 2.25 + 0.25 + 4)))
    assert item.noise == pytest.approx((19.5 / 7.0**2) / (7.0 / 5.0**2))
    assert item.bias == pytest.approx(4.0 / 11.0)
    assert item.second_pass


def test_sequence_weights_by_hand():
    item = of_hand(use_tis=True, tis={"level": "sequence", "mode": "mask", "upper_bound": 2.0})
    # the second response is rejected; Σ w A = 3 · 0.75; Σ ρ A = 2.25 − 8
    assert (item.kept, item.kept_positive, item.kept_negative, item.unit) == (0.75, 1.0, 0.0, "sequence")
    assert (item.mean_weight, item.max_weight, item.ess) == pytest.approx((0.75, 0.75, 0.5))
    assert item.noise == pytest.approx(1.0 / ((3.0**2 + 2.0**2) / 5.0**2))
    assert item.bias == pytest.approx(8.0 / 10.25)


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_the_bias_is_that_of_the_bounds_and_does_not_see_the_level_s_own(level: str):
    """Token weights are biased, and show 0 like all others that nothing cuts: page and screen say so."""
    assert of_hand(use_tis=True, tis={"level": level, "upper_bound": 100.0}).bias == pytest.approx(0.0, abs=1e-12)
    assert of_hand(use_tis=True, tis={"level": level, "upper_bound": 0.4}).bias > 0.1
    page = (Path(mp.__file__).parent / "diagnose" / "page.html.j2").read_text(encoding="utf-8")
    assert "0 does not mean unbiased" in page


def test_without_advantages_they_count_as_one():
    packed = HAND.replace(advantages=None)
    item = of_hand(packed, use_tis=True, tis={"level": "token", "mode": "clip", "upper_bound": 2.0})
    assert item.kept_positive is None and item.kept_negative is None
    assert item.noise == pytest.approx(1.0 / item.ess)
    assert item.bias == pytest.approx(2.0 / 7.0)
    with_ones = HAND.replace(advantages=torch.ones(4, dtype=torch.float64))
    other = of_hand(with_ones, use_tis=True, tis={"level": "token", "mode": "clip", "upper_bound": 2.0})
    assert other.kept_positive == 1.0 and other.kept_negative is None  # there is no such token
    assert other.noise == item.noise
    conditional, without = {"opsm", "dppo_tv", "dppo_kl"}, PACKED.replace(advantages=None)
    assert conditional <= {name.split(",")[0] for name, _, _ in SETTINGS}
    assert not conditional & {name.split(",")[0] for name, _, _ in settings_for(without, None, bounds_for(without))}
    assert left_out(PACKED, None, True) == ()


def test_of_more_tokens_whole_responses_are_drawn():
    packed = random_batch(200)
    part, notes = subset(packed, tokens=500)
    assert 400 < sum(part.lengths) <= 500 and subset(packed) == (packed, [])
    assert notes == [f"settings are predicted on {sum(part.lengths)} of {sum(packed.lengths)} tokens: "
                     f"{len(part.lengths)} responses drawn at random"]  # fmt: skip
    again, other = (subset(packed, 500, seed)[0].sequence_ids for seed in (0, 1))
    assert again == part.sequence_ids != other
    assert packed.old_log_probs is not None and part.old_log_probs is not None
    rows = packed.unpack(packed.old_log_probs)
    for index, row in zip(part.sequence_ids, part.unpack(part.old_log_probs), strict=True):
        assert isinstance(index, int) and torch.equal(rows[index], row)


def test_kept_by_length_is_of_thirds():
    def six(lengths: list[int]) -> mp.PackedSequences:
        """The fifth response is e^−2 a token."""
        rows = [[-1.0] * length for length in lengths]
        old = [[-3.0] * length if at == 4 else row for at, (length, row) in enumerate(zip(lengths, rows, strict=True))]
        return mp.PackedSequences.from_lists(
            rollout_log_probs=rows, old_log_probs=old, loss_masks=[[1] * n for n in lengths]
        )

    rules = {"criteria": ["sequence_sum:ratio:0.5:2"]}
    assert of_hand(six([1, 2, 3, 4, 5, 6]), rs=rules).kept_by_length == pytest.approx((1.0, 1.0, 6 / 11))
    assert of_hand(six([2] * 6), rs=rules).kept_by_length == ()


def test_limits_on_staleness_are_those_between_the_versions_that_are_there():
    names = [name for name, _, _ in SETTINGS if "max_staleness" in name]
    assert names == [f"algorithm {number}, max_staleness {most}" for most in (0, 1, 2) for number in (0, 2)]
    for batch in (PACKED.replace(weight_versions=None), PACKED.replace(trainer_version=None)):
        assert not any("max_staleness" in name for name, _, _ in settings_for(batch, None, bounds_for(batch)))
    assert PACKED.weight_versions is not None
    item = of_hand(PACKED, rs={"max_staleness": 1})
    versions = PACKED.weight_versions[PACKED.loss_mask]
    assert item.kept == pytest.approx(float((versions >= 7).double().mean()))


def test_own_settings_that_the_data_cannot_decide_are_predicted_without_that_and_it_is_said():
    own = mp.MismatchConfig.build({"rs": {"criteria": ["token:tv:0.1@away", "token:k2:0.02"], "max_staleness": 1}})
    bare = PACKED.replace(advantages=None, weight_versions=None)
    rest = mp.MismatchConfig.build({"rs": {"criteria": ["token:k2:0.02"]}})
    assert measurable(own, bare) == rest and measurable(own, PACKED) is own
    assert predict(bare, own)[0].kept == of_hand(bare, rs={"criteria": ["token:k2:0.02"]}).kept
    assert any("rs.max_staleness" in note for note in left_out(bare, own, True))
    group = own.replace(rs={"criteria": ["token:k2:0.02"], "group": "exclude"})
    assert any("predicted as keep" in note for note in left_out(PACKED, group, False))


def test_what_excluding_the_rejected_changes_in_their_groups_by_hand():
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0]] * 6, old_log_probs=[[-1.0], [-3.0], [-1.0], [-1.0], [-1.0], [-1.0]],
        loss_masks=[[1]] * 6, advantages=[0.866, 0.866, -0.866, -0.866, 0.7071, -0.7071],
    )  # fmt: skip
    groups = Groups(torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64), [1, 1, 1, 1, 2, 2])
    rules = {"criteria": ["token:k2:0.5"]}
    keep, exclude = (
        predict_one(packed, mp.MismatchConfig.build({"rs": {**rules, "group": group}}), "", groups)
        for group in ("keep", "exclude")
    )
    assert keep.groups_changed == 0.5  # the second response is rejected
    assert (keep.kept_positive, keep.kept_negative) == pytest.approx((2 / 3, 1.0))
    # Advantages 1.155, 0, −0.577, −0.577 and ±0.707: what is rejected has none to lose.
    assert (exclude.kept_positive, exclude.kept_negative, exclude.noise) == pytest.approx((1.0, 1.0, 1.0))
    assert predict_one(packed, mp.MismatchConfig(), "", groups).groups_changed is None


def test_no_weights_a_clip_nothing_left_and_a_dry_run_by_hand():
    item = of_hand()
    assert (item.kept, item.mean_weight, item.max_weight, item.ess, item.noise) == pytest.approx((1, 1, 1, 1, 1))
    assert item.bias == pytest.approx(6.0 / 11.0)  # Σ (1 − ρ) A = 0 − 0.5 + 0.5 + 6
    item = of_hand(use_rollout_log_probs=True)
    # clipped: ρ 1.5 > 1.2 with A > 0; not ρ 0.5 with A > 0, nor ρ 4 with A < 0: w = 1, 0, 0.5, 4
    assert (item.max_weight, item.mean_weight) == pytest.approx((4.0, 5.5 / 4))
    assert (item.bias, item.second_pass) == (pytest.approx(1.5 / 11.0), False)
    item = of_hand(rs={"criteria": ["token:ratio:50:60"]})
    assert (item.kept, item.kept_positive, item.mean_weight, item.max_weight, item.ess) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert math.isinf(item.noise) and item.bias == pytest.approx(5.0 / 11.0)
    assert Prediction.model_validate_json(item.model_dump_json()) == item
    tis = {"level": "token", "mode": "mask", "upper_bound": 1.2}
    dry, wet = (of_hand(use_tis=True, tis=tis, dry_run=dry) for dry in (True, False))
    assert dry.kept == wet.kept == 0.25 and dry.model_copy(update={"settings": wet.settings}) == wet
