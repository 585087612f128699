"""Prefill through a workspace, which an engine may run for its prefills in place of paged attention.

    steps = plan_prefill(query_start_loc, seq_lens, split, window=128, ratio=4, max_rows=rows)       # host, once a step
    topk = prefill_topk(q, q_scale, weights, ...)                                                   # a CSA layer
    out, _, lse = prefill_attention(q, workspace, cache, steps, ...)                                # every layer

The keys of a few requests at a time are dequantised into one dense buffer, compressed entries before the window, and
every token attends rows of that buffer. So a key that many tokens attend is dequantised once. The result equals
`sparse_mla_decode` over the same caches, up to the order of sums.

The host plans with lengths that it knows (`prefill_plan`); nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import layout, ops  # noqa: F401  (ops registers torch.ops.dsv4)
from ..cache import LayerCache
from ..errors import check, fail
from ..metadata import BlockTables
from ..sources import source_groups
from .prefill_plan import PrefillStep


def prefill_attention(
    q: Tensor,
    workspace: Tensor,
    cache: LayerCache,
    steps: Sequence[PrefillStep],
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: BlockTables,
    window: int,
    ratio: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    topk_indices: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run attention for the prefill tokens of a batch, after their keys were inserted into the caches.

    Args:
        q: `[T, H, D]`, normed and rotated queries of the prefill tokens.
        workspace: `[rows, D]`, contiguous, with at least `plan_prefill`'s `max_rows`. It is overwritten.
        cache: the layer's caches.
        steps: result of `plan_prefill` with the same `window` and `ratio`.
        query_start_loc: int32 `[R + 1]` of the whole batch, on the device.
        seq_lens: int32 `[R]` of the whole batch, on the device.
        block_tables: block tables of the whole batch, on the device.
        topk_indices: int `[T, K]`, the entries that the indexer selected, see `prefill_topk`. None attends every
            visible entry.
    Returns:
        out, max_logits and lse of `torch.ops.dsv4.sparse_mla_prefill`; padding tokens attend nothing.
    """
    _check_queries(q, steps)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in steps:
        starts, lens = query_start_loc[step.requests.start : step.requests.stop + 1], seq_lens[step.requests]
        gather_lens = torch.ops.dsv4.prefill_gather_lens(starts, lens, 0, window)
        rows = _workspace_rows(workspace, lens.shape[0] * step.m).view(lens.shape[0], step.m, workspace.shape[1])
        entries = _entries(topk_indices, step, q.device)
        if step.n > 0:
            torch.ops.dsv4.dequantize_and_gather_k_cache(
                rows,
                _cache(cache, "entries", ratio),
                lens // ratio,
                None,
                _table(block_tables, "entries", ratio)[step.requests],
                layout.storage_block_size(ratio),
                0,
                cache_format,
                kv_scale,
            )
        torch.ops.dsv4.dequantize_and_gather_k_cache(
            rows,
            cache.window,
            lens,
            gather_lens,
            block_tables.window[step.requests],
            layout.WINDOW_BLOCK,
            step.n,
            cache_format,
            kv_scale,
        )
        indices, counts = torch.ops.dsv4.combine_topk_swa(
            entries, starts, lens, gather_lens, window, max(ratio, 1), entries.shape[1], step.m, step.n
        )
        parts.append(
            torch.ops.dsv4.sparse_mla_prefill(q[step.tokens], rows.flatten(0, 1), indices, counts, scale, attn_sink)
        )
    if not parts:
        no_keys = seq_lens.new_empty(q.shape[0], 0)
        parts.append(torch.ops.dsv4.sparse_mla_prefill(q, workspace, no_keys, None, scale, attn_sink))
    if len(parts) == 1:
        return parts[0]
    out, max_logits, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return out, max_logits, lse


