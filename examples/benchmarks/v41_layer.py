"""Time the launches of a DeepSeek-V4.1-Flash layer: python examples/benchmarks/v41_layer.py --out examples/results

Every op with a kernel, cold, as CUDA graph replays in microseconds: the launcher of its kernel, and its reference in
PyTorch, which runs where a kernel is not proven. The floor is the op's bytes at the rate of a large copy; at
one token the weights of a layer are 282.8 MB, and wo_a in bfloat16 instead of e4m3 adds 33.6. Parts belong to kinds of
layers: `every` layer has those of this name. A kernel that fails or differs from its reference makes the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv4_compile.ops  # noqa: F401  registers the ops
from dsv4_compile.bench import timing
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.layout import MX_TILE, allocate_cache, cdiv
from dsv4_compile.models.v41.config import V41Config
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.reference.common.row_format import store_rows

TOKENS = (1, 8, 32, 128)
MOST_SETS = 12
PAGE = 64
"""Rows of a page of a cache."""
STORED_ROWS = 65536
"""Rows that are rounded at a time."""
SLOW_REFERENCE = {"mx_experts"}
"""Ops with references that take every expert in turn: timed as calls of a stream, which takes no graph of them."""
WRITES = {"rope_quantize_insert"}
"""Ops that write into their arguments, which are compared."""
LARGEST_ERROR = 1e-2
"""Relative error of floating results against the reference, as a whole: two sums may round to neighbours in e4m3."""
Args = tuple[Any, ...]


class Part(NamedTuple):
    """Launches of a layer.

    Attributes:
        name: what the op does there. op: its name. layers: the kinds of layers that have it, "every" for all.
        build: takes tokens, and returns a function that gives a new set of arguments for each call.
        traffic: bytes of a call, by tokens. times: calls of a layer.
    """

    name: str
    op: str
    layers: str
    build: Callable[[int], Callable[[], Args]]
    traffic: Callable[[int], int]
    times: int = 1


class Layer:
    """Parts of a layer, with random weights on a device."""

    def __init__(self, config: V41Config, device: torch.device, experts: int, context: int) -> None:
        self.config, self.device, self.context = config, device, context
        self.generator = torch.Generator(device).manual_seed(0)
        self.experts = experts
        self._routed: tuple[Tensor, ...] | None = None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def bytes_(self, low: int, high: int, *shape: int) -> Tensor:
        """Return random bytes, of large tensors drawn once for each first dim."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=torch.uint8)

    def blocks(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Return an e4m3 weight and scales of its 32x32 blocks."""
        weight = (self.randn(rows, size) * 8 * size**-0.5).to(torch.float8_e4m3fn)
        return weight, self.bytes_(123, 125, rows // MX_TILE, size // MX_TILE)

    def routed(self) -> tuple[Tensor, ...]:
        """Return w13, w2 and their scales, the same for all calls: a call takes other experts than the last."""
        if self._routed is None:
            hidden, inner = self.config.hidden_size, self.config.intermediate_size
            shapes = (2 * inner, hidden), (hidden, inner)
            weights = [self.bytes_(0, 256, self.experts, n, k // 2) for n, k in shapes]
            scales = [self.bytes_(117, 121, self.experts, n, k // MX_TILE) for n, k in shapes]
            self._routed = *weights, *scales
        return self._routed

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order of a layer."""
        config = self.config
        hidden, latent, dim = config.hidden_size, config.q_lora_rank, config.head_dim
        linears = {
            "wq_a": ("every", latent, hidden),
            "wkv": ("every", dim, hidden),
            "wq_b": ("every", config.num_heads * dim, latent),
            "wo_b": ("every", hidden, config.o_groups * config.o_lora_rank),
            "index wq_b": ("index source", config.index_n_heads * config.index_head_dim, latent),
        }
        for name, (layers, rows, size) in linears.items():
            yield self.linear(name, layers, rows, size)
        group = config.num_heads * dim // config.o_groups

        def wo_a(tokens: int) -> Callable[[], Args]:
            def make() -> Args:
                x, weight = self.randn(tokens, config.o_groups, group), self.randn(config.o_groups * rank, group)
                return x.bfloat16(), (weight * group**-0.5).bfloat16(), config.o_groups

            return make

        rank = config.o_lora_rank
        weight_bytes = 2 * config.o_groups * rank * group
        yield Part("wo_a", "grouped_linear", "every", wo_a, lambda tokens: weight_bytes + 2 * tokens * 2 * group)
        yield self.router()
        yield self.moe()
        yield from self.hyper_connections()
        yield self.insert()
        for ratio in (2, 1):
            yield self.selection(ratio)
        for picks in (0, config.index_topk):
            yield self.attention(picks)

    def cache(self, fmt: str, rows: int, channels: int) -> Tensor:
        """Return a cache of pages of `PAGE` rows, rounded from normal ones: no key outweighs the others."""
        cache = allocate_cache(fmt, cdiv(rows, PAGE), PAGE, channels, device=self.device)
        for slots in torch.arange(cache.shape[0] * PAGE, device=self.device).split(STORED_ROWS):
            store_rows(cache, fmt, PAGE, slots, self.randn(len(slots), channels))
        return cache

    def rope(self) -> Tensor:
        return self.randn(self.context, self.config.rope_dim)

    def hyper_connections(self) -> Iterator[Part]:
        """Yield the coefficients and the collapse of the streams, before attention and before the experts."""
        streams, hidden = self.config.hc_mult, self.config.hidden_size
        rows = (streams + 2) * streams

        def mixes(tokens: int) -> Callable[[], Args]:
            return lambda: (
                self.randn(tokens, streams, hidden).bfloat16(), self.randn(rows, streams * hidden) / 128,
                self.randn(rows), self.randn(3), 1e-6, 1e-6,
            )  # fmt: skip

        def collapse(tokens: int) -> Callable[[], Args]:
            return lambda: (
                self.randn(tokens, streams, hidden).bfloat16(), self.randn(tokens, streams),
                self.randn(hidden).bfloat16(), 1e-6,
            )  # fmt: skip

        x = 2 * streams * hidden
        yield Part("mhc mixes", "mhc_mixes", "every", mixes, lambda tokens: 4 * rows * streams * hidden + x * tokens, 2)
        yield Part("mhc collapse", "mhc_collapse", "every", collapse, lambda tokens: (x + 2 * hidden) * tokens, 2)

    def insert(self) -> Part:
        """Return the insert of window rows."""
        dim = self.config.head_dim

        def build(tokens: int) -> Callable[[], Args]:
            def make() -> Args:
                cache = self.cache("mxfp8", 256 * tokens, dim)
                slots = 256 * torch.arange(tokens, device=self.device)
                return self.randn(tokens, dim).bfloat16(), cache, slots, slots % 128, self.rope(), PAGE, "mxfp8", ""

            return make

        return Part("insert", "rope_quantize_insert", "every", build, lambda tokens: tokens * (3 * dim))

    def selection(self, ratio: int) -> Part:
        """Return the selection of a source of entries of `ratio` tokens, over all of `context`."""
        heads, dim, topk = self.config.index_n_heads, self.config.index_head_dim, self.config.index_topk
        entries = self.context // ratio

        def build(tokens: int) -> Callable[[], Args]:
            pages = cdiv(entries, PAGE)
            keys = self.cache("mxfp4", tokens * pages * PAGE, dim)
            table = torch.arange(tokens * pages, device=self.device, dtype=torch.int32).view(tokens, pages)
            requests, rope = torch.arange(tokens, device=self.device), self.rope()
            visible, positions = (torch.full_like(requests, n) for n in (entries, self.context - 1))

            def make() -> Args:
                q, weights = self.randn(tokens, heads, dim).bfloat16(), self.randn(tokens, heads).bfloat16()
                return q, weights, positions, rope, keys, table, requests, visible, PAGE, "mxfp4", topk, "mxfp4"

            return make

        layers = "full, ratio " + str(ratio)
        row = dim // 2 + dim // MX_TILE
        return Part(
            "index_topk", "index_topk", layers, build, lambda tokens: tokens * (entries * row + 2 * heads * dim)
        )

    def attention(self, picks: int) -> Part:
        """Return attention over the window and `picks` entries."""
        heads, dim, window = self.config.num_heads, self.config.head_dim, 128

        def build(tokens: int) -> Callable[[], Args]:
            def make() -> Args:
                def rows(count: int) -> Tensor:
                    order = torch.rand(tokens, 4 * count, device=self.device, generator=self.generator).argsort(1)
                    return (order[:, :count] + 4 * count * torch.arange(tokens, device=self.device)[:, None]).int()

                first = self.cache("mxfp8", 4 * window * tokens, dim), rows(window)
                second = (self.cache("nvfp4", 4 * picks * tokens, dim), rows(picks)) if picks else (None, None)
                formats = "mxfp8", PAGE, "nvfp4" if picks else "plain", PAGE
                q = self.randn(tokens, heads, dim).bfloat16()
                return q, *first, *second, *formats, dim**-0.5, self.randn(heads)

            return make

        size = window * 528 + picks * 288 + 4 * heads * dim
        return Part(
            "attention", "sparse_mla_mixed", "picks" if picks else "window", build, lambda tokens: size * tokens
        )

    def linear(self, name: str, layers: str, rows: int, size: int) -> Part:
        """Return a quantised linear."""

        def build(tokens: int) -> Callable[[], Args]:
            return lambda: (self.randn(tokens, size).bfloat16(), *self.blocks(rows, size))

        weight_bytes = rows * size + rows * size // MX_TILE**2
        return Part(name, "mx_linear", layers, build, lambda tokens: weight_bytes + 2 * tokens * (rows + size))

    def router(self) -> Part:
        """Return the choice of experts."""
        config, count = self.config, self.config.num_experts

        def build(tokens: int) -> Callable[[], Args]:
            def make() -> Args:
                gate = (self.randn(count, config.hidden_size) * config.hidden_size**-0.5).bfloat16()
                is_image = torch.arange(tokens, device=self.device) % 3 == 1
                biases = self.randn(2, count) * 0.1
                routing = config.experts_per_token, config.routed_scaling_factor, config.gate_temperature
                return self.randn(tokens, config.hidden_size).bfloat16(), gate, *biases, is_image, *routing

            return make

        size = 2 * count * config.hidden_size
        return Part("router", "moe_route_images", "every", build, lambda t: size + 2 * t * config.hidden_size)

    def moe(self) -> Part:
        """Return the routed experts, uniform and independent, and the shared one."""
        config = self.config
        hidden, inner, top_k = config.hidden_size, config.intermediate_size, config.experts_per_token
        weights = 3 * hidden * inner

        def build(tokens: int) -> Callable[[], Args]:
            w13, w2, w13_scale, w2_scale = self.routed()

            def make() -> Args:
                (s13, s13_scale), (s2, s2_scale) = self.blocks(2 * inner, hidden), self.blocks(hidden, inner)
                places = torch.rand(tokens, self.experts, device=self.device, generator=self.generator)
                ids, shares = places.argsort(1)[:, :top_k].int(), torch.rand(tokens, top_k, device=self.device)
                scales = w13_scale, w2_scale, s13_scale, s2_scale
                return (
                    *(self.randn(tokens, hidden).bfloat16(), ids, shares, w13, w2, s13, s2),
                    *(*scales, config.swiglu_limit, 0, True),
                )

            return make

        def traffic(tokens: int) -> int:
            distinct = self.experts * (1 - (1 - top_k / self.experts) ** tokens)
            return int(weights * (1 + distinct * (0.5 + 1 / MX_TILE)) + 4 * tokens * hidden)

        return Part("experts", "mx_experts", "every", build, traffic)


def differs(op: str, args: Args) -> str:
    """Return how far a kernel's result is from the reference's, "" if it is close."""
    writes = op in WRITES
    copies = tuple(x.clone() if writes and isinstance(x, Tensor) else x for x in args)
    got, want = launcher(op)(*args), REFERENCES[op](*copies)
    if writes:
        got, want = (tuple(x for x in call if isinstance(x, Tensor)) for call in (args, copies))
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        if not one.is_floating_point():
            share = float((one == other).float().mean())
            if share < 0.99:
                return f"{share:.3f} of the whole numbers are equal"
            continue
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        if not error <= LARGEST_ERROR:
            return f"relative error {error:.1e}"
    return ""


def time_part(part: Part, tokens: int, device: torch.device, peer: bool) -> dict[str, Any]:
    """Return a row of the record."""
    row: dict[str, Any] = {"tokens": tokens, "part": part.name, "op": part.op, "layers": part.layers}
    row["bytes"], row["times"] = (traffic := part.traffic(tokens)), part.times
    if part.op not in KERNELS:
        return row | {"status": "no kernel"}
    make = part.build(tokens)
    sets = [make() for _ in range(max(1, min(MOST_SETS, timing.cold_sets(traffic, device) + 1)))]
    unsupported = refusal(part.op)
    if unsupported is not None and (why := unsupported(*sets[0])):
        return row | {"status": f"unsupported: {why}"}
    try:
        row["status"] = differs(part.op, sets[0]) or "ok"
        row["cold_us"] = timing.measure(launcher(part.op), sets, device, cold=True).cold_us
        if peer:
            clock = "stream" if part.op in SLOW_REFERENCE else ""
            few = sets[: 2 if clock else len(sets)]
            row["reference_us"] = timing.measure(REFERENCES[part.op], few, device, cold=True, clock=clock).cold_us
    except (RuntimeError, AssertionError) as fault:
        row["status"] = f"{type(fault).__name__}: {fault}".splitlines()[0][:200]
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Launches of a DeepSeek-V4.1-Flash layer, by kind.")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="%(default)s")
    parser.add_argument("--parts", nargs="*", help="names of parts (all)")
    parser.add_argument("--experts", type=int, default=V41Config().num_experts, help="routed experts (%(default)s)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a request (%(default)s)")
    parser.add_argument("--no-reference", action="store_true", help="time kernels alone")
    parser.add_argument("--out", type=Path, help="write v41_layer.json in this folder")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.device("cuda")
    rate = timing.copy_rate(device)
    layer, rows = Layer(V41Config(), device, args.experts, args.context), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {rate / 1e12:.2f} TB/s")
    print(f"{'tokens':>6} {'layers':13} {'part':12} {'MB':>8} {'us':>9} {'floor':>8} {'reference':>11}  status")
    for tokens in args.tokens:
        for part in layer.parts():
            if args.parts and part.name not in args.parts:
                continue
            row = time_part(part, tokens, device, not args.no_reference)
            row["floor_us"] = 1e6 * row["bytes"] / rate
            rows.append(row)
            times = [f"{row[name]:.1f}" if row.get(name) else "-" for name in ("cold_us", "floor_us", "reference_us")]
            print(
                f"{tokens:6} {part.layers:13} {part.name:12} {row['bytes'] / 1e6:8.1f} {times[0]:>9} {times[1]:>8} "
                f"{times[2]:>11}  {row['status']}",
                flush=True,
            )
        every = [row for row in rows if row["tokens"] == tokens and row["layers"] == "every"]
        columns = "bytes", "cold_us", "floor_us", "reference_us"
        sums = {name: sum(row["times"] * (row.get(name) or 0.0) for row in every) for name in columns}
        print(
            f"{tokens:6} {'every':13} {'sum':12} {sums['bytes'] / 1e6:8.1f} {sums['cold_us']:9.1f} "
            f"{sums['floor_us']:8.1f} {sums['reference_us']:11.1f}",
            flush=True,
        )
    if args.out:
        record = {"scenario": "v41_layer", **environment(device), "copy_gb_s": round(rate / 1e9, 1), "rows": rows}
        stamp = {name: record[name] for name in ("date", "commit")}
        write_json(record | {"rows": [row | stamp for row in rows]}, args.out)
    return int(any(row["status"] not in ("ok", "no kernel") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
