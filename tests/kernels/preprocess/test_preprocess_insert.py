"""The fused preprocessing kernel against the reference and against the kernels it replaces, every access checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile._compat import triton_interpreter
from dsv4_compile.kernels.preprocess import compress_norm_rope_insert as compress
from dsv4_compile.kernels.preprocess import fused_q_kv_rmsnorm as norms
from dsv4_compile.kernels.preprocess import kv_rope_insert as insert
from dsv4_compile.kernels.preprocess import preprocess_insert as kernel
from dsv4_compile.kernels.preprocess import save_partial_states as save
from dsv4_compile.ops.common.define import OPS, REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.preprocess.preprocess_insert import PreprocessArguments, compress_arguments, result_dtype
from dsv4_compile.testing import (
    Tolerance,
    assert_bitwise,
    assert_close,
    hostile_indices,
    padded,
    poisoned_empty,
    strided,
)
from dsv4_compile.testing.samples import op_samples
from tests.ops.preprocess.preprocess_layer import CACHES, PADDING, Layer, storage, with_copied_caches
from tests.support import bounds
from tests.support.bounds import checked

interpreted = pytest.mark.interpreted

reference = REFERENCES["preprocess_insert"]
MUTATED = ("latents.p_out", "window.p_cache", "parts.p_pooled", "parts.p_arrived")
MUTATED += tuple(f"{who}.{name}" for who in ("main", "keys") for name in ("cache", "state_cache"))
FLOAT32 = Tolerance(abs=5e-6, rel=5e-6, cosine=1e-11)
"""Bound of the separate kernels: sums run in a different order, and exponentials come from a second library."""
MLA: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16, "max_len": 160}
KINDS: dict[str, dict[str, Any]] = {
    "swa": {"ratio": 0},
    "swa fp8_ds_mla": {**MLA, "ratio": 0},
    "swa fp8": {"ratio": 0, "fmt": "fp8", "kv_scale": torch.tensor([0.03]), "dtype": torch.float16},
    "swa rounded to bfloat16": {"ratio": 0, "rounded": torch.bfloat16},
    "hca": {"ratio": 128},
    "hca fp8": {"ratio": 128, "fmt": "fp8", "kv_scale": torch.tensor([0.03]), "dtype": torch.bfloat16},
    "csa": {"ratio": 4, "hadamard": True},
    "csa fp8_ds_mla, indexer_fp8": {**MLA, "ratio": 4, "key_fmt": "indexer_fp8", "key_dim": 128},
    "csa plain, indexer_mxfp4 hadamard": {
        "ratio": 4, "dim": 32, "key_fmt": "indexer_mxfp4", "key_dim": 128, "hadamard": True
    },
    "another ratio": {"ratio": 8},
}  # fmt: skip
SMALL = pytest.mark.parametrize("kind", ["swa", "hca", "csa"])
COMPRESSED = pytest.mark.parametrize("kind", ["hca", "csa"])
STEP = [*((0, p) for p in range(125, 131)), PADDING, *((1, p) for p in range(2, 9)), (2, 127), PADDING, PADDING]
"""A chunk that passes a group's end, a prompt from the middle of a group, a decode that closes one, and padding."""


def layer(kind: str, **options: Any) -> Layer:
    return Layer(**{**KINDS[kind], "requests": 3, **options})


def history(model: Layer) -> None:
    """States of every request before STEP, which reads some, overwrites some, and should leave the others."""
    for request, before in enumerate((125, 2, 127)):
        reference(**model.arguments([(request, p) for p in range(before)], model.projection(before)))


def step(kind: str, **options: Any) -> dict[str, Any]:
    """The arguments of STEP behind its history; slices of a float32 projection."""
    model = layer(kind, **options)
    history(model)
    return model.arguments(STEP, model.projection(len(STEP)))


