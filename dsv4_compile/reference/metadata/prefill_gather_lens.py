"""Number of cached tokens that each prefill gathers."""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, num_decodes: int, window: int) -> Tensor:
    """int32 `[R - num_decodes]`: cached tokens each prefill needs: its query and up to W - 1 tokens before it.

    Args:
        query_start_loc: int `[R + 1]`; seq_lens: int `[R]`. Never more than the request's length, 0 for padded ones.
    """
    query_lens = query_start_loc.diff()[num_decodes:]
    seq_lens = seq_lens[num_decodes:]
    context = (seq_lens - query_lens).clamp_max(window - 1)
    return (query_lens + context).clamp_min(0).to(torch.int32)
