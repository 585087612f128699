"""`engram_embed`: rows and their scales side by side, and rows outside the table."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

embed = torch.ops.dsv4.engram_embed


def test_each_row_has_a_scale_for_32_channels() -> None:
    rows, table, scale = op_samples("engram_embed")[0]
    result = embed(rows, table, scale).view(len(rows), 6, 64)
    for token, chosen in enumerate(rows.tolist()):
        for place, row in enumerate(chosen):
            if 0 <= row < 20:
                factors = torch.exp2(scale[row].double() - 127).repeat_interleave(32)
                assert torch.equal(result[token, place].double(), table[row].double() * factors)
            else:
                assert result[token, place].abs().max() == 0


def test_rows_that_are_not_read_may_be_nan() -> None:
    table = torch.full((4, 8), torch.nan)
    table[2] = 3.0
    assert torch.equal(embed(torch.tensor([[2, 2, -1]]), table), torch.tensor([[3.0] * 16 + [0.0] * 8]))


def test_op_keeps_its_promises() -> None:
    rows, table, scale = op_samples("engram_embed")[0]
    check_op(OPS["engram_embed"], [*op_samples("engram_embed"), (rows, table[:0], scale[:0]), (rows[:1], table, scale)])


def test_wrong_arguments_raise() -> None:
    rows, table, scale = op_samples("engram_embed")[0]
    with pytest.raises(InputError, match="without scale"):
        embed(rows, table)
    with pytest.raises(InputError, match="scale is"):
        embed(rows, table, scale[:, :1])
