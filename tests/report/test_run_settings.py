"""What was run, in words."""

from __future__ import annotations

import json
from pathlib import Path

from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.run_settings import about_algorithms, about_seeds, about_task, changes
from tests.report.synthetic import write_comparison, write_run


def test_algorithms_are_described_by_their_configuration(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["stale32"]))
    decoupled = "PPO, clipped around π_old; times the weight π_old/π_rollout,"
    assert dict(about_algorithms(folder)) == {
        "0 PPO": "PPO, clipped around π_old; no correction",
        "0 dual clip": "PPO, clipped around π_old; dual clip at 3",
        "1 bypass PPO": "PPO, clipped around π_rollout",
        "2 token truncate": f"{decoupled} token truncate at most 2",
        "2 sequence truncate": f"{decoupled} sequence truncate at most 2",
        "2 IcePop": f"{decoupled} IcePop 0.5 to 5",
    }


def test_a_configuration_of_another_version_is_left_out(tmp_path: Path):
    write_run(tmp_path, "stale32", "1", 100)
    config = tmp_path / "stale32" / "1" / "seed100" / "config.json"
    for mismatch in ({"no_such_field": 1}, [], "x", {}):
        config.write_text(json.dumps({"variant": "1", "mismatch": mismatch}))
        assert about_algorithms(read_run_folder(tmp_path)) == []


def test_the_task_and_how_it_is_trained(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["stale16"]))
    assert about_task(folder, "stale16") == (
        "Six digits are reversed. A rollout batch is 16 prompts with 8 responses each, trained on in 4 mini-batches; "
        "400 optimizer steps at learning rate 0.003."
    )
    assert about_task(folder, "control") == "Six digits are reversed."
    (tmp_path / "run.json").write_text('{"lab": {"task": "reverse6"}, "about_settings": {"control": {"task": null}}}')
    assert about_task(read_run_folder(tmp_path), "control") == "Task reverse6."
    (tmp_path / "run.json").write_text('{"lab": 3}')
    assert about_task(read_run_folder(tmp_path), "control") == ""


def test_seeds_and_changes(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["stale32"]))
    assert about_seeds(folder) == "Seeds reported: 100 to 111. Parameters were chosen on seeds 0 to 9."
    assert changes(folder.about("stale32")) == "staleness = 32" and changes(folder.about("control")) == ""
    (tmp_path / "run.json").write_text('{"seeds": [3, 5, 6]}')
    assert about_seeds(read_run_folder(tmp_path)).startswith("Seeds reported: 3, 5, 6, 100")
    assert about_seeds(read_run_folder(tmp_path / "stale32")) == ""