def launch(arguments: dict[str, Any], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What the kernel returns, and the caches that it wrote."""
    mine = with_copied_caches(arguments)
    with poisoned_empty(), checked(mutated=MUTATED) as launched:
        out = launcher("preprocess_insert")(**mine, **options)
    assert launched == ["preprocess_insert_kernel"] * bool(len(mine["positions"]))
    assert out.is_contiguous()
    return out, {name: mine[name] for name in CACHES if name in mine}


def separately(arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the kernels of the ops that it replaces, one launch after the other."""
    a = with_copied_caches(arguments)
    call = PreprocessArguments(**a)
    pairs = (call.qr, call.q_weight), (call.kv, call.kv_weight)
    qr, kv = (x.to(result_dtype(x, weight, call.dtype)) for x, weight in pairs)
    out, kv = norms.fused_q_kv_rmsnorm(qr, kv, call.q_weight, call.kv_weight, call.eps)
    window = call.window_cache, call.window_slot_mapping, call.positions, call.cos_sin_cache, call.window_block_size
    insert.kv_rope_insert(kv, *window, call.cache_format, call.kv_scale)
    for of_indexer, c in enumerate(call.compressors()):
        if c is not None:
            block = layout.state_block_size(call.ratio)
            save.save_partial_states(c.kv_score, c.ape, c.state_cache, c.state_slot_mapping, call.positions, block)
            compress.compress_norm_rope_insert(compress_arguments(call, c, bool(of_indexer)))
    return out, {name: a[name] for name in CACHES if name in a}


def tiling_of(arguments: dict[str, Any], **changes: int) -> kernel.Tiling:
    """Return the default tiling with changes."""
    dim = len(arguments["norm_weight"]) if "norm_weight" in arguments else 1
    return kernel.tiling_of(len(arguments["qr"]), arguments.get("ratio", 0), dim)._replace(**changes)


def assert_equal(arguments: dict[str, Any], **changes: int) -> dict[str, Tensor]:
    """One launch leaves every byte that the separate launches leave. Returns the caches."""
    (ours, mine), (theirs, others) = launch(arguments, tiling=tiling_of(arguments, **changes)), separately(arguments)
    assert_bitwise(ours, theirs, strides=True, label="qr")
    for name, cache in others.items():
        assert_bitwise(storage(mine[name]), storage(cache), label=name)
    return mine


def assert_reference(arguments: dict[str, Any]) -> None:
    """States are the reference's bit for bit, latents and rows to the order of their sums."""
    ours, mine = launch(arguments)
    theirs = with_copied_caches(arguments)
    want = reference(**theirs)
    assert ours.dtype is want.dtype
    assert_close(ours, want, FLOAT32 if want.dtype is torch.float32 else Tolerance(1e-6, 1.01 / 128, 1e-6))
    for name, cache in mine.items():
        if "state" in name:
            assert_bitwise(storage(cache), storage(theirs[name]), label=name)
        elif cache.dtype is torch.float32:
            assert_close(storage(cache).view(cache.dtype), storage(theirs[name]).view(cache.dtype), FLOAT32)
        else:
            # A value in a hundred lies so near a boundary that a different order of its sum rounds it to a neighbour.
            assert (storage(cache) == storage(theirs[name])).float().mean() >= 0.99


def keep(arguments: dict[str, Any], caches: dict[str, Tensor]) -> None:
    """Let the arguments' own caches hold what a launch left in their copies."""
    for name, cache in caches.items():
        arguments[name].copy_(cache)


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("preprocess_insert"))))
def test_samples(number: int) -> None:
    names = [argument.name for argument in OPS["preprocess_insert"]._schema.arguments]
    args = dict(zip(names, op_samples("preprocess_insert")[number], strict=False))
    assert_reference({name: value for name, value in args.items() if value is not None})


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_does_what_the_separate_launches_and_the_reference_do(kind: str) -> None:
    arguments = step(kind)
    assert_equal(arguments)
    assert_reference(arguments)


TILINGS = [{"tokens": 8, "pooled": 16, "splits": 1}, {"tokens": 16, "splits": 2, "pooled": 2, "parts": 2}]


@interpreted
@COMPRESSED
@pytest.mark.parametrize("changes", TILINGS, ids=str)
def test_no_result_depends_on_the_tiling(kind: str, changes: dict[str, int]) -> None:
    assert_equal(step(kind), **changes)


