"""The start-up block on sampling filters: what they leave in the ratio, host by host; nothing where they are off."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks import megatron_rl, miles, slime
from mismatch_plugin.hooks.nemo_rl import config as nemo_rl
from mismatch_plugin.hooks.verl import config as verl
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.slime_data import arguments

METRIC = "rollout_corr/rollout_is_ratio_mean"


def of_slime(top_p: float = 1.0, top_k: int = -1) -> list[str]:
    args = arguments(rollout_top_p=top_p, rollout_top_k=top_k)
    return slime.describe(slime.settings(args), args)


def of_miles(top_p: float = 1.0, top_k: int = -1) -> list[str]:
    args = arguments("miles", rollout_top_p=top_p, rollout_top_k=top_k)
    return miles.describe(miles.settings(args), args)


def of_verl(top_p: float = 1.0, top_k: int = -1, **rollout: Any) -> list[str]:
    block = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "mismatch": {"metrics": "off"}}
    section = {"top_p": top_p, "top_k": top_k, **rollout}
    actor = {"policy_loss": {"rollout_correction": block}}
    tree = {"algorithm": {"rollout_correction": block}, "actor_rollout_ref": {"actor": actor, "rollout": section}}
    return verl.describe(verl.settings(tree), tree)


def of_nemo_rl(top_p: float = 1.0, top_k: int | None = None) -> list[str]:
    master = {"loss_fn": {"mismatch": {}}, "policy": {"generation": {"top_p": top_p, "top_k": top_k}}}
    return nemo_rl.describe(nemo_rl.settings(master), master)


def of_megatron_rl(top_p: float = 0.0, top_k: int = -1, **more: Any) -> list[str]:
    args = Namespace(rl_default_top_p=top_p, rl_default_top_k=top_k, **more)
    return megatron_rl.describe(megatron_rl.settings(args), args)


def said(lines: list[str]) -> str:
    return "".join(line for line in lines if line.removeprefix("! ").startswith("sampling filter: "))


HOSTS = (of_slime, of_miles, of_verl, of_nemo_rl, of_megatron_rl)


@pytest.mark.parametrize("host", HOSTS)
def test_without_filters_nothing_is_said(host: Any) -> None:
    assert said(host()) == ""


def test_hosts_whose_config_does_not_show_the_filters_say_nothing() -> None:
    block = {"loss_fn": {"mismatch": {}}}
    assert said(nemo_rl.describe(nemo_rl.settings(block), block)) == ""
    assert said(of_megatron_rl(top_p=1.0)) == "" and said(of_verl(name="vllm")) == ""


@pytest.mark.parametrize("host", [of_miles, of_verl, of_megatron_rl])
def test_top_p_has_a_bound_and_top_k_has_none(host: Any) -> None:
    assert "top_p 0.9 without a sampling mask" in said(host(top_p=0.9))
    assert "for equal engines in [0.9, 1]" in said(host(top_p=0.9)) and METRIC in said(host(top_p=0.9))
    assert "no bound is known" in said(host(top_k=20)) and "top_k 20" in said(host(top_k=20))
    assert "no bound is known" in said(host(top_p=0.9, top_k=20))


def test_whether_the_metric_shows_it_depends_on_the_engine_s_log_probs() -> None:
    hidden, shown = f"{METRIC} does not show it", f"{METRIC} shows it"
    assert hidden in said(of_miles(top_p=0.9)) and hidden in said(of_verl(top_p=0.9, name="sglang"))
    assert said(of_verl(top_p=0.9, name="vllm")).split(";")[1].startswith(f" {shown}. verl")
    assert hidden in said(of_verl(top_p=0.9, name="vllm", logprobs_mode="raw_logprobs"))
    assert f"{shown} if the engine renormalises" in said(of_verl(top_p=0.9, name="trtllm"))
    assert hidden in said(of_megatron_rl(top_p=0.9))
    processed = of_megatron_rl(top_p=0.9, inference_dynamic_batching_logprobs_mode="processed_logprobs")
    assert f"{shown}. Megatron-LM RL" in said(processed)


def test_slime_replays_under_top_p_and_not_under_top_k_alone() -> None:
    assert "the ids that SGLang (with slime's patch) kept" in said(of_slime(top_p=0.9))
    assert "the ids that SGLang (with slime's patch) kept" in said(of_slime(top_p=0.9, top_k=20))
    assert "no bound is known" in said(of_slime(top_k=20)) and "slime passes no mask on" in said(of_slime(top_k=20))


def test_nemo_rl_filters_by_its_own_probabilities() -> None:
    text = said(of_nemo_rl(top_p=0.9))
    assert "top_p 0.9, top_k None; NeMo-RL cuts the trainer's logits" in text and METRIC in text
    assert "top_k 20" in said(of_nemo_rl(top_k=20))


def script(folder: Path, imported: str) -> str:
    path = folder / "main.py"
    path.write_text(f"if __name__ == '__main__':\n    pass\n\n\ndef unused():\n    import {imported}\n")
    return str(path)


@pytest.mark.parametrize(
    ("imported", "line", "filter_"),
    [
        ("slime.utils", "--use-tis", "--rollout-top-k 20"),
        ("verl.trainer", "--use-tis", "actor_rollout_ref.rollout.top_k=20"),
        ("megatron.rl", "--use-tis", "--rl-default-top-k 20"),
    ],
)
def test_the_launcher_s_block_says_it_too(tmp_path: Path, imported: str, line: str, filter_: str) -> None:
    def block(words: str) -> str:
        return said(list(prepare([script(tmp_path, imported), *words.split()])[3].lines))

    assert block(line) == "" and "no bound is known" in block(f"{line} {filter_}")


@pytest.mark.parametrize("renormalised", [True, False])
def test_the_sentence_is_true(renormalised: bool) -> None:
    """Equal engines, every token of a top-p sampler in its exact share: the metric is the kept mass or 1, as said."""
    probabilities, top_p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64), 0.6
    kept = probabilities[:2]
    drawn = torch.tensor([0] * 4 + [1] * 3)  # 4/7 and 3/7: the kept ids' shares
    engine = (kept / kept.sum() if renormalised else kept).log()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[engine[drawn]], train_log_probs=[probabilities.log()[drawn]], loss_masks=[[1] * 7]
    )
    mean = mp.correct(packed, mp.MismatchConfig(use_tis=True)).statistics.metrics()[METRIC]
    text = filter_bias(top_p=top_p, renormalised=renormalised)
    assert f"in [{top_p:g}, 1]" in text and top_p <= float(kept.sum()) <= 1
    assert ("does not show it" in text) == (not renormalised)
    assert mean == pytest.approx(0.7 if renormalised else 1.0)
