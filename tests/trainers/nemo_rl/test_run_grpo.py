"""NeMo-RL's own examples/run_grpo.py, whole: two rollouts of 16 responses, two optimizer steps each.

At a rollout's second step θ is not π_old any more. The engine has a bias on every token's logit, so its log-probs do
not agree with the trainer's. The metrics that NeMo-RL logs are means over a rollout's optimizer steps.
"""

from __future__ import annotations

import pytest

from tests.trainers.nemo_rl.trainer import Job
from tests.trainers.reference import TOLERANCE
from tests.trainers.whole import SETTINGS, Record, Runs, largest

ROLLOUTS, STEPS = (1, 2), (0, 1)
REINFORCE = "--use-rollout-log-probs --use-tis"
YAML = "+loss_fn.mismatch={use_rollout_log_probs: true, use_tis: true, tis: {level: sequence}}"
CASES = {
    "algorithm 0": "--mismatch-metrics basic",
    "algorithm 1": "--use-rollout-log-probs",
    "algorithm 2": "--use-tis",
    "algorithm 3": REINFORCE,
    "sequence": "--use-tis --tis-level sequence --mismatch-report-dir {run}/report",
    "in the YAML": f"{REINFORCE} --tis-level sequence",
    "rejection and mask": "--use-tis --tis-mode mask --tis-upper-bound 1.5 --rs-criterion token:k2:0.1",
    "geometric": "--use-tis --tis-level geometric --tis-mode clip --tis-upper-bound 1.01",
    "preset": "--mismatch-preset token_icepop --tis-upper-bound 1.2",
    "settings file": f"--mismatch-config {SETTINGS}",
}
JOBS = {
    **{name: Job([YAML] if name == "in the YAML" else flags.split()) for name, flags in CASES.items()},
    "own": Job(launch=False),
    "no bias": Job(["--use-tis"], env={"NEMO_RL_ENGINE_BIAS": "0"}),
    "missing": Job(["--use-tis"], env={"NEMO_RL_NAN": "1"}),
    "misspelt": Job(["--use-tis", "--tis-levle", "sequence"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_logged_loss_is_ours_and_no_others_on_what_the_policy_had(
    name: str, trained: Runs, record_property: Record
) -> None:
    run = trained(name)
    assert run.finished.status == 0, run.text[-3000:]
    assert run.said("^mismatch_plugin on nemo-rl:")
    logged = run.tracked["train/loss"]
    assert tuple(sorted(logged)) == tuple(run.seen) == ROLLOUTS
    losses = [[run.loss(rollout, step, CASES[name].split()) for step in STEPS] for rollout in ROLLOUTS]
    assert min(abs(value) for found in losses for value in found) > 1e-4
    apart = [abs(sum(found) / 2 - logged[rollout]) for rollout, found in zip(ROLLOUTS, losses, strict=True)]
    assert largest(apart) < TOLERANCE
    for other in CASES:
        assert name == other or abs(losses[1][1] - run.loss(2, 1, CASES[other].split())) > 1e-4, other
    record_property("loss_equals_reference", largest(apart))


def test_algorithm_0_is_nemo_rls_own_loss(trained: Runs) -> None:
    own, ours = trained("own"), trained("algorithm 0")
    assert own.finished.status == 0 and not own.said("^mismatch_plugin on")
    for name in ("loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "kl_penalty"):
        assert own.tracked[f"train/{name}"] == pytest.approx(ours.tracked[f"train/{name}"], rel=1e-5, abs=1e-6), name


def test_the_algorithms_gradients_are_as_the_formulas_say(trained: Runs) -> None:
    """At θ = π_old algorithms 2 and 3 have one gradient, w·A·∇log π; 0 has no w; later the clip makes them differ."""
    norms = {i: [trained(f"algorithm {i}").seen[rollout]["grad_norms"] for rollout in ROLLOUTS] for i in (0, 2, 3)}
    first = {i: of[0][0].item() for i, of in norms.items()}
    assert first[2] == pytest.approx(first[3], rel=1e-5)
    assert abs(first[0] - first[2]) > 0.01
    assert abs(norms[2][1][1] - norms[3][1][1]) > 1e-3


def test_metrics_reach_tensorboard_and_the_report_folder(trained: Runs) -> None:
    run = trained("sequence")
    assert tuple(line["step"] for line in run.reported) == ROLLOUTS
    ours = {name for name in run.tracked if name.startswith("train/rollout_corr/")}
    assert len(ours) > 20 and all(tuple(sorted(run.tracked[name])) == ROLLOUTS for name in ours)
    for line in run.reported:
        for name in (*ours, "train/loss", "train/gen_kl_error"):
            assert run.tracked[name][line["step"]] == pytest.approx(line[name[6:]], rel=1e-5, abs=1e-7, nan_ok=True)
        ratios = [run.log_ratios(line["step"], step) for step in STEPS]
        wanted = {
            "gen_kl_error": sum(float((ratio.expm1() - ratio).mean()) for ratio in ratios) / 2,
            "rollout_corr/kl": -sum(float(ratio.mean()) for ratio in ratios) / 2,
            "rollout_corr/accepted_token_fraction": 1.0,
        }
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_the_engine_samples_with_the_weights_of_the_last_step(trained: Runs, record_property: Record) -> None:
    """Its model is zeros until NeMo-RL sends weights; without a bias it agrees in every rollout."""
    run = trained("no bias")
    assert run.finished.status == 0, run.text[-3000:]
    apart = largest(float(run.log_ratios(rollout, step).abs().max()) for rollout in ROLLOUTS for step in STEPS)
    assert apart < 1e-5
    moved = [float((part["current"] - part["prev_logprobs"][:, 1:]).abs().max()) for part in run.seen[1]["parts"]]
    assert max(moved) > 0.01
    record_property("weight_versions_arrive", apart)


def test_a_wrong_command_line_is_named(trained: Runs) -> None:
    run = trained("misspelt")
    assert run.finished.status == 2 and run.said("--tis-levle.*--tis-level") and not run.said("Loaded configuration")


def test_a_log_prob_that_the_engine_did_not_return_is_named(trained: Runs) -> None:
    run = trained("missing")
    assert run.finished.status == 1 and run.said("InvalidLogProbError.*missing or NaN")
    assert not run.seen and "train/loss" not in run.tracked
