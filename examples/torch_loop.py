"""A minimal loop of your own: gradient accumulation, batch normalisation and DDP, with the same gradients everywhere.

python examples/torch_loop.py [MICRO_BATCHES]; torchrun --nproc-per-node 2 examples/torch_loop.py [MICRO_BATCHES]"""

import os
import sys
from typing import Any

import torch
from torch import distributed as dist

import mismatch_plugin as mp

config = mp.preset("token_is").replace(tis={"batch_normalize": True})
rank, world, count = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1")), int([*sys.argv, "1"][1])
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16)).double()
model: Any = torch.nn.parallel.DistributedDataParallel(policy) if world > 1 else policy
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
for _ in range(3):
    tokens, advantages = torch.randint(16, (8, 13)), torch.randn(8)  # made-up rollouts: put yours here
    mask = torch.arange(12) < torch.randint(3, 13, (8, 1))  # 1 where a response token trains
    # π_old, before the first optimizer step on these; log-prob t is of token t + 1, from the logits at t
    old = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].detach()
    sampled = (old + 0.3 * torch.randn(8, 12)).clamp(max=0.0)  # what the rollout engine returned for these tokens
    results, parts = [], torch.arange(8).chunk(world)[rank].chunk(count)
    for part in parts:
        fields = {"old_log_probs": old, "rollout_log_probs": sampled, "loss_masks": mask, "advantages": advantages}
        packed = mp.PackedSequences.from_padded(**{name: rows[part] for name, rows in fields.items()})
        model.require_backward_grad_sync = part is parts[-1]  # DDP's no_sync(), but for the last micro-batch
        log_probs = model(tokens[part, :-1]).log_softmax(-1).gather(-1, tokens[part, 1:, None])[..., 0]
        results.append(mp.policy_loss(log_probs, packed, config))
        results[-1].undivided.backward()  # without accumulation: mp.step_loss([result], group).loss.backward()
    ended = mp.step_loss(results, dist.group.WORLD)  # divides by what all micro-batches and ranks hold
    ended.scale_gradients(policy.parameters())
    print(ended.metrics()["rollout_corr/pg_loss"], *mp.check_health(ended.metrics(), config))
    optimizer.step()
    optimizer.zero_grad()
