"""Digests of weights: which tensors differ from those that were sent before, as the server would round them."""

from __future__ import annotations

import pytest
import torch

from mismatch_plugin.rollout.weights import digests


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), ((1 << 20) + 3,), (2, 1 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_digest_is_of_the_bytes_and_sees_every_entry(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape).to(dtype)
    same = digests([("a", tensor), ("b", tensor.clone())], dtype)
    assert same["a"] == same["b"]
    flat = tensor.reshape(-1)
    for index in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
        other = tensor.clone()
        other.view(-1)[index] = 1
        assert digests([("a", other)], dtype)["a"] != same["a"]


def test_a_digest_is_of_what_the_server_gets() -> None:
    tensor, moved = torch.ones(4, 4), torch.ones(4, 4) + 1e-6
    view = torch.ones(4, 8)[:, ::2]
    for dtype, equal in ((torch.bfloat16, True), (None, True), (torch.float32, False)):
        found = digests([("a", tensor), ("b", moved), ("c", view)], dtype)
        assert (found["a"] == found["b"]) is equal and found["a"] == found["c"]
    swapped = digests([("a", torch.tensor([1.0, 2.0, 3.0, 4.0])), ("b", torch.tensor([3.0, 4.0, 1.0, 2.0]))], None)
    assert swapped["a"] != swapped["b"]
