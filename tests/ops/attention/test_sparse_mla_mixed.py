"""`sparse_mla_mixed` against attention of float64 over the decoded rows, with sinks, padding and NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.attention.sparse_mla_mixed import MixedArguments
from dsv4_compile.reference.common.row_format import load_rows, store_rows
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples

attend = torch.ops.dsv4.sparse_mla_mixed


def keys_of(cache: Tensor | None, fmt: str, size: int, slots: Tensor | None, channels: int) -> list[Tensor]:
    if cache is None or slots is None:
        return []
    return [load_rows(cache, fmt, size, slot, channels).double() for slot in slots if 0 <= slot < cache.shape[0] * size]


@pytest.mark.parametrize("number", range(3))
def test_one_softmax_over_both_caches(number: int) -> None:
    a = MixedArguments(*op_samples("sparse_mla_mixed")[number])
    result = attend(*a)
    for token in range(a.q.shape[0]):
        channels, entry_slots = a.q.shape[2], a.entry_slots
        rows = keys_of(a.window, a.window_format, a.window_block_size, a.window_slots[token], channels)
        entries = None if entry_slots is None else entry_slots[token]
        rows += keys_of(a.entries, a.entry_format, a.entry_block_size, entries, channels)
        if not rows:
            assert result[token].abs().max() == 0
            continue
        keys = torch.stack(rows)
        scores = a.q[token].double() @ keys.t() * a.scale
        weights = torch.softmax(torch.cat((scores, a.sink.double()[:, None]), 1), 1)[:, :-1]
        rtol, atol = (2.0**-8, 1e-4) if a.q.dtype is torch.bfloat16 else (1e-4, 1e-5)
        torch.testing.assert_close(result[token].double(), weights @ keys, rtol=rtol, atol=atol)


def test_rows_that_no_slot_names_may_be_nan_and_all_padding_gives_zeros() -> None:
    """At ratio 1 a token sees itself twice, in the window and as an entry: both rows count."""
    q, sink = torch.randn(2, 2, 16), torch.full((2,), -torch.inf)
    window, entries = torch.full((2, 4, 16), torch.nan), torch.full((2, 4, 16), torch.nan)
    window[1, 1], entries[0, 2] = torch.randn(2, 16)
    slots, entry_slots = torch.tensor([[5, -1], [-1, -1]]), torch.tensor([[2, 8], [-1, 9]])
    result = attend(q, window, slots, entries, entry_slots, "plain", 4, "plain", 4, 0.25, sink)
    both = torch.stack((window[1, 1], entries[0, 2])).double()
    want = torch.softmax(q[0].double() @ both.t() * 0.25, 1) @ both
    torch.testing.assert_close(result[0].double(), want, rtol=1e-4, atol=1e-5)
    assert result[1].abs().max() == 0


@pytest.mark.parametrize(("window", "entry"), [("mxfp8", "nvfp4"), ("nvfp4", "mxfp8")])
def test_bytes_and_plain_rows_on_their_grids_give_the_same_bits(window: str, entry: str) -> None:
    a = MixedArguments(*op_samples("sparse_mla_mixed")[1])
    caches = []
    for fmt in (window, entry):
        x, slots = torch.randn(32, 32), torch.arange(32)
        packed, plain = layout.allocate_cache(fmt, 4, 8, 32), torch.zeros(4, 8, 32)
        store_rows(packed, fmt, 8, slots, x)
        store_rows(plain, "plain", 8, slots, x, grid=fmt)
        caches.append((packed, plain))
    (packed, plain), (packed_entries, plain_entries) = caches
    slots, entry_slots = torch.randint(-1, 33, (2, a.q.shape[0], 6))
    got = attend(a.q, packed, slots, packed_entries, entry_slots, window, 8, entry, 8, a.scale, a.sink)
    want = attend(a.q, plain, slots, plain_entries, entry_slots, "plain", 8, "plain", 8, a.scale, a.sink)
    assert_bitwise(got, want)


def test_op_keeps_its_promises() -> None:
    check_op(OPS["sparse_mla_mixed"], op_samples("sparse_mla_mixed")[1:])


def test_wrong_arguments_raise() -> None:
    a = MixedArguments(*op_samples("sparse_mla_mixed")[0])
    with pytest.raises(InputError, match="come together"):
        attend(*a._replace(entry_slots=None))
    with pytest.raises(InputError, match="window in 'mxfp6'"):
        attend(*a._replace(window_format="mxfp6"))
    with pytest.raises(InputError, match="each head"):
        attend(*a._replace(sink=a.sink[:1]))
