"""What an engine says about a batch before any backend looks at it, for the caches of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..metadata.split import BatchSplit, split_decodes_and_prefills


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """A batch for the caches of one group, ordered decodes first.

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
        """From host numbers; tensors go to the device of `block_table`. T is the length of `slot_mapping`."""
        starts, device = tuple(query_start_loc), block_table.device
        return cls(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            num_reqs=len(starts) - 1,
            num_actual_tokens=slot_mapping.shape[0],
            max_query_len=max((end - start for start, end in pairwise(starts)), default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            positions=positions,
        )

    def split(self, decode_threshold: int = 1) -> BatchSplit:
        """Decodes and prefills. Every builder of a model uses the same threshold, so that their parts line up."""
        return split_decodes_and_prefills(
            self.query_start_loc_cpu, decode_threshold=decode_threshold, num_tokens=self.num_actual_tokens
        )
