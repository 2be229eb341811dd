"""TRL, prime-rl and SkyRL without the trainer: settings at their doors, what is refused, and the loss on a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.core.validity import InvalidLogProbError
from mismatch_plugin.diagnose.flags import available, flags_for
from mismatch_plugin.hooks import prime_rl, skyrl, trl
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.report.presets import quiet_preset
from tests.hooks.test_contract import MASK, batch

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


# The doors: the settings that flags give there, and the sum of the loss -----------------------------------------------

TRL_ARGS: dict[str, Any] = {
    "loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_correction": True, "top_p": 1.0, "top_k": 0,
    "vllm_importance_sampling_mode": "sequence_mask", "min_p": None, "max_completion_length": 6,
}  # fmt: skip


class Generation:
    """What a trainer has when TRL's mixin is called: a batch with or without vLLM's ratio, and one process."""

    def __init__(self, ratio: bool = True, **args: Any) -> None:
        one = SimpleNamespace(is_main_process=True, reduce=lambda values, reduction: values, gather=lambda v: v)
        self.accelerator, self.args = one, SimpleNamespace(**{**TRL_ARGS, **args})
        self.model, self._metrics, self.ratio = SimpleNamespace(training=True), {"train": defaultdict(list)}, ratio

    def _generate_and_score_completions(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {"completion_mask": torch.ones_like(MASK), "tool_mask": MASK, "advantages": data["advantages"]}
        made |= {"sampling_per_token_logps": data["rollout"], "old_per_token_logps": data["old"]}
        return made | ({"importance_sampling_ratio": torch.full_like(data["old"], 7.0)} if self.ratio else {})


Corrected: Any = type("Corrected", (trl.CorrectionMixin, Generation), {})


def _trl_settings(words: str) -> mp.MismatchConfig:
    return trl.settings(words, SimpleNamespace(**TRL_ARGS))


def _trl_total(words: str, data: dict[str, Tensor], current: Tensor) -> Tensor:
    totals = []
    for ratio in (True, False):
        made = Corrected(mismatch=words, ratio=ratio)._generate_and_score_completions(data)
        advantages = made["advantages"] if made["advantages"].dim() == 2 else made["advantages"].unsqueeze(1)
        r = (current - made["old_per_token_logps"]).exp()
        losses = -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)  # as TRL's loss does
        totals.append((losses * made.get("importance_sampling_ratio", 1.0) * MASK).sum())
    torch.testing.assert_close(*totals)
    return totals[0]


def _prime_settings(words: str) -> mp.MismatchConfig:
    return prime_rl.settings(flags=words) if words else prime_rl.settings()


def _prime_total(words: str, data: dict[str, Tensor], current: Tensor) -> Tensor:
    """Sequence by sequence; with prime-rl's weights of tokens all 1."""
    total = current.sum() * 0.0
    for row, mask in enumerate(MASK.bool()):
        inputs: Any = SimpleNamespace(
            trainer_logprobs=current[row], inference_logprobs=data["rollout"][row], ref_logprobs=None,
            advantages=data["advantages"][row].expand(6), loss_mask=mask, loss_weights=torch.ones(6),
        )  # fmt: skip
        made = prime_rl.policy_loss(inputs, flags=words)
        assert all(values.shape == (int(mask.sum()),) for values in made.metrics.values())
        total = total + made.loss
    return total


@dataclass
class OffPolicyCorrection:
    tis_ratio_type: str | None = None


@dataclass
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    logprobs: int | None = 1
    max_generate_length: int = 6


@dataclass
class Algorithm:
    policy_loss_type: str = "mismatch"
    loss_reduction: str = "token_mean"
    use_tis: bool = False
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    cispo: Any = field(default_factory=lambda: SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0))
    off_policy_correction: OffPolicyCorrection = field(default_factory=OffPolicyCorrection)


def _skyrl(algorithm: Algorithm | None = None, sampling: Sampling | None = None) -> Any:
    engine = SimpleNamespace(engine_init_kwargs={})
    generator = SimpleNamespace(sampling_params=sampling or Sampling(), inference_engine=engine)
    return SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm or Algorithm()), generator=generator)


def _skyrl_settings(words: str) -> mp.MismatchConfig:
    return skyrl.settings(_skyrl(), words or {})


def _skyrl_total(words: str, data: dict[str, Tensor], current: Tensor) -> Tensor:
    advantages = data["advantages"].unsqueeze(1).expand(MASK.shape) / MASK.sum()  # as `loss_reduction` scales them
    config = skyrl.settings(_skyrl(), words)
    loss, metrics = skyrl.policy_loss(
        current, data["old"], advantages, config=None, loss_mask=MASK.float(), rollout_logprobs=data["rollout"],
        mismatch=config,
    )  # fmt: skip
    assert all(isinstance(value, float) for value in metrics.values())
    return loss * MASK.sum()


