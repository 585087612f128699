"""`copy_ragged_to_graph_buffers`: one launch copies both arrays of a list of rows and pads what is left.

The last end is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX, cdiv
from ..host.launch import launch_kernel

BLOCK = 1024
"""Elements that a program writes."""
PAD = tl.constexpr(PAD_INDEX)


@triton.jit(do_not_specialize=["ends", "end_room", "available", "room"])
def copy_ragged_kernel(
    outputs,  # indices [room] int32 and ends [end_room] int32
    inputs,  # indices [available] int and ends [ends] int
    strides,  # of out, out ends, indices, ends
    ends,
    end_room,
    available,
    room,
    BLOCK: tl.constexpr,
):
    """Write elements [p * BLOCK, (p + 1) * BLOCK) of both arrays in program p."""
    p_out, p_out_ends = outputs
    p_indices, p_ends = inputs
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.minimum(room, available)
    # Ends after the last repeat it.
    end = tl.load(p_ends + tl.minimum(o, ends - 1) * strides[3], mask=o < end_room, other=0).to(tl.int64)
    tl.store(p_out_ends + o * strides[1], tl.minimum(tl.maximum(end, 0), limit).to(tl.int32), mask=o < end_room)
    used = tl.load(p_ends + (ends - 1).to(tl.int64) * strides[3]).to(tl.int64)
    used = tl.minimum(tl.maximum(used, 0), limit)
    index = tl.load(p_indices + o * strides[2], mask=o < used, other=PAD)
    tl.store(p_out + o * strides[0], index.to(tl.int32), mask=o < room)


def copy_ragged_to_graph_buffers(
    ragged_indices: Tensor, ragged_indptr: Tensor, indices_buffer: Tensor, indptr_buffer: Tensor
) -> None:
    """Launch `copy_ragged_to_graph_buffers`; every byte of the buffers equals the reference."""
    arrays = (indices_buffer, indptr_buffer, ragged_indices, ragged_indptr)
    most = max(indices_buffer.shape[0], indptr_buffer.shape[0])
    launch_kernel(
        copy_ragged_kernel,
        (cdiv(most, BLOCK),),
        arrays[:2],
        arrays[2:],
        tuple(array.stride(0) for array in arrays),
        ragged_indptr.shape[0],
        indptr_buffer.shape[0],
        ragged_indices.shape[0],
        indices_buffer.shape[0],
        BLOCK=BLOCK,
        num_warps=4,
    )
