"""What holds for every host, one row each: flags arrive or are refused with the reason, and the loss is `policy_loss`.

A row says what stands before our flags on a launch line, and how the host's adapter makes the sum of its loss over a
batch. Data are rows of responses with tool tokens in the middle, one advantage a response.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config.fields import flag_names, value_and_default
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.values import dotted_fields_set
from mismatch_plugin.core.validity import InvalidLogProbError
from mismatch_plugin.diagnose.flags import available, flags_for
from mismatch_plugin.hooks import prime_rl, skyrl, trl
from mismatch_plugin.hooks.base import METHODS, Plan, peek
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.report.presets import quiet_preset
from tests.hooks.test_lines import script_of

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
Data = dict[str, Tensor]

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1]])


def batch() -> Data:
    """[4, 6] log-probs of three policies, all different, and [4] advantages of responses."""
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = (rollout + noise(0.3)).clamp(max=-0.01)
    current = (old + noise(0.3)).clamp(max=-0.01)
    advantages = torch.tensor([0.7, -1.2, 0.4, 1.5], dtype=torch.float64)
    return {"rollout": rollout, "old": old, "current": current, "advantages": advantages}


# The rows -------------------------------------------------------------------------------------------------------------


def _ray_total(name: str) -> Callable[[Plan, Data, Tensor], Tensor]:
    def total(plan: Plan, data: Data, current: Tensor) -> Tensor:
        """Through our whole loss, or the hook in the host's own PPO, as the launcher has chosen."""
        assert plan.config is not None
        args, _ = peek(plan.argv, import_module(HOSTS[name].launch).TABLE)
        plan.settle(args)
        adapter = type(import_module(f"mismatch_plugin.hooks.{name}").ADAPTER)()
        adapter.groups = ParallelGroups()
        size = MASK.shape[1]
        shape: dict[str, Any] = {"rollout_log_probs": list(data["rollout"]), "loss_masks": list(MASK)}
        shape |= {"total_lengths": [size + 3] * len(MASK), "response_lengths": [size] * len(MASK)}

        def reduce(values: Tensor) -> Tensor:
            return (values * MASK.flatten()).sum()

        if args.loss_type == "custom_loss":
            more = {"log_probs": list(data["old"]), "advantages": list(data["advantages"])}
            return adapter.loss(args, {**shape, **more}, list(current), None, reduce)[0]
        ratio, clip = (current - data["old"]).exp(), plan.config.ppo
        bounded = ratio.clamp(1 - clip.eps_clip_low, 1 + clip.eps_clip_high)
        loss = torch.maximum(-ratio * data["advantages"], -bounded * data["advantages"]).flatten()
        if "tis_function" not in str(args.custom_tis_function_path):  # algorithm 1 is the host's own
            ratio = (current - data["rollout"]).exp()
        return reduce(adapter.tis_function(args, pg_loss=loss, train_log_probs=list(data["old"]), **shape)[0])

    return total


def _megatron_total(plan: Plan, data: Data, current: Tensor) -> Tensor:
    from mismatch_plugin.hooks.megatron_rl.loss import grpo_terms, pack

    assert plan.config is not None
    columns = {"old": data["old"], "rollout": data["rollout"], "advantages": data["advantages"][:, 0]}
    packed = pack(plan.config, **columns, loss_mask=MASK, seq_starts=None, seq_lengths=None)
    return (grpo_terms(current, data["old"], packed, plan.config)[0].loss * MASK).sum()


def _verl_total(plan: Plan, data: Data, current: Tensor) -> Tensor:
    from mismatch_plugin.hooks.verl import correct_rollout_batch, verl_token_loss

    assert plan.config is not None
    anchor, mask, weights = data["rollout"], MASK, None
    if not plan.config.use_rollout_log_probs:  # weights and rejection are made on the driver
        made = {"old_log_probs": data["old"], "rollout_log_probs": anchor, "response_mask": MASK.clone()}
        made = correct_rollout_batch(SimpleNamespace(batch=made), plan.config)[0].batch
        anchor, mask, weights = data["old"], made["response_mask"], made.get("rollout_is_weights")
    losses, kept, _ = verl_token_loss(anchor, current, data["advantages"], mask, plan.config, weights)
    return (losses * kept).sum()


