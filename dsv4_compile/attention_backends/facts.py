"""Facts that attention backends are asked about and made of: what they support, and what a layer is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import torch

from .. import layout

ENGINES = ("dsv4", "library")
"""Who computes attention: torch.ops.dsv4, or the kernel library that a backend was made for."""


class CudaGraphSupport(IntEnum):
    """Which batches a backend can be captured for; each level includes those before it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def capability(architecture: str) -> tuple[int, int] | None:
    """CUDA compute capability of a `_compat.device_architecture`; None of other devices."""
    found = re.fullmatch(r"cuda sm_(\d+)(\d)", architecture)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend serves a demand. `reason` says why or why not; true as a bool if it does."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model and a machine ask of a backend.

    Attributes:
        model_type: `deepseek_v4` or `deepseek_v32`.
        head_size: D, of queries and of cached vectors.
        num_heads: H, query heads on this device.
        dtype: of hidden states.
        kv_cache_dtype: the user's word, such as `auto`, `fp8_ds_mla`, `fp8` or `bfloat16`.
        block_size: tokens that one entry of the main cache's block table covers.
        index_topk: entries that the model's indexer selects; None for a model without one.
        has_sink: whether heads have a sink logit.
        qk_nope_head_dim: dims of a query head that carry no position, before they are absorbed; None if none are.
        architecture: as `_compat.device_architecture` names it: "cpu", "cuda sm_90", "cuda gfx942".
        engine: one of `ENGINES`.
    """

    model_type: str = "deepseek_v4"
    head_size: int = layout.HEAD_DIM
    num_heads: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    block_size: int = layout.KV_BLOCK
    index_topk: int | None = 512
    has_sink: bool = True
    qk_nope_head_dim: int | None = None
    architecture: str = "cpu"
    engine: str = "dsv4"

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability; None on other devices."""
        return capability(self.architecture)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The fixed facts of one attention layer.

    Attributes:
        num_heads, head_size: H and D of queries. scale: factor of the scores.
        window: tokens attended directly, W. ratio: compress ratio, 1 = window only.
        max_model_len, max_num_batched_tokens: capacities; they size prefill workspaces.
        kv_cache_dtype: the user's word; see the backend's `cache_format`.
        window_block_size, block_size: tokens that one entry of a block table covers, of the window and of the main
            cache.
        value_dim: leading dims of a cached vector that are its value; 0 = all.
    """

    num_heads: int
    head_size: int
    scale: float
    window: int = layout.SLIDING_WINDOW
    ratio: int = 1
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    kv_cache_dtype: str = "auto"
    window_block_size: int = layout.WINDOW_BLOCK
    block_size: int = layout.KV_BLOCK
    value_dim: int = 0

    @property
    def entry_block_size(self) -> int:
        """Compressed entries in a page of the main cache."""
        return max(self.block_size // self.ratio, 1)
