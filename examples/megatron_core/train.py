"""GRPO through megatron-core on rollouts of an SGLang server, without and with our correction. Copy what you need.

    make compare-sglang                                                        # on CPU, with token weights
    python -m examples.megatron_core.train --use-rollout-log-probs             # flags of yours; starts a server on CPU
    torchrun --nproc-per-node 2 -m examples.megatron_core.train --tp 2 --use-tis --url http://HOST:PORT

Six digits are to be written backwards; the reward is the share of right positions. The trainer computes in float32, the
server in bfloat16, and it gets new weights only after every `--update-every` rollout batches, as in asynchronous RL: so
the server's log-probs (π_rollout) are not the trainer's (π_old), and the loss corrects for that.

"Ours" marks what the plugin adds to such a loop. With a GPU the same file runs as it is: `cpu_shim` does nothing there.
Larger models take megatron's layers of Transformer Engine, `get_gpt_layer_with_transformer_engine_spec()`, and `bf16`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import os
import random
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F

import mismatch_plugin as mp
from examples.megatron_core import cpu_shim
from examples.sglang_server import start_cpu_server
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.hooks.megatron_core import MegatronBatch, MegatronLoss, make_batch
from mismatch_plugin.log_probs import vocab_parallel_log_probs
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.sglang.client import SGLangClient

cpu_shim.install()  # before megatron-core asks for a GPU

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

LAYERS, HIDDEN, HEADS, FFN = 2, 64, 4, 192
BOS, SEP, EOS, PAD, VOCAB = 10, 11, 12, 13, 14  # 0 to 9 are the digits
PROMPTS, SAMPLES, MINI_BATCHES = 32, 8, 4  # a rollout batch: responses to each prompt, optimizer steps
SERVER_ARGUMENTS = ("--skip-tokenizer-init",)  # token ids in and out

# ---------------------------------------------------------------------------------------------------------- the task


def questions(count: int, seed: object) -> list[list[int]]:
    """Prompts [BOS, six digits, SEP]."""
    draw = random.Random(f"questions {seed}")
    return [[BOS, *draw.choices(range(10), k=6), SEP] for _ in range(count)]


def answer(prompt: Sequence[int]) -> list[int]:
    """The digits backwards, and EOS."""
    return [*prompt[-2:0:-1], EOS]


def reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Right positions / the longer of answer and response."""
    right = answer(prompt)
    return sum(a == b for a, b in zip(right, response, strict=False)) / max(len(right), len(response))


# ------------------------------------------------------------------------------------------------------- the trainer


def initialize(tp: int = 1) -> None:
    """torch.distributed and megatron's process groups: what is not tensor parallel is data parallel."""
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}  # without torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **alone)
    parallel_state.initialize_model_parallel(tp)
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)


