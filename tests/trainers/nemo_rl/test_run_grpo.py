"""NeMo-RL's own examples/run_grpo.py, whole: two rollouts of 16 responses, two optimizer steps each.

At a rollout's second step θ is not π_old any more. The engine has a bias on every token's logit, so its log-probs do
not agree with the trainer's. The metrics that NeMo-RL logs are means over a rollout's optimizer steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.trainers.columns import Shown, largest
from tests.trainers.nemo_rl.conftest import Start
from tests.trainers.nemo_rl.reference import loss_of
from tests.trainers.nemo_rl.trainer import Job, Trained

ROLLOUTS, STEPS = (1, 2), (0, 1)
REINFORCE = ("--use-rollout-log-probs", "--use-tis")
SEQUENCE = ("--use-tis", "--tis-level", "sequence")
# Name → our flags, and the run.
CASES: dict[str, tuple[Sequence[str], Job]] = {
    "algorithm 0": ((), Job(("--mismatch-metrics", "basic"))),
    "algorithm 1": (("--use-rollout-log-probs",), Job(("--use-rollout-log-probs",))),
    "algorithm 2": (("--use-tis",), Job(("--use-tis",))),
    "algorithm 3": (REINFORCE, Job(REINFORCE)),
    "sequence": (SEQUENCE, Job((*SEQUENCE, "--mismatch-report-dir", "{run}/report"))),
    "in the YAML": (
        (*REINFORCE, "--tis-level", "sequence"),
        Job(("+loss_fn.mismatch={use_rollout_log_probs: true, use_tis: true, tis: {level: sequence}}",)),
    ),
    **{
        name: (flags.split(), Job(flags.split()))
        for name, flags in {
            "rejection and mask": "--use-tis --tis-mode mask --tis-upper-bound 1.5 --rs-criterion token:k2:0.1",
            "geometric": "--use-tis --tis-level geometric --tis-mode clip --tis-upper-bound 1.01",
            "preset": "--mismatch-preset token_icepop --tis-upper-bound 1.2",
            "settings file": f"--mismatch-config {Path(__file__).parents[1] / 'settings.yaml'}",
        }.items()
    },
}


def _losses(run: Trained, flags: Sequence[str]) -> list[list[float]]:
    """Of each rollout and optimizer step, `mp.policy_loss` on what the policy had."""
    parts = [run.seen[rollout]["parts"] for rollout in ROLLOUTS]
    return [[loss_of([part for part in each if part["step"] == step], flags) for step in STEPS] for each in parts]


def _difference(run: Trained, flags: Sequence[str]) -> float:
    """The largest |logged loss − mean of `mp.policy_loss` over the optimizer steps|."""
    assert run.finished.status == 0, run.text[-3000:]
    logged = run.tracked["train/loss"]
    assert tuple(sorted(logged)) == tuple(run.seen) == ROLLOUTS
    found = _losses(run, flags)
    assert all(abs(value) > 1e-4 for steps in found for value in steps)
    return largest(abs(sum(steps) / 2 - logged[rollout]) for rollout, steps in zip(ROLLOUTS, found, strict=True))


@pytest.mark.shows("starts", "exit_status", "flags_arrive", "loss_equals_reference")
@pytest.mark.parametrize("name", CASES)
def test_the_logged_loss_is_ours_on_what_the_policy_had(name: str, start: Start, shows: Shown) -> None:
    flags, job = CASES[name]
    run = start(name, job)
    found = _difference(run, flags)
    assert found < 1e-5
    others = [flags for other, (flags, _) in CASES.items() if other != name]
    assert all(abs(_losses(run, flags)[1][1] - _losses(run, other)[1][1]) > 1e-4 for other in others)
    assert run.said("^mismatch_plugin on nemo-rl:")
    shows("starts", "run_grpo.py, an engine of our own, two rollouts each")
    shows("flags_arrive", "each algorithm's loss is its own, in one process")
    shows("loss_equals_reference", "algorithms 0 to 3, sequence weights, settings in YAML", found)
    shows("exit_status", "0 at the end of training")


@pytest.mark.shows("loss_equals_reference", "gradients_change")
def test_algorithm_0_is_nemo_rls_own_loss(start: Start, shows: Shown) -> None:
    own, ours = start("own", Job(launch=False)), start("algorithm 0", CASES["algorithm 0"][1])
    assert own.finished.status == 0 and not own.said("^mismatch_plugin on")
    for name in ("loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "kl_penalty"):
        assert own.tracked[f"train/{name}"] == pytest.approx(ours.tracked[f"train/{name}"], rel=1e-5, abs=1e-6), name
    shows("loss_equals_reference", "algorithm 0 as NeMo-RL's own loss")


@pytest.mark.shows("gradients_change")
def test_the_algorithms_gradients_are_as_the_formulas_say(start: Start, shows: Shown) -> None:
    """At θ = π_old algorithms 2 and 3 have one gradient, w·A·∇log π; 0 has no w; later the clip makes them differ."""
    seen = {name: start(name, CASES[name][1]).seen for name in CASES}
    first = {name: seen[name][1]["grad_norms"][0].item() for name in CASES}
    last = {name: seen[name][2]["grad_norms"][1].item() for name in CASES}
    assert first["algorithm 2"] == pytest.approx(first["algorithm 3"], rel=1e-5)
    assert abs(first["algorithm 0"] - first["algorithm 2"]) > 0.01
    assert abs(last["algorithm 2"] - last["algorithm 3"]) > 1e-3
    shows("gradients_change", "norm in 0 as with NeMo-RL's own loss; first step: equal in 2 and 3, another in 0")


@pytest.mark.shows("metrics_arrive")
def test_metrics_reach_tensorboard_and_the_report_folder(start: Start, shows: Shown) -> None:
    run = start("sequence", CASES["sequence"][1])
    lines = [json.loads(line) for line in (run.folder / "report/metrics.jsonl").read_text().splitlines()]
    assert tuple(line["step"] for line in lines) == ROLLOUTS
    ours = {name for name in run.tracked if name.startswith("train/rollout_corr/")}
    assert len(ours) > 20 and all(tuple(sorted(run.tracked[name])) == ROLLOUTS for name in ours)
    for line in lines:
        for name in (*ours, "train/loss", "train/gen_kl_error"):
            assert run.tracked[name][line["step"]] == pytest.approx(line[name[6:]], rel=1e-5, abs=1e-7, nan_ok=True)
        ratios = [_log_ratios(run, line["step"], step) for step in STEPS]
        wanted = {
            "gen_kl_error": sum(float((ratio.expm1() - ratio).mean()) for ratio in ratios) / 2,
            "rollout_corr/kl": -sum(float(ratio.mean()) for ratio in ratios) / 2,
            "rollout_corr/accepted_token_fraction": 1.0,
        }
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    shows("metrics_arrive", "TensorBoard and our report folder, equal")


def _log_ratios(run: Trained, rollout: int, step: int) -> torch.Tensor:
    """log π_old − log π_rollout of a step's trained tokens."""
    parts = [part for part in run.seen[rollout]["parts"] if part["step"] == step]
    return torch.cat(
        [(part["prev_logprobs"] - part["generation_logprobs"])[:, 1:][part["token_mask"][:, 1:] != 0] for part in parts]
    )


