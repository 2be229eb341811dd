"""Planted faults are named and clean pairs are not. megatron-core stands for the server: it fuses as SGLang does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache
from typer.testing import CliRunner

from mismatch_plugin.bisect.certify import Run, Served, certify, check
from mismatch_plugin.bisect.command import drawn
from mismatch_plugin.bisect.engines import Engine, Trainer, from_megatron
from mismatch_plugin.bisect.verdict import bisect
from mismatch_plugin.cli import app
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from mismatch_plugin.sglang.modules import Recorder, describe, row_hashes, watched
from tests.bisect.plants import FAMILIES, FAULTS, IDS, MEGATRON_FAULTS, MOE, VOCAB, Family, tiny, trainer_of

PROMPTS = drawn(VOCAB, 2, 12)
WHEN = {"batch": lambda x: len(x) > 1, "chunked": lambda x: x.shape[1] == 8, "decode": lambda x: x.shape[1] == 1}
SPLIT = "from types import SimpleNamespace as S\nparts = S(num_query_groups=1, pipeline_model_parallel_size=2)\n"


def megatron(family: Family, dtype: torch.dtype = torch.float32) -> Trainer:
    return from_megatron("tests.bisect.plants:build", Path(family), dtype, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_named_and_explain_the_gap(family: Family) -> None:
    theirs = megatron(family).capture(IDS, torch.float32)
    for table in (FAULTS, MEGATRON_FAULTS):
        faults = [fault for fault in table.values() if family in fault.families]
        assert len(faults) == {"qwen3_moe": 12}.get(family, 11) - 2 * (table is MEGATRON_FAULTS)
        for fault in faults:
            trainer = trainer_of(tiny(family, 0)) if table is FAULTS else megatron(family)
            fault.plant(trainer.model)
            found = bisect(trainer, theirs, torch.float32)
            first = found.jumps[0]
            assert (first.module, first.which) == (fault.module, fault.which), fault
            assert fault.says in f"{first.what} {first.why}" and first.ratio > 10 * first.allowed, fault
            assert found.explained > 0.9 and found.gap > 0, fault
            assert len(found.jumps) == 1 or ".layers.0." in first.module, fault  # which is a fault of all layers
    with pytest.raises(InputError, match=r"\d+ of \d+ modules have other weights .* model\.embed_tokens among them"):
        bisect(trainer_of(tiny(family, 1)), theirs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_pairs_are_silent(family: Family, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 pairs: a fused engine, one whose vocabulary is padded, other orders of additions, another attention."""
    theirs, padded = megatron(family, dtype), megatron(family, dtype)
    head: Any = padded.model.output_layer
    head.weight = nn.Parameter(F.pad(head.weight, (0, 0, 0, 64 * (family in MOE))))
    eager = tiny(family, 0)
    eager.config._attn_implementation = "eager"
    captured = [theirs.capture(IDS, dtype), trainer_of(eager, dtype).capture(IDS, dtype)]
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: (x.double() @ w.double().T + (0 if b is None else b)).to(x))
    captured.append(trainer_of(tiny(family, 0), dtype).capture(IDS, dtype))
    monkeypatch.undo()
    found = [bisect(trainer_of(tiny(family, 0), dtype), server, dtype) for server in captured]
    found.append(bisect(padded, captured[0], dtype))
    for one in found:
        assert not one.jumps and not one.unpaired and one.watched > 45
        assert one.largest[0].ratio < one.largest[0].allowed / 2
    assert any(one.largest[0].ratio for one in found)


def test_other_experts_that_nearly_tie_are_no_fault_and_others_are() -> None:
    """Of two experts with the same router weights either may be chosen; the model computes something else then."""
    trainer = trainer_of(tiny("qwen3_moe", 0))
    gate: Any = trainer.model.get_submodule("model.layers.1.mlp.gate")
    gate.weight.data[5] = gate.weight.data[2]
    theirs, call = trainer.capture(IDS, torch.float32), gate.forward

    def exchanged(hidden: Tensor, other: int) -> Any:
        logits, shares, ids = call(hidden)
        return logits, shares, torch.where(ids == 2, other, torch.where(ids == other, 2, ids))

    gate.forward = lambda hidden: exchanged(hidden, 5)
    found = bisect(trainer, theirs, torch.float32)
    assert found.gap > 1e-3 and not found.jumps
    gate.forward = lambda hidden: exchanged(hidden, 3)
    first = bisect(trainer, theirs, torch.float32).jumps[0]
    assert (first.module, first.which) == ("model.layers.1.mlp.experts", "routing")
    gate.forward = lambda hidden: [value / 0 for value in call(hidden)[:2]] + [call(hidden)[2]]  # nothing is finite
    assert bisect(trainer, theirs, torch.float32).jumps[0].module == "model.layers.1.mlp.gate"


