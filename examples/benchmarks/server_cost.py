"""What the SGLang plugin costs: CPU seconds of a server's processes for each reply, with the plugin and without it.

    python -m examples.benchmarks.server_cost [--rounds 24] [--replies 128]

Two servers of one tiny model take turns, so that what else the machine does is the same for both. Each reply has 64
tokens, 64 are under way at once. A real model computes longer for a reply; what the plugin adds stays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from ci.sglang_cpu.tiny_model import write_tiny_model
from examples.sglang_server import CpuServer, start_cpu_server
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import SGLangClient

SWITCH = "MISMATCH_PLUGIN_SGLANG"
TOKENS = 64


def cpu_seconds(group: int) -> float:
    """User and system time of all processes of a group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def milliseconds_a_reply(server: CpuServer, replies: int) -> float:
    """CPU milliseconds of the server for each of so many replies."""
    prompts = [[5 + (7 * row + place) % 240 for place in range(16)] for row in range(replies)]
    sampling = SamplingParameters(max_new_tokens=TOKENS, ignore_eos=True)

    async def job() -> float:
        async with SGLangClient(server.url) as client:
            await client.generate(prompts[:1], sampling)
            before = cpu_seconds(server.process_group)
            await client.generate(prompts, sampling)
            return cpu_seconds(server.process_group) - before

    return 1000 * asyncio.run(job()) / replies


def main() -> None:
    """Print both servers' figures and their ratio with its standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--replies", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_tiny_model(Path(folder), "llama", seed=0)
        servers: dict[str, CpuServer] = {}
        for switch in ("on", "off"):
            os.environ[SWITCH] = switch
            starting = start_cpu_server(folder, arguments=("--skip-tokenizer-init",), timeout=900)
            servers[switch] = stack.enter_context(starting)
        rounds = []
        for number in range(given.rounds + 1):
            order = ("on", "off") if number % 2 else ("off", "on")
            took = {switch: milliseconds_a_reply(servers[switch], given.replies) for switch in order}
            if number:  # the first one warms up
                rounds.append(took)
        ratios = [took["on"] / took["off"] for took in rounds]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        for switch in servers:
            print(f"plugin {switch}: {statistics.median(took[switch] for took in rounds):.3f} CPU ms a reply")
        print(f"with : without = {statistics.mean(ratios):.4f} ± {error:.4f} (median {statistics.median(ratios):.4f})")


if __name__ == "__main__":
    main()