Door = tuple[Callable[[str], mp.MismatchConfig], Callable[[str, dict[str, Tensor], Tensor], Tensor]]
DOORS: dict[str, Door] = {
    "trl": (_trl_settings, _trl_total),
    "prime-rl": (_prime_settings, _prime_total),
    "skyrl": (_skyrl_settings, _skyrl_total),
}
doors = pytest.mark.parametrize("name", DOORS)
SETTINGS = (
    "--rs-criterion token:k2:0.05",
    "--rs-criterion sequence_mean:k3:0.04@negative --rs-veto-threshold 0.3",
    "--use-tis",
    "--use-tis --tis-level sequence --tis-mode clip --tis-upper-bound 1.2",
    "--use-tis --tis-level geometric --tis-mode mask --tis-upper-bound 1.1",
    "--use-tis --tis-level turn --tis-upper-bound 1.3 --rs-criterion token:k3:0.04",
    "--mismatch-preset token_icepop --tis-upper-bound 1.2",
    "--use-rollout-log-probs",
    "--use-rollout-log-probs --rs-criterion token:k2:0.05 --rs-veto-threshold 0.5",
    "--use-rollout-log-probs --use-tis --tis-level prefix --tis-upper-bound 1.5",
    "--use-rollout-log-probs --use-tis --rs-criterion token:tv:0.1@away --mismatch-rollout-kl-coef 0.1",
    "--mismatch-preset pg_is --tis-upper-bound 1.2",
    "--use-rollout-log-probs --mismatch-objective gspo",
)


@pytest.mark.parametrize("words", SETTINGS)
@doors
def test_flags_arrive_and_the_loss_is_policy_loss(name: str, words: str) -> None:
    settings, total = DOORS[name]
    asked, host = mp.MismatchConfig.from_words(words.split()), HOSTS[name]
    owned = any(start in ("objective",) for start in host.owns) and asked.objective != "ppo"
    judges = name == "trl" and asked.algorithm == 1 and asked.rejects  # π_θ, once a generation
    if host.lacking(asked) or owned or judges:
        with pytest.raises(ValueError, match=f"cannot be had in {host.title}|is {host.title}'s to set"):
            settings(words)
        return
    config = settings(words)
    for path in ("algorithm", "rs", "tis", "terms"):
        assert getattr(config, path) == getattr(asked, path)
    data = batch()
    mine, theirs = (data["current"].clone().requires_grad_() for _ in range(2))
    packed = mp.PackedSequences.from_padded(
        loss_masks=MASK, rollout_log_probs=data["rollout"], old_log_probs=data["old"], advantages=data["advantages"]
    )
    result = mp.policy_loss(mine, packed, config)
    wanted, got = result.loss_sum + sum(result.terms.values()), total(words, data, theirs)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got, theirs), torch.autograd.grad(wanted, mine), rtol=1e-9, atol=0)
    if config.rejects:
        assert 0 < float(result.correction.keep.sum()) < float(MASK.sum())


REFUSED = {
    "--rs-criterion token:k2:0.5 --rs-group exclude": "groups",
    "--rs-max-staleness 1": "versions",
    "--rs-criterion token:k2:0.5 --mismatch-denominator accepted": "accepted",
    "--use-tis --tis-batch-normalize": "normalisation",
    "--mismatch-log-prob-backend torch": "log_probs",
    "--mismatch-verify-weights error": "updates",
    "--mismatch-report-dir /tmp/none": "report",
    "--mismatch-gate-kl 0.1": "gate",
    "--rs-criterion token:k2:0.5 --rs-policy current": "current_policy",
    "--mismatch-rollout-kl-coef 0.1": "penalty",
}


@pytest.mark.parametrize("words", REFUSED)
@doors
def test_what_cannot_be_had_is_refused_with_the_reason(name: str, words: str) -> None:
    host, key = HOSTS[name], REFUSED[words]
    words += " --use-rollout-log-probs" if name == "prime-rl" and key != "current_policy" else ""
    if key not in host.lacks and "old_log_probs" not in host.lacking(mp.MismatchConfig.from_words(words.split())):
        assert DOORS[name][0](words)
        return
    key = key if key in host.lacks else "old_log_probs"
    with pytest.raises(ValueError, match=r"cannot be had in|needs to know what is accepted") as caught:
        DOORS[name][0](words)
    # In algorithms 1 and 3, prime-rl's, there are no groups anywhere.
    assert host.lacks[key].why in str(caught.value) or (name, key) == ("prime-rl", "groups")


@pytest.mark.parametrize("words", ["--use-tsi", "--use-tis --tis-lower-bound 0.5", "--tis-level sequence"])
@doors
def test_misspelt_and_idle_flags_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"--use-tsi|--tis-lower-bound 0.5|--tis-level sequence"):
        DOORS[name][0](words)


OWNED = ("--mismatch-aggregation seq-mean-token-sum", "--mismatch-entropy-coef 0.01", "--mismatch-eps-clip-low 0.1")


@pytest.mark.parametrize("words", OWNED)
@doors
def test_what_the_host_decides_is_its_to_set(name: str, words: str) -> None:
    if name == "prime-rl" and "clip" in words:  # its custom loss has no clip of its own
        assert prime_rl.settings(flags=f"{words} --use-rollout-log-probs").ppo.eps_clip_low == 0.1
        return
    with pytest.raises(ValueError, match=f"{words.split()[0]}.*{HOSTS[name].title}.*leave it out"):
        DOORS[name][0](words)


