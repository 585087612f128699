"""Launcher of `sparse_mla_decode`: on Hopper the kernel made for it where that fits, else the portable one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

from ..layout import PAGE_LAYOUTS
from .gpu import Gpu, gpu_of
from .sparse_mla_decode_portable import Source, launch

MAX_HEAD_DIM = 512
MAX_SLOTS = 2**31
HOPPER = 90


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
    if q_norm_eps is not None or inverse_rope or batch_invariant:
        return "the kernel attends what it is given, split by the number of tokens"
    if q.shape[2] > MAX_HEAD_DIM:
        return f"the kernel holds vectors of at most {MAX_HEAD_DIM} dims, these have {q.shape[2]}"
    if len({cache.dtype for cache in caches}) > 1 or len({row.dtype for row in rows}) > 1:
        return "the kernel reads two caches of one dtype through indices of one dtype"
    if any(cache.shape[0] * block >= MAX_SLOTS for cache, block in zip(caches, blocks, strict=True)):
        return f"the kernel counts fewer than {MAX_SLOTS} slots"
    if cache_format in PAGE_LAYOUTS and any(c.stride(0) % 4 or c.storage_offset() % 4 for c in caches):
        return f"the kernel reads 4-byte words, and {cache_format} pages here do not start at multiples of 4 bytes"
    return ""


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

    The same call gives the same bits. With another number of tokens, a token's keys may be split differently, which
    changes the order of its sums.
    """
    if extra_k_cache is None or extra_indices is None or extra_lens is None:
        extra_k_cache, extra_indices, extra_lens, extra_block_size = k_cache, indices[:, :0], lens, block_size
    window = Source(k_cache, indices, lens, block_size)
    extra = Source(extra_k_cache, extra_indices, extra_lens, extra_block_size)
    gpu = gpu_of(q.device)
    hopper = _hopper(gpu)
    if hopper is not None and not hopper.hopper_refuses(q, window, extra, cache_format, attn_sink):
        return hopper.launch_hopper(q, window, extra, scale, attn_sink, gpu)
    return launch(q, window, extra, cache_format, scale, attn_sink, kv_scale, gpu)


@functools.cache
def _hopper(gpu: Gpu) -> ModuleType | None:
    """The module of the Hopper kernel; None on other GPUs, and where Triton has no Gluon."""
    if gpu.capability != HOPPER or importlib.util.find_spec("triton.experimental.gluon") is None:
        return None
    return importlib.import_module(".sparse_mla_decode_hopper", __package__)