class Local(Served):
    """A transformers model in place of a server; of more than `chunk` tokens the last sequence is computed in parts."""

    def __init__(self, model: Any, chunk: int = 64) -> None:
        self.model, self.vocab, self._chunk, self._folder, self.name = model, VOCAB, chunk, "same", "local"
        weights = fingerprint(digests(model.named_parameters()))
        self._engine: Any = SimpleNamespace(update=lambda folder: None, facts=lambda: {"fingerprint": weights})

    def _runs(self, sequences: Sequence[list[int]], tokens: int = 0) -> list[Run]:
        length = len(sequences[0])
        if len(sequences) * length <= self._chunk:
            return self._computed(sequences, [length, *[1] * (tokens - 1)])
        return self._computed(sequences[:1], [length]) + self._computed(sequences[1:], [4, length - 4])

    def _computed(self, sequences: Sequence[list[int]], parts: list[int]) -> list[Run]:
        cache, ids, start, logits = DynamicCache(), torch.tensor([*sequences]), 0, torch.empty(0)
        hashes: list[dict[str, list[str]]] = [{} for _ in sequences]
        for size in parts:
            if start == ids.shape[1]:
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            recorder = Recorder()
            with torch.no_grad(), watched(self.model, size * len(ids), recorder):
                logits = self.model(ids[:, start : start + size], cache=cache).logits
            for (name, which), value in recorder.values().items():
                for own, rows in zip(hashes, value.split(size), strict=True):
                    own.setdefault(f"{name} {which}", []).extend(row_hashes(rows))
            start += size
        return [Run(row.tolist(), own, [(n, len(ids)) for n in parts]) for row, own in zip(ids, hashes, strict=True)]


def one_ulp(model: Any, name: str, when: Any = lambda rows: True) -> Any:
    """The last element of the first row of what the module gives is the next number."""
    module = model.get_submodule(name)
    call = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        rows = out[0] if isinstance(out, tuple) else out
        if when(rows):
            rows[..., 0, -1] = rows[..., 0, -1].nextafter(torch.tensor(torch.inf))
        return out

    module.forward = forward
    return model


def test_one_ulp_in_any_operation_is_placed() -> None:
    certificate = certify(Local(tiny("qwen3_moe", 0)), PROMPTS)
    names = [*describe(tiny("qwen3_moe", 0))][::3]
    assert len(names) > 10 and len(certificate.model_dump_json()) < 40_000
    for name in names:
        place = dict(check(certificate, Local(one_ulp(tiny("qwen3_moe", 0), name))))["alone"]
        assert not isinstance(place, str) and place.tap == f"{name} output"


def test_what_depends_on_how_it_is_computed_is_placed() -> None:
    for condition, when in WHEN.items():
        engine = Local(one_ulp(tiny("llama", 0), "model.embed_tokens", when), 16 if condition == "chunked" else 64)
        certificate = certify(engine, PROMPTS)
        differs = {one.condition: one.differs for one in certificate.results}
        place = differs[condition]
        assert place is not None and place.tap == "model.embed_tokens output" and not certificate.zero
        assert differs["again"] is None and differs["update"] is None


def test_the_command_certifies_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.json").write_text("{}")
    for seed, words, code, says in (
        (0, "--check zero.json", 2, "zero.json is no certificate of `mismatch-plugin certify`"),
        (0, "--tokens 12", 1, "chunked  not run: all of them are fewer tokens than the 64"),
        (0, "--check certificate.json", 0, "All bits are those of the certificate."),
        (1, "--check certificate.json", 2, "the certificate is of weights"),
    ):
        monkeypatch.setattr("mismatch_plugin.bisect.certify.Served", lambda *_, seed=seed: Local(tiny("llama", seed)))
        result = CliRunner().invoke(app, ["certify", "--url", "http://127.0.0.1:1", *words.split()])
        assert result.exit_code == code and says in result.output, result.output


def test_what_is_no_whole_megatron_model_is_refused(tmp_path: Path) -> None:
    for text, says in (
        ("def build(folder): raise ValueError('of the user')", "ValueError: of the user"),
        ("def build(folder): return {}", "returned dict, and no GPTModel"),
        (f"{SPLIT}def build(folder): return S(config=parts)", "pipeline parallelism of 2 spreads a module over ranks"),
    ):
        (tmp_path / "model.py").write_text(text)
        with pytest.raises(InputError, match=says):
            from_megatron(f"{tmp_path}/model.py:build", tmp_path, torch.float32, VOCAB)


def test_servers_that_cannot_be_watched_are_refused() -> None:
    engine: Any = Engine("http://127.0.0.1:1")
    with pytest.raises(InputError, match="does not answer"):
        engine.facts()
    for info, reply, says in (
        ({}, {}, "runs without this plugin"),
        ({"tp_size": 2}, {}, "tp_size 2: under tensor parallelism each rank holds a part"),
        ({"tp_size": 1}, {}, "the plugin there is too old, or off"),
        ({"tp_size": 1}, {"mismatch_taps": [{"error": "requests of others"}]}, "cannot be watched: requests of others"),
    ):
        server = {"internal_states": [{"mismatch_plugin": info}] if info else [], "message": "no such folder"}
        answers = {"/generate": [{"meta_info": reply}]}
        engine._ask = lambda method, path, body, answers=answers, server=server: answers.get(path, server)
        with pytest.raises(InputError, match=says):
            engine.facts()
    with pytest.raises(InputError, match="did not load x: no such folder"):
        engine.update("x")