def _nemo_total(plan: Plan, data: Data, current: Tensor) -> Tensor:
    from mismatch_plugin.hooks.nemo_rl import MismatchLoss
    from mismatch_plugin.hooks.tree import read_overrides

    block = read_overrides(plan.argv)["loss_fn.mismatch"]
    names = {"advantages": "advantages", "prev_logprobs": "old", "generation_logprobs": "rollout"}
    rows = {theirs: torch.nn.functional.pad(data[mine], (1, 0)) for theirs, mine in names.items()}
    rows |= {"token_mask": torch.nn.functional.pad(MASK, (1, 0)), "sample_mask": torch.ones(len(MASK))}
    one = torch.ones((), dtype=torch.float64)
    section = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.3, "reference_policy_kl_penalty": 0.0, "mismatch": block}
    loss, total = MismatchLoss(section), current.sum() * 0.0
    size = len(MASK) if loss.config.tis.batch_normalize else 1  # row by row, as its sequence packing has them
    for at in range(0, len(MASK), size):
        part = {name: values[at : at + size] for name, values in rows.items()}
        total = total + loss(current[at : at + size], part, one, one)[0]
    return total


# Host → (the sum of its loss, host words under which it is a plain sum over tokens).
ROWS: dict[str, tuple[Callable[[Plan, Data, Tensor], Tensor], str]] = {
    "slime": (_ray_total("slime"), "--calculate-per-token-loss"),
    "miles": (_ray_total("miles"), "--calculate-per-token-loss"),
    "megatron-lm": (_megatron_total, "--grpo-kl-beta 0"),
    "verl": (_verl_total, ""),
    "nemo-rl": (_nemo_total, "loss_fn.token_level_loss=true"),
}


def _plan(name: str, words: str, folder: Path) -> Plan:
    shutil.rmtree(folder / "tree", ignore_errors=True)
    script = script_of(name, folder / "tree")
    return prepare([*script, *ROWS[name][1].split(), *words.split()])[3]


# The doors: the settings that flags give there, and the sum of the loss -----------------------------------------------


def _trl_args(**args: Any) -> SimpleNamespace:
    own = {"loss_type": "dapo", "use_vllm": True, "top_p": 1.0, "top_k": 0, "min_p": None, "max_completion_length": 6}
    vllm = {"correction": True, "mode": "sequence_mask"}
    own |= {f"vllm_importance_sampling_{name}": value for name, value in vllm.items()}
    return SimpleNamespace(**{**own, **args})


class Generation:
    """What a trainer has when TRL's mixin is called: a batch with or without vLLM's ratio, and one process."""

    def __init__(self, ratio: bool) -> None:
        one = SimpleNamespace(is_main_process=True, reduce=lambda values, reduction: values, gather=lambda v: v)
        self.accelerator, self.args = one, _trl_args()
        self.model, self._metrics, self.ratio = SimpleNamespace(training=True), {"train": defaultdict(list)}, ratio

    def _generate_and_score_completions(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {"completion_mask": torch.ones_like(MASK), "tool_mask": MASK, "advantages": data["advantages"]}
        made |= {"sampling_per_token_logps": data["rollout"], "old_per_token_logps": data["old"]}
        return made | ({"importance_sampling_ratio": torch.full_like(data["old"], 7.0)} if self.ratio else {})


Corrected: Any = type("Corrected", (trl.CorrectionMixin, Generation), {})


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
        packed = mp.PackedSequences(
            loss_mask=mask, lengths=(6,), rollout_log_probs=data["rollout"][row], advantages=inputs.advantages
        )
        ours = mp.policy_loss(current[row], packed, prime_rl.settings(flags=words)).statistics.metrics()
        ours["rollout_corr/rollout_is_masked_fraction"] = 1.0 - ours["rollout_corr/accepted_token_fraction"]
        for name in ("kl", "k3_kl", "rollout_is_ratio_mean", "rollout_is_masked_fraction"):
            mean = float(made.metrics[f"rollout_corr/{name}"].detach().mean())
            assert mean == pytest.approx(ours[f"rollout_corr/{name}"], rel=1e-6, abs=1e-9), name
        total = total + made.loss
    return total


def _skyrl(temperature: float = 1.0, logprobs: int | None = 1, **algorithm: Any) -> Any:
    sampling = SimpleNamespace(temperature=temperature, logprobs=logprobs, top_p=1.0, top_k=-1, min_p=0.0)
    sampling.max_generate_length = 6
    own = {"policy_loss_type": "mismatch", "loss_reduction": "token_mean", "use_tis": False, "eps_clip_low": 0.2}
    own |= {"eps_clip_high": 0.2, "cispo": SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0)}
    own |= {"off_policy_correction": SimpleNamespace(), **algorithm}
    generator = SimpleNamespace(sampling_params=sampling, inference_engine=SimpleNamespace(engine_init_kwargs={}))
    return SimpleNamespace(trainer=SimpleNamespace(algorithm=SimpleNamespace(**own)), generator=generator)


