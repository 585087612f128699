"""The Triton decode kernel in the bounds-checking interpreter, against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_decode as launcher
from dsv4_compile.kernels.attention import sparse_mla_decode_triton as kernel
from dsv4_compile.kernels.attention.common import decode_call, operand_dtype
from dsv4_compile.kernels.attention.sparse_mla_decode_triton import Tiles
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import assert_bitwise, assert_close, padded, poisoned_empty, strided
from tests.kernels.handed_over import handed_over
from tests.ops.attention.test_sparse_mla_decode import one_key, sample
from tests.support.bounds import checked

interpreted = pytest.mark.interpreted
INF, NAN = math.inf, math.nan
OUTPUTS = ("outputs[0]", "outputs[1]", "p_out", "p_lse")
BF16: dict[str, Any] = {"dim": 512, "dtype": torch.bfloat16}
TILES = [Tiles(16, 16, 4), Tiles(16, 32, 4, prefetch=True), Tiles(16, 16, 4, keys_first=True, prefetch=True)]
FEW_KEYS = "attention_few_keys"


def launch(args: tuple[Any, ...], tiles: Tiles | None = None, splits: int = 0) -> tuple[Tensor, Tensor]:
    """Run the kernel on the op's arguments with these tiles and splits, every access checked, over poisoned memory."""
    with checked(OUTPUTS) as launched, poisoned_empty():
        call = decode_call(DecodeArguments(*args))
        result = kernel.launch(call, gpu_of(call.q.device), splits, tiles=tiles)
    assert launched == ["sparse_mla_decode_kernel", *["combine_splits_kernel"] * (splits > 1)]
    return result


def assert_same(args: tuple[Any, ...], tiles: Tiles | None = None, splits: int = 1) -> None:
    """Check that the kernel agrees with the reference as well as its operands' dtype allows."""
    out, lse = launch(args, tiles, splits)
    want, want_lse = sparse_mla_decode(*args)
    assert out.dtype is want.dtype and lse.dtype is want_lse.dtype
    exact = operand_dtype(args[0], args[1], args[5]) is torch.float32
    assert_close(out, want, "attention_float32" if out.dtype is torch.float32 and exact else FEW_KEYS, label="out")
    assert_close(lse, want_lse, "lse", label="lse")


@interpreted
@pytest.mark.parametrize(
    ("tiles", "splits"),
    [(TILES[0], 1), (TILES[1], 3), (TILES[2], 1), (TILES[2], 3)],
    ids=["heads_first-1", "prefetch-3", "keys_first-1", "keys_first-3"],
)
@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_every_format_tiling_and_split_gives_the_references_result(fmt: str, tiles: Tiles, splits: int) -> None:
    assert_same(sample(3, 20, window=45, extra=37, fmt=fmt, **BF16), tiles, splits)


@interpreted
@pytest.mark.parametrize("tiles", TILES, ids=["heads_first", "prefetch", "keys_first"])
@pytest.mark.parametrize("fmt", ["plain", "fp8"])
def test_float32_stays_float32(fmt: str, tiles: Tiles) -> None:
    assert_same(sample(5, 3, window=40, extra=20, fmt=fmt), tiles, 2)


@interpreted
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 100])
def test_any_number_of_heads(heads: int) -> None:
    assert_same(sample(1, heads, window=20, extra=3, fmt="fp8_ds_mla", **BF16))


@interpreted
@pytest.mark.parametrize("dim", [4, 48, 64, 128])
def test_any_number_of_dims(dim: int) -> None:
    assert_same(sample(3, 2, dim=dim), splits=2)


@interpreted
def test_one_cache_without_a_sink() -> None:
    assert_same(sample(4, window=33, extra=None, sink=False), splits=2)
    assert_same(sample(4, window=33, extra=0, sink=False))


@interpreted
@pytest.mark.parametrize("fmt", ["plain", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float32])
def test_queries_of_every_dtype(fmt: str, dtype: torch.dtype) -> None:
    q, *rest = sample(3, fmt=fmt, **BF16)
    assert_same((q.to(dtype), *rest))


@interpreted
def test_float16_keys() -> None:
    assert_same(sample(3, dtype=torch.float16))


@interpreted
def test_wide_indices_and_lengths_and_longer_buffers() -> None:
    args = list(sample(4, window=20))
    want = launch(tuple(args), splits=2)
    for i in (2, 3, 9, 10):
        args[i] = torch.cat((args[i].long(), torch.full_like(args[i], 2**62, dtype=torch.int64)))
    # A large index must not come back into range when it is narrowed.
    args[2][:4] += torch.where((args[2][:4] < 0) | (args[2][:4] >= 192), 2**32, 0)
    for got, expected in zip(launch(tuple(args), splits=2), want, strict=True):
        assert_bitwise(got, expected)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("fmt", ["plain", "fp8_ds_mla"])
def test_strides_do_not_matter(fmt: str, spread: Any) -> None:
    args = list(sample(3, window=20, fmt=fmt, **(BF16 if fmt == "fp8_ds_mla" else {})))
    want = launch(tuple(args), splits=2)
    for i in (0, 2, 3, 7, 9, 10):
        args[i] = spread(args[i])
    for i in (1, 8):
        args[i] = spread(args[i]) if fmt == "plain" else padded(args[i])  # the bytes of a page are contiguous
    for got, expected in zip(launch(tuple(args), splits=2), want, strict=True):
        assert_bitwise(got, expected)


