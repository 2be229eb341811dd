"""A plain megatron-core training loop with the corrected loss: copy `main`, bring your own model and samples.

    torchrun --nproc-per-node 2 examples/megatron_core/train.py --tp 2 --use-tis --tis-level sequence

The "rollout engine" here draws tokens uniformly, so its log-probs are exactly −ln V, and the reward is the share of
even tokens: the policy learns to write even tokens from data that it did not sample itself. So it moves away from them:
the KL printed next to the loss must grow here (beyond half a nat a token), and `mismatch-plugin inspect` would warn of
it.

Samples have no `old_log_probs`: with one optimizer step a rollout batch π_old is π_θ before the step, which the hook
takes for it. With several, give what a forward pass before the first one returned.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.hooks.megatron_core.batch import Sample, make_batch
from mismatch_plugin.lab import cpu_shim  # not needed with a GPU
from mismatch_plugin.parallel.groups import ParallelGroups

cpu_shim.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCAB, LENGTH, STEPS = 32, 8, 20


def rollouts(step: int, count: int = 32) -> list[Sample]:
    """Uniformly drawn responses with what the engine says of them: −ln V a token."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    reward = (ids % 2 == 0).double().mean(1)
    said = [-math.log(VOCAB)] * LENGTH
    return [
        Sample([0], row.tolist(), float(r - reward.mean()), rollout_log_probs=said)
        for row, r in zip(ids, reward, strict=True)
    ]


def main() -> None:
    """Twenty optimizer steps of two micro-batches each."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    mp.add_arguments(parser)
    args = parser.parse_args()
    config = mp.MismatchConfig.from_args(args)  # ours: before anything starts, so that a mistake costs no time

    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    torch.manual_seed(0)
    model_config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,  # lets the hook divide by the step's exact token count
        use_cpu_initialization=not torch.cuda.is_available(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(
        model_config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH + 1,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model: list[Any] = [DistributedDataParallel(model_config, DistributedDataParallelConfig(), gpt)]
    model[0].broadcast_params()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=1.0), model)

    # Ours: the hook.
    hook = MegatronLoss(config, model_config, ParallelGroups.from_megatron(), vocab_size=VOCAB)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for step in range(STEPS):
        mine = rollouts(step)[rank::size]
        half = len(mine) // 2
        batches = [make_batch(part, form="bshd") for part in (mine[:half], mine[half:])]
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        hook.start(batches)
        get_forward_backward_func()(
            forward_step_func=hook.forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=LENGTH + 1,
            micro_batch_size=half,
            forward_only=False,
        )
        optimizer.step()
        metrics = hook.metrics()  # {} but on the last pipeline stage
        if metrics and parallel_state.get_tensor_model_parallel_rank() == 0 and rank == 0:
            loss, kl = metrics["rollout_corr/pg_loss"], metrics["rollout_corr/kl"]
            print(f"step {step}: loss {loss:.6f}, KL(rollout || train) {kl:.6f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
