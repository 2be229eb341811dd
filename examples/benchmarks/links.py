"""What a collective costs on a real link, by formula: terms and constants are stated, nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass


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