def _skyrl_total(words: str, data: dict[str, Tensor], current: Tensor) -> Tensor:
    advantages = data["advantages"].unsqueeze(1).expand(MASK.shape) / MASK.sum()  # as `loss_reduction` scales them
    config = skyrl.settings(_skyrl(), words)
    rest: dict[str, Any] = {"loss_mask": MASK.float(), "rollout_logprobs": data["rollout"], "mismatch": config}
    loss, metrics = skyrl.policy_loss(current, data["old"], advantages, config=None, **rest)
    assert all(isinstance(value, float) for value in metrics.values())
    return loss * MASK.sum()


Door = tuple[Callable[[str], mp.MismatchConfig], Callable[[str, dict[str, Tensor], Tensor], Tensor]]
DOORS: dict[str, Door] = {
    "trl": (lambda words: trl.settings(words, _trl_args()), _trl_total),
    "prime-rl": (lambda words: prime_rl.settings(**({"flags": words} if words else {})), _prime_total),
    "skyrl": (lambda words: skyrl.settings(_skyrl(), words or {}), _skyrl_total),
}


def _made(name: str, words: str, folder: Path) -> tuple[mp.MismatchConfig, Callable[[Data, Tensor], Tensor]]:
    """(the configuration that our flags give there, the sum of the loss over a batch)."""
    if name in DOORS:
        settings, total = DOORS[name]
        return settings(words), partial(total, words)
    plan = _plan(name, words, folder)
    assert plan.config is not None and f"algorithm {plan.config.algorithm}: " in "\n".join(plan.lines)
    return plan.config, partial(ROWS[name][0], plan)


every_host = pytest.mark.parametrize("name", HOSTS)
SETTINGS = (
    "--use-rs --rs-level geometric --rs-upper-bound 1.2",
    "--use-rollout-log-probs --rs-criterion token:k2:0.05 --rs-veto-threshold 0.5",
    "--use-rollout-log-probs --rs-criterion token:tv:0.1@away",
    "--use-tis",
    "--use-tis --tis-level sequence --tis-mode clip --tis-upper-bound 1.2",
    "--use-tis --tis-level prefix --tis-mode mask --tis-upper-bound 1.5",
    "--use-tis --tis-batch-normalize --tis-level sequence",
    "--use-tis --rs-criterion token:k3:0.04 --rs-policy current",
    "--use-tis --mismatch-rollout-kl-coef 0.1 --mismatch-rollout-kl-type k3",
    "--use-tis --mismatch-objective cispo",
    "--mismatch-objective gspo --rs-criterion token:k2:0.05 --mismatch-denominator original",
    "--use-tis --mismatch-denominator original --rs-criterion sequence_max:k2:0.2",
    "--use-tis --mismatch-dry-run --tis-upper-bound 1.1",
    "--use-tis --use-rollout-log-probs --tis-mode mask --tis-upper-bound 1.2 --rs-criterion sequence_max:k2:0.3",
    "--use-tis --use-rollout-log-probs --tis-level none --rs-criterion token:k2:0.05",
    "--mismatch-preset token_icepop --tis-upper-bound 1.2",
    "--mismatch-preset dppo_tv",
    "--mismatch-config FILE",
)


@pytest.mark.parametrize("words", SETTINGS)
@every_host
def test_flags_arrive_and_the_loss_is_policy_loss(name: str, words: str, tmp_path: Path) -> None:
    """Settings as given, next to what the host decides; loss and gradient as `policy_loss` on the same tokens."""
    (tmp_path / "mismatch.yaml").write_text("use_tis: true\ntis: {mode: clip, upper_bound: 1.15}\n")
    words = words.replace("FILE", str(tmp_path / "mismatch.yaml"))
    asked, host = mp.MismatchConfig.from_words(words.split()), HOSTS[name]
    owned = "objective" in host.owns and asked.objective != "ppo"
    judges = name == "trl" and asked.algorithm == 1 and asked.rejects  # π_θ, which only its loss has
    if (lacking := host.lacking(asked)) or owned or judges:
        reasons = [re.escape(lack.why) for _, lack in lacking.values()]
        reasons += ["is TRL's to set", "judges π_θ, which only its loss"]
        with pytest.raises(ValueError, match="|".join(reasons)):
            _made(name, words, tmp_path)
        return
    config, total = _made(name, words, tmp_path)
    given = asked.model_dump(exclude_unset=True)
    for path in dotted_fields_set(given) - {"denominator"}:
        if not any(path.startswith(start) for start in host.owns):
            assert value_and_default(config, path)[0] == value_and_default(asked, path)[0], path
    assert (config.algorithm, config.tis.upper_bound) == (asked.algorithm, asked.tis.upper_bound)

    data = batch()
    mine, theirs = (data["current"].clone().requires_grad_() for _ in range(2))
    columns = {"rollout_log_probs": "rollout", "old_log_probs": "old", "advantages": "advantages"}
    rows: dict[str, Any] = {column: list(data[key]) for column, key in columns.items()}
    rows["advantages"] = list(data["advantages"][:, None].expand(MASK.shape))
    result = mp.policy_loss(mine.flatten(), mp.PackedSequences.from_lists(loss_masks=list(MASK), **rows), config)
    expected = result.loss_sum + sum(result.terms.values())
    if name in ROWS:
        data["advantages"] = data["advantages"][:, None].expand(MASK.shape)
    got = total(data, theirs)
    expected.backward()
    got.backward()
    assert mine.grad is not None and mine.grad.abs().sum() > 0
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-7, atol=1e-12)
    if config.rejects and not config.dry_run and config.rs.policy != "current":
        assert 0 < float(result.correction.keep.sum()) < float(MASK.sum())


