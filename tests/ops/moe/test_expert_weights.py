"""The interleaved order of MXFP4 weights: which nibble is which element, and back bit by bit."""

from __future__ import annotations

import torch

from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.moe import expert_weights
from dsv4_compile.reference.moe.expert_weights import checkpoint_order, deinterleave_, interleave_, interleaved_order
from dsv4_compile.testing import assert_bitwise
from tests.kernels.moe.problems import experts


def nibble(packed: torch.Tensor, index: int) -> int:
    byte = int(packed[index // 2])
    return byte >> 4 if index % 2 else byte & 15


def test_a_word_holds_what_a_thread_multiplies() -> None:
    packed = torch.randint(0, 256, (32,), dtype=torch.uint8)
    moved = interleaved_order(packed)
    for group in range(2):
        for k in range(32):
            c, b, t, p = k >> 4 & 1, k >> 3 & 1, k >> 1 & 3, k & 1
            assert nibble(moved, 32 * group + 8 * t + 4 * p + 2 * b + c) == nibble(packed, 32 * group + k)
    assert_bitwise(checkpoint_order(moved), packed)


def test_weights_come_back_bit_by_bit_in_the_same_memory(monkeypatch) -> None:
    call = experts(3, kind="mxfp4", hidden=256)
    tensors = [call.w13, call.w13_scale, call.w2, call.w2_scale]
    before, addresses = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    want = OPS["moe_experts"](*call)
    monkeypatch.setattr(expert_weights, "_CHUNK", 1000)
    interleave_(call.w13, call.w13_scale)
    interleave_(call.w2, call.w2_scale)
    assert not any(torch.equal(*pair) for pair in zip(tensors[:3:2], before[:3:2], strict=True))
    assert_bitwise(OPS["moe_experts"](*call._replace(interleaved=True)), want)
    deinterleave_(call.w13, call.w13_scale)
    deinterleave_(call.w2, call.w2_scale)
    for now, then in zip(tensors, before, strict=True):
        assert_bitwise(now, then)
    assert [x.data_ptr() for x in tensors] == addresses
