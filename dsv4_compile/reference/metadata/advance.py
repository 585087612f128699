"""Move a decode batch to its next step on the device: lengths, query starts and the tokens to feed.

A step runs `query_len` tokens of each request: one that the request really has, and drafts of those that may follow.
The model then says how many of them it keeps. Dropping the others takes nothing but a shorter length, because every
cache of this package is addressed by position:

- A dropped token at position p has written its row of the window, its compressor state and, if p closes a group, a
  compressed entry. The step with p in its query writes all three again before anything reads them: within a step, rows
  and states are written before entries, and entries before attention.
- Nothing else can see them. A token sees positions up to its own and entries that closed at or before it. The overlap
  compressor, which pools two groups of 4, reaches back from the token that closes the second one; it reads the states
  of tokens that were kept, or that this very step has written again.
- Where pages form a ring, a dropped token has overwritten the row one ring before it. A ring has room for the tokens
  that a step reads and for `query_len` more (see `cache.PagedCaches`), so that row was out of reach already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PAD_TOKEN = 0


class AdvanceArguments(NamedTuple):
    """Arguments of `advance`, in schema order.

    Attributes:
        num_new: int `[R]`, tokens of its query that each request keeps. Taken as at least 1 and at most the query: its
            first token is no draft.
        tokens: int `[R, S]`, the tokens that the model chose. With S = 1, the token to feed; otherwise column j is its
            choice after token j of the query, and the one after the last kept token is fed.
        drafts: int `[R, query_len - 1]`, fed behind it; None where query_len is 1.
        reserved: int `[R]`, tokens that the pages of each request hold.
        query_start_loc: int32 `[R + 1]`, of the step that ran, whatever its query lengths: becomes
            `0, query_len, 2 * query_len, ...`.
        seq_lens: int32 `[R]`, queries included, 0 for no request: becomes `kept + query_len`, where kept is the tokens
            in front of the query and those kept of it.
        input_ids: int64 `[N]`, N >= R * query_len: becomes the tokens to feed, 0 where there is none.
        overflow: int32 `[R]`. A request stops if its next query would not fit its pages: its length becomes 0, which
            makes it padding, and its element here becomes kept, the tokens that it has. Others are left as they are.
    """

    num_new: Tensor
    tokens: Tensor
    drafts: Tensor | None
    reserved: Tensor
    query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    input_ids: Tensor
    overflow: Tensor


def advance(op: AdvanceArguments) -> None:
    """Turn the description of the step that has run into that of the next, in place: `query_len` tokens a request.


    Requests do not wait for each other or for the host, which reads `overflow` when it likes. Requests of length 0,
    or shorter than their query, are padding and stay so.
    """
    starts, lens = op.query_start_loc.long(), op.seq_lens.long()
    queries = starts.diff()
    running = (queries > 0) & (lens >= queries)
    new = torch.minimum(op.num_new.long().clamp_min(1), queries)
    kept_lens = lens - queries + new
    fits = running & (kept_lens + op.query_len <= op.reserved)
    column = (new - 1).clamp(0, op.tokens.shape[1] - 1)
    fed = op.tokens.long().gather(1, column[:, None])
    if op.drafts is not None:
        fed = torch.cat((fed, op.drafts.long()), dim=1)
    fed = torch.where(fits[:, None], fed, PAD_TOKEN).flatten()

    op.query_start_loc.copy_(torch.arange(starts.shape[0], device=starts.device) * op.query_len)
    op.seq_lens.copy_(torch.where(fits, kept_lens + op.query_len, 0))
    op.overflow.copy_(torch.where(running & ~fits, kept_lens, op.overflow))
    op.input_ids[: fed.shape[0]].copy_(fed)
    op.input_ids[fed.shape[0] :].fill_(PAD_TOKEN)
