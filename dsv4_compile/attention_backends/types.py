"""Types that engines, layers and attention backends exchange: a batch, a layer, a demand, CUDA graph support."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from .. import layout
from ..metadata.split import BatchSplit, split_decodes_and_prefills
from ..sources import SELECTIONS

ENGINES = ("dsv4", "library")
"""Implementations of attention: `torch.ops.dsv4`, or the kernel library that a backend was made for."""


class CudaGraphSupport(IntEnum):
    """Batches that a backend can be captured for; each level includes the levels before it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def capability(architecture: str) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a `_compat.device_architecture`; None for other devices."""
    match = re.fullmatch(r"cuda sm_(\d+)(\d)", architecture)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Demand:
    """Requirements of a model and a machine that a backend must meet.

    Attributes:
        model_type: `deepseek_v4` or `deepseek_v32`.
        head_size: D, of queries and of cached vectors.
        num_heads: H, query heads on this device.
        dtype: of hidden states.
        kv_cache_dtype: the user's word, such as `auto`, `fp8_ds_mla`, `fp8` or `bfloat16`.
        block_size: tokens that one entry of the extra cache's block table covers.
        index_topk: entries that the model's indexer selects; None for a model without one.
        has_sink: whether heads have a sink logit.
        qk_nope_head_dim: dims of a query head without RoPE, before the latent up-projection is absorbed; None if the
            model does not absorb one.
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
    """Fixed sizes of one attention layer.

    Attributes:
        num_heads, head_size: H and D of queries. scale: factor of the scores.
        window: tokens attended directly, W. ratio: compress ratio of its source, 1 for a window alone.
        selection: how it selects entries of its source, `topk` or `all`; "" stands for that of the ratio.
        max_model_len, max_num_batched_tokens: capacities; they size prefill workspaces.
        kv_cache_dtype: the user's word; see the backend's `cache_format`.
        window_block_size, block_size: tokens that one block table entry covers, of the window cache and of the extra
            cache.
        value_dim: leading dims of a cached vector that are its value; 0 = all.
    """

    num_heads: int
    head_size: int
    scale: float
    window: int = layout.SLIDING_WINDOW
    ratio: int = 1
    selection: str = ""
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    kv_cache_dtype: str = "auto"
    window_block_size: int = layout.WINDOW_BLOCK
    block_size: int = layout.KV_BLOCK
    value_dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "selection", self.selection or SELECTIONS.get(self.ratio, ""))

    @property
    def entry_block_size(self) -> int:
        """Compressed entries in a page of the extra cache."""
        return max(self.block_size // self.ratio, 1)


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """A batch as an engine describes it to every backend, for the caches of one group; decodes come first.

    Attributes:
        query_start_loc: int32 `[R + 1]`, first token of each request and the end of the last; padded requests repeat
            it. query_start_loc_cpu: the same numbers on the host.
        seq_lens: int32 `[R]`, tokens of each request, this step's query included; 0 for padded requests.
        num_reqs, num_actual_tokens: R and T, padding included where a graph is captured.
        max_query_len, max_seq_len: bounds over the batch.
        block_table_tensor: int32 `[R, B]` of this group. slot_mapping: int64 `[T]`, -1 for padding.
        positions: int64 `[T]` within the request; only ratio 128 needs it.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: tuple[int, ...]
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        slot_mapping: Tensor,
        positions: Tensor | None = None,
    ) -> CommonAttentionMetadata:
        """Build from host numbers; tensors go to the device of `block_table`. T is the length of `slot_mapping`."""
        starts, device = tuple(query_start_loc), block_table.device
        return cls(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            num_reqs=len(starts) - 1,
            num_actual_tokens=slot_mapping.shape[0],
            max_query_len=max(query_lens(starts), default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            positions=positions,
        )

    def split(self, decode_threshold: int = 1) -> BatchSplit:
        """Split into decodes and prefills. All builders of a model use one threshold, so that their splits agree."""
        return split_decodes_and_prefills(
            self.query_start_loc_cpu, decode_threshold=decode_threshold, num_tokens=self.num_actual_tokens
        )


def query_lens(query_start_loc: Sequence[int]) -> list[int]:
    """Return the query length of each request, from R + 1 host integers."""
    return [end - start for start, end in pairwise(query_start_loc)]
