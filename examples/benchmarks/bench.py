"""What the plugin costs next to what else there is: `make bench`, or python -m examples.benchmarks.bench --help.

ratio: a time divided by that of the case's first contender, in turns in one process; where that is ours, above 1 we are
ahead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.correction_contenders import FULL_SETTING, SETTINGS, Batch, in_driver, of_loss, packed
from examples.benchmarks.counting import count
from examples.benchmarks.log_prob_contenders import OURS, draw_logits, from_hidden, from_logits, ours, step
from examples.benchmarks.measuring import Contender, Row, describe, in_processes, measure, megatron_groups, sent
from mismatch_plugin.files import write_whole
from mismatch_plugin.parallel.agreement import step_kind
from mismatch_plugin.parallel.context import shard
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.report.table import NOTHING, Table


def log_probs(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """From logits, with and without the entropy."""
    sizes = [(1024, 32768, "float32"), (1024, 32768, "bfloat16"), (256, 4096, "float32")]
    if device.type == "cuda":
        sizes = [(8192, 131072, "bfloat16"), (32768, 32768, "bfloat16")]
    rows = []
    for tokens, vocab, dtype in [(48, 512, "float32")] if quick else sizes:
        for entropy in (True, False):
            case = f"{tokens} tokens, vocabulary {vocab}, {dtype}{', with entropy' if entropy else ''}"
            contenders = from_logits(tokens, vocab, dtype, entropy, device)
            rows += measure(case, contenders, device, repeats, memory=True)
    return rows


def linear(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """From hidden states and the head's weight."""
    rows, sizes = [], [(512, 32768, 256), (512, 32768, 1024)] if device.type == "cpu" else [(8192, 131072, 4096)]
    for tokens, vocab, width in [(16, 512, 16)] if quick else sizes:
        for entropy in (True, False):
            case = f"{tokens} tokens, vocabulary {vocab}, hidden size {width}{', with entropy' if entropy else ''}"
            contenders = from_hidden(tokens, vocab, width, entropy, device)
            rows += measure(case, contenders, device, repeats, calls=1, memory=True)
    return rows


