"""Benchmark: what the ranks of a job send each other, by formula, counted over gloo, and its cost on real links.

Costs on links are by formula alone: terms and constants are stated, nothing of them is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mismatch_plugin as mp
from examples.benchmarks.correction_cases import SETTINGS, Batch
from examples.benchmarks.counting import count
from examples.benchmarks.results import MEASURED, Row, Section
from examples.benchmarks.workers import in_processes
from mismatch_plugin.parallel.agreement import step_kind
from mismatch_plugin.parallel.context import shard
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.log_probs import vocab_parallel_log_probs


@dataclass(frozen=True)
class Link:
    """latency: seconds a message. bandwidth: bytes a second that one GPU sends, in practice and not on the label."""

    name: str
    latency: float
    bandwidth: float

    def all_reduce(self, size: int, ranks: int) -> float:
        """Seconds of a ring: 2 (p − 1) messages of size / p bytes."""
        return 2 * (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    def all_gather(self, size: int, ranks: int) -> float:
        """Seconds of a ring: p − 1 messages of size bytes, the part of one rank."""
        return (ranks - 1) * (self.latency + size / self.bandwidth)

    def tree(self, size: int, ranks: int) -> float:
        """Seconds of an all-reduce of few bytes over many ranks: up and down a binary tree."""
        return 2 * max(1, (ranks - 1).bit_length()) * (self.latency + size / self.bandwidth)


LINKS = (Link("NVLink 4", 3e-6, 360e9), Link("InfiniBand 400 Gb/s", 8e-6, 45e9), Link("Ethernet 100 Gb/s", 25e-6, 11e9))


def sent_bytes(kind: str, size: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring: `size` is what it puts in."""
    return (ranks - 1) * size if kind == "all-gather" else 2 * (ranks - 1) * size // ranks


TOKENS, SEQUENCES, VOCAB = 32768, 512, 64
"""Of a micro-batch; the vocabulary is small here, since what is sent does not depend on it."""
COLUMNS = ("train", "log_ratio", "tokens", "k3", "ratio", "ratio_squared", "catastrophic")
"""Whose sums per sequence the settings of the correction need."""
NOTES = [
    "Payload: what one rank puts into its collectives. tp, a micro-batch: one all-gather of 4 float32 a target. cp, a "
    f"micro-batch: one SUM of {len(COLUMNS)} float64 a sequence. dp x cp, a step: one MAX of 9, one SUM of S, "
    "one MAX of M float64.",
    "Counted: the bytes handed to torch.distributed by real processes over gloo. The others follow the formula.",
    "Peers, from their sources: megatron-core reduces maximum, predicted logit and sum of exponentials one after "
    "another (no entropy); a loop over sequences reduces twice for each, padded to its whole length.",
    "Sent: by one rank in a ring, (p − 1) n for an all-gather, 2 (p − 1) / p n for an all-reduce. Time, not measured: "
    "(p − 1)(a + n / b) and 2 (p − 1)(a + n / (p b)), latency a and bandwidth b: "
    + "; ".join(f"{link.name} {link.latency * 1e6:g} us, {link.bandwidth / 1e9:g} GB/s" for link in LINKS)
    + ".",
]


def section(_: torch.device, quick: bool, *__: object) -> Section:
    """tp and cp of 2 to 16, and the statistics of a step."""
    tokens, sequences = (64, 8) if quick else (TOKENS, SEQUENCES)
    longest = max(2, 3 * tokens // (2 * sequences))
    counted = {ranks: in_processes(sent_by_rank, ranks, tokens, sequences, longest)[0] for ranks in (2, 4)}
    whole = len(Batch(sequences, longest, torch.device("cpu")).packed.loss_mask)
    sizes: dict[str, Any] = {"targets": tokens, "sequences": sequences, "tokens": whole}
    sums, maxima = counted[2]["S"], counted[2]["M"]
    rows: list[Row] = []
    for ranks in (2, 4, 8, 16):
        gathered = [("all-gather", 16 * tokens)]
        rows.append(_row("tp: log-probs and entropy", ranks, gathered, counted.get(ranks, {}).get("tp")))
        rows.append(_row("tp: megatron-core, log-probs only", ranks, [("all-reduce", 4 * tokens)] * 3, None))
        summed = [("all-reduce", 8 * len(COLUMNS) * sequences)]
        rows.append(_row("cp: correction", ranks, summed, counted.get(ranks, {}).get("cp")))
        each = [("all-reduce", 4 * whole // sequences)] * (2 * sequences)
        rows.append(_row("cp: a loop over sequences", ranks, each, None))
        step = [("all-reduce", 8 * size) for size in (9, sums, maxima)]
        rows.append(_row("dp x cp: a step's statistics", ranks, step, counted.get(ranks, {}).get("dp")))
    facts = {**sizes, "S": sums, "M": maxima}
    return Section("communication", "Communication", rows, facts, NOTES)


def _row(what: str, ranks: int, collectives: list[tuple[str, int]], counted: int | None) -> Row:
    payload = sum(size for _, size in collectives)
    row: Row = {
        "name": what,
        "ranks": ranks,
        "status": MEASURED if counted is not None else "by formula",
        "collectives": len(collectives),
        "payload": payload,
        "counted": counted,
        "sent": sum(sent_bytes(kind, size, ranks) for kind, size in collectives),
    }
    for link in LINKS:
        costs = {"all-gather": link.all_gather, "all-reduce": link.all_reduce}
        row[f"us, {link.name}"] = 1e6 * sum(costs[kind](size, ranks) for kind, size in collectives)
    return row


def sent_by_rank(tokens: int, sequences: int, longest: int) -> dict[str, int]:
    """Bytes that this rank hands to the collectives of log-probs (tp), correction (cp) and a step's statistics (dp).

    S, M: how many sums and maxima a step has. For a process of its own.
    """
    world = dist.group.WORLD
    logits = torch.randn(tokens, VOCAB, requires_grad=True)
    targets = torch.randint(0, VOCAB * dist.get_world_size(), (tokens,))

    def log_probs() -> None:
        result = vocab_parallel_log_probs(logits, targets, tp_group=world, entropy="grad")
        assert result.entropy is not None
        (result.log_probs.sum() + result.entropy.sum()).backward()

    groups = ParallelGroups(cp=world, dp_cp=world)
    packed = shard(Batch(sequences, longest, torch.device("cpu")).packed, "zigzag", groups.cp_size, groups.cp_rank)
    config = mp.MismatchConfig(**SETTINGS)
    statistics = mp.correct(packed, config, groups).statistics

    def step() -> None:
        ParallelGroups(dp_cp=world).agree(step_kind(config, [packed], has_loss=True))
        groups.reduce_step(statistics)

    sent = {
        "tp": count(log_probs).sent,
        "cp": count(lambda: mp.correct(packed, config, groups)).sent,
        "dp": count(step).sent,
    }
    found = {name: sum(size for _, size in collectives) for name, collectives in sent.items()}
    return {**found, "S": len(statistics.sum_names), "M": len(statistics.maximum_names)}