OWNED = {
    "ppo.eps_clip_low": "--mismatch-eps-clip-low 0.123",
    "ppo.eps_clip_high": "--mismatch-eps-clip-high 0.456",
    "ppo.dual_clip": "--mismatch-dual-clip 3.5",
    "terms.entropy_coef": "--mismatch-entropy-coef 0.012",
    "terms.kl_coef": "--mismatch-kl-coef 0.034",
    "aggregation": "--mismatch-aggregation seq-mean-token-sum",
}
ASKED = {
    "groups": "--rs-criterion token:k2:0.5 --rs-group exclude",
    "versions": "--rs-max-staleness 1",
    "normalisation": "--tis-batch-normalize",
    "accepted": "--rs-criterion token:k2:0.5 --mismatch-denominator accepted",
    "log_probs": "--mismatch-log-prob-backend torch",
    "updates": "--mismatch-verify-weights error",
    "current_policy": "--rs-criterion token:k2:0.5 --rs-policy current",
    "conditions": "--rs-criterion token:k2:0.5@negative",
    "budgets": "--rs-criterion token:k2:0.5:share=0.1",
    "penalty": "--mismatch-rollout-kl-coef 0.1",
    "report": "--mismatch-report-dir REPORT",
    "gate": "--mismatch-gate-kl 0.001",
}


@every_host
def test_what_the_host_decides_is_refused_and_the_rest_arrives(name: str, tmp_path: Path) -> None:
    host, algorithm = HOSTS[name], "--use-rollout-log-probs" if name == "prime-rl" else "--use-tis"
    for path, words in OWNED.items():
        where = next((where for start, where in host.owns.items() if path.startswith(start)), None)
        if where is None and path == "terms.kl_coef":
            continue  # needs the reference's log-probs, which these batches lack
        if where is None:
            config, _ = _made(name, f"{algorithm} {words}", tmp_path)
            assert str(value_and_default(config, path)[0]) == words.split()[1], path
            continue
        with pytest.raises(ValueError, match="leave it out") as caught:
            _made(name, f"{algorithm} {words}", tmp_path)
        assert where in str(caught.value) and host.spell(f"<{path}>") in str(caught.value)


@pytest.mark.parametrize("key", ASKED)
@every_host
def test_a_method_is_had_or_refused_with_the_reason(name: str, key: str, tmp_path: Path) -> None:
    words = f"--use-tis {ASKED[key]}".replace("REPORT", str(tmp_path / "run"))
    words += " --use-rollout-log-probs" if name == "prime-rl" and key not in ("current_policy", "groups") else ""
    asked = mp.MismatchConfig.from_words(words.split())
    assert METHODS[key].asked(asked)
    if lacking := HOSTS[name].lacking(asked):
        with pytest.raises(ValueError, match="cannot be had in") as caught:
            _made(name, words, tmp_path)
        said = str(caught.value)
        assert any(lack.why in said and said.endswith(HOSTS[name].spell(lack.instead)) for _, lack in lacking.values())
        return
    config, _ = _made(name, words, tmp_path)
    for path in METHODS[key].paths:
        if path in flag_names(mp.MismatchConfig):
            assert value_and_default(config, path)[0] == value_and_default(asked, path)[0], path