def prefill_topk(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: LayerCache,
    steps: Sequence[PrefillStep],
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: BlockTables,
    token_to_req: Tensor,
    context_lens: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int,
    ratio: int = layout.CSA_RATIO,
) -> Tensor:
    """Return the entries that the indexer selects for the prefill tokens of a batch, int32 `[T, topk]`.

    The result equals `torch.ops.dsv4.indexer_logits_topk`, up to the order of sums. The keys of a step's requests are
    gathered once for all their tokens.

    Args:
        q, q_scale, weights: `[T, .]`, results of `indexer_q_rope_quant` for the prefill tokens.
        cache: the layer's caches; its source's keys have `cache_format`.
        steps: result of `plan_prefill`.
        query_start_loc, seq_lens, block_tables: see `prefill_attention`.
        token_to_req: int `[T]`, the request of each prefill token, a row of the batch.
        context_lens: int `[T]`, the number of entries each prefill token sees.
        max_logits_bytes: see `torch.ops.dsv4.indexer_logits_topk_ragged`.
        ratio: compress ratio of the source.
    """
    _check_queries(q, steps)
    keys, table = _cache(cache, "keys", ratio), _table(block_tables, "keys", ratio)
    selected = torch.full((q.shape[0], topk), layout.PAD_INDEX, dtype=torch.int32, device=q.device)
    for step in steps:
        if step.entries == 0:
            continue
        bounds = torch.nn.functional.pad((seq_lens[step.requests] // ratio).cumsum(0), (1, 0))
        k, k_scale = _indexer_workspace(keys, cache_format, step.entries)
        torch.ops.dsv4.cp_gather_indexer_k(
            keys,
            table[step.requests],
            bounds,
            k,
            k_scale,
            layout.storage_block_size(ratio),
            cache_format,
        )
        owner = (token_to_req[step.tokens] - step.requests.start).clamp(0, bounds.shape[0] - 1)
        first = bounds[owner.long()]
        selected[step.tokens] = torch.ops.dsv4.indexer_logits_topk_ragged(
            q[step.tokens],
            q_scale[step.tokens],
            weights[step.tokens],
            k,
            k_scale,
            first,
            first + context_lens[step.tokens],
            cache_format,
            topk,
            max_logits_bytes,
        )
    return selected


def _check_queries(q: Tensor, steps: Sequence[PrefillStep]) -> None:
    """Raise E201 unless the steps cover the rows of `q` exactly."""
    tokens = steps[-1].tokens.stop if steps else q.shape[0]
    check(
        q.shape[0] == tokens,
        "E201",
        got=f"queries of {q.shape[0]} tokens, steps of {tokens}",
        rule="q has the prefill tokens of the batch that was planned, padding included, and no decodes",
        fix="pass q[split.num_decode_tokens:]",
    )


def _cache(cache: LayerCache, role: str, ratio: int) -> Tensor:
    tensor: Tensor | None = getattr(cache.sources[0], role) if cache.sources else None
    if tensor is None:
        fail(
            "E201",
            got=f"a cache without {role}, with ratio {ratio}",
            rule="the caches belong to a layer of this ratio",
            fix="pass PagedCaches.layers[i] for layer i",
        )
    return tensor


def _workspace_rows(workspace: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows. E204 if there are fewer."""
    got, fix = f"a workspace of {workspace.shape[0]} rows for {rows}", "plan with max_rows of this workspace"
    check(rows <= workspace.shape[0], "E204", got=got, fix=fix)
    return workspace[:rows]


def _entries(topk_indices: Tensor | None, step: PrefillStep, device: torch.device) -> Tensor:
    """Return entries that the tokens of `step` may attend, int `[T, K]`, visible to them or not."""
    if topk_indices is not None:
        return topk_indices[step.tokens]
    every = torch.arange(step.n, dtype=torch.int32, device=device)
    return every.expand(step.tokens.stop - step.tokens.start, step.n)


def _table(block_tables: BlockTables, role: str, ratio: int) -> Tensor:
    return block_tables.table(next(group for group in source_groups(ratio) if group.role == role))


def _indexer_workspace(cache: Tensor, cache_format: str, rows: int) -> tuple[Tensor, Tensor]:
    """Allocate memory for `rows` gathered keys of `cache` and for their scales."""
    page = layout.PAGE_LAYOUTS.get(cache_format)
    width, scale = (page.data, page.scale) if page else (cache.shape[-1], 0)
    return cache.new_empty((rows, width)), cache.new_empty((rows, scale), dtype=torch.uint8)