class Trainer:
    """This rank's part of a small Llama, its optimizer, and our loss."""

    def __init__(self, config: mp.MismatchConfig, lr: float = 5e-4, state: Mapping[str, Any] | None = None) -> None:
        self.model_config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=FFN,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=0.05,
            embedding_init_method_std=0.5,  # smaller ones drown in what the layers add
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            calculate_per_token_loss=True,  # ours: lets the hook divide by the step's exact token count
            use_cpu_initialization=not torch.cuda.is_available(),
            gradient_accumulation_fusion=False,
        )
        gpt = GPTModel(
            self.model_config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=16,
            position_embedding_type="rope",
        )
        self.device: Any = torch.cuda.current_device()  # on CPU the shim's answer
        gpt.to(device=self.device)
        if state is not None:
            gpt.load_state_dict(state)
        self.model: list[Any] = [DistributedDataParallel(self.model_config, DistributedDataParallelConfig(), gpt)]
        self.model[0].broadcast_params()
        settings = OptimizerConfig(lr=lr, clip_grad=1.0, weight_decay=0.0, adam_beta2=0.95)
        self.optimizer: Any = get_megatron_optimizer(settings, self.model, use_gloo_process_groups=False)
        self.groups = ParallelGroups.from_megatron()  # ours
        self.hook = MegatronLoss(config, self.model_config, self.groups, vocab_size=VOCAB)  # ours

    def batch(self, samples: Sequence[Sample]) -> MegatronBatch:
        """Ours: tokens for the model, log-probs and advantages for the loss, of what is this data-parallel rank's."""
        mine = samples[parallel_state.get_data_parallel_rank() :: self.groups.dp_size]
        return make_batch(mine, self.groups, layout="none", form="bshd", padding_id=PAD, device=self.device)

    def log_probs(self, batch: MegatronBatch) -> Tensor:
        """log π of the batch's response tokens, one response after the other: a forward pass."""

        def forward_step(data: Iterator[MegatronBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(data)
            return model(batch.tokens, batch.position_ids, None), partial(chosen, batch)

        def chosen(batch: MegatronBatch, logits: Tensor, non_loss_data: bool) -> Tensor:
            rows = {"tp_group": self.groups.tp, "vocab_size": VOCAB, "rows": batch.rows}
            return vocab_parallel_log_probs(logits.flatten(0, -2), batch.targets, **rows).log_probs

        with torch.no_grad():
            return self._schedule(forward_step, [batch], forward_only=True, collect_non_loss_data=True)[0]

    def step(self, batches: Sequence[MegatronBatch]) -> dict[str, float]:
        """One optimizer step on micro-batches: the plugin's metrics, and the gradient norm before clipping."""
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        self.hook.start(batches)  # ours
        self._schedule(self.hook.forward_step, batches)  # ours: the forward step, and with it the loss
        _, norm, _ = self.optimizer.step()
        return {**self.hook.metrics(), "grad_norm": float(norm)}  # ours

    def _schedule(self, forward_step: Any, batches: Sequence[MegatronBatch], **options: Any) -> list[Any]:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=batches[0].tokens.shape[0],
            **{"forward_only": False, **options},
        )

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The whole weights under Llama's names, as a server takes them. Collective over TP."""
        state: dict[str, Tensor] = {}
        for name, weight in self.model[0].module.named_parameters():
            parts = [weight.detach()]
            if getattr(weight, "tensor_model_parallel", False):
                parts = [torch.empty_like(weight) for _ in range(self.model_config.tensor_model_parallel_size)]
                dist.all_gather(parts, weight.detach().contiguous(), group=self.groups.tp)
            if "linear_fc1" in name:  # each part is one of the gate above one of the up projection
                gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
                state[_llama_name(name, "gate")], state[_llama_name(name, "up")] = torch.cat(gates), torch.cat(ups)
            elif "linear_qkv" in name:  # q, k and v of a head, then those of the next
                heads = torch.cat(parts).view(HEADS, 3, -1, HIDDEN)
                state |= {_llama_name(name, part): heads[:, i].reshape(-1, HIDDEN) for i, part in enumerate("qkv")}
            else:
                state[_llama_name(name)] = torch.cat(parts, dim=max(0, getattr(weight, "partition_dim", 0)))
        return {name: weight.cpu() for name, weight in state.items()}


_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.layers": "model.layers",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_qkv": "self_attn.{}_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_fc1": "{}_proj",
    "linear_fc2": "down_proj",
}


def _llama_name(name: str, part: str = "") -> str:
    return re.sub("|".join(_NAMES), lambda found: _NAMES[found[0]], name).format(part)


