"""Scenario `sparse_mla_decode`: attention of decode steps over the window and the selected entries of their tokens.

V4-Flash has 64 heads and selects 512 entries, V4-Pro 128 and 1024; fewer heads are a shard of Flash. Every row is full
and random. The entries of a step come from a pool of 4096 for each token, at most `POOL`: up to 32 tokens the keys stay
in the L2 cache of an H200 between calls, at 512 tokens they do not.

`fused` names the work in the same call: nothing, the queries' norm and RoPE (prologue), the output's inverse RoPE
(epilogue), both, or both with quantisation. `separate` runs an op for each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from ..reference.common.block_scale import dequantize_activation
from ..selection import costs
from ..testing import Tolerance, assert_close
from . import flash_mla
from .problem import Args, Only, Prepare, Problem, keep, on_gpu

OP, QUANT_OP = "sparse_mla_decode", "sparse_mla_decode_quant"
TOKENS = {"cuda": (1, 8, 32, 128, 512), "cpu": (1, 4)}
HEADS = (8, 16, 32, 64, 128)
FUSED = ("none", "prologue", "epilogue", "both", "quant")
FUSED_HEADS = (8, 64, 128)
TURNED = ("epilogue", "both", "quant")
COLUMNS = ("op", "heads", "keys", "fused", "tokens", "impl")
CACHE, WINDOW, BLOCK = "fp8_ds_mla", layout.SLIDING_WINDOW, layout.storage_block_size(layout.CSA_RATIO)
POOL_PER_TOKEN, SMALLEST_POOL, POOL = 4096, 16384, 262144
PRO_HEADS, TOPK, PRO_TOPK = 128, 512, 1024
MAX_POSITION, EPS, GROUP_HEADS = 65536, 1e-6, 8
QUANTIZED = Tolerance(abs=1e-3, rel=0.13, cosine=1e-3)
"""Neighbouring bfloat16 values are sometimes quantised to neighbouring e4m3 values, which differ by an eighth."""


def topk_of(heads: int) -> int:
    """Return how many entries a model with this many heads selects."""
    return PRO_TOPK if heads >= PRO_HEADS else TOPK


def random_cache(entries: int, generator: torch.Generator, block: int = BLOCK) -> Tensor:
    """Return `fp8_ds_mla` pages of random keys: every finite code, scales that make most values of order one."""
    device, page = generator.device, layout.FP8_DS_MLA
    cache = layout.allocate_cache(CACHE, layout.cdiv(entries, block), block, device=device)
    data, scale = cache.split((block * page.data, block * page.scale), dim=1)
    codes = torch.randint(0, 256, data.shape, device=device, generator=generator, dtype=torch.uint8)
    data.copy_(torch.where((codes & 0x7F) == 0x7F, 0, codes))
    rope = torch.randn(*data.shape[:1], block, layout.ROPE_DIM, device=device, generator=generator).bfloat16()
    data.unflatten(1, (block, page.data))[..., layout.NOPE_DIM :].copy_(rope.view(torch.uint8))
    scale.copy_(torch.randint(117, 121, scale.shape, device=device, generator=generator))
    return cache


def arguments(tokens: int, heads: int, device: torch.device, seed: int, pool: int = 0) -> Args:
    """Return the op's arguments; `pool` is the number of entries, by default the scenario's for `tokens`."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = pool or max(SMALLEST_POOL, min(tokens * POOL_PER_TOKEN, POOL))
    window = random_cache(max(tokens, 8) * WINDOW, generator)
    entries = random_cache(pool, generator)

    def row(cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
        bound = cache.shape[0] * BLOCK
        slots = torch.randint(0, bound, (tokens, width), device=device, generator=generator, dtype=torch.int32)
        return slots, torch.full((tokens,), width, device=device, dtype=torch.int32)

    q = torch.randn(tokens, heads, layout.HEAD_DIM, device=device, generator=generator).bfloat16()
    sink = torch.randn(heads, device=device, generator=generator)
    first = window, *row(window, WINDOW), BLOCK
    return q, *first, CACHE, layout.HEAD_DIM**-0.5, sink, entries, *row(entries, topk_of(heads)), BLOCK


def fused_arguments(fused: str, tokens: int, heads: int, device: torch.device, seed: int, pool: int = 0) -> Args:
    """Return `arguments`, followed by positions, a RoPE table and the options that `fused` stands for."""
    args = arguments(tokens, heads, device, seed, pool)
    if fused == "none":
        return args
    generator = torch.Generator(device).manual_seed(seed)
    angle = 6.2832 * torch.rand(MAX_POSITION, layout.ROPE_DIM // 2, device=device, generator=generator)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device, generator=generator)
    eps = None if fused == "epilogue" else EPS
    options = eps, fused != "prologue", False
    groups = (heads // GROUP_HEADS, GROUP_HEADS, False) if fused == "quant" else ()
    return *args, None, positions, torch.cat((angle.cos(), angle.sin()), dim=1), *options, *groups


def differs(got: Sequence[Tensor], want: Sequence[Tensor], turned: int = 0, lse: str = "lse") -> str:
    """Return why results are not within the tolerances of attention, or "".

    Args:
        turned: last dims of each head that were rotated, see `assert_close`.
        lse: name of the tolerance of the log-sum-exp.
    """
    try:
        if got[0].dtype is torch.float8_e4m3fn:
            values, expected = (
                dequantize_activation(*pair).unflatten(-1, (-1, layout.HEAD_DIM)) for pair in (got, want)
            )
            assert_close(values, expected, QUANTIZED, label="values", turned=turned)
        else:
            assert_close(got[0], want[0], "attention_bfloat16", label="out", turned=turned)
            assert_close(got[1], want[1], lse, label="lse")
    except AssertionError as wrong:
        return str(wrong)
    return ""


def portable(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel for all GPUs, even if the op has a faster one; `options` go to its launcher."""
    from ..kernels.attention.common import decode_call
    from ..kernels.attention.sparse_mla_decode_triton import launch
    from ..kernels.host.gpu import gpu_of

    quant = len(args) > len(DecodeArguments._fields)
    call = decode_call(DecodeQuantArguments(*args) if quant else DecodeArguments(*args))
    return launch(call, gpu_of(args[0].device), **options)


def separate(implementation: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function like a fused `sparse_mla_decode` that runs an op for each step, by `implementation`."""

    def call(*args: Any) -> Any:
        where, (eps, inverse, _, *groups) = args[13:15], args[15:]
        q = args[0] if eps is None else implementation("q_norm_rope")(args[0], *where, eps)
        out, lse = implementation(OP)(q, *args[1:13])
        if groups:
            return implementation("inv_rope_fp8_quant")(out, *where, *groups)
        return (implementation("inv_rope")(out, *where) if inverse else out), lse

    return call


def implementations(op: str, fused: str, heads: int) -> Mapping[str, Prepare]:
    """Return the reference, the op's kernel, the kernel for all GPUs, and an op for each fused step.

    Without fused steps the last is FlashMLA, if it is installed.
    """
    ways: dict[str, Prepare] = {
        "eager": lambda: REFERENCES[op],
        "triton": lambda: on_gpu(launcher(op)),
        "portable": lambda: on_gpu(portable),
    }
    if fused == "none":
        return ways | flash_mla.if_installed(lambda: on_gpu(flash_mla.decode()), heads)
    return ways | {"separate": lambda: on_gpu(separate(launcher))}


def problems(
    device: torch.device, only: Only, tokens: tuple[int, ...] | None = None, pool: int = 0
) -> Iterator[Problem]:
    """Yield every number of heads at every number of tokens, and fused calls for some."""
    for heads, fused in ((heads, fused) for heads in HEADS for fused in FUSED):
        keys, op = WINDOW + topk_of(heads), QUANT_OP if fused == "quant" else OP
        if fused != "none" and heads not in FUSED_HEADS:
            continue
        for size in tokens or TOKENS[device.type]:
            if not keep(only, op=op, heads=heads, keys=keys, fused=fused, tokens=size):
                continue
            yield Problem(
                op=op,
                params={"heads": heads, "keys": keys, "fused": fused, "tokens": size},
                make=partial(fused_arguments, fused, size, heads, device, pool=pool),
                written=(),
                cost=costs.of(op, T=size, H=heads, D=layout.HEAD_DIM, K=keys, row=costs.row_bytes(CACHE)),
                reference=REFERENCES[op],
                implementations=implementations(op, fused, heads),
                published={},
                differs=partial(differs, turned=layout.ROPE_DIM if fused in TURNED else 0),
            )
