"""What the launcher makes of a line at each host: one table of lines, each with what the start-up block says, what is
added to the line, and the configuration that the host reads back, or with the refusal.

Parts of what is said stand between bars; one behind ~ must not be in it. What every host shares is in test_contract.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.hooks.tree import put, read_overrides, text
from mismatch_plugin.hooks.verl import config as verl
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import launch, megatron_tree, ray_tree

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

SHORT = {
    "MODE": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "RC": "algorithm.rollout_correction",
    "ACTOR": "actor_rollout_ref.actor",
    "ROLLOUT": "actor_rollout_ref.rollout",
    "GENERATION": "policy.generation",
    "METRIC": "rollout_corr/rollout_is_ratio_mean",
    "TRUNCATED": "truncated_importance_sampling",
    "SWITCH": "--rl-inference-logprobs-is-correction",
}


def written(words: str) -> str:
    """With the long names in the place of the short ones."""
    for short, name in SHORT.items():
        words = words.replace(short, name)
    return words


def script_of(host: str, folder: Path) -> list[str]:
    """The beginning of a host's line, in a small tree of its own."""
    if host in ("slime", "miles"):
        return [str(ray_tree(folder, host))]
    if host == "megatron-lm":
        return [str(megatron_tree(folder))]
    folder.mkdir()
    script = folder / "main.py"
    script.write_text(f"def unused():\n    import {HOSTS[host].packages[0]}.trainer\n")
    if host != "nemo-rl":
        return [str(script)]
    own = {"token_level_loss": False, "ratio_clip_min": 0.2, "ratio_clip_max": 0.3}
    (folder / "base.yaml").write_text(f"loss_fn: {own}\npolicy: {{max_total_sequence_length: 8192}}\n")
    (folder / "grpo.yaml").write_text("defaults: base.yaml\n")
    (folder / "alias.yaml").write_text("loss_fn: &a {mismatch: *a}\n")
    return [str(script), "--config", str(folder / "grpo.yaml")]


def said(host: str, line: str, folder: Path) -> str:
    words = written(line).replace("FOLDER", str(folder / "tree"))
    try:
        plan = prepare([*script_of(host, folder / "tree"), *words.split()])[3]
    except ValueError as error:
        return f"refused: {error}"
    config = plan.config
    if host == "verl" and plan.added:
        config = verl.check_tree(composed(plan.argv))
        assert config is not None
        assert sum(token.startswith(SHORT["MODE"]) for token in plan.argv) <= 1  # ours stands in the place of verl's
    lines = [*plan.lines, f"added: {' '.join(plan.added)}"]
    if config is not None:
        tis, ppo = config.tis, config.ppo
        lines.append(f"= {config.algorithm} {tis.level} {tis.mode} {tis.lower:g} {tis.upper:g} {config.objective}")
        lines.append(f"clip {ppo.eps_clip_low:g} {ppo.eps_clip_high:g} {ppo.dual_clip}, {config.aggregation}")
    return "\n".join(lines)


