"""Digests against the formula in Python's integers, and what they do not depend on: order, shards, fusing, padding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_plugin.sglang import fingerprints
from mismatch_plugin.sglang.fingerprints import (
    Comparison,
    SentWeights,
    combined,
    digest,
    digests,
    fingerprint,
    place_of,
    read_tensors,
    served_dtypes,
    written,
)

WRAP = 1 << 64


def signed(value: int) -> int:
    """As 64 bits hold it."""
    value %= WRAP
    return value - WRAP if value >= WRAP // 2 else value


def plain(words: list[int]) -> int:
    """The formula at the top of the file, in integers without end."""
    total = 0
    for word in words:
        mixed = signed(word * -7046029254386353131)
        total += (mixed ^ (mixed >> 32)) * -4417276706812531889
    return total % WRAP


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool])
def test_the_digest_is_the_formula(dtype: torch.dtype):
    """So every bit of every element counts: h has an inverse."""
    draw = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    words = torch.randint(0, 2 if dtype == torch.bool else 256, (50, size), generator=draw, dtype=torch.uint8)
    bits = words.view(fingerprints._INTEGERS[size])
    assert int(digest(bits.view(dtype))) % WRAP == plain(bits.flatten().tolist())


def test_chunks_shards_order_fusing_and_zero_padding_change_nothing(monkeypatch: pytest.MonkeyPatch):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 24, generator=draw).bfloat16() for rows in (32, 8, 8))
    parts = sum(int(digest(part)) for part in (q, k, v)) % WRAP
    fused = torch.cat([q, k, v, torch.zeros(16, 24, dtype=torch.bfloat16)])
    assert int(digest(fused)) % WRAP == parts
    for view in (fused.t(), fused.t()[:, 5:].contiguous().t(), fused.flip(0)):
        whole = view if view.numel() == fused.numel() else torch.cat([fused[:5], view])
        assert int(digest(whole)) % WRAP == parts
    for dim in (0, 1):
        assert sum(int(digest(shard)) for shard in fused.chunk(4, dim)) % WRAP == parts
    monkeypatch.setitem(fingerprints._CHUNK, "cpu", 7)
    assert int(digest(fused)) % WRAP == parts
    assert int(digest(torch.zeros(3, 5))) == 0 and digests([]) == {}


def test_ranks_are_summed_and_copies_count_once():
    whole = torch.arange(24.0).reshape(4, 6)
    norm = torch.ones(6)
    ranks = [digests({"w": shard, "norm": norm}.items()) for shard in whole.chunk(2)]
    assert combined(ranks) == digests({"w": whole, "norm": norm}.items())
    two_copies = [ranks[0], ranks[1], ranks[0], ranks[1]]  # attention of data-parallel workers
    assert combined(two_copies) == combined(ranks)
    assert len(fingerprint(combined(ranks))) == 16
    assert read_tensors({"tensors": written(ranks[0])}) == ranks[0]
    with pytest.raises(ValueError, match="another form"):
        read_tensors({"tensors": {"w": "0"}})


ATTENTION, EXPERTS = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
EMBEDDING, OUT, QKV = "model.embed_tokens.weight", f"{ATTENTION}o_proj.weight", f"{ATTENTION}qkv_proj.weight"
SHAPES = {
    EMBEDDING: (16, 8),
    f"{ATTENTION}q_proj.weight": (8, 8),
    f"{ATTENTION}k_proj.weight": (4, 8),
    f"{ATTENTION}v_proj.weight": (4, 8),
    OUT: (8, 8),
    f"{EXPERTS}0.gate_proj.weight": (6, 8),
    f"{EXPERTS}0.up_proj.weight": (6, 8),
    f"{EXPERTS}0.down_proj.weight": (8, 6),
    "model.layers.0.input_layernorm.weight": (8,),
}
DRAW = torch.Generator().manual_seed(1)
STATE = {name: torch.randn(shape, generator=DRAW) for name, shape in SHAPES.items()}
NEW = {name: tensor + 1 for name, tensor in STATE.items()}
TIED = {**STATE, "lm_head.weight": STATE[EMBEDDING]}
A_LOG, A = "model.layers.0.mixer.A_log", "model.layers.0.mixer.A"  # −exp(A_log) is kept as A


def served(weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """As SGLang holds them: fused, and the vocabulary padded to 64."""
    of = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return {
        EMBEDDING: torch.cat([of[EMBEDDING], torch.zeros(48, 8, dtype=dtype)]),
        QKV: torch.cat([of[f"{ATTENTION}{x}_proj.weight"] for x in "qkv"]),
        OUT: of[OUT],
        f"{EXPERTS}w13_weight": torch.cat([of[f"{EXPERTS}0.{x}_proj.weight"] for x in ("gate", "up")])[None],
        f"{EXPERTS}w2_weight": of[f"{EXPERTS}0.down_proj.weight"][None],
        "model.layers.0.input_layernorm.weight": of["model.layers.0.input_layernorm.weight"],
    }


def told(tensors: dict[str, Tensor], **more: object) -> dict[str, object]:
    return {"tensors": written(digests(tensors.items())), **more}


def compared(weights: dict[str, Tensor], info: dict[str, object], rounded: bool = False) -> Comparison:
    found = SentWeights()
    found.add(weights.items(), served_dtypes(weights.items(), info) if rounded else None)
    return found.compare(info)


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}


IN_BFLOAT16 = told(served(STATE, torch.bfloat16), dtype="bfloat16")
REPEATED = {**served(STATE), QKV: torch.cat([served(STATE)[QKV], STATE[OUT]])}  # keys and values on two ranks
SWAPPED = {**NEW, OUT: NEW[f"{ATTENTION}q_proj.weight"]}
K_AND_V = {f"{ATTENTION}k_proj.weight": STATE[f"{ATTENTION}v_proj.weight"]}
K_AND_V |= {f"{ATTENTION}v_proj.weight": STATE[f"{ATTENTION}k_proj.weight"]}
LOG = torch.linspace(0.1, 0.9, 4)
OTHER_DTYPE = "6 tensors are served in another dtype than they were sent in, and not compared"
REPEATS = "1 tensors hold key and value heads that tensor parallelism repeats, and were not compared"
NO_PART = "1 names that were sent are no part of what serves: lm_head.weight"
COMPUTED = "1 tensors are loaded from other names, perhaps as other values, and were not compared"


@pytest.mark.parametrize(
    ("sent", "info", "differ", "problem", "note", "complete"),
    [
        (STATE, told(served(STATE)), [], "", "", True),
        (STATE, told(served(NEW)), [*served(NEW)], "6 of 6 tensors are not what was sent", "", False),
        (NEW, told({**served(NEW), QKV: served(STATE)[QKV]}), [QKV], f"1 of 6 tensors.*{QKV}", "", False),
        (SWAPPED, told(served(NEW)), [OUT], "1 of 6", "", False),
        ({OUT: STATE[OUT]}, told(served(STATE)), [], "", "", False),  # a part is not all that serves
        (
            {**NEW, "model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)},
            told({**served(NEW), QKV: served(STATE)[QKV]}),
            [QKV],
            "1 of 10 names that were sent belong to no tensor of the server and were skipped: model.layers.7.mlp.up",
            "",
            False,
        ),
        (STATE, IN_BFLOAT16, [], "", OTHER_DTYPE, False),  # digests of float32
        (STATE, told(REPEATED, kv_heads_repeated=True), [], "", REPEATS, False),
        (STATE, told(REPEATED), [QKV], "1 of 6", "", False),
        (TIED, told(served(STATE)), [], "", "", True),
        ({**STATE, "lm_head.weight": torch.ones(16, 8)}, told(served(STATE)), [], "", NO_PART, True),
        # A loader that renames: the whole fingerprint is what was sent.
        (renamed(STATE), told(served(STATE)), [], "", "", True),
        (renamed(TIED), told(served(STATE)), [], "", "", True),
        (renamed({**STATE, EMBEDDING: NEW[EMBEDDING]}), told(served(STATE)), [], "6 of 9 names", "", False),
        # What a loader computes is not compared.
        ({**STATE, A_LOG: LOG}, told({**served(STATE), A: -LOG.exp()}), [], "", COMPUTED, False),
        ({**STATE, A_LOG: -LOG.exp()}, told({**served(STATE), A: -LOG.exp()}), [], "", "", True),
        # The module says what fingerprints do not see, and what they do.
        (STATE, told(served({**STATE, **K_AND_V})), [], "", "", True),
        ({}, {"tensors": {}}, [], "", "the server could not take fingerprints: see its log.", False),
    ],
)
def test_what_serves_next_to_what_was_sent(
    sent: Any, info: Any, differ: list[str], problem: str, note: str, complete: bool
) -> None:
    found = compared(sent, info)
    assert (sorted(found.differ), found.complete) == (sorted(differ), complete)
    for said, sentences in ((problem, found.problems), (note, found.notes)):
        assert bool(sentences) == bool(said) and re.search(said, " ".join(sentences)), sentences


@pytest.mark.parametrize(("weights", "complete"), [(STATE, True), (TIED, True), (NEW, False)])
def test_what_is_sent_is_rounded_as_what_serves(weights: dict[str, Tensor], complete: bool) -> None:
    """Also a head that shares the embedding, and goes by no name there."""
    assert compared(weights, IN_BFLOAT16, rounded=True).complete == complete


SGLANG = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.layers.{}.input_layernorm.weight": "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight",
    "model.layers.{}.self_attn.qkv_proj.weight": "decoder.layers.{}.self_attention.linear_qkv.weight",
    "model.layers.{}.self_attn.qkv_proj.bias": "decoder.layers.{}.self_attention.linear_qkv.bias",
    "model.layers.{}.self_attn.q_norm.weight": "module.decoder.layers.{}.self_attention.q_layernorm.weight",
    "model.layers.{}.self_attn.o_proj.weight": "decoder.layers.{}.self_attention.linear_proj.weight",
    "model.layers.{}.post_attention_layernorm.weight": "decoder.layers.{}.pre_mlp_layernorm.weight",
    "model.layers.{}.mlp.gate.weight": "decoder.layers.{}.mlp.router.weight",
    "model.layers.{}.mlp.experts.w13_weight": "decoder.layers.{}.mlp.experts.linear_fc1.weight0",
    "model.layers.{}.mlp.experts.w2_weight": "decoder.layers.{}.mlp.experts.local_experts.0.linear_fc2.weight",
    "model.layers.{}.mlp.shared_expert.gate_up_proj.weight": "decoder.layers.{}.mlp.shared_experts.linear_fc1.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
"""A mixture of experts, as SGLang names and fuses it → as megatron-core and Transformer Engine do."""
HUGGING_FACE = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "experts.w13_weight": ("experts.0.gate_proj.weight", "experts.0.up_proj.weight"),
    "experts.w2_weight": ("experts.0.down_proj.weight",),
    "shared_expert.gate_up_proj": ("shared_expert.gate_proj", "shared_expert.up_proj"),
}


def mixture() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Three layers under the names of SGLang, megatron-core and Hugging Face."""
    draw = torch.Generator().manual_seed(2)
    ours: dict[str, Tensor] = {}
    cores: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, core in SGLANG.items():
        for layer in range(3) if "{}" in name else (0,):
            tensor = torch.randn(12, 4, generator=draw)
            ours[name.format(layer)] = cores[core.format(layer)] = tensor
            fused = next((part for part in HUGGING_FACE if part in name), "")
            parts = [name.replace(fused, part).format(layer) for part in HUGGING_FACE.get(fused, (fused,))]
            theirs |= dict(zip(parts, tensor.chunk(len(parts)), strict=True))
    return ours, cores, theirs


