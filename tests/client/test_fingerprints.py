"""Digests against the formula in Python's integers, and what they do not depend on: order, shards, fusing, padding."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mismatch_plugin.sglang import fingerprints
from mismatch_plugin.sglang.fingerprints import (
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


@given(st.lists(st.floats(width=32), max_size=40))
def test_the_digest_is_the_formula(values: list[float]):
    tensor = torch.tensor(values, dtype=torch.float32)
    words = [struct.unpack("i", struct.pack("f", value))[0] for value in tensor.tolist()]
    if not tensor.isnan().any():  # Python does not keep a NaN's bits
        assert int(digest(tensor)) % WRAP == plain(words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool])
def test_every_bit_of_every_element_counts(dtype: torch.dtype):
    tensor = (torch.arange(-40, 40).reshape(8, 10) * 3).to(dtype)
    bits = tensor.clone().view(fingerprints._INTEGERS[tensor.element_size()])
    whole = int(digest(tensor))
    for position in (0, 37, 79):
        for bit in range(1 if dtype == torch.bool else 8 * tensor.element_size()):
            changed = bits.clone()
            size = 8 * tensor.element_size()
            changed.view(-1)[position] ^= (1 << bit) - (1 << size if bit == size - 1 else 0)
            assert int(digest(changed.view(dtype))) != whole


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


def state() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.experts.0.gate_proj.weight": (6, 8),
        f"{layer}mlp.experts.0.up_proj.weight": (6, 8),
        f"{layer}mlp.experts.0.down_proj.weight": (8, 6),
        f"{layer}input_layernorm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def served(weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """As SGLang holds them."""
    layer = "model.layers.0."
    of = {name: tensor.to(dtype) for name, tensor in weights.items()}
    experts = f"{layer}mlp.experts."
    return {
        "model.embed_tokens.weight": torch.cat(
            [of["model.embed_tokens.weight"], torch.zeros(48, 8, dtype=dtype)]  # a vocabulary padded to 64
        ),
        f"{layer}self_attn.qkv_proj.weight": torch.cat([of[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"]),
        f"{layer}self_attn.o_proj.weight": of[f"{layer}self_attn.o_proj.weight"],
        f"{experts}w13_weight": torch.stack(
            [torch.cat([of[f"{experts}0.gate_proj.weight"], of[f"{experts}0.up_proj.weight"]])]
        ),
        f"{experts}w2_weight": torch.stack([of[f"{experts}0.down_proj.weight"]]),
        f"{layer}input_layernorm.weight": of[f"{layer}input_layernorm.weight"],
    }


def told(tensors: dict[str, Tensor], **more: object) -> dict[str, object]:
    return {"tensors": written(digests(tensors.items())), **more}


def sent(weights: dict[str, Tensor], info: dict[str, object] | None = None) -> SentWeights:
    found = SentWeights()
    found.add(weights.items(), None if info is None else served_dtypes(weights.items(), info))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_what_serves(dtype: torch.dtype):
    info = told(served(state(), dtype))
    found = sent(state(), info).compare(info)
    assert (found.compared, found.problems, found.notes, found.complete) == (6, [], [], True)


def test_a_tensor_that_did_not_arrive_and_a_name_that_is_not_there_are_named():
    new = {name: tensor + 1 for name, tensor in state().items()}
    held = {
        **served(new),
        "model.layers.0.self_attn.qkv_proj.weight": served(state())["model.layers.0.self_attn.qkv_proj.weight"],
    }
    found = sent({**new, "model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}).compare(told(held))
    assert found.problems == [
        "1 of 6 tensors are not what was sent: model.layers.0.self_attn.qkv_proj.weight.",
        "1 of 10 names that were sent belong to no tensor of the server and were skipped: "
        "model.layers.7.mlp.up_proj.weight.",
    ]
    swapped = {**new, "model.layers.0.self_attn.o_proj.weight": new["model.layers.0.self_attn.q_proj.weight"]}
    assert sent(swapped).compare(told(served(new))).differ == ["model.layers.0.self_attn.o_proj.weight"]


def test_what_cannot_be_compared_is_said_and_is_no_fault():
    info = told(served(state(), torch.bfloat16))
    found = sent(state()).compare(info)  # digests of float32
    assert found.compared == 0 and not found.problems
    assert found.notes[0].startswith("6 tensors are served in another dtype")
    assert not found.complete
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    held = served(state())
    held[qkv] = torch.cat([held[qkv], held[qkv][8:]])  # keys and values on two ranks
    repeated = sent(state()).compare(told(held, kv_heads_repeated=True))
    assert repeated.compared == 5 and "heads that tensor parallelism repeats" in repeated.notes[0]
    assert not repeated.complete and sent(state()).compare(told(held)).differ == [qkv]
    tied = sent({**state(), "lm_head.weight": state()["model.embed_tokens.weight"]}).compare(told(served(state())))
    assert not tied.problems


def test_a_head_that_shares_the_embedding_is_rounded_as_what_serves():
    info = told(served(state(), torch.bfloat16), dtype="bfloat16")
    weights = {**state(), "lm_head.weight": state()["model.embed_tokens.weight"]}
    found = sent(weights, info).compare(info)
    assert not found.problems and found.complete
    other = {**weights, "lm_head.weight": torch.ones(16, 8)}
    assert sent(other, info).compare(info).unknown == []  # not part of what serves, all of which is what was sent
    assert "1 names that were sent are no part of what serves" in sent(other, info).compare(info).notes[0]


def test_other_names_for_the_same_weights():
    """A loader that renames (`model.` and `model.language_model.`): the whole fingerprint is what was sent."""
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state().items()}
    found = sent(renamed).compare(told(served(state())))
    assert not found.problems and found.complete
    tied = {**renamed, "lm_head.weight": state()["model.embed_tokens.weight"]}
    assert sent(tied).compare(told(served(state()))).complete
    name = next(iter(renamed))
    found = sent({**renamed, name: renamed[name] + 1}).compare(told(served(state())))
    assert found.problems and not found.complete


def test_what_a_loader_computes_is_not_compared():
    """−exp(A_log) is kept as A."""
    log = torch.rand(4)
    held = {**served(state()), "model.layers.0.mixer.A": -log.exp()}
    found = sent({**state(), "model.layers.0.mixer.A_log": log}).compare(told(held))
    assert not found.problems and not found.complete and "from other names" in found.notes[0]
    same = sent({**state(), "model.layers.0.mixer.A_log": -log.exp()}).compare(told(held))
    assert same.complete
    other = {name: tensor + 1 for name, tensor in state().items()}
    assert sent({**other, "model.layers.0.mixer.A_log": log}).compare(told(held)).differ


def test_a_part_that_was_sent_is_not_all_that_serves():
    name = "model.layers.0.self_attn.o_proj.weight"
    found = sent({name: state()[name]}).compare(told(served(state())))
    assert (found.compared, found.problems, found.complete) == (1, [], False)


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


def test_what_fingerprints_do_not_see():
    """The module says so: elements that change places within a tensor that serves."""
    k, v = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight")
    weights = state()
    swapped = served({**weights, k: weights[v], v: weights[k]})
    assert sent(weights).compare(told(swapped)).complete
    o, embedding = "model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"
    moved = {**weights, o: weights[embedding][:8], embedding: torch.cat([weights[o], weights[embedding][8:]])}
    assert {o, embedding} == {*sent(weights).compare(told(served(moved))).differ}
