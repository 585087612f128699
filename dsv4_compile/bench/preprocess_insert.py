"""Scenario `preprocess_insert`: the preprocessing of a whole layer, in one launch and op by op.

Steps are those of scenario `indexer`: up to 512 tokens are a decode step where every token closes a group, the worst
case (one step in 128 at ratio 128); more tokens are the last chunk of one prompt. All inputs are slices of one float32
projection. `separate` runs the kernels of the ops that the one launch replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..reference.preprocess.preprocess_insert import PreprocessArguments, compress_arguments, result_dtype
from ..selection import costs
from ..testing.cached import FEW_TIES, TIES
from . import gate
from .indexer import CONTEXT, KEYS
from .problem import Args, Only, Prepare, Problem, keep, on_gpu
from .steps import Compressor, StepInputs

TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096, 16384), "cpu": (1, 4)}
COLUMNS = ("op", "kind", "latent", "tokens", "impl")
CACHE = "fp8_ds_mla"
KINDS: Mapping[str, int] = {"swa": 0, "hca": layout.HCA_RATIO, "csa": layout.CSA_RATIO}
WRITTEN = {"swa": (9,), "hca": (9, 15, 18), "csa": (9, 15, 18, 24, 27)}


def _compressors(config: DeepseekV4Config, ratio: int) -> list[Compressor]:
    main = [Compressor(ratio, config.head_dim, CACHE)] if ratio else []
    return main + ([Compressor(ratio, config.index_head_dim, KEYS)] if ratio == layout.CSA_RATIO else [])


def build(s: StepInputs, ratio: int) -> Args:
    """Return the arguments of `preprocess_insert` for a layer of `ratio`."""
    c, compressors = s.config, _compressors(s.config, ratio)
    widths = [c.q_lora_rank, c.head_dim, *(compressor.width for compressor in compressors)]
    qr, kv, *scores = s.randn(s.tokens, sum(widths), part=8, dtype=torch.float32).split(widths, dim=1)
    weights = s.randn(c.q_lora_rank, part=9), s.randn(c.head_dim, part=10)
    pages = layout.cdiv(s.tokens, layout.WINDOW_BLOCK)
    slots = s.randn(pages * layout.WINDOW_BLOCK, part=11, dtype=torch.float32).argsort()[: s.tokens]
    window = layout.allocate_cache(CACHE, pages, layout.WINDOW_BLOCK, device=s.device)
    where = s.positions(), s.rope(), s.owners(), c.rms_norm_eps, CACHE
    args: Args = (qr, kv, *weights, *where, window, slots, layout.WINDOW_BLOCK)
    for compressor, kv_score in zip(compressors, scores, strict=True):
        _, ape, *_ = compressor.save(s)
        state, state_slots, table, _, _, entry_slots, norm, _, cache, *_ = compressor.compress(s)
        args += (kv_score, ape, norm, state, state_slots, table, cache, entry_slots)
        args += (ratio,) if compressor is compressors[0] else (KEYS,)
    return args


def cost(s: StepInputs, ratio: int) -> costs.Cost:
    """Return the cost; the projection is float32, and a chunk of a prompt pools the states that it saves."""
    c = s.config
    of = {"T": s.tokens, "D": c.head_dim, "Q": c.q_lora_rank, "rope": c.rope_dim, "row": costs.row_bytes(CACHE)}
    moved = costs.of("preprocess_insert", **of).bytes
    moved += s.tokens * (c.q_lora_rank + c.head_dim) * (torch.float32.itemsize - torch.bfloat16.itemsize)
    for compressor in _compressors(c, ratio):
        entries = s.tokens // ratio
        pooled = compressor.compress_cost(s).bytes if s.requests > 1 else entries * costs.row_bytes(compressor.fmt)
        moved += compressor.save_cost(s).bytes + pooled
    return costs.Cost(moved, 0)


def separately(ops: Callable[[str], Callable[..., Any]], *args: Any) -> Tensor:
    """Run the ops that `preprocess_insert` replaces on its arguments; `ops` returns their implementations."""
    call = PreprocessArguments(*args)
    rounded = (x.to(result_dtype(x, w, call.dtype)) for x, w in ((call.qr, call.q_weight), (call.kv, call.kv_weight)))
    qr, kv = ops("fused_q_kv_rmsnorm")(*rounded, call.q_weight, call.kv_weight, call.eps)
    window = call.window_cache, call.window_slot_mapping, call.positions, call.cos_sin_cache, call.window_block_size
    ops("kv_rope_insert")(kv, *window, call.cache_format)
    for of_indexer, compressor in enumerate(call.compressors()):
        if compressor is not None:
            compress = compress_arguments(call, compressor, bool(of_indexer))
            states = compressor.state_cache, compressor.state_slot_mapping, call.positions, compress.state_block_size
            ops("save_partial_states")(compressor.kv_score, compressor.ape, *states)
            ops("compress_norm_rope_insert")(*compress)
    return qr


def differs(got: list[Tensor], want: list[Tensor]) -> str:
    """Return `gate.disagreement`, but let a few bytes of caches differ: the order of sums may change rounding."""
    floats = [i for i, x in enumerate(want) if x.dtype is not torch.uint8]
    if wrong := gate.disagreement([got[i] for i in floats], [want[i] for i in floats]):
        return wrong
    for i, expected in enumerate(want):
        if i not in floats and (flipped := int((got[i] != expected).sum())) > FEW_TIES + TIES * expected.numel():
            return f"result {i}: {flipped} of {expected.numel()} bytes are wrong"
    return ""


def _ways() -> Mapping[str, Prepare]:
    return {
        "eager": lambda: REFERENCES["preprocess_insert"],
        "separate": lambda: on_gpu(partial(separately, launcher)),
        "triton": lambda: on_gpu(launcher("preprocess_insert")),
    }


def problems(
    device: torch.device, only: Only, tokens: tuple[int, ...] | None = None, context: int | None = None
) -> Iterator[Problem]:
    """Yield every kind of layer of V4-Flash and V4-Pro, which differ in the query latent, at every size."""
    context = context or CONTEXT[device.type]
    for config in (DeepseekV4Config.flash(), DeepseekV4Config.pro()):
        for kind, ratio in KINDS.items():
            for size in tokens or TOKENS[device.type]:
                params: dict[str, int | str] = {"kind": kind, "latent": config.q_lora_rank, "tokens": size}
                if not keep(only, op="preprocess_insert", **params):
                    continue

                def make(seed: int, of: tuple[Any, ...] = (config, size, ratio)) -> Args:
                    return build(StepInputs(of[0], of[1], context, device, seed), of[2])

                yield Problem(
                    op="preprocess_insert",
                    params=params,
                    make=make,
                    written=WRITTEN[kind],
                    cost=cost(StepInputs(config, size, context, device, 0), ratio),
                    reference=REFERENCES["preprocess_insert"],
                    implementations=_ways(),
                    published={},
                    differs=differs,
                )
