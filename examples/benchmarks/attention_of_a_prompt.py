"""Time attention of a prompt from pages and from rows: python examples/benchmarks/attention_of_a_prompt.py

One prompt of `tokens` tokens, with prologue and epilogue fused, as a compiled layer calls attention: queries' norm and
RoPE, inverse RoPE, and quantisation for e4m3 weights. Each token attends the 128 tokens before it and `keys` - 128
random entries; the caches hold `rows` rows for each token. `pages` are the decode kernels, which dequantise a key for
every token that attends it; `by rows` dequantises both caches first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.bench.record import collect, environment
from dsv4_compile.bench.timing import us_in_a_row
from dsv4_compile.kernels.attention.common import decode_call, outputs_for
from dsv4_compile.kernels.attention.sparse_mla_decode import decode_by_rows, launch_best
from dsv4_compile.kernels.host.gpu import SM90, gpu_of
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from dsv4_compile.reference.common.block_scale import dequantize_activation

TOKENS, KEYS, ROWS, FUSED = (512, 1024, 2048, 4096, 16384), (128, 640), (2, 4, 8, 16), ("none", "both", "quant")
CUDA = torch.device("cuda")


def arguments(fused: str, tokens: int, heads: int, keys: int, rows: int) -> tuple[Any, ...]:
    """Return the op's arguments; a token's window is the tokens before it."""
    args = list(scenario.fused_arguments(fused, tokens, heads, CUDA, 0, pool=max(scenario.BLOCK, (rows - 1) * tokens)))
    generator = torch.Generator(CUDA).manual_seed(0)
    args[1] = scenario.random_cache(tokens, generator)
    args[2] = torch.arange(tokens, device=CUDA)[:, None] - torch.arange(scenario.WINDOW, device=CUDA)
    args[2] = args[2].clamp(min=-1).int()
    more = keys - scenario.WINDOW
    args[9], args[10] = args[9][:, :more].contiguous(), args[10].clamp(max=more)
    return tuple(args)


def calls(args: tuple[Any, ...]) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Return both implementations."""
    quant = len(args) > len(DecodeArguments._fields)
    call = decode_call(DecodeQuantArguments(*args) if quant else DecodeArguments(*args))

    def pages() -> tuple[Tensor, Tensor]:
        return launch_best(call, outputs_for(call.q, call.fused))

    return {"pages": pages, "by rows": lambda: decode_by_rows(call)}


def distance(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    """Return the relative distance of two results; the decode kernels do not round queries after their norm."""
    quantised = got[0].dtype is torch.float8_e4m3fn
    x, y = (dequantize_activation(*pair) if quantised else pair[0].float() for pair in (got, want))
    return float((x - y).norm() / y.norm())


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for tokens in options.tokens:
        for keys in options.keys:
            for count in options.rows:
                for fused in options.fused:
                    both = calls(arguments(fused, tokens, options.heads, keys, count))
                    got, want = both["by rows"](), both["pages"]()
                    far = distance(got, want)
                    del got, want
                    row = {"tokens": tokens, "keys": keys, "rows": count, "fused": fused}
                    for name, call in both.items():
                        row[f"{name.replace(' ', '_')}_us"] = round(us_in_a_row(call, 4), 1)
                    yield row | {"distance": round(far, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in (("tokens", TOKENS), ("keys", KEYS), ("rows", ROWS), ("fused", FUSED)):
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), default=values, choices=values)
    parser.add_argument("--heads", type=int, default=64, choices=(64, 128))
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args()
    if not torch.cuda.is_available() or gpu_of(CUDA).capability != SM90:
        parser.error("rows are attended by a kernel for Hopper GPUs")
    record: dict[str, Any] = {"scenario": "attention_of_a_prompt", **environment(CUDA), "rows": []}
    names = ("tokens", "keys", "rows", "fused")
    limits = [f"--heads {options.heads}", *(f"--{n} {' '.join(map(str, getattr(options, n)))}" for n in names)]
    record["command"] = " ".join(["python examples/benchmarks/attention_of_a_prompt.py", *limits])
    with torch.no_grad():
        for row in collect(record, rows(options), options.out):
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
