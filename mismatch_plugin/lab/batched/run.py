"""A block of batched runs into the folders of its runs: the files that `lab.run.run_one` writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.files import write_whole
from mismatch_plugin.lab.batched.trainer import Runs
from mismatch_plugin.lab.batched.warm import warm_weights
from mismatch_plugin.lab.run import DONE, METRICS, describe_run, write_description
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.report.log import to_json


def run_block(
    settings: LabSettings,
    configs: Sequence[MismatchConfig],
    seeds: Sequence[int],
    folders: Sequence[Sequence[Path]],
    warm_up_cache: Path,
) -> None:
    """Train every variant with every seed in one program. folders[i][j]: where variant i with seed j goes.

    What was there of these runs is written again. `done.json` is written when all have ended; a run whose gradient
    stopped being finite is `diverged` there, and its weights stayed as they were from that step on.
    """
    start = time.process_time()
    weights = warm_weights(settings, seeds, warm_up_cache)
    warm_seconds = time.process_time() - start
    runs = Runs(settings, seeds, configs, weights)
    with ExitStack() as stack:
        files = []
        for config, row in zip(configs, folders, strict=True):
            for seed, folder in zip(seeds, row, strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / DONE).unlink(missing_ok=True)
                write_description(folder, describe_run(settings.model_copy(update={"seed": seed}), config))
                files.append(stack.enter_context((folder / METRICS).open("w")))
        last = [{} for _ in files]
        for records in runs.steps():
            flat = [record for of_variant in records for record in of_variant]
            for file, record, end in zip(files, flat, last, strict=True):
                file.write(to_json(record) + "\n")
                end |= {name: value for name, value in record.items() if name in ("step", "held_out_exact")}
                if "held_out_exact" in record:
                    file.flush()
    total = time.process_time() - start
    seconds = {"warm_up": warm_seconds / len(files), "total": total / len(files)}
    places = [folder for row in folders for folder in row]
    for folder, end, live in zip(places, last, runs.optimizer.live.tolist(), strict=True):
        outcome = {"status": "finished" if live else "diverged", "seconds": seconds, **end}
        write_whole(folder / DONE, to_json(outcome, indent=2) + "\n")