def test_what_trl_s_configuration_rules_out() -> None:
    with pytest.raises(ValueError, match="loss_type vespo makes weights or sums of its own"):
        trl.settings("--use-tis", SimpleNamespace(**{**TRL_ARGS, "loss_type": "vespo"}))
    with pytest.raises(ValueError, match="neutral cannot be had in algorithm 1"):
        trl.settings("--use-rollout-log-probs --rollout-log-prob-policy neutral", SimpleNamespace(**TRL_ARGS))
    lines = trl.describe(_trl_settings("--use-tis"), SimpleNamespace(**{**TRL_ARGS, "top_p": 0.9}))
    assert any(line.startswith("! sampling filter: top_p 0.9") for line in lines)
    assert "TRL's own vllm_importance_sampling_mode sequence_mask: replaced by ours" in lines


def test_what_skyrl_s_configuration_rules_out_and_says() -> None:
    with pytest.raises(ValueError, match="policy_loss_type is regular"):
        skyrl.settings(_skyrl(Algorithm(policy_loss_type="regular")), "--use-tis")
    with pytest.raises(ValueError, match="off_policy_correction is set"):
        skyrl.settings(_skyrl(Algorithm(off_policy_correction=OffPolicyCorrection("token"))), "--use-tis")
    with pytest.raises(ValueError, match=r"set generator.sampling_params.logprobs=1"):
        skyrl.settings(_skyrl(sampling=Sampling(logprobs=None)), "--use-tis")
    clip = skyrl.settings(_skyrl(Algorithm(eps_clip_low=0.1, eps_clip_high=0.3)), "--use-tis").ppo
    assert (clip.eps_clip_low, clip.eps_clip_high) == (0.1, 0.3)
    cispo = skyrl.settings(_skyrl(), "--use-tis --mismatch-objective cispo").ppo
    assert (cispo.eps_clip_low, cispo.eps_clip_high) == (1.0, 4.0)
    config = _skyrl_settings("--use-tis")
    warm = skyrl.describe(config, _skyrl(sampling=Sampling(temperature=0.7)))
    assert any(line.startswith("! temperature 0.7: vLLM returns log-probs from before it") for line in warm)
    assert not any(line.startswith("! temperature") for line in skyrl.describe(config, _skyrl()))


@doors
def test_an_invalid_log_prob_is_an_error(name: str) -> None:
    data = batch()
    data["rollout"][1, 2] = float("nan")
    words = "--use-rollout-log-probs" if name == "prime-rl" else "--use-tis"
    with pytest.raises(InvalidLogProbError, match="nan"):
        DOORS[name][1](words, data, data["current"])


def test_prime_rl_s_example_is_what_its_loss_takes() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    path = Path(__file__).parents[2] / "examples" / "prime_rl" / "rl.toml"
    loss = tomllib.loads(path.read_text(encoding="utf-8"))["trainer"]["loss"]
    config = prime_rl.settings(**loss["kwargs"])
    assert (loss["type"], loss["import_path"]) == ("custom", "mismatch_plugin.hooks.prime_rl.policy_loss")
    assert (config.algorithm, config.tis.level, len(config.criteria)) == (3, "sequence", 1)
    with pytest.raises(ValueError, match="has flags and preset: give all as flags, or none"):
        prime_rl.settings(flags="--use-rollout-log-probs", preset="pg_is")


@pytest.mark.parametrize("preset", [record.name for record in PRESETS])
@doors
def test_what_inspect_shows_is_what_the_door_takes(name: str, preset: str) -> None:
    """What is left out is said; where the algorithm cannot be had there is nothing to paste."""
    config = quiet_preset(preset)
    text, (allowed, notes) = flags_for(config, name), available(config, name)
    shown = [line for line in text.splitlines() if not line.startswith("#")]
    if not shown:
        assert any("cannot be had on" in note for note in notes)
        return
    if name == "trl":
        argument = shown[0].removeprefix("CorrectedGRPOTrainer(mismatch=").removesuffix(", …)")
        given = eval(argument, {"mp": mp, "inf": float("inf")})
    elif name == "skyrl":
        given = shown[0].partition("… ")[2]
    else:
        tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
        given = tomllib.loads(shown[0])["trainer"]["loss"]["kwargs"]["flags"]
    if name == "trl" and allowed.use_rollout_log_probs and allowed.rejects:
        with pytest.raises(ValueError, match="rejection in algorithm 1"):
            trl.settings(given, SimpleNamespace(**TRL_ARGS))
        return
    made = {
        "trl": lambda: trl.settings(given, SimpleNamespace(**TRL_ARGS)),
        "skyrl": lambda: skyrl.settings(_skyrl(), given or {}),
        "prime-rl": lambda: prime_rl.settings(flags=given),
    }[name]()
    own = {"denominator": allowed.denominator}
    if any(note.startswith("ppo.eps_clip_low") for note in notes):  # an objective's, which the host has to be told
        own["ppo"] = allowed.ppo.model_dump(exclude_unset=True) | made.ppo.model_dump()
    assert made.replace(**own) == allowed.replace(**own)
