"""Time decode attention between its projections: python examples/benchmarks/attention_between_projections.py

Four consecutive layers in one CUDA graph: the projection of the latents, attention with prologue and epilogue fused,
wo_a and wo_b, each with separate weights and caches, so that the L2 cache holds no data of a layer when it starts. `us`
is the time of a layer, and `adds_us` its difference to a layer without attention: with Hopper's decode kernel for many
tokens (`many`) and the one for few tokens in its shapes; `once` are those that take a row in one block of these heads
and keys.

`--heads 8`, 16 or 32: each layer's shard under tensor parallelism, with a group of wo_a for every 8 heads, with the
kernel for few heads (`few`), and proportionally more layers, so that the weights have the same size. Results must agree
with those of `many`, or of the Triton kernel. `--compile` only compiles, one kernel after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.bench.record import collect, environment
from dsv4_compile.bench.timing import us_in_a_row
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as many
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_heads as few
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as small
from dsv4_compile.kernels.attention import sparse_mla_decode_triton as portable
from dsv4_compile.kernels.attention.common import DecodeCall, FusedParts, PagedKeys, outputs_for
from dsv4_compile.kernels.host.gpu import SM90, gpu_of
from dsv4_compile.kernels.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.kernels.linear.fp8_linear import fp8_linear
from dsv4_compile.kernels.linear.grouped_linear import grouped_linear

ALL_HEADS, GROUP_HEADS, LATENT, HIDDEN = 256, scenario.GROUP_HEADS, 1024, 4096
HEADS, TOKENS, KEYS, WEIGHTS = (64, 8, 16, 32), (1, 8, 16, 32, 64, 128, 512), (128, 256, 640), ("bfloat16", "fp8")
SHAPES = {"narrow": small.NARROW}
SHAPES |= {f"once {shape.block_h} {shape.block_n}": shape for shape in small.ONE_BLOCK}
CUDA = torch.device("cuda")


def kernels_for(heads: int) -> list[str]:
    return ["none", "few"] if heads <= few.MAX_HEADS else ["none", "many", *SHAPES]


def weight(rows: int, columns: int, fp8: bool) -> Any:
    x = torch.randn(rows, columns, device=CUDA)
    if not fp8:
        return (x * columns**-0.5).bfloat16()
    scales = torch.full((-(-rows // 128), -(-columns // 128)), columns**-0.5, device=CUDA)
    return x.to(torch.float8_e4m3fn), scales


class Layer:
    """Weights, caches and rows of slots of one layer."""

    def __init__(self, tokens: int, heads: int, keys: int, fp8: bool, seed: int) -> None:
        args = scenario.fused_arguments("both", tokens, heads, CUDA, seed)
        more, self.fp8 = keys - scenario.WINDOW, fp8
        self.heads, self.groups = heads, heads // GROUP_HEADS
        window = PagedKeys(*args[1:5])
        extra = PagedKeys(args[8], args[9][:, :more].contiguous(), args[10].clamp(max=more), args[11])
        groups = (self.groups, GROUP_HEADS, False) if fp8 else ()
        fused = FusedParts(*args[13:17], *groups)
        self.call = DecodeCall(args[0], window, extra, scenario.CACHE, *args[6:8], fused=fused)
        width = heads * args[0].shape[2]
        self.weights = weight(width, LATENT, fp8), weight(self.groups * LATENT, width // self.groups, fp8)
        self.last = weight(HIDDEN, self.groups * LATENT, fp8)

    def attend(self, kernel: str, q: Tensor) -> tuple[Tensor, Tensor]:
        call, gpu = self.call._replace(q=q), gpu_of(CUDA)
        if kernel == "none":
            return outputs_for(q, call.fused).pair() if self.fp8 else (q, q)
        if kernel in SHAPES:
            return small.launch(call, gpu, tiling=SHAPES[kernel])
        return {"many": many, "few": few, "portable": portable}[kernel].launch(call, gpu)

    def __call__(self, kernel: str, latent: Tensor) -> Tensor:
        tokens, (first, second) = latent.shape[0], self.weights
        q = fp8_linear(latent, *first) if self.fp8 else grouped_linear(latent, first, 1)
        out, scale = self.attend(kernel, q.view(tokens, self.heads, -1))
        if self.fp8:
            out = fp8_linear(fp8_grouped_einsum(out, scale, *second).flatten(1), *self.last)
        else:
            out = grouped_linear(out.reshape(tokens, self.groups, -1), second, self.groups)
            out = grouped_linear(out, self.last, 1)
        return out[:, :LATENT]


def run(layers: list[Layer], kernel: str, latent: Tensor) -> Tensor:
    for layer in layers:
        latent = layer(kernel, latent)
    return latent


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kernels, count = kernels_for(options.heads), ALL_HEADS // options.heads
    for weights in options.weights:
        for tokens in options.tokens:
            for keys in options.keys:
                layers = [Layer(tokens, options.heads, keys, weights == "fp8", seed) for seed in range(count)]
                latent = torch.randn(tokens, LATENT, device=CUDA).bfloat16()
                if options.compile:
                    for kernel in kernels:
                        run(layers[:2], kernel, latent)
                    continue
                q = torch.randn(tokens, options.heads, layout.HEAD_DIM, device=CUDA).bfloat16()
                want, without = layers[0].attend("many" if "many" in kernels else "portable", q), 0.0
                for kernel in kernels:
                    got = layers[0].attend(kernel, q)
                    wrong = "" if kernel == "none" else scenario.differs(got, want, layout.ROPE_DIM, "lse_normed")
                    us = us_in_a_row(partial(run, layers, kernel, latent), 8) / len(layers)
                    without = us if kernel == "none" else without
                    row = {"weights": weights, "heads": options.heads, "tokens": tokens, "keys": keys}
                    row |= {"kernel": kernel}
                    yield row | {"us": round(us, 2), "adds_us": round(us - without, 2), "differs": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in (("tokens", TOKENS), ("keys", KEYS), ("weights", WEIGHTS)):
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), default=values, choices=values)
    parser.add_argument("--heads", type=int, default=HEADS[0], choices=HEADS)
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args()
    if not torch.cuda.is_available() or gpu_of(CUDA).capability != SM90:
        parser.error("these kernels are for Hopper GPUs")
    record: dict[str, Any] = {"scenario": "attention_between_projections", **environment(CUDA), "rows": []}
    limits = [f"--{name} {' '.join(map(str, getattr(options, name)))}" for name in ("tokens", "keys", "weights")]
    limits = [f"--heads {options.heads}", *limits]
    record["command"] = " ".join(["python examples/benchmarks/attention_between_projections.py", *limits])
    with torch.no_grad():
        for row in collect(record, rows(options), options.out):
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
