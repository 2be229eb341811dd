"""Megatron-LM RL's train_rl.py: its command line, what it logs, and what its `forward_step` had in its hands."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.patching import apply, patches_of
from tests.trainers import whole
from tests.trainers.reference import config_of, loss_and_gradient
from tests.trainers.whole import CPU_SHIM, ENVIRONMENT, ROOT, RUNS, Host, Sources, made_once, needed

HERE = Path(__file__).parent
MODEL = """
    --use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 16
"""
CPU = """
    --transformer-impl local --spec megatron_cpu_spec layer_spec --distributed-backend gloo --inference-rng-tracker
    --use-cpu-initialization --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
# Two optimizer steps a collection of 16 rollouts, two collections: at each second step π_θ is not π_old.
TRAINING = """
    --perform-rl-step --seq-length 32 --inference-max-seq-length 32 --micro-batch-size 1 --global-batch-size 8
    --grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 1 --grpo-clamp-eps-lower 0.2
    --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.01 --train-iters 4 --lr 3e-3 --lr-decay-style constant
    --weight-decay 0 --clip-grad 1.0 --optimizer adam --calculate-per-token-loss --eval-iters 0 --eval-interval 1000
    --log-interval 1 --tensorboard-log-interval 1 --seed 3 --ckpt-format torch_dist --no-load-optim --no-load-rng
"""
# What that says of the KL and, but for REINFORCE, of the clip, over Megatron's own token count.
KL = ("--mismatch-kl-coef", "0.01", "--mismatch-kl-type", "k3", "--mismatch-denominator", "original")
CLIP = ("--mismatch-eps-clip-low", "0.2", "--mismatch-eps-clip-high", "0.28")
COLUMNS = {
    "current": "current_logprobs",
    "old": "old_logprobs",
    "ref": "ref_logprobs",
    "rollout": "inference_logprobs",
    "gradient": "gradient",
}
Record = dict[str, Any]


@dataclass(frozen=True)
class Trained(whole.Trained):
    """What a run left, with what `forward_step` had."""

    @cached_property
    def seen(self) -> dict[int, list[Record]]:
        """Step (from 1) → what `forward_step` had, micro-batches of all ranks of the last stage."""
        found: dict[int, list[Record]] = {}
        for file in sorted(self.folder.glob("seen_*")):
            record = torch.load(file, weights_only=True)
            found.setdefault(record["step"] + 1, []).append({**record, "rank": int(file.name.split("_")[1])})
        return found

    @property
    def losses(self) -> dict[int, float]:
        """What the trainer logged of its loss, by step from 1."""
        return self.tracked["lm loss"]


@dataclass(frozen=True)
class Job(whole.Job):
    """One run of train_rl.py.

    patched: in the checkout with our patch. ranks: of torchrun. rollouts: the file they come from, below the inputs
    where relative; else the engine samples them. first: it begins without a checkpoint, and saves one.
    """

    patched: bool = True
    rollouts: Path | None = Path("rollouts.jsonl")
    first: bool = False
    RESULT = Trained

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        rollouts = {} if self.rollouts is None else {"MEGATRON_ROLLOUTS": str(sources.inputs / self.rollouts)}
        return {
            **{name: os.environ[name] for name in keep if name in os.environ},
            **ENVIRONMENT,
            "PYTHONPATH": ":".join(map(str, (HERE / "shim", HERE.parent / "shim", ROOT, CPU_SHIM))),
            "TRAINER_SHIM": "megatron_rl",
            "MEGATRON_SEEN": str(folder),
            **rollouts,
        }

    def cwd(self, sources: Sources, folder: Path) -> Path:
        return sources.inputs / "patched" if self.patched else sources.checkout

    def command(self, sources: Sources, folder: Path) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        checkpoint = str(sources.inputs / "checkpoint")
        save = ("--lr", "0", "--save", checkpoint, "--save-interval", "100")
        return [
            *("-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--master-port", str(port)),
            *(*self.launcher, "train_rl.py", *MODEL.split(), *CPU.split(), *TRAINING.split()),
            *("--tokenizer-model", str(sources.inputs / "tokenizer")),
            *("--langrl-env-config", str(sources.inputs / "env.yaml")),
            *(save if self.first else ("--pretrained-checkpoint", checkpoint)),
            *("--tensorboard-dir", str(folder / "tensorboard")),
            *self.placed_flags(folder),
        ]


def make_inputs(host: Host) -> None:
    """A tokenizer, a copy of the checkout with our patch, and what one run makes: a checkpoint, and rollouts.

    These are sampled with a bias on every token's logit.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inputs = host.sources.inputs
    # <pad> is not the first: Megatron-LM RL takes pad id 0 for none
    words = [*map(str, range(10)), *(chr(ord("a") + i) for i in range(20)), "<pad>", "<eos>"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.save_pretrained(inputs / "tokenizer")
    (inputs / "env.yaml").write_text("- agent_type: TinyAgent\n  agent_args: {}\n  weight: 1.0\n")
    subprocess.run(["git", "clone", "-q", "--shared", str(host.sources.checkout), str(inputs / "patched")], check=True)
    apply(patches_of("megatron-lm"), inputs / "patched")
    env = {"MEGATRON_ENGINE_BIAS": "0.5", "MEGATRON_ROLLOUTS_TO": str(inputs / "rollouts.jsonl")}
    run = host.train(Job(launch=False, patched=False, rollouts=None, first=True, env=env), "first")
    assert run.finished.status == 0, run.text[-3000:]


def _sequences(records: Sequence[Record]) -> dict[str, list[Any]]:
    """The trained tokens of each sequence, of rows and of bins alike; those that train nothing are left out."""
    found: dict[str, list[Any]] = {key: [] for key in (*COLUMNS, "advantages")}
    for record in records:
        width, advantages = record["current_logprobs"].shape[1], record["advantages"].tolist()
        spans = [(row, 0, width, value) for row, value in enumerate(advantages)]
        if record["seq_starts"] is not None:  # one more than there are sequences: where the padding starts
            ends = zip(record["seq_starts"], record["seq_lengths"], advantages, strict=False)
            spans = [(0, int(start), int(start) + int(n) - 1, value) for start, n, value in ends]
        for row, start, end, advantage in spans:
            trained = record["loss_mask"][row, start:end] != 0
            if trained.any():
                for key, name in COLUMNS.items():
                    values = record[name]
                    found[key].append(values[row, start:end][trained].float() if values is not None else None)
                found["advantages"].append(torch.full((int(trained.sum()),), advantage))
    return found


def step_of(records: Sequence[Record], flags: Sequence[str]) -> tuple[float, Tensor, Tensor]:
    """(the step's loss by `mp.policy_loss`, its ∂ loss/∂ log π_θ of the trained tokens, that of the trainer).

    records: of one context- or tensor-parallel rank, as each has all tokens.
    """
    clip = () if {"--use-tis", "--use-rollout-log-probs"} <= set(flags) else CLIP
    data = _sequences(records)
    theirs = torch.cat(data.pop("gradient"))
    rollout = data.pop("rollout")
    config, current = config_of([*KL, *clip, *flags]), data.pop("current")
    loss, mine = loss_and_gradient(config, current, rollout=None if rollout[0] is None else rollout, **data)
    return loss, mine, theirs / len(theirs)  # Megatron-LM divides by the step's tokens


def make_host() -> Host:
    """MEGATRON_SRC: a checkout."""
    megatron, python = needed("MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    found = Host("megatron_rl", Sources(python, megatron, RUNS / "megatron_rl/inputs"))
    made_once(found.sources.inputs, [megatron], lambda: make_inputs(found))
    return found