@interpreted
@pytest.mark.parametrize(
    ("empty", "sink"),
    [
        *(("length 0", sink) for sink in (None, -INF, 0.0, INF)),
        ("index -1", None),
        ("index -1", INF),
        ("index past the cache", 0.0),
        ("no columns", -INF),
        ("no columns", None),
        ("no pages", INF),
    ],
)
def test_nothing_to_attend_gives_zero_and_infinite_lse(sink: float | None, empty: str) -> None:
    q, cache, indices, lens, block, fmt, scale, logit = one_key(sink, value=NAN)
    if empty.startswith("index"):
        indices = torch.full_like(indices, -1 if empty == "index -1" else 2)
    elif empty == "length 0":
        lens = torch.zeros_like(lens)
    else:
        indices, cache = (indices[:, :0], cache) if empty == "no columns" else (indices, cache[:0])
    for splits in (1, 2):
        args = torch.full_like(q, NAN), cache, indices, lens, block, fmt, scale, logit, None, None, None, 0, None
        out, lse = launch(args, splits=splits)
        assert_bitwise(out, torch.zeros(1, 1, 4))
        assert_bitwise(lse, torch.full((1, 1), INF))


@interpreted
@pytest.mark.parametrize(("sink", "kept"), [(None, 1.0), (-INF, 1.0), (0.0, 0.5), (math.log(3), 0.25), (INF, 0.0)])
def test_the_sink_scales_the_output_and_leaves_lse_unchanged(sink: float | None, kept: float) -> None:
    for splits in (1, 2):
        out, lse = launch((*one_key(sink), None, None, None, 0, None), splits=splits)
        assert_close(out, torch.full((1, 1, 4), 2.0 * kept), "attention_float32")
        assert lse.item() == 0.0


@interpreted
def test_a_split_without_keys_has_no_weight() -> None:
    args = list(sample(2, window=40, extra=None))
    args[2][:, :16] = -1
    args[3].fill_(40)
    assert_same(tuple(args), Tiles(16, 16, 4), splits=3)


@interpreted
def test_tokens_do_not_influence_each_other() -> None:
    args = sample(5, 2, window=20)
    out, lse = launch(args, splits=2)
    for t in range(5):
        row = tuple(x[t : t + 1] if i in (0, 2, 3, 9, 10) else x for i, x in enumerate(args))
        alone = launch(row, splits=2)
        assert_bitwise(alone[0][0], out[t])
        assert_bitwise(alone[1][0], lse[t])


@interpreted
def test_no_tokens_and_no_heads_launch_nothing() -> None:
    args = list(sample(2))
    for q in (args[0][:0], args[0][:, :0]):
        with checked() as launched:
            out, lse = launcher.sparse_mla_decode(DecodeArguments(q, *args[1:7]))
        assert launched == [] and out.shape == q.shape and lse.shape == q.shape[:2]


@interpreted
def test_every_code_with_every_scale_is_dequantised_exactly() -> None:
    """A token that attends one key returns it. Larger scales overflow bfloat16, and q times infinity is NaN."""
    scales = torch.tensor([*range(0, 247, 13), 127, 133, 134, 135, 136, 246])
    codes = torch.arange(256)[(torch.arange(256) & 0x7F) != 0x7F].to(torch.uint8)
    cache = layout.allocate_cache("fp8_ds_mla", 1, len(scales))
    data, scale = cache[0, : 576 * len(scales)].view(-1, 576), cache[0, 576 * len(scales) :].view(-1, 8)
    data[:, :448] = codes.repeat(2)[:448]
    scale[:, :7] = scales[:, None]
    slots = torch.arange(len(scales))
    row = slots[:, None].int(), torch.ones(len(scales), dtype=torch.int32), len(scales), "fp8_ds_mla", 1.0
    q = torch.zeros(len(scales), 1, 512, dtype=torch.bfloat16)
    out, _ = launch((q, cache, *row, None, None, None, None, 0, None))
    want = kv_format.load_kv(cache, "fp8_ds_mla", len(scales), slots)
    assert_bitwise(out[:, 0], want + 0.0)  # a sum is never -0


def test_unsupported_calls_say_why() -> None:
    args = list(sample(2, fmt="fp8_ds_mla", **BF16))
    assert launcher.why_unsupported_sparse_mla_decode(DecodeArguments(*args)) == ""
    for position, value, reason in (
        (0, torch.zeros(2, 2, 1024), "at most 512 dims"),
        (8, args[8].view(torch.int8), "both caches have one dtype"),
        (2, args[2].long(), "both indices have one dtype"),
        (4, 2**30, "slots"),
        (1, torch.zeros(3, 64 * 584 + 1, dtype=torch.uint8)[:, 1:], "multiples of 4 bytes"),
        (1, handed_over(args[1], 2), "multiples of 4 bytes, these start at byte 2"),
    ):
        changed = [*args[:position], value, *args[position + 1 :]]
        assert reason in launcher.why_unsupported_sparse_mla_decode(DecodeArguments(*changed))