@interpreted
@pytest.mark.parametrize("tiling", [{"parts": 2}, {"parts": 8, "pooled": 8}, {"parts": 4, "pooled": 1}], ids=str)
def test_programs_that_share_an_entry_leave_their_counters_at_zero(
    tiling: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens close a group, both in one program's reach."""
    model = layer("hca")
    history(model)
    tokens = [(2, 127), PADDING, *((0, p) for p in range(125, 128))]
    counters = torch.zeros(len(tokens), dtype=torch.int32)
    monkeypatch.setattr(compress, "arrival_counters", lambda count, device: counters)
    arguments = model.arguments(tokens, model.projection(len(tokens)))
    for _ in range(2):
        assert_equal(arguments, **tiling)
        assert not counters.any()


@interpreted
@COMPRESSED
def test_any_batch_of_any_chunks_is_what_separate_launches_make_of_it(kind: str) -> None:
    """Requests take turns in steps of random size that start and end anywhere in a group, padding between them."""
    rng = random.Random(7)
    model, done = layer(kind), [0, 126, 125]
    for request, before in enumerate(done):
        reference(**model.arguments([(request, p) for p in range(before)], model.projection(before)))
    for _ in range(3):
        tokens: list[tuple[int, int]] = []
        for request in rng.sample(range(3), 3):
            count = rng.choice((0, 1, 2, 5))
            tokens += [(request, done[request] + i) for i in range(count)] + [PADDING] * rng.choice((0, 0, 2))
            done[request] += count
        arguments = model.arguments(tokens, model.projection(len(tokens)))
        keep(arguments, assert_equal(arguments))


@interpreted
@COMPRESSED
def test_programs_may_run_in_any_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = step(kind)
    tiling = tiling_of(arguments, parts=4)
    want, caches = launch(arguments, tiling=tiling)
    builder = triton_interpreter.interpreter_builder
    set_grid_idx, rng = builder.set_grid_idx, random.Random(1)
    numbers: list[int] = []
    for disorder in (list.reverse, rng.shuffle):

        def elsewhere(x: int, y: int, z: int, disorder: Callable[[list[int]], None] = disorder) -> None:
            if x == 0:
                numbers[:] = range(builder.grid_dim[0])
                disorder(numbers)
            set_grid_idx(numbers[x], y, z)

        monkeypatch.setattr(builder, "set_grid_idx", elsewhere)
        got, mine = launch(arguments, tiling=tiling)
        assert numbers[0] != 0
        assert_bitwise(got, want)
        for name, cache in caches.items():
            assert_bitwise(storage(mine[name]), storage(cache), label=name)


@interpreted
@COMPRESSED
def test_no_program_reads_what_the_launch_writes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in any order, so no state that is stored may be loaded, by whichever program."""
    loaded, stored = (dict[str, set[int]](main=set(), keys=set()) for _ in range(2))
    check = bounds._Checker._check

    def record(self: Any, access: str, argument: Any, addresses: Any, width: int) -> None:
        check(self, access, argument, addresses, width)
        who, _, name = argument.name.partition(".")
        if name == "state_cache":
            (loaded if access == "load" else stored)[who].update(addresses.tolist())

    monkeypatch.setattr(bounds._Checker, "_check", record)
    arguments = step(kind)
    launch(arguments)
    for who, prefix in (("main", ""), ("keys", "indexer_")):
        if f"{prefix}kv_score" in arguments:
            assert loaded[who] and stored[who]
            assert not loaded[who] & stored[who]


@interpreted
@COMPRESSED
def test_a_row_that_is_saved_nowhere_is_read_from_where_the_table_has_it(kind: str) -> None:
    """Rows inside the windows of STEP lose their slot: the cache's own row counts, as behind a separate save."""
    arguments = step(kind)
    for prefix in ("", "indexer_") if kind == "csa" else ("",):
        slots = arguments[f"{prefix}state_slot_mapping"].clone()
        slots[[1, 8, 10]] = torch.tensor([-1, 10**6, -(2**40)])
        arguments[f"{prefix}state_slot_mapping"] = slots
    assert_equal(arguments)


@interpreted
@COMPRESSED
def test_rows_before_are_told_from_rows_of_another_request(kind: str) -> None:
    """Decodes side by side: the row before holds a position of a different request, or the same one of a copy."""
    model = layer(kind)
    history(model)
    tokens = [(2, 127), (1, 3), (0, 127), (1, 7), (2, 131), (0, 131)]
    assert_equal(model.arguments(tokens, model.projection(len(tokens))))


def ring(model: Layer, rows: int) -> int:
    """Let request 0 keep its states in a ring of at least `rows`; returns the window."""
    for engine in (model.main, model.keys):
        if engine is not None:
            pages = layout.cdiv(rows, engine.state_block)
            engine.state_table = (torch.arange(engine.state_table.shape[1]) % pages).int()[None]
    return model.ratio * layout.overlap_factor(model.ratio)


@interpreted
@COMPRESSED
def test_a_ring_of_states_as_long_as_a_step_and_the_rest_of_its_windows_suffices(kind: str) -> None:
    """The rings of `cache.PagedCaches`. Steps of the greatest length overwrite the slots right before their windows."""
    longest = 10
    model = layer(kind, requests=1, max_len=384)
    window = model.ratio * layout.overlap_factor(model.ratio)
    ring(model, window - 1 + longest)
    done = 2 * window - 13
    reference(**model.arguments([(0, p) for p in range(done)][-window:], model.projection(window)))
    for count in (longest, 1, longest, longest - 1):
        arguments = model.arguments([(0, p) for p in range(done, done + count)], model.projection(count))
        keep(arguments, assert_equal(arguments))
        done += count
    assert done > 2 * window


@interpreted
@COMPRESSED
def test_entries_of_this_step_alone_need_no_ring(kind: str) -> None:
    """A step longer than its ring breaks the contract: of the states only some survive. What closes over the step's own
    tokens is right all the same, since it is not read from the cache."""
    model = layer(kind, requests=1)
    tokens = [(0, p) for p in range(model.ratio * layout.overlap_factor(model.ratio) + 4)]
    arguments = model.arguments(tokens, model.projection(len(tokens)))
    want = launch(arguments)[1]
    ring(model, len(tokens) - 4)
    meta = model.arguments(tokens, torch.empty(len(tokens), sum(model.widths)))
    got = launch({**arguments, **{name: meta[name] for name in meta if "state" in name}})[1]
    for name in ("compressed_cache", "indexer_cache"):
        if name in want:
            assert_bitwise(storage(got[name]), storage(want[name]), label=name)


@interpreted
@COMPRESSED
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(kind: str, spread: Callable[[Tensor], Tensor]) -> None:
    arguments = step(kind)
    apart = {n: spread(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    (got, mine), (want, caches) = launch(apart), launch(arguments)
    assert_bitwise(got, want)
    for name, cache in caches.items():
        assert_bitwise(mine[name].contiguous(), cache.contiguous(), label=name)


@interpreted
@COMPRESSED
@pytest.mark.parametrize("where", [("positions",), ("token_to_req", "state_block_table"), ("slot_mapping",)], ids=str)
def test_hostile_indices(kind: str, where: tuple[str, ...]) -> None:
    """Two of five indices are none: no access is out of bounds. Legal slots stay distinct.

    The kernel pools the tokens of a request as neighbours, so bytes are compared where all tokens of a request have
    such an index, and for slots, which make no hole in a request.
    """
    clean = step(kind)
    names = [name for name in clean if name.endswith(where)]
    bad = {n: hostile_indices(clean[n].shape, 10**6, fraction=1.0, dtype=clean[n].dtype) for n in names}
    launch({**clean, **{n: torch.where(torch.rand(x.shape) < 0.4, x, clean[n]) for n, x in bad.items()}})
    if where == ("slot_mapping",):
        mask = {n: torch.rand(x.shape) < 0.4 for n, x in bad.items()}
    else:
        request = int(torch.randint(3, ()))
        token = clean["token_to_req"] == request
        mask = {n: token if x.dim() == 1 else torch.arange(x.shape[0])[:, None] == request for n, x in bad.items()}
    assert_equal({**clean, **{n: torch.where(mask[n], x, clean[n]) for n, x in bad.items()}})


@interpreted
@SMALL
@pytest.mark.parametrize("tokens", [[], [(0, 127)], [(1, 3)], [PADDING]])
def test_no_token_and_one(kind: str, tokens: list[tuple[int, int]]) -> None:
    model = layer(kind)
    history(model)
    assert_equal(model.arguments(tokens, model.projection(len(tokens))))


@interpreted
@SMALL
def test_fewer_slots_than_tokens(kind: str) -> None:
    arguments = step(kind)
    for name in ("window_slot_mapping", "state_slot_mapping"):
        if name in arguments:
            arguments[name] = arguments[name][:9]
    assert_equal(arguments)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_keep_their_dtype(dtype: torch.dtype) -> None:
    arguments = step("swa")
    arguments |= {"qr": arguments["qr"].to(dtype), "kv": arguments["kv"].to(dtype)}
    out, caches = launch(arguments)
    theirs = with_copied_caches(arguments)
    assert_close(out, reference(**theirs), Tolerance(1e-6, 1.01 / 128, 1e-6))
    assert_close(caches["window_cache"], theirs["window_cache"], Tolerance(1e-6, 1.01 / 128, 1e-6))
