"""Paged addressing and predicated stores in Inductor IR, and buffers to store into; see reference/paging.py.

The rule of ir_common about the body of `ops.masked` holds here too: what it needs is passed as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import FloorDiv, ModularIndexing, V, ir, lowerings, ops
from ...layout import PAD_INDEX
from .common import I32, I64, Expr, Loader, Value, const


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a token goes: `valid` is a boolean value, `block` and `offset` are indices that are legal in any case."""

    valid: Value
    block: Expr
    offset: Expr


def slot_of(load_slot: Loader, token: Expr, num_blocks: Expr, block_size: int) -> Slot:
    """Where `token` goes."""
    return place_of(ops.to_dtype(load_slot([token]), I64), num_blocks, block_size)


def place_of(slot: Value, num_blocks: Expr, block_size: int) -> Slot:
    """Where an int64 slot is. One outside the cache is not valid and is addressed as slot 0."""
    capacity = num_blocks * block_size
    valid = within(slot, ops.index_expr(capacity, I64))
    index = legal_index(slot, valid, capacity)
    return Slot(valid, FloorDiv(index, block_size), ModularIndexing(index, 1, block_size))


def lookup_slot(block_table: Any, block_size: int) -> Callable[[Callable[[], Value], Callable[[], Value]], Value]:
    """Function of a request and of a logical index in it, both functions of int64 values, that gives the int64 slot.

    -1 where the index is negative, and where request, column or block does not exist.
    """
    load_block, (rows, columns) = block_table.make_loader(), block_table.get_size()

    def slot(request: Callable[[], Value], logical: Callable[[], Value]) -> Value:
        def exists() -> Value:
            return ops.logical_and(
                within(request(), ops.index_expr(rows, I64)),
                within(logical(), ops.index_expr(columns * block_size, I64)),
            )

        def look_up() -> Value:
            row = legal_index(request(), exists(), rows)
            index = legal_index(logical(), exists(), columns * block_size)
            block = ops.to_dtype(load_block([row, FloorDiv(index, block_size)]), I64)
            offset = ops.index_expr(ModularIndexing(index, 1, block_size), I64)
            slot = ops.add(ops.mul(block, const(block_size, I64)), offset)
            return ops.where(ops.ge(block, const(0, I64)), slot, const(PAD_INDEX, I64))

        return ops.masked(exists(), look_up, PAD_INDEX)

    return slot


def page_address(cache: Any, block: Expr, column: Expr) -> list[Expr]:
    """Index of a byte of a page, which is bytes whatever shape the cache gives it: first and last index address it."""
    return [block, *[0] * (len(cache.get_size()) - 2), column]


def load_i64(x: Any) -> Loader:
    """Loader that widens to int64."""
    load = x.make_loader()
    return lambda index: ops.to_dtype(load(index), I64)


def within(index: Value, bound: Value) -> Value:
    """Whether 0 <= index < bound, all int64."""
    return ops.logical_and(ops.ge(index, const(0, I64)), ops.lt(index, bound))


def legal_index(index: Value, valid: Value, size: Expr) -> Expr:
    """An int64 value as an index expression: itself where it is `valid`, else 0."""
    return ops.indirect_indexing(ops.where(valid, index, const(0, I64)), size, check=False, wrap_neg=False)


@dataclass(frozen=True, slots=True)
class Store:
    """A store: functions of the iteration index that give predicate (None: always), target index and value."""

    keep: Loader | None
    target: Callable[[Sequence[Expr]], Sequence[Expr]]
    value: Loader


@ir.ir_dataclass
class MultiStore(ir.Scatter):
    """Several stores into one mutated buffer, predicated or not, in one node.

    Separate scatters into one buffer are never fused, because the scheduler keeps mutations in order. Triton joins the
    mask of `ops.masked` to the store inside it; the C++ backend cannot.
    """

    stores: tuple[Store, ...] = ()

    def store_output(self, output_name: str | None, indexer: Any, vars: Sequence[Expr]) -> None:
        """Emit the stores. `indexer` turns an index of the target into an address."""
        for store in self.stores:
            address = indexer(store.target(vars))

            def body(store: Store = store, address: Expr = address) -> Value:
                ops.store(output_name or "unnamed", address, store.value(vars), mode=None)
                return const(0, I32)

            if store.keep is None:
                body()
            else:
                ops.masked(store.keep(vars), body, 0)


def scatter(target: Any, ranges: Sequence[Expr], stores: Sequence[Store]) -> None:
    """Mutate `target` by `stores`, each run over `ranges`."""
    target.realize()
    node = MultiStore(
        device=target.get_device(),
        dtype=target.get_dtype(),
        inner_fn=stores[0].value,
        ranges=list(ranges),
        output_indexer=lambda index: index,
        stores=tuple(stores),
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(target), data=node)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)


def overwrite(target: Any, value: Callable[[Sequence[Expr]], Value]) -> None:
    """Mutate all of `target`: the element at an index becomes `value` of it, in target's dtype."""
    data = ir.Pointwise.create(
        device=target.get_device(), dtype=target.get_dtype(), inner_fn=value, ranges=target.get_size()
    )
    ir.MutationLayoutSHOULDREMOVE.realize_into(data, target)


def uninitialized(size: Sequence[Expr], dtype: torch.dtype, device: torch.device) -> Any:
    """A new contiguous buffer, for `scatter` to fill."""
    return lowerings[torch.ops.aten.empty_strided.default](list(size), None, dtype=dtype, device=device)


def strided_view(value: Any, size: Sequence[Expr], stride: Sequence[Expr]) -> Any:
    """View of `value`, which is computed into contiguous memory."""
    value.realize()
    storage, _ = ir.as_storage_and_layout(value, want_contiguous=True)
    layout = ir.FixedLayout(value.get_device(), value.get_dtype(), list(size), list(stride))
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))


def align_up(size: Expr, multiple: int) -> Expr:
    """Smallest multiple that is >= `size`, in torch's form, so that strides compare equal."""
    return -FloorDiv(-size, multiple) * multiple