@pytest.mark.parametrize("name", DOORS)
def test_misspelt_and_contradictory_flags_and_broken_numbers_are_refused_at_a_door(name: str) -> None:
    """As the launcher does, tests/launch/test_command_line.py."""
    for words, sentence in (("--use-tsi", "is "), ("--tis-level sequence", "changes no weight")):
        with pytest.raises(ValueError, match=f"{words} {sentence}"):
            DOORS[name][0](words)
    data = batch()
    data["rollout"][1, 2] = float("nan")
    words = "--use-rollout-log-probs" if name == "prime-rl" else "--use-tis"
    with pytest.raises(InvalidLogProbError, match="nan"):
        DOORS[name][1](words, data, data["current"])


@pytest.mark.parametrize("name", ROWS)
def test_without_our_flags_nothing_is_changed(name: str, tmp_path: Path) -> None:
    plan = _plan(name, "--lr=1e-6", tmp_path)
    assert (plan.added, plan.config, plan.argv[-1]) == ((), None, "--lr=1e-6")


# The doors, each by itself --------------------------------------------------------------------------------------------


TRL_NEUTRAL = "--use-rollout-log-probs --rollout-log-prob-policy neutral"
OFF_POLICY = SimpleNamespace(tis="token")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trl.settings("--use-tis", _trl_args(loss_type="vespo")), "loss_type vespo makes weights or sums of"),
        (lambda: trl.settings(TRL_NEUTRAL, _trl_args()), "neutral cannot be had in algorithm 1"),
        (lambda: skyrl.settings(_skyrl(policy_loss_type="regular"), "--use-tis"), "loss_type is regular"),
        (lambda: skyrl.settings(_skyrl(off_policy_correction=OFF_POLICY), "--use-tis"), "off_policy_correction is set"),
        (lambda: skyrl.settings(_skyrl(logprobs=None), "--use-tis"), "sampling_params.logprobs=1"),
        (lambda: prime_rl.settings(flags="--use-tis", preset="pg_is"), "setting 'flags' is unknown"),
    ],
)
def test_what_a_door_s_own_configuration_rules_out(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_the_doors_say_and_read_of_their_host() -> None:
    lines = trl.describe(DOORS["trl"][0]("--use-tis"), _trl_args(top_p=0.9))
    assert any(line.startswith("! sampling filter: top_p 0.9") for line in lines)
    assert "TRL's own vllm_importance_sampling_mode sequence_mask: replaced by ours" in lines
    clips = {"--use-tis": (0.1, 0.3), "--use-tis --mismatch-objective cispo": (1.0, 4.0)}
    for words, clip in clips.items():
        ppo = skyrl.settings(_skyrl(eps_clip_low=0.1, eps_clip_high=0.3), words).ppo
        assert (ppo.eps_clip_low, ppo.eps_clip_high) == clip
    config = DOORS["skyrl"][0]("--use-tis --mismatch-gate-kl 1")
    assert "! temperature 0.7: vLLM returns" in "\n".join(skyrl.describe(config, _skyrl(temperature=0.7)))
    lines = skyrl.describe(config, _skyrl())
    assert "the gate judges each micro-batch, in the worker that holds it" in lines and "! temp" not in "".join(lines)
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    text = (Path(__file__).parents[2] / "examples" / "prime_rl" / "rl.toml").read_text(encoding="utf-8")
    loss = tomllib.loads(text)["trainer"]["loss"]
    assert (loss["type"], loss["import_path"]) == ("custom", "mismatch_plugin.hooks.prime_rl.policy_loss")
    assert prime_rl.settings(**loss["kwargs"]).algorithm == 3


def test_skyrl_s_registry_gets_the_loss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    registered: dict[str, Any] = {}
    module = SimpleNamespace(PolicyLossRegistry=SimpleNamespace(register=registered.__setitem__))
    monkeypatch.setitem(sys.modules, "skyrl.backends.skyrl_train.utils.ppo_utils", module)
    config = skyrl.register(_skyrl(), "--use-tis")
    assert registered["mismatch"].keywords == {"mismatch": config}
    assert "mismatch_plugin on skyrl:\n  algorithm 2: " in capsys.readouterr().out


@pytest.mark.parametrize("preset", [record.name for record in PRESETS])
@pytest.mark.parametrize("name", DOORS)
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
            DOORS[name][0](given)
        return
    made = DOORS[name][0](given)
    own: dict[str, Any] = {"denominator": allowed.denominator}
    if any(note.startswith("ppo.eps_clip_low") for note in notes):  # an objective's, which the host has to be told
        own["ppo"] = allowed.ppo.model_dump(exclude_unset=True) | made.ppo.model_dump()
    assert made.replace(**own) == allowed.replace(**own)
