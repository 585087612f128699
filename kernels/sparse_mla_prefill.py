"""Launchers of `sparse_mla_prefill` and its list form: on Hopper the kernel made for it where that fits, else the
portable one.
"""

from __future__ import annotations

from torch import Tensor

from .gpu import gpu_of, hopper_kernel
from .sparse_mla_prefill_portable import Rows, launch

MAX_HEAD_DIM = 512
LIMIT = 2**31 - 2**10
"""What is counted in 32 bits, up to some blocks behind the last element."""


def sparse_mla_prefill_refuses(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    return _why_not(q, kv, indices)


def sparse_mla_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Weights are rounded to the dtype of the keys before they meet them; sums are float32.

    A token's result depends on nothing but its own arguments, to the bit.
    """
    return attend_rows(q, kv, Rows(indices, topk_length, indices.shape[1]), scale, attn_sink)


def sparse_mla_prefill_ragged_refuses(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    return _why_not(q, kv, indices)


def sparse_mla_prefill_ragged(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sparse_mla_prefill`."""
    total = indices.shape[0]
    width = min(max_row, total) if max_row > 0 else total
    return attend_rows(q, kv, Rows(indices, indptr, width, ragged=True), scale, attn_sink)


def _why_not(q: Tensor, kv: Tensor, indices: Tensor) -> str:
    if q.shape[2] > MAX_HEAD_DIM:
        return f"the kernel holds vectors of at most {MAX_HEAD_DIM} dims, these have {q.shape[2]}"
    if max(kv.shape[0], indices.shape[-1], q.shape[0] * q.shape[1]) >= LIMIT:
        return f"the kernel counts fewer than {LIMIT} rows, indices, and heads of all tokens"
    return ""


def attend_rows(q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `max_logits` and `lse` of either form."""
    gpu = gpu_of(q.device)
    hopper = hopper_kernel(gpu, "sparse_mla_prefill_hopper")
    if hopper is not None and not hopper.hopper_refuses(q, kv, rows, scale, sink):
        return hopper.launch_hopper(q, kv, rows, scale, sink, gpu)
    return launch(q, kv, rows, scale, sink, gpu)
