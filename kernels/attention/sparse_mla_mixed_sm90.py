"""`sparse_mla_mixed` on sm_90: the caches of DeepSeek-V4.1 in the kernel of sparse_mla_decode_sm90.py.

Its producer dequantises window rows of mxfp8 and entries of nvfp4 to exact bfloat16 once for 64 heads, where the Triton
kernel does so for 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import HEAD_DIM, byte_pages
from ...reference.attention.sparse_mla_mixed import MixedArguments
from ..host.addresses import first_byte
from ..host.gpu import Gpu
from . import sparse_mla_decode_sm90 as many
from .common import GRIDS, DecodeCall, Outputs, PagedKeys

FORMATS = "mxfp8", "nvfp4"


def why_unsupported(a: MixedArguments) -> str:
    """Return why this kernel does not support a call that the Triton kernel supports, "" if it does."""
    q, sink = a.q, a.sink
    _, heads, dim = q.shape
    if heads < many.MIN_HEADS:
        return f"it takes {many.MIN_HEADS} heads or more, these are {heads}"
    if q.dtype is not torch.bfloat16 or dim != HEAD_DIM:
        return f"it takes bfloat16 queries of {HEAD_DIM} channels, these are {q.dtype} of {dim}"
    formats = a.window_format, FORMATS[1] if a.entries is None else a.entry_format
    if formats != FORMATS:
        return f"it takes {' and '.join(FORMATS)}, these are {' and '.join(formats)}"
    for keys in _keys(a):
        page, stride, offset = keys.block_size, keys.cache.stride(0), first_byte(keys.cache)
        if page & (page - 1):
            return f"pages have a power of two of rows, these have {page}"
        if stride % many.PAGE_ALIGN or offset % many.PAGE_ALIGN:
            at = f"these start at byte {offset}, {stride} bytes apart"
            return f"pages start at multiples of {many.PAGE_ALIGN} bytes, {at}"
        if keys.indices.stride(1) != 1:
            return f"the slots of a token are contiguous, these have stride {keys.indices.stride(1)}"
    if q.stride(2) != 1 or sink.stride(0) != 1:
        return f"channels and sinks are contiguous, these have strides {q.stride(2)} and {sink.stride(0)}"
    return ""


def _keys(a: MixedArguments) -> tuple[PagedKeys, PagedKeys]:
    """Return both caches as byte pages with their slots; without entries, the window again with no slot."""
    pages = byte_pages(a.window, a.window_format, a.window_block_size, head_dim=a.q.shape[2])
    window = PagedKeys(pages, a.window_slots, None, a.window_block_size)
    if a.entries is None or a.entry_slots is None:
        return window, window._replace(indices=a.window_slots[:, :0])
    pages = byte_pages(a.entries, a.entry_format, a.entry_block_size, head_dim=a.q.shape[2])
    return window, PagedKeys(pages, a.entry_slots, None, a.entry_block_size)


def call_of(a: MixedArguments) -> DecodeCall:
    """Return a call as the decode kernels take it."""
    return DecodeCall(a.q, *_keys(a), GRIDS, a.scale, a.sink)


def launch(a: MixedArguments, gpu: Gpu, splits: int = 0) -> Tensor:
    """Run a call on `gpu`; `splits` overrules the plan."""
    out = torch.empty(a.q.shape, dtype=a.q.dtype, device=a.q.device)
    many.launch_into(Outputs(out, None), call_of(a), gpu, splits)
    return out
