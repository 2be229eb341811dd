"""The hosts for which `inspect` writes flags."""

from __future__ import annotations

from typing import Literal

Host = Literal["slime", "miles", "megatron_lm", "verl", "nemo_rl", "python"]
HOSTS: dict[Host, str] = {
    "slime": "slime",
    "miles": "miles",
    "megatron_lm": "Megatron-LM",
    "verl": "verl",
    "nemo_rl": "NeMo-RL",
    "python": "Python",
}
"""Host → its name as people write it, in the order in which they are shown."""
