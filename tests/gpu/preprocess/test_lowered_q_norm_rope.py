"""Lowered ops on a GPU against the reference on the same GPU: values, cache bytes, launches and copies.

Inductor contracts multiplies and adds, so a rotated value next to a rounding boundary may land on its neighbour: one
stored byte in 100,000 at most. Everything that is not rotated is exact.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.backend import dsv4
from dsv4_compile.selection import decisions
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

NUM_BLOCKS, BLOCK = 64, layout.WINDOW_BLOCK
CONTRACTED_SHARE = 1e-5


def inputs(tokens: int, fmt: str, heads: int = 64) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    fused = randn(tokens, (heads + 1) * layout.HEAD_DIM) * 3
    q, kv = fused[:, : heads * layout.HEAD_DIM].unflatten(1, (heads, layout.HEAD_DIM)), fused[:, -layout.HEAD_DIM :]
    cache = layout.allocate_cache(fmt, NUM_BLOCKS, BLOCK, device="cuda")
    slots = torch.randperm(NUM_BLOCKS * BLOCK, device="cuda", generator=generator)[:tokens]
    slots[::5] = -1
    slots[3::7] = NUM_BLOCKS * BLOCK + 5
    positions = torch.randint(0, 1000, (tokens,), device="cuda", generator=generator)
    angles = torch.rand(1000, layout.ROPE_DIM // 2, device="cuda", generator=generator) * 6.28
    return q, kv, cache, slots, positions, torch.cat((angles.cos(), angles.sin()), 1)


def call(q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor, fmt: str) -> Tensor:
    return torch.ops.dsv4.q_norm_rope_kv_insert(q, kv, cache, slots, positions, table, 1e-6, BLOCK, fmt)


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_lowered_op_equals_the_reference(fmt: str) -> None:
    def step(*args: Tensor) -> Tensor:
        return call(*args, fmt)

    compiled = torch.compile(step, backend=dsv4, fullgraph=True, options={"dsv4.impl.q_norm_rope_kv_insert": "ir"})
    with decisions.collect() as chosen, torch.inference_mode():
        for tokens in (7, 64, 513, 2048):
            expected_args, args = inputs(tokens, fmt), inputs(tokens, fmt)
            for tensor in (args[0], args[1], args[3], args[4]):
                torch._dynamo.mark_dynamic(tensor, 0)
            q, expected = compiled(*args), step(*expected_args)
            torch.testing.assert_close(q, expected, atol=1e-6, rtol=2.0**-7)
            ours, theirs = args[2].view(torch.uint8), expected_args[2].view(torch.uint8)
            written = int(slot_is_valid(args[3]).sum()) * layout.HEAD_DIM * args[2].element_size()
            assert (ours != theirs).sum() <= 2 + CONTRACTED_SHARE * written
    assert {d.impl for d in chosen} == {"ir"}


def slot_is_valid(slots: Tensor) -> Tensor:
    return (slots >= 0) & (slots < NUM_BLOCKS * BLOCK)


def test_two_launches_and_no_copy_of_the_cache() -> None:
    def step(*args: Tensor) -> Tensor:
        return call(*args, "fp8_ds_mla")

    args = inputs(256, "fp8_ds_mla")
    compiled = torch.compile(step, backend=dsv4, fullgraph=True, options={"dsv4.impl.q_norm_rope_kv_insert": "ir"})
    with torch.inference_mode():
        compiled(*args)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compiled(*args)
            torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, kernels


@torch.inference_mode()
def test_70_000_tokens_over_a_cache_of_more_than_2_31_bytes() -> None:
    fmt, pages = "fp8_ds_mla", 2**31 // layout.FP8_DS_MLA.page_stride(BLOCK) + 2 * NUM_BLOCKS
    q, kv, _, slots, positions, table = inputs(70_000, fmt, heads=1)
    # All pages that are written begin more than 2^31 bytes into the cache.
    slots = torch.where(slot_is_valid(slots), slots + (pages - NUM_BLOCKS) * BLOCK, -1)
    caches = [layout.allocate_cache(fmt, pages, BLOCK, device="cuda") for _ in range(2)]

    def step(cache: Tensor) -> Tensor:
        return call(q, kv, cache, slots, positions, table, fmt)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=dsv4, fullgraph=True, options={"dsv4.impl.q_norm_rope_kv_insert": "ir"})
    got, want = compiled(caches[0]), step(caches[1])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2.0**-7)
    ours, theirs = (cache[-NUM_BLOCKS:] for cache in caches)
    assert theirs.any() and (ours != theirs).sum() <= 2 + CONTRACTED_SHARE * theirs.numel()
    assert not caches[0][:-NUM_BLOCKS].any()
