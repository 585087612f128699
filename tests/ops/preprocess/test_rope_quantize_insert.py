"""`rope_quantize_insert`: what a row of each format holds, and which bytes of a cache it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.rope import apply_rope
from dsv4_compile.reference.common.row_format import load_rows, round_to_grid
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples

insert = torch.ops.dsv4.rope_quantize_insert
SAMPLES = range(len(op_samples("rope_quantize_insert")))


@pytest.mark.parametrize("number", SAMPLES)
def test_stored_rows_are_rotated_and_on_the_grid_and_others_stay(number: int) -> None:
    x, cache, slots, positions, table, block_size, fmt, grid = op_samples("rope_quantize_insert")[number]
    before, everything = cache.clone(), torch.arange(4 * block_size)
    insert(x, cache, slots, positions, table, block_size, fmt, grid)
    rotated = apply_rope(x, positions, table).to(x.dtype).float()
    got = load_rows(cache, fmt, block_size, everything, x.shape[1])
    old = load_rows(before, fmt, block_size, everything, x.shape[1])
    written = {int(slot): row for row, slot in enumerate(slots) if 0 <= slot < 4 * block_size}
    for slot in range(4 * block_size):
        if slot not in written:
            assert_bitwise(got[slot], old[slot])
        elif fmt != "fp8_ds_mla":
            assert_bitwise(got[slot], round_to_grid(rotated[written[slot]], grid or fmt))
        else:
            torch.testing.assert_close(got[slot], rotated[written[slot]], rtol=0.07, atol=0.02)


@pytest.mark.parametrize("fmt", layout.GRIDS)
def test_plain_rows_hold_what_bytes_decode_to(fmt: str) -> None:
    """So a cache of bytes and one of bfloat16 or float32 rows on a grid give the same model."""
    x, _, slots, positions, table, block_size, *_ = op_samples("rope_quantize_insert")[0]
    cache = layout.allocate_cache(fmt, 4, block_size, x.shape[1])
    rows = torch.zeros(4, block_size, x.shape[1], dtype=torch.bfloat16)
    insert(x, cache, slots, positions, table, block_size, fmt)
    insert(x, rows, slots, positions, table, block_size, "plain", fmt)
    assert_bitwise(
        load_rows(cache, fmt, block_size, slots, 128),
        load_rows(rows, "plain", block_size, slots, 128),
    )


def test_op_keeps_its_promises() -> None:
    check_op(OPS["rope_quantize_insert"], op_samples("rope_quantize_insert")[1:])
    x, cache, slots, *rest = op_samples("rope_quantize_insert")[0]
    nowhere: list[Any] = [(x, cache, torch.full_like(slots, -1), *rest), (x, cache[:0], slots, *rest)]
    check_op(OPS["rope_quantize_insert"], nowhere, utilities=False)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(6, "mxfp6", "E202"), (7, "nvfp4", "plain rows hold"), (5, 16, "E203"), (1, torch.zeros(4, 1056), "E203")],
)
def test_wrong_arguments_raise(place: int, value: Any, message: str) -> None:
    args = list(op_samples("rope_quantize_insert")[0])
    args[place] = value
    with pytest.raises(InputError, match=message):
        insert(*args)