def correction(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """Weights, rejection and metrics: packed, and in verl's driver."""
    batch = Batch(*((32, 40) if quick else (512, 3072)), device)
    cases = [(f"{setting.name}, packed", packed(batch, setting)) for setting in SETTINGS]
    cases += [(f"{setting.name}, verl's driver", in_driver(batch, setting)) for setting in SETTINGS[:-1]]
    for name, contenders in cases:  # not kept: at first the allocator gives back memory that it keeps later on
        measure(name, contenders, device, repeats=1, calls=1)
    return [row for name, contenders in cases for row in measure(name, contenders, device, repeats)]


def loss(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """The whole of policy_loss from log-probs: what it costs over the bare formulas."""
    rows = []
    for sequences, longest in [(4, 40)] if quick else [(8, 768), (32, 768), (512, 3072)]:
        batch = Batch(sequences, longest, device)
        case = f"policy_loss, {len(batch.packed.loss_mask)} tokens in {sequences} sequences"
        rows += measure(case, of_loss(batch), device, repeats)
    return rows


def whole_step(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """A step of megatron-core's schedule on one process: forward, backward, gradients finalised; no optimizer."""
    rows = []
    for tokens, width in [(32, 32)] if quick else [(1024, 256), (2048, 256), (1024, 1024)]:
        case = f"{tokens} tokens, vocabulary {512 if quick else 32768}, hidden size {width}, 2 layers"
        contenders = steps_of(tokens, width, 512 if quick else 32768, device)
        rows += measure(case, contenders, device, repeats, calls=1, memory=True)
    return rows


def steps_of(tokens: int, width: int, vocab: int, device: torch.device) -> list[Contender]:
    """Our hook with its three ways of a head, and megatron-core's own loss, on one model and batch."""
    megatron_groups(model=True)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from mismatch_plugin.data.sample import Sample
    from mismatch_plugin.hooks.megatron_core import MegatronLoss
    from mismatch_plugin.hooks.megatron_core.batch import make_batch
    from tests.megatron_cpu import ModelSettings, build_model, run_step

    heads = max(2, width // 64)
    size = ModelSettings(hidden=width, heads=heads, kv_groups=heads, ffn=3 * width, vocab=vocab)
    model = build_model(size)
    config = model[0].config
    finalize = config.finalize_model_grads_func
    generator = torch.Generator().manual_seed(0)
    length = min(tokens, 512)  # of a prompt and its response, which is four times as long
    samples = []
    for _ in range(tokens // length):
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        old = (-8.0 - torch.rand(length - length // 5, generator=generator)).tolist()
        logged = {"rollout_log_probs": [value + 0.01 for value in old], "train_log_probs": old}
        samples.append(Sample(prompt_ids=ids[: length // 5], response_ids=ids[length // 5 :], advantages=1.0, **logged))
    batch = make_batch(samples, device=device)

    def hooked(**options: Any) -> Callable[[], None]:
        config.finalize_model_grads_func = finalize
        hook = MegatronLoss(FULL_SETTING.config.replace(**options), config, ParallelGroups.from_megatron())
        wrapped = config.finalize_model_grads_func

        def run() -> None:
            config.finalize_model_grads_func = wrapped
            hook.start([batch])
            run_step(model, hook.forward_step, iter([batch]), 1)

        return run

    def megatron_loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        chosen = logits.flatten(0, -2).index_select(0, batch.rows)
        losses = vocab_parallel_cross_entropy(chosen[:, None], batch.targets[:, None])
        return losses.sum(), torch.ones((), dtype=torch.int64, device=device), {}

    def forward(_: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params), megatron_loss

    def megatrons() -> None:
        config.finalize_model_grads_func = finalize
        run_step(model, forward, iter([batch]), 1)

    return [
        Contender(f"{OURS}'s hook", hooked),
        Contender("the same, gradient in new memory", lambda: hooked(inplace_logits="off")),
        Contender("the same, fused head", lambda: hooked(fused_head=True)),
        Contender("megatron-core's cross entropy", lambda: megatrons),
    ]


def communication(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """Two processes over gloo: time, collectives and bytes of one rank."""
    return in_processes(rows_of_rank, 2, quick, repeats)[0]


def rows_of_rank(quick: bool, repeats: int) -> list[Row]:
    """Half of the vocabulary, half of the tokens of every sequence, a step's statistics. For one of two processes."""
    world, device = dist.group.WORLD, torch.device("cpu")
    tokens, half = (32, 64) if quick else (1024, 16384)
    rows = []
    for entropy in (True, False):
        contenders = from_logits(tokens, half, "float32", entropy, device, world)
        case = f"tp 2: {tokens} tokens, vocabulary {2 * half}{', with entropy' if entropy else ''}"
        rows += measure(case, contenders, device, repeats, calls=1)
    groups = ParallelGroups(cp=world, dp_cp=world)
    sequences, longest = (8, 12) if quick else (512, 96)
    own = shard(Batch(sequences, longest, device).packed, "zigzag", groups.cp_size, groups.cp_rank).prepared()
    config = FULL_SETTING.config
    statistics = mp.correct(own, config, groups).statistics

    def a_step() -> None:
        ParallelGroups(dp_cp=world).agree(step_kind(config, [own], has_loss=True))
        groups.reduce_step(statistics)

    corrected = count(lambda: mp.correct(own, config, groups))
    rows.append({"case": f"cp 2: correction of {sequences} sequences", "contender": OURS} | sent(corrected))
    rows.append({"case": "dp 2: a step's agreement and statistics", "contender": OURS} | sent(count(a_step)))
    return rows


def scaling(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """Our own cost at growing sizes: each divided by that of the first size."""
    longest, vocab = (24, 256) if quick else (512, 8192)

    def of_batch(sequences: int, longest: int) -> Contender:
        batch, config = Batch(sequences, longest, device).packed, FULL_SETTING.config
        name = f"correction of {sequences} sequences of at most {longest} tokens"
        return Contender(name, lambda: lambda: mp.correct(batch, config).statistics.metrics())

    def of_logits(tokens: int, vocab: int) -> Contender:
        logits, targets, grads = draw_logits(tokens, vocab, "float32", device)
        run = partial(step, ours(True), logits.requires_grad_(), targets, grads)
        return Contender(f"log-probs of {tokens} tokens, vocabulary {vocab}", lambda: run, results=lambda _: ())

    series = {
        "more tokens in as many sequences": [of_batch(64, longest * p) for p in (1, 4, 16)],
        "as many tokens in more sequences": [of_batch(64 * p, 8 * longest // p) for p in (1, 8, 64)],
        "more logits": [of_logits(64 * p, vocab * q) for p, q in ((1, 1), (4, 1), (16, 1), (4, 4))],
    }
    return [row for case, contenders in series.items() for row in measure(case, contenders, device, repeats)]


def inspect(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """Commands, as processes of their own: CPU time of a whole `inspect`, and of importing the package."""
    batch = Batch(*((4, 40) if quick else (2048, 768)), torch.device("cpu"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/records.jsonl"
        with open(path, "w") as stream:
            for at, (train, rollout, mask) in enumerate(batch.rows):
                ids = [7 + i % 1000 for i in range(len(train))]
                line = {"sample_id": f"s{at}", "prompt_ids": [1, 2, 3], "response_ids": ids, "loss_mask": mask.tolist()}
                line |= {"rollout_log_probs": rollout.tolist(), "train_log_probs": train.tolist()}
                stream.write(json.dumps(line) + "\n")
        parse = "import json, sys; [json.loads(line) for line in open(sys.argv[1])]"
        cases = {
            f"inspect of {len(batch.packed.loss_mask)} tokens in JSONL": {
                "mismatch-plugin inspect": ["-m", "mismatch_plugin", "inspect", path],
                "json.loads of its lines": ["-c", parse, path],
            },
            "starting": {name: ["-c", name] for name in ("import mismatch_plugin", "import torch")},
        }
        for case, commands in cases.items():
            contenders = []
            for name, words in commands.items():  # inspect ends with 1 where it finds a fault, as in made-up numbers
                run = partial(subprocess.run, [sys.executable, *words], capture_output=True, check=False)
                contenders.append(Contender(name, lambda run=run: run, counted=False))
            rows += measure(case, contenders, torch.device("cpu"), min(repeats, 3), calls=1)
    return rows


def samples(device: torch.device, quick: bool, repeats: int) -> list[Row]:
    """Samples in a JSONL file and packed, next to orjson with numpy's arrays on the same values."""
    from mismatch_plugin.data.files import row_of, write_samples
    from mismatch_plugin.data.pack import pack
    from mismatch_plugin.data.read import read
    from mismatch_plugin.data.sample import Sample

    count, length = (2, 40) if quick else (400, 1000)
    made, sides = [], ("rollout_log_probs", "train_log_probs")
    for at in range(count):
        draw = torch.Generator().manual_seed(at)
        logged = {name: -torch.rand(length, generator=draw) for name in sides}
        ids = torch.randint(0, 150_000, (length,), generator=draw)
        made.append(Sample(response_ids=ids, prompt_ids=ids[: length // 10], loss_mask=torch.ones(length), **logged))
    lists: dict[str, Any] = {name: [getattr(sample, name).tolist() for sample in made] for name in sides}
    masks = [[1] * length] * count

    def by_orjson(path: Path, write: bool) -> Callable[[], Any]:
        import numpy as np

        orjson: Any = import_module("orjson")  # of `make bench-contenders`
        if write:
            return lambda: path.write_bytes(b"\n".join(orjson.dumps(row_of(sample)) for sample in made))
        names = ("response_ids", "prompt_ids", "loss_mask", *lists)
        return lambda: [
            [np.array(row[name]) for name in names] for row in map(orjson.loads, path.read_bytes().splitlines())
        ]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.jsonl")
        write_samples(path, made)
        cases: dict[str, dict[str, Callable[[], Callable[[], Any]]]] = {
            "read": {"data.read": lambda: lambda: len(read(path).samples), "orjson": lambda: by_orjson(path, False)},
            "write": {
                "write_samples": lambda: lambda: write_samples(path, made),
                "orjson": lambda: by_orjson(Path(folder, "other.jsonl"), True),
            },
            "pack": {
                "pack": lambda: lambda: pack(made).lengths,
                "from_lists": lambda: lambda: mp.PackedSequences.from_lists(loss_masks=masks, **lists).lengths,
            },
        }
        rows = []
        for case, makes in cases.items():
            contenders = [Contender(name, make, results=lambda _: (), counted=False) for name, make in makes.items()]
            rows += measure(f"{case} {count} samples of {length} tokens", contenders, device, repeats, calls=1)
    return rows


_ORDER = (log_probs, linear, correction, loss, whole_step, communication, scaling, inspect, samples)
PARTS = {part.__name__: part for part in _ORDER}
COLUMNS = {"ms": "{:.3g}", "ratio": "{:.2f}", "lowest": "{:.2f}", "highest": "{:.2f}", "extra_mib": "{:.0f}"}
COLUMNS |= {"memory_ratio": "{:.2f}", "deviation": "{:.0e}"}
COLUMNS |= dict.fromkeys(("kernels", "syncs", "collectives", "sent_bytes"), "{}")
"""Keys of a row, and how the table shows them."""


def measure_part(name: str, kind: str, quick: bool, repeats: int) -> dict[str, Any]:
    """One part on a device of this kind. For a process of its own."""
    device = torch.device(kind)
    return {"rows": PARTS[name](device, quick, repeats), "machine": describe(device)}


def table(part: dict[str, Any]) -> Table:
    """The rows of a part, without columns that none of them fills; why a contender has no figures stands for its ms."""
    shown = [key for key in COLUMNS if key == "ms" or any(key in row for row in part["rows"])]
    lines, last = [], ""
    for row in part["rows"]:
        cells = [COLUMNS[key].format(row[key]) if key in row else NOTHING for key in shown]
        case, last = "" if row["case"] == last else row["case"], row["case"]
        lines.append((case, row["contender"], row.get("status", cells[0]), *cells[1:]))
    return Table("", ("case", "contender", *(key.replace("_", " ") for key in shown)), tuple(lines))


def save(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """bench.json, one row a line, and bench.md, a table of each part."""
    parts, pages = [], []
    for name, part in results.items():
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in part["rows"])
        parts.append(f'"{name}": {{"machine": {json.dumps(part["machine"])},\n"rows": [\n{rows}\n]}}')
        machine = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
        pages.append(f"# {name}\n\n{PARTS[name].__doc__}\n\n{machine}\n\n{table(part).to_markdown()}")
    write_whole(folder / "bench.json", "{" + ",\n".join(parts) + "}\n")
    write_whole(folder / "bench.md", "\n".join(pages))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 1 where a part failed."""
    parser = argparse.ArgumentParser(
        description="Measure what the plugin costs next to what else there is. verl and TRL take part after `make "
        "bench-contenders`, slime's and NeMo-RL's own code where SLIME_SRC and NEMO_RL_SRC name a checkout.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of bench.json and bench.md")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="repeatable; others stay as they are")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? times say little")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of torch on CPU; with several, wall time is taken")
    parser.add_argument("--repeats", type=int, default=0, help="that medians are taken of; 0: 5, quick 2")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device: choose cpu or auto.")
    kind = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    path = options.output / "bench.json"
    try:  # before anything is measured: what is there can be read, and the folder written to
        options.output.mkdir(parents=True, exist_ok=True)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        save(results, options.output)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"--output: {path} cannot be used ({error!r}): give another folder.")
    failed = False
    for name in options.only or PARTS:
        print(f"{name}: {PARTS[name].__doc__}", flush=True)
        settings = (name, kind, options.quick, options.repeats or (2 if options.quick else 5))
        try:  # a process of its own: megatron-core's stand-ins would slow down what comes after
            (results[name],) = in_processes(measure_part, 1, *settings, threads=options.threads)
        except Exception as error:  # one part leaves the others
            print(f"{name} failed: {error!r}", flush=True)
            failed = True
        else:
            save(results, options.output)
            print(table(results[name]).to_markdown())
    print(f"Results: {options.output / 'bench.md'} and bench.json.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
