"""The kernel that combines all partial results at once, interpreted, against the one that takes them in turn."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.kernels.attention.common import NOT_FUSED, FusedParts, outputs_for
from dsv4_compile.kernels.attention.split_combine import Partials, combine_splits, warps_at_once
from dsv4_compile.testing import assert_close
from tests.support.bounds import checked

TOKENS, HEADS, DIM = 2, 2, layout.HEAD_DIM
OUTPUTS = ("outputs[0]", "outputs[1]", "outputs[2]", "p_out", "p_lse", "p_scale")
ROPE = torch.tensor([3, 70]), torch.randn(64, layout.ROPE_DIM, generator=torch.Generator().manual_seed(0))
FUSED = {
    "plain": NOT_FUSED,
    "rotated": FusedParts(*ROPE, 1e-6, inverse_rope=True),
    "quantised": FusedParts(*ROPE, 1e-6, True, n_groups=1, heads_per_group=HEADS, packed_scales=True),
}


def partial_results(splits: int, dtype: torch.dtype) -> Partials:
    """Return partial results: NaN where a split has no keys, as some of one head and all of one token do."""
    values, lse = torch.randn(TOKENS, splits, HEADS, DIM), 3 * torch.randn(TOKENS, splits, HEADS)
    lse[0, 2:, 1], lse[1, :, 0] = -torch.inf, -torch.inf
    values[lse == -torch.inf] = torch.nan
    unit = torch.exp2(torch.randint(-9, 9, (TOKENS, splits, HEADS, 2)).float())
    return Partials(values.to(dtype), lse, unit if dtype is torch.float16 else None)


@pytest.mark.interpreted
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("splits", "dtype", "warps"), [(3, torch.float16, 4), (17, torch.float32, 8), (33, torch.float16, 16)]
)
def test_all_splits_at_once_are_those_in_turn(
    splits: int, dtype: torch.dtype, warps: int, fused: str, sink: bool
) -> None:
    partials, logits = partial_results(splits, dtype), torch.randn(HEADS) if sink else None
    both = [outputs_for(torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16), FUSED[fused]) for _ in range(2)]
    for into, at_once in zip(both, (0, warps), strict=True):
        for first in range(TOKENS):
            of_token = Partials(*(None if x is None else x[first : first + 1] for x in partials))
            with checked(OUTPUTS) as launched:
                combine_splits(into, of_token, logits, FUSED[fused], torch.bfloat16, (first, first + 1), False, at_once)
            assert launched == ["combine_at_once_kernel" if at_once else "combine_splits_kernel"]
    want, got = both
    assert_close(got.out.float(), want.out.float(), "attention_bfloat16", label="out")
    if want.lse is not None and got.lse is not None:
        assert_close(got.lse, want.lse, "lse", label="lse")
        assert got.lse[1, 0] == torch.inf and (got.out[1, 0] == 0).all()
    else:
        assert want.scale is not None and got.scale is not None and torch.equal(got.scale, want.scale)


def test_rows_of_17_to_72_splits_are_combined_at_once() -> None:
    warps = {splits: warps_at_once(splits) for splits in (1, 16, 17, 65, 72, 73, 130)}
    assert warps == {1: 0, 16: 0, 17: 8, 65: 8, 72: 8, 73: 0, 130: 0}
