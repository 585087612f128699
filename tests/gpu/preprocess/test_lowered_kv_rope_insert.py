"""IR of `kv_rope_insert` on a GPU against the reference on the same GPU.

Inductor contracts multiplies and adds, so a rotated value next to a rounding boundary may be stored as its neighbour.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.backend import dsv4
from dsv4_compile.selection import decisions
from tests.gpu.preprocess.test_lowered_q_norm_rope import BLOCK, CONTRACTED_SHARE, inputs, slot_is_valid


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_lowered_op_equals_the_reference(fmt: str) -> None:
    def step(kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor) -> None:
        torch.ops.dsv4.kv_rope_insert(kv, cache, slots, positions, table, BLOCK, fmt)

    compiled = torch.compile(step, backend=dsv4, fullgraph=True, options={"dsv4.impl.kv_rope_insert": "ir"})
    with decisions.collect() as chosen, torch.inference_mode():
        for tokens in (7, 64, 513, 2048):
            expected, args = inputs(tokens, fmt, 1)[1:], inputs(tokens, fmt, 1)[1:]
            for tensor in (args[0], args[2], args[3]):
                torch._dynamo.mark_dynamic(tensor, 0)
            compiled(*args)
            step(*expected)
            ours, theirs = args[1].view(torch.uint8), expected[1].view(torch.uint8)
            written = int(slot_is_valid(args[2]).sum()) * layout.HEAD_DIM * args[1].element_size()
            assert theirs.any() and (ours != theirs).sum() <= 2 + CONTRACTED_SHARE * written
    assert {d.impl for d in chosen} == {"ir"}
