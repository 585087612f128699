"""Costs of ops: bytes moved and products added, as functions of sizes, and the least time that they take.

    cost = costs.of("fp8_linear", T=8, K=4096, N=1536)      # 6.4 MB, 0.1 GFLOP
    costs.floor_us(cost, costs.H200)                        # 1.48 us: no implementation is faster

The file of an op gives its `CostModel` to `define`. Bytes are those of arguments, read once, and of results; a cache or
a table counts with the rows that a call touches. Flops are those of GEMMs and of the score; a norm or a rotation costs
bytes alone. Sizes that are not given stay symbols of sympy, so that a cost can be looked at and differentiated.

Sizes: T tokens, R requests, H heads, D head dim, G groups, N output features (of a group), K input features (of a
group), or keys that a token selects, S rows of a gathered workspace, L logits of a token, C cached entries that a step
reads or writes, W the sliding window or the raw tokens that one entry pools, Q the rank of the queries, `rope` rotated
dims, `width` of a state row; in bytes: `row` a cached row with its scales, `e` an activation, `s` a scale.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import layout
from ..errors import check

INT32, INT64, FLOAT32, FP8 = 4, 8, 4, 1
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and flops of one call: integers, or expressions of the sizes that were left open.

    `operands` is the narrowest dtype that the products may be made of, "bfloat16" or "e4m3".
    """

    bytes: Any
    flops: Any
    operands: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Sizes of a call from its arguments by name: fake tensors and plain values. Mutated caches may be absent."""

    arguments: Mapping[str, Any]

    def dims(self, name: str) -> list[int]:
        """Shape of a tensor. ValueError for a size that has no number yet."""
        return [_number(size) for size in self.arguments[name].shape]

    def size(self, name: str) -> int:
        """Bytes of an element."""
        return int(self.arguments[name].element_size())

    def of_heads(self, name: str) -> dict[str, int]:
        """Sizes of `[T, H, D]`."""
        return dict(zip(("T", "H", "D"), self.dims(name), strict=True)) | {"e": self.size(name)}

    def of_rows(self, name: str) -> dict[str, int]:
        """Sizes of `[T, D]`."""
        return dict(zip(("T", "D"), self.dims(name), strict=True)) | {"e": self.size(name)}

    def of_streams(self) -> dict[str, int]:
        """Sizes of `[T, G, D]` streams."""
        return dict(zip(("T", "G", "D"), self.dims("streams"), strict=True)) | {"e": self.size("streams")}

    def row(self, dim: int, like: str, cache_format: str = "cache_format") -> dict[str, int]:
        """Bytes of a row; plain rows are as wide as elements of `like`."""
        return {"row": row_bytes(self.arguments[cache_format], dim, self.size(like))}

    @property
    def rope(self) -> dict[str, int]:
        """Rotated dims."""
        return {"rope": self.dims("cos_sin_cache")[-1]}

    def bytes_of(self, *names: str) -> int:
        """Bytes of those of the tensors `names` that are given."""
        present = [name for name in names if self.arguments.get(name) is not None]
        return sum(math.prod(self.dims(name)) * self.size(name) for name in present)

    def of_indices(self, name: str) -> dict[str, int]:
        """Sizes of `[T, ..., K]` indices, at most `topk` of them read, and of the window where there is one."""
        dims = self.dims(name)
        return {"T": dims[0], "K": self.arguments.get("topk", dims[-1]), "W": self.arguments.get("window", 0)}

    def of_product(self, x: str, weight: str, scale: str = "") -> dict[str, int]:
        """Sizes of a GEMM, whether groups are a dim of x or not."""
        (rows, k), dims = self.dims(weight), self.dims(x)
        groups = self.arguments.get("groups", dims[1] if scale == "b_scale" else 1)
        sizes = {"T": math.prod(dims) // (groups * k), "G": groups, "N": rows // groups, "K": k, "e": self.size(x)}
        return sizes | ({"s": self.size(scale)} if scale else {})

    @property
    def grouped_heads(self) -> dict[str, int]:
        """Heads that are in a group, where the call gives groups; others are padding."""
        groups, heads = self.arguments["n_groups"], self.arguments["heads_per_group"]
        return {"H": groups * heads} if heads else {}


class CostModel(NamedTuple):
    """Cost of an op: `formula` gives bytes and flops by named sizes, with defaults for `e` and `s`.

    `sizes` reads the sizes from a call, where its shapes tell them; `added` returns costs of optional arguments.
    """

    formula: Callable[..., tuple[Any, Any]]
    sizes: Callable[[CallSizes], Mapping[str, int]] | None = None
    added: Callable[[CallSizes], Sequence[Cost]] | None = None
    operands: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of a machine: bytes/s of a large copy, read and written together, flops/s of GEMMs by dtype of
    the operands, and microseconds of an empty node of a CUDA graph."""

    name: str
    copy: float
    flops: Mapping[str, float]
    node_us: float