def write_checkpoint(folder: str | Path, context: int = 64) -> None:
    """A Llama of the trainer's shape with random weights, for a server to start with."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        rms_norm_eps=1e-5,  # megatron's default
        max_position_embeddings=context,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# -------------------------------------------------------------------------------------------------- the rollout engine


class Server:
    """Samples from the SGLang server at `url`. Rank 0 talks to it, and hands what it says to the other ranks."""

    def __init__(self, url: str | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = SGLangClient(url, vocab_size=VOCAB) if url and dist.get_rank() == 0 else None  # ours

    def update(self, weights: Mapping[str, Tensor], version: str) -> None:
        """New weights; an error if others serve then, where the server has our plugin."""
        if self.client is not None:
            self.loop.run_until_complete(self.client.update_weights_from_tensors(weights, version))

    def sample(self, prompts: list[list[int]], samples: int) -> list[Sample]:
        """`samples` responses to each prompt, with the log-probs of their tokens as the server returned them."""
        box: list[Any] = [None]
        if self.client is not None:
            sampling = SamplingParameters(max_new_tokens=7, stop_token_ids=(EOS,))
            box[0] = self.loop.run_until_complete(self.client.generate(prompts, sampling, samples_per_prompt=samples))
        dist.broadcast_object_list(box)
        return box[0]


# ------------------------------------------------------------------------------------------------------------- the loop


def warm_up(steps: int = 70, seed: int = 0) -> dict[str, Any]:
    """This rank's weights after supervised steps on right answers, so that RL has something to begin with.

    With advantage 1 and π_θ = π_old the gradient of PPO's loss is that of −log π.
    """
    torch.manual_seed(seed)
    trainer = Trainer(mp.MismatchConfig(metrics="off"), lr=2e-3)
    for step in range(steps):
        prompts = questions(128, f"warm-up {step}")
        shown = [Sample(prompt_ids=prompt, response_ids=answer(prompt), advantages=1.0) for prompt in prompts]
        trainer.step([trainer.batch(shown)])
    return copy.deepcopy(trainer.model[0].module.state_dict())


def train(trainer: Trainer, server: Server, rollouts: int, update_every: int, name: str) -> list[dict[str, float]]:
    """RL on so many rollout batches; of each the reward, and the metrics of its first optimizer step."""
    history = []
    for number in range(rollouts):
        if number % update_every == 0:
            server.update(trainer.weights(), f"{name}-{number}")
        samples = server.sample(questions(PROMPTS, number), SAMPLES)
        rewards = [reward(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in samples]
        advantages = mp.group_advantages(rewards, [row // SAMPLES for row in range(len(samples))]).tolist()  # ours
        samples = [sample.replace(advantages=a) for sample, a in zip(samples, advantages, strict=True)]  # ours
        # Each mini-batch has its share of every prompt's responses. π_old of all of them is from before the first step.
        batches = [trainer.batch(samples[part::MINI_BATCHES]) for part in range(MINI_BATCHES)]
        if not trainer.hook.config.use_rollout_log_probs:
            batches = [replace(b, packed=b.packed.replace(old_log_probs=trainer.log_probs(b))) for b in batches]
        first, *_ = [trainer.step([batch]) for batch in batches]
        history.append({"reward": statistics.fmean(rewards), **first})
        if dist.get_rank() == 0 and (number + 1) % 10 == 0:
            print(f"{name}, rollout batch {number + 1}: reward {history[-1]['reward']:.3f}", flush=True)
    return history


def main() -> None:
    """Algorithm 0, and after it, from the same weights, the one of the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.megatron_core.train", allow_abbrev=False)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument("--url", help="of a server with the model of write_checkpoint (default: start one on CPU)")
    parser.add_argument("--rollouts", type=int, default=40, help="rollout batches (default: %(default)s)")
    parser.add_argument("--update-every", type=int, default=8, help="rollout batches (default: %(default)s)")
    mp.add_arguments(parser)  # ours
    args = parser.parse_args()
    config = mp.MismatchConfig.from_args(args)  # ours: before anything starts, so that a mistake costs no time
    initialize(args.tp)
    start, table = warm_up(), []
    with ExitStack() as stack:
        if args.url is None and dist.get_rank() == 0:
            print("starting SGLang on CPU, in bfloat16", flush=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_checkpoint(folder)
            started = start_cpu_server(folder, dtype="bfloat16", arguments=SERVER_ARGUMENTS)
            args.url = stack.enter_context(started).url
        server = Server(args.url)
        for own in dict.fromkeys([mp.MismatchConfig(), config]):
            name = f"algorithm {own.algorithm}" + (" with your flags" if own == config else "")
            trainer = Trainer(own, state=start)
            history = train(trainer, server, args.rollouts, args.update_every, name)
            server.update(trainer.weights(), f"{name}-end")
            samples = server.sample(questions(256, "held out"), SAMPLES)
            exact = statistics.fmean(s.response_ids.tolist() == answer(s.prompt_ids.tolist()) for s in samples)
            kl = statistics.fmean(step.get("rollout_corr/kl", math.nan) for step in history)
            norm = max(step["grad_norm"] for step in history)
            table.append(f"{name:27}  {exact:11.3f}  {kl:20.4f}  {norm:21.2f}")
        if server.client is not None:
            server.loop.run_until_complete(server.client.close())
    if dist.get_rank() == 0:
        print(f"{'':27}  exact match  KL(rollout || train)  largest gradient norm", *table, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
