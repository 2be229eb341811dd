"""Certificates: two engines of the same make agree to the bit, and one ulp anywhere is found and placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mismatch_plugin.bisect.certify import Certificate, InProcess, certify, check
from mismatch_plugin.bisect.command import drawn
from mismatch_plugin.cli import app
from mismatch_plugin.data.read import InputError
from tests.bisect.plants import VOCAB, tiny, trainer_of

PROMPTS = drawn(VOCAB, 2, 12)
OPERATIONS = (
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.0.self_attn.q_norm",
    "model.layers.0.self_attn.v_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.post_attention_layernorm",
    "model.layers.1.mlp.gate",
    "model.layers.2.mlp.experts",
    "model.norm",
    "lm_head",
)


def engine(model: Any = None) -> InProcess:
    return InProcess(trainer_of(model or tiny("qwen3_moe", 0)), torch.float32)


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return certify(engine(), PROMPTS)


def one_ulp(model: Any, name: str, when: Any = lambda out: True) -> Any:
    """The last element of the first row of what the module gives is the next number."""
    module = model.get_submodule(name)
    call = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        rows = out[0] if isinstance(out, tuple) else out
        if when(rows):
            last = rows.reshape(-1)[rows.shape[-1] - 1]
            rows.view(-1)[rows.shape[-1] - 1] = torch.nextafter(last, torch.tensor(torch.inf))
        return out

    module.forward = forward
    return model


def test_the_same_engine_gives_the_same_bits(certificate: Certificate) -> None:
    assert check(certificate, engine()) == []
    again = next(one for one in certificate.results if one.condition == "again")
    assert again.differs is None and len(again.tokens) == 2 and len(again.tokens[0]) == 12
    assert [one.condition for one in certificate.results if one.not_run] == ["update"]
    assert len(certificate.model_dump_json()) < 40_000


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_ulp_in_one_operation_is_placed(certificate: Certificate, name: str) -> None:
    found = dict(check(certificate, engine(one_ulp(tiny("qwen3_moe", 0), name))))
    place = found["alone"]
    assert not isinstance(place, str) and place.tap == f"{name} output"


def test_what_depends_on_the_batch_is_placed() -> None:
    """Two sequences in one batch, and a prompt's second part; of the first operation: others may differ."""
    name = "model.embed_tokens"
    for condition, when in (("batch", lambda out: len(out) > 1), ("chunked", lambda out: out.shape[1] == 8)):
        model = one_ulp(tiny("llama", 0), name, when)
        results = {one.condition: one for one in certify(engine(model), PROMPTS).results}
        differs = results[condition].differs
        assert differs is not None and differs.tap == f"{name} output"
        assert (differs.sequence, differs.token) == (0, 0 if condition == "batch" else 4)
        assert results["again"].differs is None and not certify(engine(model), PROMPTS).zero


def test_decoding_is_compared_with_the_prefill_of_its_tokens() -> None:
    def when(out: Tensor) -> bool:
        return out.shape[1] == 1

    name = "model.embed_tokens"
    results = {one.condition: one for one in certify(engine(one_ulp(tiny("llama", 0), name, when)), PROMPTS).results}
    decode = results["decode"]
    assert decode.differs is not None and (decode.differs.tap, decode.differs.token) == (f"{name} output", 6)
    assert [ids[:6] for ids in decode.ids] == [ids[:6] for ids in PROMPTS] and len(decode.ids[0]) == 11


def test_other_weights_and_other_ids_are_refused(certificate: Certificate) -> None:
    with pytest.raises(InputError, match="the certificate is of weights"):
        check(certificate, engine(tiny("qwen3_moe", 1)))
    with pytest.raises(InputError, match="ids from 0 to 255"):
        check(certificate.model_copy(update={"prompts": [[1, VOCAB]]}), engine())


def test_command(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "zero.json"
    tiny("llama", 0).save_pretrained(model)

    def run(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["certify", *map(str, words)])
        return result.exit_code, result.output

    code, said = run("--checkpoint", model, "--out", file, "--tokens", 12)
    assert "again    equal to the last bit" in said and file.is_file() and code in (0, 1)
    assert run("--checkpoint", model, "--check", file) == (0, "All bits are those of the certificate.\n")
    other = run("--checkpoint", model, "--check", file, "--dtype", "bfloat16")
    assert other[0] == 2 and "the certificate is of weights" in other[1]
    assert run("--out", file)[0] == 2 and run("--url", "http://127.0.0.1:1", "--checkpoint", model)[0] == 2
    file.write_text("{}")
    code, said = run("--checkpoint", model, "--check", file)
    assert code == 2 and "is no certificate of `mismatch-plugin certify`" in said
