"""All that stands between the projections of a layer's input and its caches, for a kernel that does it in one launch.

From one projection of the hidden states come the query latent, the key/value vector and what the compressors pool.
None of these needs another: the latent is normalised for wq_b, the key/value vector goes to the window cache, and each
compressor saves its states and stores the entries that this step closes.

`preprocess_insert` whose latents come quantised for wq_b.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import layout
from ...errors import fail
from ..common.block_scale import quantize_rows
from .compress_norm_rope_insert import compress_norm_rope_insert
from .fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from .kv_rope_insert import kv_rope_insert
from .save_partial_states import save_partial_states


class Compressor(NamedTuple):
    """The arguments of one compressor; each as `save_partial_states` and `compress_norm_rope_insert` take it."""

    kv_score: Tensor
    ape: Tensor
    norm_weight: Tensor
    state_cache: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    cache: Tensor
    slot_mapping: Tensor


def compressors(
    main: Sequence[Tensor | None], indexer: Sequence[Tensor | None]
) -> tuple[Compressor | None, Compressor | None]:
    """The compressors that the optional arguments describe: entries' and indexer keys'; None where all are None.

    Raises E201 where some are None, and for an indexer's compressor alone.
    """
    made = []
    for what, given in (("the compressor", main), ("the indexer's compressor", indexer)):
        tensors = [tensor for tensor in given if tensor is not None]
        if tensors and len(tensors) < len(Compressor._fields):
            missing = ", ".join(name for name, tensor in zip(Compressor._fields, given, strict=True) if tensor is None)
            fail(
                "E201",
                got=f"preprocess_insert: {what} without its {missing}",
                rule="a compressor comes with all of its arguments, or with none",
            )
        made.append(Compressor(*tensors) if tensors else None)
    if made[0] is None and made[1] is not None:
        fail("E201", got="preprocess_insert: an indexer's compressor alone", rule="an indexer is beside a compressor")
    return made[0], made[1]


def result_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """dtype that `x` is rounded to when it is loaded: its own, or that of its norm's weight where it is float32."""
    return weight.dtype if x.dtype is torch.float32 else x.dtype


def preprocess_insert(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    token_to_req: Tensor,
    eps: float,
    cache_format: str,
    window_cache: Tensor,
    window_slot_mapping: Tensor,
    window_block_size: int,
    kv_score: Tensor | None = None,
    ape: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state_cache: Tensor | None = None,
    state_slot_mapping: Tensor | None = None,
    state_block_table: Tensor | None = None,
    compressed_cache: Tensor | None = None,
    compressed_slot_mapping: Tensor | None = None,
    ratio: int = 0,
    indexer_kv_score: Tensor | None = None,
    indexer_ape: Tensor | None = None,
    indexer_norm_weight: Tensor | None = None,
    indexer_state_cache: Tensor | None = None,
    indexer_state_slot_mapping: Tensor | None = None,
    indexer_state_block_table: Tensor | None = None,
    indexer_cache: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_cache_format: str = "",
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """`fused_q_kv_rmsnorm`; `kv_rope_insert` of the normed kv; then, for each compressor that is given, first the main
    one, `save_partial_states` and `compress_norm_rope_insert`. The arguments are theirs.

    qr, kv and the scores may be slices of one projection. Where that is float32, qr and kv are rounded once, to the
    dtype of their weights, as a projection in that dtype would have been.

    A step keeps two rules, so that its jobs can run side by side; where it breaks them, kernels and this function
    differ. A state that token t pools from k positions back was saved before this step and is not overwritten by it,
    or is saved by row t - k of it. So the tokens of a request, by `token_to_req`, are neighbouring rows in the order of
    their positions, and a ring of states holds the tokens of a step beside the older ones of their windows. And caches
    do not overlap.

    Args:
        qr: `[T, Lq]`; kv: `[T, D]`. bfloat16, float16 or float32, any strides. q_weight: `[Lq]`; kv_weight: `[D]`.
        positions: int `[>= T]`; token_to_req: int `[>= T]`; cos_sin_cache: float32 `[max_pos, rope_dim]`.
        cache_format: of the window cache, whose pages hold `window_block_size` tokens, and of the compressed cache.
        window_slot_mapping: int64 `[<= T]`.
        ratio: C of both compressors; 0 for a layer that has none. Page sizes follow from it, see `layout`.
        kv_score ... compressed_slot_mapping: the compressor of key/value entries, all or none.
        indexer_kv_score ... indexer_slot_mapping: that of the indexer's keys, all or none, stored in
            `indexer_cache_format` and with `hadamard` transformed; only beside the former.
        kv_scale: float32 `[1]`, of `fp8` caches.
    Returns:
        Normed qr, contiguous `[T, Lq]`, in qr's dtype or, where that is float32, in q_weight's. Padding rows included.
    """
    qr, kv = fused_q_kv_rmsnorm(
        qr.to(result_dtype(qr, q_weight)), kv.to(result_dtype(kv, kv_weight)), q_weight, kv_weight, eps
    )
    kv_rope_insert(
        kv, window_cache, window_slot_mapping, positions, cos_sin_cache, window_block_size, cache_format, kv_scale
    )

    def compress(c: Compressor, fmt: str, transform: bool = False, scale: Tensor | None = None) -> None:
        state_block = layout.state_block_size(ratio)
        save_partial_states(c.kv_score, c.ape, c.state_cache, c.state_slot_mapping, positions, state_block)
        compress_norm_rope_insert(
            c.state_cache,
            c.state_slot_mapping,
            c.state_block_table,
            token_to_req,
            positions,
            c.slot_mapping,
            c.norm_weight,
            cos_sin_cache,
            c.cache,
            eps,
            ratio,
            state_block,
            layout.storage_block_size(ratio),
            fmt,
            transform,
            scale,
        )

    main, indexer = compressors(
        (
            kv_score,
            ape,
            norm_weight,
            state_cache,
            state_slot_mapping,
            state_block_table,
            compressed_cache,
            compressed_slot_mapping,
        ),
        (
            indexer_kv_score,
            indexer_ape,
            indexer_norm_weight,
            indexer_state_cache,
            indexer_state_slot_mapping,
            indexer_state_block_table,
            indexer_cache,
            indexer_slot_mapping,
        ),
    )
    if main is not None:
        compress(main, cache_format, scale=kv_scale)
    if indexer is not None:
        compress(indexer, indexer_cache_format, hadamard)
    return qr


@functools.wraps(preprocess_insert, assigned=())  # its signature
def preprocess_insert_quant(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`preprocess_insert`, whose result is then quantised as `fp8_linear` does its input: the same bytes.

    Args:
        args, options: as of `preprocess_insert`.
    Returns:
        e4m3 `[T, 1, Lq]`, contiguous, and float32 scales `[T, 1, n]`, n = ceil(Lq / 128), a view of contiguous
        `[n, T]`: strides (1, T * n, T). Of one group, as `fp8_grouped_einsum` takes them for the next product.
    """
    return quantize_rows(preprocess_insert(*args, **options))
