"""Everything between the projections of a layer's input and its caches, for a kernel that does it in one launch.

One projection of the hidden states gives the query latent, the key/value vector and the inputs of the compressors. They
do not depend on each other: the latent is normalized for wq_b, the key/value vector goes into the window cache, and
each compressor saves its states and stores the entries that this step closes. `preprocess_insert_quant` quantises the
normalized latents too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import layout
from ...errors import fail
from ..common.block_scale import quantize_rows
from .compress_norm_rope_insert import CompressArguments, compress_norm_rope_insert
from .fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from .kv_rope_insert import kv_rope_insert
from .save_partial_states import save_partial_states


class Compressor(NamedTuple):
    """Arguments of one compressor, each as in `save_partial_states` and `compress_norm_rope_insert`."""

    kv_score: Tensor
    ape: Tensor
    norm_weight: Tensor
    state_cache: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    cache: Tensor
    slot_mapping: Tensor


class PreprocessArguments(NamedTuple):
    """Arguments of `preprocess_insert` and `preprocess_insert_quant`, in schema order.

    Attributes:
        qr: `[T, Lq]`; kv: `[T, D]`. bfloat16, float16 or float32, any strides. q_weight: `[Lq]`; kv_weight: `[D]`.
        positions: int `[>= T]`; cos_sin_cache: float32 `[max_pos, rope_dim]`; token_to_req: int `[>= T]`.
        cache_format: of the window cache, with `window_block_size` tokens per page, and of the compressed cache.
        window_slot_mapping: int64 `[<= T]`.
        kv_score to compressed_slot_mapping: the compressor of key/value entries, all or none.
        ratio: C of both compressors; 0 without one. It determines the page sizes, see `layout`.
        indexer_kv_score to indexer_slot_mapping: the compressor of the indexer's keys, all or none; only together with
            the first one. Its entries are stored in `indexer_cache_format`, transformed if `hadamard` is set.
        kv_scale: float32 `[1]`, for `fp8` caches.
        dtype: that float32 qr and kv are rounded to; None: that of their weights.
    """

    qr: Tensor
    kv: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    token_to_req: Tensor
    eps: float
    cache_format: str
    window_cache: Tensor
    window_slot_mapping: Tensor
    window_block_size: int
    kv_score: Tensor | None = None
    ape: Tensor | None = None
    norm_weight: Tensor | None = None
    state_cache: Tensor | None = None
    state_slot_mapping: Tensor | None = None
    state_block_table: Tensor | None = None
    compressed_cache: Tensor | None = None
    compressed_slot_mapping: Tensor | None = None
    ratio: int = 0
    indexer_kv_score: Tensor | None = None
    indexer_ape: Tensor | None = None
    indexer_norm_weight: Tensor | None = None
    indexer_state_cache: Tensor | None = None
    indexer_state_slot_mapping: Tensor | None = None
    indexer_state_block_table: Tensor | None = None
    indexer_cache: Tensor | None = None
    indexer_slot_mapping: Tensor | None = None
    indexer_cache_format: str = ""
    hadamard: bool = False
    kv_scale: Tensor | None = None
    dtype: torch.dtype | None = None

    def compressors(self) -> tuple[Compressor | None, Compressor | None]:
        """Return the compressors of entries and of indexer keys; None where all arguments are None.

        Raises E201 where some are None, and for an indexer's compressor without the other.
        """
        main = _compressor("the compressor", self[12:20])
        indexer = _compressor("the indexer's compressor", self[21:29])
        if main is None and indexer is not None:
            fail(
                "E201",
                got="preprocess_insert: an indexer's compressor without a main one",
                rule="an indexer comes with a compressor of entries",
            )
        return main, indexer

    def result_dtype(self) -> torch.dtype:
        """Return the dtype of the normalized latents."""
        return result_dtype(self.qr, self.q_weight, self.dtype)


def _compressor(what: str, given: Sequence[Tensor | None]) -> Compressor | None:
    tensors = [tensor for tensor in given if tensor is not None]
    if tensors and len(tensors) < len(given):
        missing = ", ".join(name for name, tensor in zip(Compressor._fields, given, strict=True) if tensor is None)
        fail(
            "E201",
            got=f"preprocess_insert: {what} without its {missing}",
            rule="a compressor comes with all of its arguments, or with none",
        )
    return Compressor(*tensors) if tensors else None


def result_dtype(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that `x` is rounded to when it is loaded.

    That is its own, or for float32 `dtype`, or without one that of its norm's weight.
    """
    return (dtype or weight.dtype) if x.dtype is torch.float32 else x.dtype


