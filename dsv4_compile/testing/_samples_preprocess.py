"""Samples of the op that does a layer's preprocessing at once. See samples.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import layout
from ._samples_step import EPS, INDEXER, KV, TOKENS, Args, Step, rope_dim, sample

LATENT = 96


def _projection(s: Step, *sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """`[T, size]` for each size, slices of one projection of the hidden states."""
    return s.randn(TOKENS, sum(sizes), dtype=dtype).split(sizes, dim=1)


def _compressor(s: Step, kv_score: Tensor, ratio: int, dim: int, fmt: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the eight arguments of a compressor, its projection first."""
    block = layout.storage_block_size(ratio)
    state, state_table, state_block = s.state(ratio, dim)
    table = s.table(block, ratio)
    return (
        kv_score,
        s.randn(ratio, kv_score.shape[1] // 2, dtype=torch.float32),
        1 + 0.1 * s.randn(dim, dtype=dtype),
        state,
        s.slots(state_table, state_block),
        state_table,
        s.cache(fmt, table, block, head_dim=dim, dtype=dtype).cache,
        s.entry_slots(table, block, ratio),
    )


@sample
def preprocess_insert(s: Step) -> list[Args]:
    """Layers of ratio 4 with an indexer, of ratio 128, and a window alone with a float32 projection that is rounded."""
    (mla, fp8, plain), (key_fp8, _, key_plain) = KV, INDEXER
    samples: list[Args] = []
    for ratio, (fmt, dim, dtype), key, hadamard in (
        (layout.CSA_RATIO, mla, key_fp8, False),
        (layout.CSA_RATIO, plain, key_plain, True),
        (layout.HCA_RATIO, fp8, None, False),
        (0, mla, None, False),
    ):
        key_fmt, key_dim, key_dtype = key or ("", dim, dtype)
        qr, kv = _projection(s, LATENT, dim, dtype=torch.float32 if ratio == 0 else dtype)
        window = s.cache(fmt, s.window, layout.WINDOW_BLOCK, head_dim=dim, dtype=dtype)
        args: Args = (
            qr,
            kv,
            s.randn(LATENT, dtype=dtype),
            s.randn(dim, dtype=dtype),
            s.positions,
            s.rope(rope_dim(min(dim, key_dim))),
            s.token_to_req,
            EPS,
            fmt,
            window.cache,
            s.slots(s.window, window.block_size),
            window.block_size,
        )
        if ratio:
            scores, keys = _projection(s, layout.state_width(ratio, dim), layout.state_width(ratio, key_dim))
            args += (*_compressor(s, scores, ratio, dim, fmt, dtype), ratio)
            args += _compressor(s, keys, ratio, key_dim, key_fmt, key_dtype) if key else (None,) * 8
            args += key_fmt, hadamard, window.kv_scale
        else:
            args += (None,) * 8 + (0,) + (None,) * 8 + ("", False, None, torch.float16)
        samples.append(args)
    return samples


@sample
def preprocess_insert_quant(s: Step) -> list[Args]:
    return preprocess_insert(s)