def composed(argv: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra would make of verl's line, with the interpolation resolved."""
    actor: dict[str, Any] = {"clip_ratio": 0.2}
    tree: dict[str, Any] = {"algorithm": {"rollout_correction": {}}, "actor_rollout_ref": {"actor": actor}}
    for name, value in read_overrides(argv).items():
        put(tree, name, value)
    policy_loss = actor.setdefault("policy_loss", {})
    if policy_loss.get("rollout_correction") == "${algorithm.rollout_correction}":
        policy_loss["rollout_correction"] = tree["algorithm"]["rollout_correction"]
    return tree


REINFORCE = "RC.bypass_mode=true RC.loss_type=reinforce"
LOSS = "added: MODE=mismatch +ACTOR.policy_loss.rollout_correction=${RC}"
GROUPS = "--use-tis --rs-criterion sequence_mean:k3:0.1 --rs-group drop --rs-min-group 2"
CLIPS = "ACTOR.clip_ratio_low=4 ACTOR.clip_ratio_high=0.3"
VERL = {
    # Our flags become verl's switches and our block; switches that are on the line already stay.
    "--rs-criterion sequence_max:k2:0.5 trainer.nnodes=1": (
        "= 0 | RC.bypass_mode=false RC.loss_type=ppo_clip | ROLLOUT.calculate_log_probs=true | ~sampling filter"
    ),
    "RC.rollout_is=null ACTOR.clip_ratio_low=null --use-tis": "= 2 token truncate 0.5 2 ppo | clip 0.2 0.2",
    f"{REINFORCE} --use-rollout-log-probs --use-tis": "= 3 token | ~RC.bypass_mode | ~RC.loss_type",
    "RC.bypass_mode=true --use-tis": (
        "RC.bypass_mode=true contradicts algorithm 2 of the plugin's flags, which makes it"
    ),
    "RC.mismatch.use_tis=true --use-tis": "mismatch.use_tis is on the line next to the plugin's flags",
    # verl's YAML files, which Hydra reads later, may hold settings of ours.
    "RC.rollout_is=token MODE=gspo": "Settings in verl's YAML files, if any, are checked and printed | ~added: ACTOR",
    # verl's keys and ours on its line make one configuration, and get the loss that they need.
    "+RC.mismatch.use_tis=true +RC.mismatch.tis.level=geometric": f"= 2 geometric truncate | {LOSS}",
    "RC={bypass_mode:true,mismatch:{metrics:full}}": (
        f"= 1 token | {LOSS} | second forward pass: no | metrics are verl's plain mean | ~the gate judges"
    ),
    f"{REINFORCE} +RC.mismatch.tis.level=sequence": f"= 3 sequence | {LOSS} | loss_mode mismatch is algorithm 3 here",
    "RC.rollout_rs=token_k1 RC.rollout_rs_threshold='0.5_2' +RC.mismatch.rs.criteria=[sequence_max:k2:0.5]": (
        "rejection: token_ratio in [0.5, 2], sequence_max_k2 in [0, 0.5]"
    ),
    f"{REINFORCE} MODE=mismatch": "= 3 none truncate | ~eps_clip | made in the workers' loss, micro-",
    "RC.rollout_is=token RC.rollout_is_threshold='0.5_5.0' MODE=mismatch": "= 2 token mask 0.5 5",
    "RC.rollout_is=token MODE=mismatch": "algorithm 2: decoupled PPO | made by verl's own function | ~invalid rollout",
    "RC.rollout_is=token +RC.mismatch.gate_kl=0.1": "the gate judges the rollout batch | ~verl's plain mean",
    "RC.rollout_is=token RC.rollout_rs=token_k2 RC.rollout_rs_threshold=1 +RC.mismatch.denominator=original": (
        "rejected tokens still count | weights and rejection are made on the driver, over the rollout batch"
    ),
    "+RC.mismatch.use_rollout_log_probs=true": "contradicts verl's RC.bypass_mode",
    "RC.bypass_mode=true +RC.mismatch.use_tis=true": "(in bypass mode loss_type), which makes it False",
    "+RC.mismatch.preset=pg_is": "RC.bypass_mode=true and RC.loss_type=reinforce",
    f"{REINFORCE} +RC.mismatch.preset=pg_is": "= 3 sequence truncate",
    "RC.bypass_mode=true +RC.mismatch.preset=ppo_is_bypass": "= 1 token",
    "RC.rollout_is=token +RC.mismatch.preset=token_is": "is next to mismatch.preset token_is",
    f"{REINFORCE} +RC.mismatch={{denominator:accepted,rs:{{veto_threshold:1e-4}}}}": "Choose auto or original",
    # What batch normalisation is over.
    "RC={rollout_is:token,rollout_is_batch_normalize:true,mismatch:{metrics:basic}}": "over: rollout_batch",
    "--use-tis --tis-batch-normalize --tis-batch-normalize-scope step": "rollout_batch or auto",
    # verl's v1 trainers count tokens of a mask that the driver's rejection does not reach.
    "--use-tis --use-rs": "divided as in verl, token-mean: rejected tokens still count\n",
    "--use-tis --use-rs trainer={use_v1:false}": "rejected tokens do not count",
    "--use-tis --use-rs +rollout.nnodes=1": "rejected tokens do not count",
    "--use-tis --use-rs --mismatch-denominator accepted": "accepted cannot be had in verl: its trainers count",
    # verl's loss_mode is the objective of our loss, in whose place that stands.
    f"--use-tis MODE=gspo {CLIPS}": (
        "= 2 token truncate 0.5 2 gspo | clip 1 0.3 None | objective: gspo, ratio in [0, 1.3]"
    ),
    "--rs-criterion token:k2:0.5 MODE=gpg": "= 0 token truncate 0.5 2 reinforce",
    "--use-tis --use-rollout-log-probs MODE=gpg": "= 3 token truncate 0.5 2 ppo",
    "+RC.mismatch.use_tis=true MODE=gspo": (
        "loss in the workers: verl's own gspo, with the driver's weights and mask; for the plugin's add "
        "MODE=mismatch and +ACTOR.policy_loss.rollout_correction='${RC}' | objective: gspo, ratio in [0.8, 1.2]"
    ),
    "RC.bypass_mode=true +RC.mismatch.metrics=full MODE=gspo": "needs our loss in the workers: add MODE=mismatch and",
    "--use-tis --use-rollout-log-probs MODE=gspo": "gspo contradicts algorithm 3",
    "--use-tis --mismatch-objective cispo MODE=gspo": "gspo contradicts --mismatch-objective cispo",
    "--use-tis MODE=clip_cov": "clip_cov is no setting here; next to it comes objective ppo",
    "--use-rollout-log-probs --rs-criterion token:k2:0.5 --mismatch-rollout-kl-coef 0.1": (
        "rollout_kl_on all reaches no rejected token in verl | : choose accepted, or denominator original"
    ),
    # Groups want advantages within a prompt; the estimator may be in a YAML file.
    GROUPS: "min_group",
    f"algorithm.adv_estimator=gae {GROUPS}": "adv_estimator gae compares other ones: choose grpo",
    # The longest response, and the sampler's filters, are the host's own.
    "data.max_response_length=8192 --use-tis --tis-level sequence": "! --tis-level sequence over 8192 tokens: ",
    "--use-tis ROLLOUT.name=vllm ROLLOUT.top_p=0.9": "; METRIC shows it. verl",
    "--use-tis ROLLOUT.name=vllm ROLLOUT.top_p=0.9 ROLLOUT.logprobs_mode=raw_logprobs": "METRIC does not show it",
    "--use-tis ROLLOUT.name=trtllm ROLLOUT.top_p=0.9": "METRIC shows it if the engine renormalises | [0.9, 1]",
}
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
BOUNDED = f"{CORRECTED} loss_fn.TRUNCATED_ratio=2.0 loss_fn.TRUNCATED_type"
GSPO = "loss_fn.sequence_level_importance_ratios=true"
NEMO = {
    "grpo.num_prompts_per_step=8 --use-tis --tis-level sequence --tis-upper-bound 3": (
        "= 2 sequence truncate 0.333333 3 ppo | clip 0.2 0.3 | seq-mean-token-mean | by the step's sequences"
    ),
    "--use-tis loss_fn.token_level_loss=true": (
        "by the step's tokens; rejected ones still count | means only, exact | ~sampling filter | ~the gate judges"
    ),
    "--use-tis --mismatch-gate-kl 0.1": "the gate judges each micro-batch",
    # Without a type NeMo-RL bounds nothing, whatever its ratio says: our bound holds.
    f"{CORRECTED} loss_fn.TRUNCATED_ratio=null --use-tis": "= 2 token truncate 0.5 2",
    f"{BOUNDED}=icepop loss_fn.TRUNCATED_ratio_min=0.5 --use-tis": "= 2 token mask 0.5 2",
    f"{BOUNDED}=seq-mask-tis loss_fn.TRUNCATED_ratio_min=0.9 --use-tis": "sequence_mean_ratio | [0.9, 2]",
    f"{BOUNDED}=tis --use-tis --tis-upper-bound 3": "3.0 contradicts NeMo-RL's loss_fn.TRUNCATED_…, which makes",
    f"{CORRECTED} --use-rollout-log-probs --use-tis": (
        "= 3 | force_on_policy_ratio=true skips it | correction has no effect"
    ),
    # Its switches are objectives.
    "loss_fn.use_cispo=true loss_fn.ratio_clip_min=2.0 --use-tis": "0.5 2 cispo | clip 1 0.3",
    f"{GSPO} {CORRECTED} --use-tis": "= 2 sequence truncate 0.5 2 gspo | ratio in [0.8, 1.3]",  # as NeMo-RL weighs it
    f"{GSPO} --use-tis --use-rollout-log-probs": (
        "loss_fn.sequence_level_importance_ratios clips π_θ/π_old, and algorithm 3"
    ),
    "loss_fn.disable_ppo_ratio=true --rs-criterion token:k2:0.5": "= 0 token truncate 0.5 2 reinforce",
    "loss_fn.disable_ppo_ratio=true loss_fn.force_on_policy_ratio=true --rs-criterion token:k2:0.5": (
        "0.5 2 ppo | disable_ppo_ratio: no effect next to force_on_policy_ratio"  # whose ratio is 1
    ),
    "--use-tis loss_fn.positive_example_nll_weight=0.1": "makes another loss",
    "--use-tis +loss_fn.mismatch.use_tis=true": "is set next to the plugin's flags",
    "--config FOLDER/alias.yaml --use-tis": "alias.yaml cannot be read | it has an alias (*)",
    "--use-tis --tis-level sequence": "! --tis-level sequence over 8192 tokens: ",
    "policy.max_total_sequence_length=64 --use-tis --tis-level sequence": "~! --tis-level",
    "--use-tis GENERATION.top_p=0.9": "top_p 0.9, top_k None; NeMo-RL cuts the trainer's logits | METRIC",
}
MEGATRON = {
    "--use-tis": "= 2 token | added: SWITCH",
    "SWITCH --use-rollout-log-probs": "SWITCH weighs the loss (algorithm 2), but | choose algorithm 1: add --use-t",
    "--rl-importance-sampling-truncation-coef 2 --rs-criterion token:k2:0.5": "weighs the loss (algorithm 2), but",
    "--use-tis --no-rl-inference-logprobs-is-correction": "keeps the inference log-probs from the loss",
    "SWITCH --use-tis --grpo-clamp-eps-upper 0.3": "= 2 token truncate 0.5 2 | clip 0.01 0.3 | ~added: SWITCH",
    "--use-tis --tis-upper-bound 3 --rl-importance-sampling-truncation-coef 2": (
        "--tis-upper-bound 3.0 contradicts Megatron-LM's --rl-importance-sampling-tr"
    ),
    "--mismatch-kl-coef 0.001 --mismatch-kl-type k1": "kl-type k1 cannot be had in Megatron-LM: leave it out",
    "--mismatch-objective gspo --use-tis --grpo-clamp-eps-lower 3 --grpo-clamp-eps-upper 4e-4 --bf16": (
        "objective: gspo, ratio in [0, 1.0004] | half precision | clip 1 0.0004"  # in which a response's mean is judged
    ),
    "--use-tis --tis-level sequence --bf16 --rl-use-sequence-packing": (
        "sequence level | as in Megatron: by each micro-batch | half precision | 0.0"
    ),
    "--use-tis --tis-level sequence": "! --tis-level sequence over 2560 tokens",
    "--mismatch-preset disabled": "algorithm 0: PPO | = 0 token",
    "--use-tis --rl-default-top-p 0.9": "top_p 0.9 without a sampling mask | in [0.9, 1] | METRIC does not show it",
    "--use-tis --rl-default-top-p 0.9 --inference-dynamic-batching-logprobs-mode processed_logprobs": (
        "METRIC shows it. Megatron-LM RL"
    ),
}
REPLAYED = "the ids that SGLang (with slime's patch) kept"
GROUP = "--custom-advantage-function-path mismatch_plugin.hooks.slime.group_advantages"
SLIME = {
    "--use-tis": "= 2 token truncate 0.5 2 | ~sampling filter | ~--custom-advantage | ~--get-mismatch-metrics",
    "--use-tis --rs-criterion sequence_mean:k3:0.1 --rs-group exclude": f"{GROUP} | --get-mismatch-metrics",
    "--use-tis --rs-criterion token:k3:1 --rs-group exclude --disable-rewards-normalization": "refused: | makes others",
    "--use-tis --rollout-top-p 0.9 --rollout-top-k 20": REPLAYED,
    "--use-tis --rollout-top-k 20": "no bound is known | slime passes no mask on",
}
MILES = {
    "--use-tis": "= 2 token truncate 0.5 2 | ~sampling filter",
    "--use-tis --rs-group drop": "refused: --rs-group drop cannot be had in miles: it computes advantages itself",
    "--use-tis --rollout-top-p 0.9": "top_p 0.9 without a sampling mask | in [0.9, 1] | METRIC does not show it",
}
TABLES = {"verl": VERL, "nemo-rl": NEMO, "megatron-lm": MEGATRON, "slime": SLIME, "miles": MILES}
LINES = [(host, line) for host, table in TABLES.items() for line in table]


@pytest.mark.parametrize(("host", "line"), LINES)
def test_what_is_said_of_a_line(host: str, line: str, tmp_path: Path) -> None:
    found, parts = said(host, line, tmp_path), [written(part) for part in TABLES[host][line].split(" | ")]
    missing = [part for part in parts if not part.startswith("~") and part not in found]
    surplus = [part for part in parts if part.startswith("~") and part[1:] in found]
    assert missing == surplus == [], found


def test_verl_s_entry_point_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(name="mismatch_plugin")
    monkeypatch.setattr(verl, "entry_points", lambda group: [here] if group == "verl.plugins" else [])
    verl.validate_registration()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    with pytest.raises(ValueError, match="VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading"):
        verl.validate_registration()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other,mismatch_plugin")
    verl.validate_registration()
    monkeypatch.setattr(verl, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="pip install it"):
        verl.validate_registration()


def test_nemo_rl_s_setup_gets_our_loss_wherever_the_script_has_imported_it(tmp_path: Path) -> None:
    """A stand-in for nemo_rl: its setup returns a loss, and the script prints which."""
    algorithms = tmp_path / "tree" / "nemo_rl" / "algorithms"
    algorithms.mkdir(parents=True)
    for folder in (algorithms.parent, algorithms):
        (folder / "__init__.py").write_text("")
    loss = "class Loss:\n    input_type = loss_type = None\n\n\n"
    (algorithms / "grpo.py").write_text(f"{loss}def setup(config):\n    return ('policy', Loss())\n")
    script, config = tmp_path / "tree" / "run.py", tmp_path / "tree" / "grpo.yaml"
    config.write_text("loss_fn: {}\n")
    script.write_text(
        "import sys\nfrom nemo_rl.algorithms.grpo import setup\nprint(sys.argv[3:])\n"
        "print('GIVEN [\"%s\"]' % type(setup({'loss_fn': {'mismatch': {'use_tis': True}}})[1]).__name__)\n"
    )
    done = launch(script, f"--config {config} --use-tis")
    assert done.given == ["MismatchLoss"], done.errors
    assert "+loss_fn.mismatch={use_tis: true}" in done.printed
    script.write_text("from nemo_rl.algorithms.sft import setup\n")
    assert "trains by sft, which has no policy loss" in launch(script, f"--config {config} --use-tis").errors


def test_values_are_read_and_written_as_hydra_does() -> None:
    for token in ("+a.b={c:true,d:{e:x}}", "++a.b={c: true, d: {e: x}}"):
        assert read_overrides([token, "--config-name=x", "positional"]) == {"a.b": {"c": True, "d": {"e": "x"}}}
    value = {"a": True, "b": [1e-05, math.inf], "c": {"d": None, "e": "two words", "f": "it's", "g": "geometric"}}
    made = text(value)
    assert made == "{a: true,b: [1e-05,inf],c: {d: null,e: 'two words',f: 'it\\'s',g: geometric}}"
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser", reason="hydra is not installed here")
    assert parser.OverridesParser.create().parse_override(f"+x={made}").value() == value
