"""Return of a sub-layer's output to the streams of hyper-connections."""

from __future__ import annotations

from torch import Tensor


def mhc_post(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Compute `streams'[k] = post[k] output + sum_j comb[j, k] streams[j]` in float32, rounded once.

    Args:
        streams: `[T, N, D]`, before the sub-layer; output: `[T, D]`, of the sub-layer. One dtype, any strides.
        post: float32 `[T, N]`; comb: float32 `[T, N, N]`, summed over its first stream.
    Returns:
        `[T, N, D]`, contiguous, in the dtype of streams.
    """
    # A sum of N terms in a fixed order: a batched GEMM of N x N matrices is slower, and may round its operands.
    wide, mixed = streams.float(), post.unsqueeze(2) * output.float().unsqueeze(1)
    for j in range(streams.shape[1]):
        mixed = mixed + comb[:, j].unsqueeze(2) * wide[:, j].unsqueeze(1)
    return mixed.to(streams.dtype).contiguous()
