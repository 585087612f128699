"""Preprocessing of a layer in plain PyTorch, without custom ops: the input of stock torch.compile.

Each linear is a separate call, norms and RoPE are formulas, and caches are written by indexed assignment. Tokens that
close no group of the compressor write to the last entry of its cache, which no request owns: a graph with static shapes
cannot leave them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight^T` in float32."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return the RMS norm over the last dim in float32."""
    x = x.float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[..., D]` in float32, its last dims, as many as `cos` and `sin` have together, rotated in pairs."""
    turned = cos.shape[-1] + sin.shape[-1]
    still, pairs = x.float().split((x.shape[-1] - turned, turned), dim=-1)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    return torch.cat((still, torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)), dim=-1)


def store(cache: Tensor, block: int, slots: Tensor, x: Tensor) -> None:
    """Quantise vectors float32 `[N, 512]` and store them in `fp8_ds_mla` pages."""
    page, rounded = layout.FP8_DS_MLA, x.bfloat16()
    tiles = rounded[:, : layout.NOPE_DIM].float().unflatten(1, (-1, layout.KV_TILE))
    amax = tiles.abs().amax(-1).clamp_min(layout.KV_AMAX_FLOOR)
    exponent = torch.ceil(torch.log2(amax / layout.FP8_MAX))
    values = (tiles * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn).flatten(1)
    data = torch.cat((values.view(torch.uint8), rounded[:, layout.NOPE_DIM :].contiguous().view(torch.uint8)), dim=1)
    scale = torch.nn.functional.pad((exponent + layout.UE8M0_BIAS).to(torch.uint8), (0, 1))
    datas, scales = cache.split((block * page.data, block * page.scale), dim=1)
    datas.unflatten(1, (block, page.data))[slots // block, slots % block] = data
    scales.unflatten(1, (block, page.scale))[slots // block, slots % block] = scale


def queries_and_window(
    hidden: Tensor,
    wq_a: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    wq_b: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    """Return queries `[T, H, D]`, and store keys and values in the cache."""
    linear, dtype = torch.nn.functional.linear, hidden.dtype
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    qr = rms_norm(linear(hidden, wq_a), eps, q_weight).to(dtype)
    kv = rms_norm(linear(hidden, wkv), eps, kv_weight).to(dtype)
    store(cache, layout.WINDOW_BLOCK, slots, rope(kv, cos, sin))
    q = linear(qr, wq_b).unflatten(-1, (-1, kv.shape[1]))
    return rope(rms_norm(q, eps), cos[:, None], sin[:, None]).to(dtype)


def compress(
    hidden: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    owners: Tensor,
    state: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    entry_slots: Tensor,
    ratio: int,
    eps: float,
) -> None:
    """Store the tokens' states, and an entry for each group that a token closes."""
    size, block = state.shape[1], layout.storage_block_size(ratio)
    score = linear_fp32(hidden, wgate) + ape[positions % ratio]
    state[slots // size, slots % size] = torch.cat((linear_fp32(hidden, wkv), score), dim=-1)

    window = layout.overlap_factor(ratio) * ratio
    where = positions[:, None] + torch.arange(1 - window, 1, device=positions.device)
    absent, where = (where < 0)[..., None], where.clamp_min(0)
    values, scores = state[table[owners[:, None], where // size].long(), where % size].chunk(2, dim=-1)
    if window > ratio:
        values, scores = (_halves(x, ratio) for x in (values, scores))
    weights = scores.masked_fill(absent, -torch.inf).softmax(dim=1)
    entry = rms_norm((values * weights).sum(dim=1), eps, norm_weight)
    cos, sin = cos_sin[positions // ratio * ratio].chunk(2, dim=-1)
    dummy = cache.shape[0] * block - 1
    store(cache, block, torch.where(entry_slots < 0, dummy, entry_slots), rope(entry, cos, sin))


def _halves(x: Tensor, ratio: int) -> Tensor:
    """Return the first half of the columns of the older group and the second half of the newer."""
    old, new = x[:, :ratio].chunk(2, dim=-1)[0], x[:, ratio:].chunk(2, dim=-1)[1]
    return torch.cat((old, new), dim=1)
