"""Metadata of the sliding window, common to all DeepSeek-V4 backends, and its builder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import PAD_INDEX, SLIDING_WINDOW, WINDOW_BLOCK
from ..metadata import BatchSplit
from .types import CommonAttentionMetadata, query_lens


@dataclass(frozen=True)
class DeepseekSparseSWAMetadata:
    """A batch for the window caches; tensors are views of the builder's buffers.

    Attributes:
        block_table: int32 `[R, B]`, slot_mapping: int64 `[T]`, block_size: tokens of a page.
        seq_lens: int32 `[R]`, query_start_loc: int32 `[R + 1]`, query_start_loc_cpu: the same on the host.
        token_to_req_indices: int32 `[T]`, 0 for padding. is_valid_token: bool `[T]`.
        decode_swa_indices: int32 `[Td, 1, W]`, decode_swa_lens: int32 `[Td]`: slots of each decode token's window.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split; Td is num_decode_tokens.
        prefill_seq_lens, prefill_gather_lens: int32 `[Rp]`: tokens of each prefill, and how many of the last ones its
            query attends directly.
        max_decode_query_len, max_prefill_query_len: longest query of each part, 0 for an empty part.
    """

    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    seq_lens: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: tuple[int, ...]
    token_to_req_indices: Tensor
    is_valid_token: Tensor
    decode_swa_indices: Tensor
    decode_swa_lens: Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    prefill_seq_lens: Tensor
    prefill_gather_lens: Tensor
    max_decode_query_len: int
    max_prefill_query_len: int


class DeepseekSparseSWAMetadataBuilder:
    """Builds `DeepseekSparseSWAMetadata` in buffers of fixed addresses.

    Args:
        max_num_batched_tokens: most tokens of a step.
        window: W. block_size: tokens of a page of the window cache.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        window: int = SLIDING_WINDOW,
        block_size: int = WINDOW_BLOCK,
        decode_threshold: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.window, self.block_size, self.decode_threshold = window, block_size, decode_threshold
        self.token_to_req_indices = ints(max_num_batched_tokens)
        self.is_valid_token = torch.zeros(max_num_batched_tokens, dtype=torch.bool, device=device)
        self.decode_swa_indices = ints(max_num_batched_tokens, 1, window, fill=PAD_INDEX)
        self.decode_swa_lens = ints(max_num_batched_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekSparseSWAMetadata:
        """Build the metadata of a batch. Engines pass `common_prefix_len` and `fast_build`; both are ignored."""
        cm = common_attn_metadata
        split = cm.split(self.decode_threshold)
        torch.ops.dsv4.swa_metadata(
            cm.query_start_loc,
            cm.seq_lens,
            cm.block_table_tensor,
            cm.slot_mapping,
            self.block_size,
            self.window,
            split.num_decode_tokens,
            self.token_to_req_indices,
            self.is_valid_token,
            self.decode_swa_indices,
            self.decode_swa_lens,
        )
        return window_metadata(
            cm,
            split,
            block_size=self.block_size,
            token_to_req=self.token_to_req_indices,
            is_valid_token=self.is_valid_token,
            indices=self.decode_swa_indices,
            lens=self.decode_swa_lens,
        )


def window_metadata(
    cm: CommonAttentionMetadata,
    split: BatchSplit,
    *,
    block_size: int,
    token_to_req: Tensor,
    is_valid_token: Tensor,
    indices: Tensor,
    lens: Tensor,
) -> DeepseekSparseSWAMetadata:
    """Return the window's metadata as views of buffers that hold this batch; `indices` is `[>= T, 1, W]`."""
    tokens, decodes = slice(0, cm.num_actual_tokens), slice(0, split.num_decode_tokens)
    queries = query_lens(cm.query_start_loc_cpu)
    return DeepseekSparseSWAMetadata(
        block_table=cm.block_table_tensor,
        slot_mapping=cm.slot_mapping,
        block_size=block_size,
        seq_lens=cm.seq_lens,
        query_start_loc=cm.query_start_loc,
        query_start_loc_cpu=cm.query_start_loc_cpu,
        token_to_req_indices=token_to_req[tokens],
        is_valid_token=is_valid_token[tokens],
        decode_swa_indices=indices[decodes],
        decode_swa_lens=lens[decodes],
        prefill_seq_lens=cm.seq_lens[split.num_decodes :],
        prefill_gather_lens=torch.ops.dsv4.prefill_gather_lens(
            cm.query_start_loc, cm.seq_lens, split.num_decodes, indices.shape[2]
        ),
        max_decode_query_len=max(queries[: split.num_decodes], default=0),
        max_prefill_query_len=max(queries[split.num_decodes :], default=0),
        **split._asdict(),
    )
