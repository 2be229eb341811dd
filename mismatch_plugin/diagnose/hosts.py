"""The hosts for which `inspect` writes flags."""

from __future__ import annotations

from typing import Literal

Host = Literal["slime", "miles", "megatron-lm", "verl", "nemo-rl", "python"]
HOSTS: dict[Host, str] = {
    "slime": "slime",
    "miles": "miles",
    "megatron-lm": "Megatron-LM",
    "verl": "verl",
    "nemo-rl": "NeMo-RL",
    "python": "Python",
}
"""Host → its name as people write it, in the order in which they are shown."""