H200 = Machine("NVIDIA H200", copy=4.3e12, flops={"bfloat16": 790e12, "e4m3": 2 * 790e12}, node_us=1.3)
"""132 multiprocessors, torch 2.11, Triton 3.6, medians of CUDA graph replays: a copy much larger than the L2 cache, and
a large bfloat16 product. The figure of e4m3 is not measured: its data sheet says twice that of bfloat16."""

MODELS: dict[str, CostModel] = {}
"""Cost model of every op by name, filled by `define`."""


def floor_us(cost: Cost, machine: Machine, launches: int = 0) -> float:
    """Microseconds below which no implementation gets on `machine`, with `launches` graph nodes on top.

    E201 for a cost with open sizes.
    """
    open_sizes = sorted({str(symbol) for value in (cost.bytes, cost.flops) for symbol in _symbols_in(value)})
    check(
        not open_sizes,
        "E201",
        got=f"a cost that depends on {', '.join(open_sizes)}",
        rule="a floor is that of a call of known sizes",
        fix="give every size of costs.sizes(op) to costs.of",
    )
    seconds = max(cost.bytes / machine.copy, cost.flops / machine.flops[cost.operands])
    return 1e6 * seconds + launches * machine.node_us


def names() -> tuple[str, ...]:
    """The ops with a known cost."""
    return tuple(MODELS)


def sizes(op: str) -> tuple[str, ...]:
    """Names of the sizes that the cost of `op` depends on."""
    check(op in MODELS, "E201", got=repr(op), rule=f"costs are known of {', '.join(MODELS)}", fix="pass a known op")
    return tuple(inspect.signature(MODELS[op].formula).parameters)


def of(op: str, **given: Any) -> Cost:
    """Cost of one call of `op`. Raises E201 for an op or a size that the table does not know.

    A size is an int, or an expression of sympy. One that is missing stays a symbol; `e` is 2 then, and `s` 1.
    """
    known = sizes(op)
    unknown = sorted(set(given) - set(known))
    fix = f"pass sizes among {', '.join(known)}"
    rule = f"the cost of {op} depends on {', '.join(known)}"
    check(not unknown, "E201", got=f"sizes {unknown} of {op}", rule=rule, fix=fix)
    low = {name: size for name, size in given.items() if isinstance(size, int) and size < 0}
    check(not low, "E201", got=f"sizes {low} of {op}", rule="a size is at least 0", fix="pass sizes of at least 0")
    model = MODELS[op]
    parameters = inspect.signature(model.formula).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    bytes_, flops = model.formula(**given, **{name: _symbol(name) for name in missing})
    return Cost(bytes_, flops, model.operands)


def _symbol(name: str) -> Any:
    import sympy  # type: ignore[import-untyped]  # late: it takes longer to import than this package

    return sympy.Symbol(name, integer=True, nonnegative=True)


def _symbols_in(value: Any) -> set[Any]:
    return set(getattr(value, "free_symbols", ()))


def smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers, or the expression of it."""
    if _symbols_in(a) | _symbols_in(b):
        import sympy

        return sympy.Min(a, b)
    return min(a, b)


def angles(rope: Any) -> Any:
    """Bytes of a token's position and of its row of the table of cosines and sines."""
    return INT64 + rope * FLOAT32


def inserted(row: Any) -> Any:
    """Bytes of a row that is written into a cache, and of its slot."""
    return INT64 + row


def act_tiles(size: Any) -> Any:
    """Quantisation tiles of a row of `size` activations."""
    return layout.cdiv(size, layout.ACT_TILE)


def weight_tiles(rows: Any, size: Any) -> Any:
    """Quantisation tiles of a weight `[rows, size]`."""
    return layout.cdiv(rows, layout.WEIGHT_TILE) * act_tiles(size)


def beside(T: int, K: int, N: int, M: int, e: int = 2) -> Cost:
    """Cost that a second, floating weight `[M, K]` adds to a `fp8_linear` of `[N, K]`: both results are float32, and x,
    of `e` bytes an element as that weight, is read once."""
    return Cost(T * (N * (FLOAT32 - e) + M * FLOAT32) + e * M * K, 2 * T * M * K)


def row_bytes(cache_format: str, dim: int = layout.HEAD_DIM, itemsize: int = 2) -> int:
    """Bytes of one cached vector of `dim` elements with its scales, in any format of keys and values or of the indexer.

    `itemsize` is that of `plain` rows.
    """
    page = layout.page_layout(cache_format, dim)
    if page is not None:
        return page.data + page.scale
    return dim * (itemsize if cache_format == "plain" else FP8)


def _number(size: Any) -> int:
    number = size if isinstance(size, int) else getattr(size.node, "hint", None)
    if number is None:
        raise ValueError(f"no number is known of {size}")
    return int(number)