def preprocess_insert(call: PreprocessArguments) -> Tensor:
    """Run `fused_q_kv_rmsnorm`, `kv_rope_insert` of the normalized kv, then the compressors, the main one first.

    A compressor is a `save_partial_states` and a `compress_norm_rope_insert`.

    Returns:
        Normalized qr, contiguous `[T, Lq]`, padding rows included, in `result_dtype`.
    Notes:
        qr, kv and the scores may be slices of one projection. If it is float32, qr and kv are rounded once, to `dtype`
        or the dtype of their weights, as a projection in that dtype would have been.

        A step keeps two rules, so that its jobs can run side by side; where it breaks them, kernels and this function
        differ. A state that token t pools from k positions back was saved before this step and is not overwritten by
        it, or is saved by row t - k of it. So the tokens of a request, by `token_to_req`, are neighbouring rows in the
        order of their positions, and a ring of states holds the tokens of a step and the older ones of their windows.
        And caches do not overlap.
    """
    qr, kv = fused_q_kv_rmsnorm(
        call.qr.to(call.result_dtype()),
        call.kv.to(result_dtype(call.kv, call.kv_weight, call.dtype)),
        call.q_weight,
        call.kv_weight,
        call.eps,
    )
    window = call.window_cache, call.window_slot_mapping, call.positions, call.cos_sin_cache, call.window_block_size
    kv_rope_insert(kv, *window, call.cache_format, call.kv_scale)
    main, indexer = call.compressors()
    if main is not None:
        _compress(call, main)
    if indexer is not None:
        _compress(call, indexer, of_indexer=True)
    return qr


def compress_arguments(call: PreprocessArguments, c: Compressor, of_indexer: bool = False) -> CompressArguments:
    """Return the arguments of `compress_norm_rope_insert` for one compressor of `call`."""
    return CompressArguments(
        c.state_cache,
        c.state_slot_mapping,
        c.state_block_table,
        call.token_to_req,
        call.positions,
        c.slot_mapping,
        c.norm_weight,
        call.cos_sin_cache,
        c.cache,
        call.eps,
        call.ratio,
        layout.state_block_size(call.ratio),
        layout.storage_block_size(call.ratio),
        *(
            (call.indexer_cache_format, call.hadamard, None)
            if of_indexer
            else (call.cache_format, False, call.kv_scale)
        ),
    )


def _compress(call: PreprocessArguments, c: Compressor, of_indexer: bool = False) -> None:
    compress = compress_arguments(call, c, of_indexer)
    states = c.state_cache, c.state_slot_mapping, call.positions, compress.state_block_size
    save_partial_states(c.kv_score, c.ape, *states)
    compress_norm_rope_insert(compress)


def preprocess_insert_quant(call: PreprocessArguments) -> tuple[Tensor, Tensor]:
    """Quantise the result of `preprocess_insert` as `fp8_linear` does its input: the same bytes.

    Returns:
        e4m3 `[T, 1, Lq]`, contiguous, and float32 scales `[T, 1, n]`, n = ceil(Lq / 128), a view of contiguous
        `[n, T]`: strides (1, T * n, T). One group, as `fp8_grouped_einsum` takes it for the next GEMM.
    """
    return quantize_rows(preprocess_insert(call))
