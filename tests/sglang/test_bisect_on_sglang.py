"""Faults at the trainer are named against what real servers compute, and certificates of servers hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples.sglang_server import CpuServer, start_cpu_server
from mismatch_plugin.bisect.engines import Engine, Trainer, from_checkpoint, from_megatron
from mismatch_plugin.bisect.verdict import bisect
from mismatch_plugin.cli import app
from tests.bisect.plants import FAMILIES, FAULTS, IDS, MEGATRON_FAULTS, VOCAB, Family, tiny

CHUNK = 64
MEGATRON = "examples/megatron_core/from_hugging_face.py:build"
SERVERS: dict[str, tuple[Family, Any]] = {
    **{family: (family, "float32") for family in FAMILIES},
    "qwen3 in bfloat16": ("qwen3", "bfloat16"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    found: dict[Family, Path] = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        tiny(family, 0).save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def servers(folders: dict[Family, Path]) -> Iterator[dict[str, CpuServer]]:
    arguments = ("--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK))
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(kind: tuple[Family, Any]) -> CpuServer:
            family, dtype = kind
            return stack.enter_context(start_cpu_server(folders[family], dtype=dtype, arguments=arguments, timeout=900))

        yield dict(zip(SERVERS, pool.map(start, SERVERS.values()), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_are_named_and_explain_the_gap(
    family: Family, folders: dict[Family, Path], servers: dict[str, CpuServer]
) -> None:
    theirs = Engine(servers[family].url).capture(IDS)
    for table in (FAULTS, MEGATRON_FAULTS):
        clean = bisect(trainer(table, family, folders), theirs, torch.float32)
        assert not clean.jumps and clean.watched > 45 and not clean.unpaired
        assert clean.largest[0].ratio < clean.largest[0].allowed / 2
        for fault in (fault for fault in table.values() if family in fault.families):
            planted = trainer(table, family, folders)
            fault.plant(planted.model)
            found = bisect(planted, theirs, torch.float32)
            first = found.jumps[0]
            assert (first.module, first.which) == (fault.module, fault.which), fault
            assert fault.says in f"{first.what} {first.why}" and found.explained > 0.9, fault


def trainer(table: Any, family: Family, folders: dict[Family, Path], dtype: torch.dtype = torch.float32) -> Trainer:
    """A model of transformers for FAULTS, else one of megatron-core."""
    if table is FAULTS:
        return from_checkpoint(folders[family], dtype)
    return from_megatron("tests.bisect.plants:build", Path(family), dtype, VOCAB)


def test_rounding_is_no_fault(folders: dict[Family, Path], servers: dict[str, CpuServer]) -> None:
    theirs = Engine(servers["qwen3 in bfloat16"].url).capture(IDS)
    for table in (FAULTS, MEGATRON_FAULTS):
        found = bisect(trainer(table, "qwen3", folders, torch.bfloat16), theirs, torch.bfloat16)
        assert not found.jumps and found.gap > 1e-3
        assert 0 < found.largest[0].ratio < found.largest[0].allowed / 2


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_commands(folders: dict[Family, Path], servers: dict[str, CpuServer], tmp_path: Path) -> None:
    url, folder = servers["llama"].url, folders["llama"]
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    code, said = run("bisect", "--url", url, "--checkpoint", folder, "--ids", tmp_path / "ids.json")
    assert code == 0 and "No module differs by more" in said
    code, said = run("bisect", "--url", url, "--checkpoint", folder, "--megatron", MEGATRON)
    assert code == 0 and "No module differs by more" in said and "decoder.layers.0" in said
    code, said = run("bisect", "--url", url, "--checkpoint", folder, "--ids", file := folder / "config.json")
    assert code == 2 and f"--ids {file} wants a JSON list of at least two ids from 0 to {VOCAB - 1}" in said
    changed = tmp_path / "changed"
    model = tiny("llama", 0)
    model.config.rms_norm_eps = 1e-3
    model.save_pretrained(changed)
    code, said = run("bisect", "--url", url, "--checkpoint", changed, "--json")
    verdict = json.loads(said)
    assert code == 1 and verdict["jumps"][0]["module"] == "model.layers.0.input_layernorm"
    assert len(verdict["jumps"]) == 7 and verdict["explained"] > 0.9  # of each norm


def test_certificates(folders: dict[Family, Path], servers: dict[str, CpuServer], tmp_path: Path) -> None:
    """Of 48 tokens each, of which a server that prefills 64 at once cuts the second sequence."""
    url, file = servers["llama"].url, tmp_path / "zero.json"
    code, said = run("certify", "--url", url, "--update", folders["llama"], "--out", file)
    conditions = {one["condition"]: one for one in json.loads(file.read_text())["results"]}
    assert not any(one["not_run"] for name, one in conditions.items() if name != "batch"), said
    assert conditions["again"]["differs"] is None and conditions["update"]["differs"] is None
    assert code == int(any(one["differs"] is not None for one in conditions.values()))
    code, said = run("certify", "--url", url, "--update", folders["llama"], "--check", file)
    assert code == 0 and "All bits are those of the certificate." in said, said
    told = json.loads(file.read_text())
    told["results"][0]["tokens"][1][7] = "0" * 12
    file.write_text(json.dumps(told))
    code, said = run("certify", "--url", url, "--update", folders["llama"], "--check", file)
    assert code == 1 and "differs first at lm_head output; its logits at sequence 1, token 7" in said, said
    code, said = run("certify", "--url", servers["qwen3"].url, "--check", file)
    assert code == 2 and "the certificate is of weights" in said
