"""Calls FlashMLA's sparse kernels with the arguments of this package's ops, if `flash_mla` can be imported.

It supports 64 and 128 heads, and plans a decode in the first call of a shape, which is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import layout
from ..errors import is_installed
from .problem import Prepare

NAME = "flash_mla"
HEADS = (64, 128)


def if_installed(prepare: Prepare, heads: int) -> dict[str, Prepare]:
    """Return `prepare` as an implementation for this many heads, or nothing if FlashMLA has none."""
    return {NAME: prepare} if heads in HEADS and is_installed(NAME) else {}


def decode() -> Callable[..., Any]:
    """Return a function like `sparse_mla_decode` with two `fp8_ds_mla` caches and nothing fused, for one shape."""
    library = importlib.import_module(NAME)
    plan, _ = library.get_mla_metadata()

    def call(*args: Any) -> tuple[Tensor, Tensor]:
        q, cache, slots, lens, block, _, scale, sink, entries, entry_slots, entry_lens, entry_block = args[:12]
        out, lse = library.flash_mla_with_kvcache(
            q[:, None],
            _pages(cache, block),
            None,
            None,
            q.shape[2],
            plan,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=slots[:, None],
            attn_sink=sink,
            topk_length=lens,
            extra_k_cache=_pages(entries, entry_block),
            extra_indices_in_kvcache=entry_slots[:, None],
            extra_topk_length=entry_lens,
        )
        return out[:, 0], lse[..., 0]

    return call


def prefill() -> Callable[..., Any]:
    """Return a function like `sparse_mla_prefill`."""
    library = importlib.import_module(NAME)

    def call(q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, scale: float, sink: Tensor) -> Any:
        return library.flash_mla_sparse_fwd(
            q, kv[:, None], indices[:, None], scale, d_v=q.shape[2], attn_sink=sink, topk_length=lens
        )

    return call


def _pages(cache: Tensor, block: int) -> Tensor:
    """Return a cache in FlashMLA's form: bytes `[P, S, 1, 584]`, with the strides of its pages."""
    row = layout.FP8_DS_MLA.data + layout.FP8_DS_MLA.scale
    return cache.as_strided((cache.shape[0], block, 1, row), (cache.stride(0), row, row, 1))
