"""The compressor kernel against the reference, every access checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import compress_norm_rope_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common import kv_format
from dsv4_compile.reference.preprocess.compress_norm_rope_insert import CompressArguments
from dsv4_compile.testing import (
    Tolerance,
    assert_bitwise,
    assert_close,
    hostile_values,
    padded,
    poisoned_empty,
    strided,
)
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.ops.preprocess.compressor_engine import Engine, one_request
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted

CACHE = 8
FLOAT32 = Tolerance(abs=5e-6, rel=5e-6, cosine=1e-11)
"""Sums of at most 128 terms and one of d squares, in a different order, and exponentials of a second library."""
FORMATS = [("fp8_ds_mla", 512), ("fp8", 32), ("indexer_fp8", 128), ("indexer_mxfp4", 128), ("plain", 32)]


def storage(cache: Tensor) -> Tensor:
    """All bytes behind a cache, those between its pages included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def copied(cache: Tensor) -> Tensor:
    """A copy with the same strides and the same bytes between its elements."""
    return storage(cache).clone().view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())


def launch(args: tuple[Any, ...]) -> None:
    with poisoned_empty(), checked(mutated=("p_cache", "parts.p_pooled", "parts.p_arrived")) as launched:
        kernel.compress_norm_rope_insert(CompressArguments(*args))
    assert launched == (["compress_norm_rope_insert_kernel"] if len(args[1]) else [])