@pytest.mark.shows("weight_versions_arrive")
def test_the_engine_samples_with_the_weights_of_the_last_step(start: Start, shows: Shown) -> None:
    """Its model is zeros until NeMo-RL sends weights; without a bias it agrees in every rollout."""
    run = start("sampled", Job(("--use-tis",), env={"NEMO_RL_ENGINE_BIAS": "0"}))
    assert run.finished.status == 0, run.text[-3000:]
    apart = largest(float(_log_ratios(run, rollout, step).abs().max()) for rollout in ROLLOUTS for step in STEPS)
    assert apart < 1e-5
    moved = [float((part["current"] - part["prev_logprobs"][:, 1:]).abs().max()) for part in run.seen[1]["parts"]]
    assert max(moved) > 0.01
    shows("weight_versions_arrive", "to an engine of our own, each rollout; |log-ratio|", apart)


@pytest.mark.shows("fault_named")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--use-tis", "--tis-levle", "sequence"), "--tis-levle.*--tis-level"),
        ((*REINFORCE, "loss_fn.use_cispo=true"), "algorithm 3 is REINFORCE, which has no such ratio"),
        (("--use-tis", "+loss_fn.mismatch={use_tis: true}"), "give the settings in one of the two ways"),
    ],
)
def test_a_wrong_command_line_is_named(flags: Sequence[str], message: str, start: Start, shows: Shown) -> None:
    run = start(f"wrong {message[:12]}", Job(flags))
    assert run.finished.status == 2 and run.said(message) and not run.said("Loaded configuration")
    shows("fault_named", "misspelt and contradictory flags")


@pytest.mark.shows("fault_named")
def test_a_log_prob_that_the_engine_did_not_return_is_named(start: Start, shows: Shown) -> None:
    run = start("missing", Job(("--use-tis",), env={"NEMO_RL_NAN": "1"}))
    assert run.finished.status == 1 and run.said("InvalidLogProbError.*missing or NaN")
    assert not run.seen and "train/loss" not in run.tracked
    shows("fault_named", "a NaN log-prob, before the optimizer steps")
