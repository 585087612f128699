"""Launchers of `sparse_mla_decode` and its `_out` form: on Hopper a kernel made for it where one fits, else the one for
any GPU.

A call has three parts beside its queries: the caches (`Source`), what is fused around attention (`Fusion`), and where
the results go (`Results`).
"""

from __future__ import annotations

from torch import Tensor

from ..layout import PAGE_LAYOUTS
from .gpu import gpu_of, hopper_kernel
from .sparse_mla_decode_by_rows import by_rows_refuses, decode_by_rows
from .sparse_mla_decode_plan import Fusion, Results, Source
from .sparse_mla_decode_portable import launch

MAX_HEAD_DIM = 512
MAX_SLOTS = 2**31
SMALLEST_TILE = 16
HOPPER_KERNELS = ("sparse_mla_decode_small_hopper", "sparse_mla_decode_hopper", "sparse_mla_decode_few_hopper")


def sparse_mla_decode_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    caches = [k_cache] if extra_k_cache is None else [k_cache, extra_k_cache]
    blocks = [block_size] if extra_k_cache is None else [block_size, extra_block_size]
    rows = [indices] if extra_indices is None else [indices, extra_indices]
    dim = q.shape[2]
    if dim > MAX_HEAD_DIM:
        return f"the kernel holds vectors of at most {MAX_HEAD_DIM} dims, these have {dim}"
    if (q_norm_eps is not None or inverse_rope) and (dim < SMALLEST_TILE or dim & (dim - 1)):
        return f"the kernel rotates vectors of a power of two of dims, at least {SMALLEST_TILE}, these have {dim}"
    if len({cache.dtype for cache in caches}) > 1 or len({row.dtype for row in rows}) > 1:
        return "the kernel reads two caches of one dtype through indices of one dtype"
    if any(cache.shape[0] * block >= MAX_SLOTS for cache, block in zip(caches, blocks, strict=True)):
        return f"the kernel counts fewer than {MAX_SLOTS} slots"
    if cache_format in PAGE_LAYOUTS and any(c.stride(0) % 4 or c.storage_offset() % 4 for c in caches):
        return f"the kernel reads 4-byte words, and {cache_format} pages here do not start at multiples of 4 bytes"
    return ""


def sparse_mla_decode_out_refuses(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can. Buffers that a graph has yet to allocate are contiguous."""
    if any(x is not None and x.stride(-1) != 1 for x in (out, lse)):
        return "the kernel writes dims of out and heads of lse that are neighbours"
    return sparse_mla_decode_refuses(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )


def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """See the reference. Weights are rounded to the dtype of the keys before they meet them; sums are float32.

    The same call gives the same bits, and with `inverse_rope` those of `inv_rope` behind a call without. With another
    number of tokens, a token's keys may be split differently, which changes the order of its sums; `batch_invariant`
    splits them by the token's own lengths.
    """
    fusion = Fusion(positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    return launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion)


def sparse_mla_decode_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> None:
    """`sparse_mla_decode` into `out` and `lse`."""
    fusion = Fusion(positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion, Results(out, lse))


def sources(
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    extra_block_size: int,
) -> tuple[Source, Source]:
    """Both caches; without a second one, the first with rows of no columns."""
    window = Source(k_cache, indices, lens, block_size)
    if extra_k_cache is None or extra_indices is None or extra_lens is None:
        return window, Source(k_cache, indices[:, :0], lens, block_size)
    return window, Source(extra_k_cache, extra_indices, extra_lens, extra_block_size)


def launch_best(
    q: Tensor,
    window: Source,
    extra: Source,
    cache_format: str,
    scale: float,
    sink: Tensor | None,
    kv_scale: Tensor | None,
    fusion: Fusion,
    into: Results | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel made for this GPU, or the portable one where none fits; over rows, where nobody has said where
    results go."""
    gpu = gpu_of(q.device)
    if into is None and not by_rows_refuses(q, window, extra, cache_format, scale, sink, fusion, gpu):
        return decode_by_rows(q, window, extra, scale, sink, fusion)
    for name in HOPPER_KERNELS:
        hopper = hopper_kernel(gpu, name)
        if hopper is not None and not hopper.hopper_refuses(q, window, extra, cache_format, sink, fusion):
            return hopper.launch_hopper(q, window, extra, scale, sink, gpu, fusion=fusion, into=into)
    return launch(q, window, extra, cache_format, scale, sink, kv_scale, gpu, fusion=fusion, into=into)