def test_one_fingerprint_under_the_names_of_each_library_however_split():
    ours, cores, theirs = mixture()
    expected = fingerprint(digests(ours.items()))
    assert fingerprint(digests(cores.items())) == fingerprint(digests(theirs.items())) == expected
    shards = [digests((name, tensor.chunk(2)[rank]) for name, tensor in ours.items()) for rank in (0, 1)]
    assert fingerprint(combined(shards)) == expected  # tensor parallel
    first = {name: tensor for name, tensor in ours.items() if "layers.2" not in name and "head" not in name}
    last = {name: tensor for name, tensor in ours.items() if name not in first}
    assert fingerprint(combined([digests(first.items()), digests(last.items())])) == expected  # pipeline stages
    assert place_of("model.visual.blocks.1.mlp.up_proj.weight") == place_of("visual.blocks.1.mlp.up_proj.weight")
    assert place_of("visual.blocks.1.mlp.up_proj.weight") != place_of("model.layers.1.mlp.up_proj.weight")


def test_two_tensors_that_change_places_change_the_fingerprint_under_all_names():
    """Two layers exchanged, as by a pipeline offset, two kinds within one layer, and each other pair."""
    for named in mixture():
        of = digests(named.items())
        whole = fingerprint(of)
        same_place = set[str]()
        for number, one in enumerate(names := [*of]):
            for other in names[number + 1 :]:
                if place_of(one) == place_of(other):
                    same_place |= {one, other}
                else:
                    assert fingerprint({**of, one: of[other], other: of[one]}) != whole, (one, other)
        assert all("q_proj" in n or "k_proj" in n or "v_proj" in n or "gate_p" in n or "up_p" in n for n in same_place)


def test_a_head_that_shares_the_embedding_counts_as_none():
    """Left out, sent under its own name, or held by another pipeline stage than the embedding."""
    ours, cores, _ = mixture()
    embedding = ours["model.embed_tokens.weight"]
    tied = {name: tensor for name, tensor in ours.items() if name != "lm_head.weight"}
    expected = fingerprint(digests(tied.items()))
    assert fingerprint(digests({**ours, "lm_head.weight": embedding}.items())) == expected
    assert fingerprint(digests({**cores, "output_layer.weight": embedding}.items())) == expected
    assert fingerprint(digests(ours.items())) != expected
