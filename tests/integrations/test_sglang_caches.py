"""Caches as SGLang 0.5.23 allocates them, under this package's ops: what docs/sglang.md says of them."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.reference.common.kv_format import store_kv
from tests.ops.preprocess.compressor_engine import Engine, one_request

PAGE = 256  # tokens of a page, the only size that SGLang takes for this model
RINGS = {4: 8, 128: 128}  # rows of states: for each page of the window (ratio 4), for each request (ratio 128)


def test_window_pages_of_256_tokens_are_read_as_pages_of_64() -> None:
    rows, queries = torch.randn(300, layout.HEAD_DIM), torch.randn(3, 8, layout.HEAD_DIM).bfloat16()
    outputs = []
    for block in (PAGE, layout.WINDOW_BLOCK):
        stride = layout.FP8_DS_MLA.page_stride(block)
        used = layout.FP8_DS_MLA.page_bytes(block)
        pages = torch.full((layout.cdiv(PAGE + len(rows), block), stride), 0xFF, dtype=torch.uint8)[:, :used]
        store_kv(pages, "fp8_ds_mla", block, torch.arange(PAGE, PAGE + len(rows)), rows)
        slots = torch.arange(PAGE, PAGE + 3 * 64, dtype=torch.int32).view(3, 64)
        lens = torch.tensor([64, 17, 0], dtype=torch.int32)
        scale = layout.HEAD_DIM**-0.5
        outputs.append(torch.ops.dsv4.sparse_mla_decode(queries, pages, slots, lens, block, "fp8_ds_mla", scale)[0])
    assert layout.FP8_DS_MLA.page_stride(PAGE) == 149_760
    assert torch.equal(*outputs)


def _with_ring(ratio: int) -> Engine:
    """Return a compressor whose table repeats the pages of a ring: in each 256 tokens (ratio 4), or over all."""
    engine = Engine(ratio, max_len=384)
    pages = RINGS[ratio] // engine.state_block
    columns = torch.arange(engine.state_table.shape[1])
    rings = columns * engine.state_block // PAGE if ratio == layout.CSA_RATIO else torch.zeros_like(columns)
    engine.state_table[:] = rings * pages + columns % pages
    return engine


@pytest.mark.parametrize("ratio", RINGS)
def test_a_block_table_makes_a_ring_of_states_for_decode(ratio: int) -> None:
    engine = _with_ring(ratio)
    history = torch.randn(300, engine.width)
    for position in range(len(history)):
        engine.run(one_request(range(position, position + 1)), history[position : position + 1])
    engine.check(history)


@pytest.mark.parametrize("ratio", RINGS)
def test_a_step_longer_than_the_ring_overwrites_what_it_reads(ratio: int) -> None:
    """States are written before they are read, so a prompt needs as many rows as tokens."""
    engine = _with_ring(ratio)
    history = torch.randn(300, engine.width)
    engine.run(one_request(range(len(history))), history)
    with pytest.raises(AssertionError):
        engine.check(history)
