"""A plain torch loop with the corrected loss: padded batches, a bf16 sampler, gradient accumulation, DDP, TensorBoard.

python examples/torch_loop.py [LOG_DIR]
torchrun --nproc-per-node 2 examples/torch_loop.py [LOG_DIR]      # the same losses
"""

import copy
import functools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import mismatch_plugin as mp

VOCAB, ROWS, WIDTH, MICRO_BATCH, STEPS = 16, 16, 12, 4, 3
GROUP = 4  # responses to a prompt
rejection = {"criteria": ["token:k3:0.000005", "sequence_mean:k3:0.000003"], "group": "exclude"}
config = mp.preset("token_is").replace(rs=rejection, terms={"entropy_coef": 0.01})


def score(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every next token, [B, S] each."""
    logits = model(tokens[:, :-1]).to(torch.float64).log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None])[..., 0], -(logits.exp() * logits).sum(-1)


@torch.no_grad()
def rollout(sampler: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """Tokens [B, S + 1], the sampler's own log-probs [B, S], the response mask [B, S], rewards and prompts [B]."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.arange(ROWS) // GROUP
    tokens = prompts[:, None]
    for _ in range(WIDTH):
        drawn = torch.multinomial(sampler(tokens[:, -1]).float().softmax(-1), 1, generator=random)
        tokens = torch.cat([tokens, drawn], dim=1)
    mask = torch.arange(WIDTH) < torch.randint(3, WIDTH + 1, (ROWS, 1), generator=random)  # ragged, padded to S
    reward = ((tokens[:, 1:] % 2 == 0) & mask).sum(1) / mask.sum(1)
    return tokens, score(sampler, tokens)[0], mask, reward.double(), prompts


rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB)).double()
model: Any = DistributedDataParallel(policy) if world > 1 else policy
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
writer = SummaryWriter(sys.argv[1] if len(sys.argv) > 1 else "runs/torch_loop") if rank == 0 else None

for step in range(STEPS):
    batch = rollout(copy.deepcopy(policy).bfloat16(), seed=step)  # in bf16 the same weights give other log-probs
    # All responses to a prompt on one rank; where they are not, gather rewards, prompts and verdicts before advantages.
    tokens, sampled, mask, rewards, prompts = (values.chunk(world)[rank] for values in batch)
    with torch.no_grad():
        old, _ = score(policy, tokens)  # π_old, before the optimizer step
    names: dict[str, Any] = {"old_log_probs": old, "rollout_log_probs": sampled, "loss_masks": mask}
    # What is accepted follows from π_old, so it is known before advantages: a rejected response is in no baseline.
    accepted = mp.correct(mp.PackedSequences.from_padded(**names), config).kept_N
    names["advantages"] = mp.group_advantages(rewards, prompts, accepted)
    rows = (
        {name: values[i : i + MICRO_BATCH] for name, values in names.items()} for i in range(0, len(old), MICRO_BATCH)
    )
    parts = list(zip(tokens.split(MICRO_BATCH), (mp.PackedSequences.from_padded(**row) for row in rows), strict=True))

    # The mean over a step is Σ loss_sum / Σ denominator over all micro-batches and ranks; the mean of their means would
    # weigh tokens of short micro-batches more.
    counts = [torch.stack([mp.correct(packed, config).keep.sum(), packed.loss_mask.sum()]) for _, packed in parts]
    totals = torch.stack(counts).sum(0)
    if world > 1:
        dist.all_reduce(totals)

    seen: list[mp.Statistics] = []
    for number, (tokens, packed) in enumerate(parts):
        if world > 1:
            model.require_backward_grad_sync = number == len(parts) - 1  # as under no_sync(), but for the last one
        log_probs, entropy = score(model, tokens)
        packed = packed.replace(entropy=packed.flatten(entropy))
        result = mp.policy_loss(log_probs, packed, config)  # [B, S], as the batch was padded
        loss = result.loss_sum / totals[0].clamp(min=1) + sum(result.terms.values()) / totals[1]
        # DDP divides the summed gradients by the number of ranks. Ours are parts of one mean, to be added up: undo it.
        (loss * world).backward()
        seen.append(result.statistics)
    optimizer.step()
    optimizer.zero_grad()

    statistics = functools.reduce(mp.Statistics.merge, seen)
    sums, maxima = statistics.sums, statistics.maxima
    if world > 1:
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    if writer:
        metrics = statistics.replace(sums, maxima).metrics()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        shown = [metrics[f"rollout_corr/{name}"] for name in ("pg_loss", "kl", "accepted_token_fraction")]
        print("step {} loss {:.12f} kl {:.12f} accepted {:.4f} norm {:.12f}".format(
            step, *shown, list(policy.parameters())[1].norm()), flush=True)  # fmt: skip
if writer:
    writer.close()
if world > 1:
    dist.destroy_process_group()