def both(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The cache that the kernel wrote and the one that the reference wrote."""
    ours, theirs = (list(args) for _ in range(2))
    ours[CACHE], theirs[CACHE] = copied(args[CACHE]), copied(args[CACHE])
    launch(tuple(ours))
    REFERENCES["compress_norm_rope_insert"](*theirs)
    return ours[CACHE], theirs[CACHE]


def engine_after(tokens: int, ratio: int, *, stop: int | None = None, **options: Any) -> tuple[Engine, tuple[Any, ...]]:
    """Return a request with all states saved, and the arguments that store its entries."""
    engine = Engine(ratio, **options)
    dirty = copied(engine.cache)
    positions = one_request(range(tokens))
    engine.run(positions, torch.randn(tokens, engine.width) * 2)
    engine.cache = dirty
    request, position = torch.tensor(positions[: stop or tokens]).unbind(1)
    return engine, engine.arguments(engine.metadata(request, position))


def assert_same_entries(engine: Engine, ours: Tensor, theirs: Tensor) -> None:
    """Stored values within one rounding of the format, and every other byte the same."""
    slots = torch.arange(len(ours) * engine.block)
    step = {"fp8_ds_mla": 16 / 272, "fp8": 16 / 272, "indexer_fp8": 16 / 272, "indexer_mxfp4": 1 / 2}
    if engine.fmt == "plain":
        bound = FLOAT32 if ours.dtype is torch.float32 else Tolerance(1e-6, 2.0**-7, 1e-5)
        assert_close(ours, theirs, bound)
        return
    read = kv_format.load_kv if engine.fmt in layout.KV_FORMATS else kv_format.load_indexer
    extra = (engine.kv_scale,) if engine.fmt == "fp8" else ()
    values = [read(cache, engine.fmt, engine.block, slots, *extra) for cache in (ours, theirs)]
    assert_close(*values, Tolerance(1e-6, step[engine.fmt] + 2.0**-7, 1e-3))
    # At most one value in a hundred lies so near a boundary.
    assert (storage(ours) != storage(theirs)).sum() <= 0.01 * storage(ours).numel()


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("compress_norm_rope_insert"))))
def test_samples(number: int) -> None:
    args = op_samples("compress_norm_rope_insert")[number]
    ours, theirs = both(args)
    if ours.dtype is torch.uint8:
        assert (storage(ours) != storage(theirs)).sum() <= 4
        assert not torch.equal(storage(ours), storage(args[CACHE]))
    else:
        assert_close(ours, theirs, FLOAT32)


@interpreted
@pytest.mark.parametrize("ratio", [4, 128, 6])
@pytest.mark.parametrize(("fmt", "dim"), FORMATS)
def test_every_format_holds_the_reference_entries(ratio: int, fmt: str, dim: int) -> None:
    kv_scale = torch.tensor([0.03]) if fmt == "fp8" else None
    rope_dim = 64 if dim > 64 else 8
    tokens = 260 if ratio == 128 else 19
    engine, args = engine_after(
        tokens, ratio, fmt=fmt, dim=dim, rope_dim=rope_dim, kv_scale=kv_scale, max_len=384 if ratio == 128 else 48
    )
    args = tuple(a[-7:] if i in (1, 3, 4, 5) and ratio == 128 else a for i, a in enumerate(args))
    assert_same_entries(engine, *both(args))


@interpreted
@pytest.mark.parametrize(("fmt", "dim"), FORMATS[:-1])
def test_an_entry_is_encoded_as_the_reference_encodes_it(fmt: str, dim: int) -> None:
    """The kernel's own float32 entries, stored by the reference, give its bytes: nothing behind the sums is free."""
    kv_scale = torch.tensor([0.03]) if fmt == "fp8" else None
    engine, args = engine_after(17, 4, fmt=fmt, dim=dim, rope_dim=dim // 2 if dim < 128 else 64, kv_scale=kv_scale)
    exact = engine.unrounded()
    launch((*args[:CACHE], exact.cache, *args[CACHE + 1 : 13], "plain"))
    slots = engine.slots(engine.cache_table, engine.block, torch.zeros(4, dtype=torch.int64), torch.arange(4))
    expected = copied(engine.cache)
    entries = kv_format.load_kv(exact.cache, "plain", engine.block, slots)
    if fmt in layout.KV_FORMATS:
        kv_format.store_kv(expected, fmt, engine.block, slots, entries, kv_scale)
    else:
        kv_format.store_indexer(expected, fmt, engine.block, slots, entries)
    launch(args)
    assert_bitwise(storage(args[CACHE]), storage(expected))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_dtype(dtype: torch.dtype) -> None:
    engine, args = engine_after(13, 4, dtype=dtype, dim=32)
    assert_same_entries(engine, *both(args))


@interpreted
@pytest.mark.parametrize(("fmt", "dim", "dtype"), [
    ("plain", 16, torch.float32), ("plain", 32, torch.bfloat16), ("indexer_fp8", 128, torch.float32),
    ("indexer_mxfp4", 128, torch.float32),
])  # fmt: skip
def test_hadamard_transform_of_indexer_keys(fmt: str, dim: int, dtype: torch.dtype) -> None:
    engine, args = engine_after(9, 4, fmt=fmt, dim=dim, rope_dim=dim // 2, hadamard=True, dtype=dtype)
    assert_same_entries(engine, *both(args))
    assert kernel.why_unsupported_compress_norm_rope_insert(CompressArguments(*args)) == ""


@interpreted
def test_states_of_earlier_steps_and_of_several_requests() -> None:
    engine = Engine(4, requests=3, max_len=64)
    history = torch.randn(3, 40, engine.width)
    for first, last in ((0, 6), (6, 9), (9, 10)):
        tokens = [(r, p) for r in (2, 0, 1) for p in range(first, last)]
        engine.run(tokens, torch.stack([history[r, p] for r, p in tokens]))
    request, position = torch.tensor([(2, 7), (0, 3), (1, 7), (1, 9), (0, 7)]).unbind(1)
    assert_same_entries(engine, *both(engine.arguments(engine.metadata(request, position))))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Callable[[Tensor], Tensor]) -> None:
    engine, args = engine_after(11, 4, dim=32)
    spread_args = [spread(a) if isinstance(a, Tensor) else a for a in args]
    ours, theirs = both(tuple(spread_args))
    assert_same_entries(engine, ours, theirs)
    contiguous, _ = both(args)
    assert_bitwise(ours, contiguous)


@interpreted
@pytest.mark.parametrize("argument", ["state slot", "slot", "position", "request", "block"])
def test_hostile_indices_write_what_the_reference_writes(argument: str) -> None:
    engine, args = engine_after(16, 4, dim=16)
    state_pages, pages, rows = len(args[0]), len(args[CACHE]), len(args[2])
    bound = {"state slot": state_pages * engine.state_block, "slot": pages * engine.block, "position": 0}
    bound |= {"request": rows, "block": state_pages}
    where = {"state slot": 1, "slot": 5, "position": 4, "request": 3, "block": 2}[argument]
    hostile = torch.tensor([v for v in hostile_values(bound[argument]) if argument != "position" or v < 0])
    changed = args[where].clone()
    if argument == "block":
        changed[0, : len(hostile) : 2] = hostile[: (len(hostile) + 1) // 2 * 2 : 2]
    else:
        changed[3::4] = hostile[:4]
    assert_same_entries(engine, *both((*args[:where], changed, *args[where + 1 :])))


@interpreted
def test_short_block_table_and_positions_beyond_the_rope_table() -> None:
    engine, args = engine_after(16, 4, dim=16)
    assert_same_entries(engine, *both((*args[:2], args[2][:, :2], *args[3:])))
    assert_same_entries(engine, *both((*args[:7], args[7][:5], *args[8:])))


@interpreted
def test_no_tokens_and_one_token() -> None:
    engine, args = engine_after(8, 4)
    none = tuple(a[:0] if i in (1, 3, 4, 5) else a for i, a in enumerate(args))
    ours, _ = both(none)
    assert_bitwise(storage(ours), storage(args[CACHE]))
    for i in (0, 7):
        assert_same_entries(engine, *both(tuple(a[i : i + 1] if j in (1, 3, 4, 5) else a for j, a in enumerate(args))))


@interpreted
def test_special_scores_and_values() -> None:
    """Infinite and NaN scores, scores of -inf alone, infinite values: the same elements are not finite."""
    engine, args = engine_after(8, 4, dim=16)
    state = args[0].clone()
    row = state[engine.state_table[0, 1].long()]  # positions 4 to 7, which nothing else pools
    half = engine.width // 2
    row[0, half + 16], row[1, half + 17], row[2, half + 18] = torch.nan, torch.inf, -torch.inf
    row[:, half + 19] = -torch.inf
    state[engine.state_table[0, 0].long()][:, half + 3] = -torch.inf
    row[3, 20], row[3, 21] = torch.inf, torch.nan
    ours, theirs = both((state, *args[1:]))
    assert_same_entries(engine, ours, theirs)
    assert theirs[engine.cache_table[0, 0].long(), 1].isnan().all()  # the norm spreads it; the entry before is finite


@interpreted
@pytest.mark.parametrize("ratio", [4, 6])
def test_a_channel_of_scores_of_minus_infinity_alone_is_zero(ratio: int) -> None:
    engine, args = engine_after(2 * ratio, ratio, dim=16)
    args[0][..., engine.width // 2 + 3 :: 16] = -torch.inf
    ours, theirs = both(args)
    assert_same_entries(engine, ours, theirs)
    written = theirs[engine.cache_table[0, 0].long(), :2]
    assert written.isfinite().all() and (written[:, 3] == 0).all() and written.any()


@interpreted
@pytest.mark.parametrize(("ratio", "state_block"), [(6, 3), (6, 6), (12, 6)])
def test_states_in_blocks_of_any_number_of_tokens(
    ratio: int, state_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "state_block_size", lambda _: state_block)
    engine, args = engine_after(2 * ratio, ratio, dim=16)
    assert_same_entries(engine, *both(args))


def test_unsupported_calls_have_a_reason() -> None:
    _, args = engine_after(4, 4, dim=16)
    call, why_unsupported = CompressArguments(*args), kernel.why_unsupported_compress_norm_rope_insert
    assert why_unsupported(call) == ""
    assert "24 dims" in why_unsupported(call._replace(norm_weight=torch.ones(24)))
    assert "transform has 8 dims" in why_unsupported(call._replace(norm_weight=torch.ones(8), hadamard=True))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    layers = shared_out(
        [(4, 512, "fp8_ds_mla"), (128, 512, "fp8_ds_mla"), (4, 128, "indexer_fp8"), (4, 128, "indexer_mxfp4")]
    )[target]
    with compiled_for(target) as compiled:
        for ratio, dim, fmt in layers:
            state_block, block = layout.state_block_size(ratio), layout.storage_block_size(ratio)
            slots, index = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
            state = torch.empty(2, state_block, layout.state_width(ratio, dim))
            norm, cache = torch.empty(dim, dtype=torch.bfloat16), layout.allocate_cache(fmt, 2, block)
            per_token = (slots, index[None], index, slots, slots)
            where = state, *per_token, norm, torch.empty(8, 64), cache
            kernel.compress_norm_rope_insert(
                CompressArguments(*where, 1e-6, ratio, state_block, block, fmt, dim == 128)
            )
    assert len(compiled) == len(layers)
    assert all(binary.assembled for binary in compiled)
    assert all(begins_early(binary) == early for binary in compiled)
