"""The kernel that fills a step's metadata against the reference, to the bit, every access checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.metadata import batch_metadata as kernel
from dsv4_compile.metadata.buffers import buffers_of
from dsv4_compile.metadata.fill import arguments_of, names_of
from dsv4_compile.ops.common.arguments import map_tensors
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.ops.metadata.batch_metadata import ARGUMENTS, WRITTEN
from dsv4_compile.sources import RATIOS
from dsv4_compile.testing import assert_bitwise, padded, strided
from dsv4_compile.testing.batch import Batch, random_batch, random_table, table_tensor
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
GROUPS = {group.name: group for group in kernel.PLACES}
OF_GROUPS = ("block_tables", "row_tokens", "page_rows", "slots")
MUTATED = (
    *(f"buffers.{name}" for name in kernel.Buffers._fields if name != "p_slots"),
    *(f"buffers.p_slots[{i}]" for i in range(len(GROUPS))),
)


def copied(value: Any) -> Any:
    """A copy with the same strides and the same memory between its elements."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone()
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def written(values: dict[str, Any]) -> dict[str, Tensor]:
    """Every written buffer of a call, by its argument and its place in a list."""
    buffers: dict[str, Tensor] = {}
    for name in WRITTEN:
        value = values[name]
        buffers |= {name: value} if isinstance(value, Tensor) else {f"{name} {i}": x for i, x in enumerate(value)}
    return buffers


def compare(values: dict[str, Any]) -> dict[str, Any]:
    """Run both; all memory behind the buffers must be equal."""
    ours, theirs = (dict(zip(values, map_tensors(copied, values.values()), strict=True)) for _ in range(2))
    with checked(mutated=MUTATED) as launched:
        launcher("batch_metadata")(*ours.values())
    REFERENCES["batch_metadata"](*theirs.values())
    expected = written(theirs)
    for name, got in written(ours).items():
        assert_bitwise(got, expected[name], label=name)
        memory = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in (got, expected[name]))
        assert_bitwise(*memory, label=f"memory of {name}")
    assert len(launched) == (1 if values["positions"].shape[0] else 0)
    return ours


def arguments(
    batch: Batch,
    rows: int,
    *,
    groups: tuple[str, ...] = tuple(GROUPS),
    max_len: int = 700,
    window: int = 9,
    hostile: bool = False,
    engine: Tensor | None = None,
    ratios: tuple[int, ...] = RATIOS,
) -> dict[str, Any]:
    rng, tables = random.Random(rows), {}
    for name in groups:
        columns = -(-max_len // GROUPS[name].page_tokens)
        table = random_table(rng, len(batch.seq_lens), columns, hostile=hostile)
        tables[GROUPS[name]] = table_tensor(table, columns)
    specs = {spec.name: spec for spec in buffers_of(kernel.PLACES)}
    widths = {"window_indices": window, "entries_128_indices": layout.listed_width(128, max_len)}
    buffers = {}
    for name in names_of([*tables], ratios):
        shape, dtype = (rows, widths[name]) if name in widths else (rows,), specs[name].dtype
        buffers[name] = torch.full(shape, 1 if dtype is torch.bool else 12345, dtype=dtype)
    batch_of = batch.query_start_loc(), batch.seq_lens_tensor(), engine
    return dict(zip(ARGUMENTS, arguments_of(*batch_of, tables, ratios, buffers), strict=True))


MIXED = Batch((1, 2, 3, 5, 0), (640, 256, 257, 300, 0), padding=1)


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("batch_metadata"))))
def test_samples(number: int) -> None:
    compare(dict(zip(ARGUMENTS, op_samples("batch_metadata")[number], strict=True)))


@interpreted
@pytest.mark.parametrize("hostile", [False, True])
def test_random_batches(hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        batch = random_batch(rng, max_seq_len=14)
        engine = torch.where(torch.rand(batch.num_tokens) < 0.2, -1, 5) if rng.random() < 0.5 else None
        compare(arguments(batch, batch.num_tokens + rng.choice((0, 3)), hostile=hostile, engine=engine))


@interpreted
@pytest.mark.parametrize("window", [1, 5, 128])
def test_every_kind_of_request_at_once(window: int) -> None:
    ours = compare(arguments(MIXED, 14, window=window))
    assert ours["is_valid_token"].sum() == 11


@interpreted
def test_rows_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PIECE", 64)
    monkeypatch.setattr(kernel, "MAX_STARTS", 4)
    compare(arguments(Batch((1, 1, 0, 1, 1, 2, 1), (20_000, 16_383, 0, 16_384, 1, 9000, 127)), 9, max_len=20_000))


@interpreted
@pytest.mark.parametrize("groups", [(), ("window",), ("entries_4", "key_states_4"), ("entries_128",)])
def test_groups_that_are_absent(groups: tuple[str, ...]) -> None:
    compare(arguments(MIXED, 13, groups=groups))
    compare(arguments(MIXED, 13, groups=groups, ratios=()))


@interpreted
def test_slots_that_no_index_can_hold() -> None:
    values = arguments(Batch((2,), (400,)), 2)
    chosen = ("window", "entries_128", "states_4")
    tables = [
        torch.full_like(table, 2**31 - 1) if name in chosen else table
        for name, table in zip(GROUPS, values["block_tables"], strict=True)
    ]
    compare(values | {"block_tables": tables})
    compare(values | {"block_tables": [tables[0].long() * 2**20, *tables[1:]]})


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides_of_inputs_and_rows(spread: Any) -> None:
    values = arguments(MIXED, 13, engine=torch.arange(12))
    inputs = ("query_start_loc", "seq_lens", "slot_mapping", "block_tables")
    values |= dict(zip(inputs, map_tensors(spread, [values[name] for name in inputs]), strict=True))
    values["indices"] = [padded(rows) for rows in values["indices"]]
    compare(values)
    compare(values | dict(zip(inputs, map_tensors(Tensor.long, [values[name] for name in inputs]), strict=True)))


@interpreted
def test_none_and_one() -> None:
    for rows in (0, 1, 3):
        compare(arguments(Batch((), ()), rows))
        compare(arguments(Batch((1,), (1,)), rows))
        compare(arguments(Batch((1, 1), (129, 4)), rows, engine=torch.zeros(0, dtype=torch.int64)))


@interpreted
def test_tables_narrower_than_their_requests() -> None:
    values = arguments(MIXED, 13)
    for rows, columns in ((5, 1), (2, 3), (0, 3), (5, 0)):
        compare(values | {"block_tables": [table[:rows, :columns] for table in values["block_tables"]]})


def test_buffers_with_gaps_are_unsupported() -> None:
    values, why_unsupported = arguments(MIXED, 13), refusal("batch_metadata")
    assert why_unsupported is not None
    assert why_unsupported(*values.values()) == ""
    for name in ("positions", "indices", "lens"):
        (spread,) = map_tensors(strided, [values[name]])
        stride = (spread if name == "positions" else spread[0]).stride(-1)
        where = name if name == "positions" else f"{name} 0"
        reason = why_unsupported(**(values | {name: spread}))
        assert reason == f"the last dim of {where} is contiguous, this one has stride {stride}"


@interpreted
def test_groups_in_any_order_and_with_any_pages() -> None:
    values = arguments(MIXED, 13)
    for order in ((6, 5, 4, 3, 2, 1, 0), (3, 0, 1, 6, 5, 2, 4)):
        moved = {
            name: [values[name][i] for i in order] for name in ("block_tables", "row_tokens", "page_rows", "slots")
        }
        compare(values | moved | {"listed": [order.index(group) for group in values["listed"]]})
    compare(values | {"page_rows": [16, 3, 8, 5, 2, 7, 1]})
    compare(values | {"row_tokens": [1, 2, 1, 8, 1, 128, 3]})


def test_ratios_and_lists_that_the_kernel_does_not_have_are_unsupported() -> None:
    values, why_unsupported = arguments(MIXED, 13), refusal("batch_metadata")
    assert why_unsupported is not None
    for change in (
        {"row_tokens": [1, 4, 1, 4, 1, 64, 1]},
        {"listed": [0, 1]},
        {"listed": [0, 2]},
        {"ratios": [4, 2]},
        {"ratios": [4, 4]},
        {name: values[name] + values[name][1:2] for name in OF_GROUPS},
    ):
        assert why_unsupported(**(values | change)).startswith("it ")


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    decode = arguments(Batch((1,) * 6, (9,) * 6), 6, max_len=16_384, window=128)
    with compiled_for(target) as compiled:
        launcher("batch_metadata")(*decode.values())
        launcher("batch_metadata")(
            *arguments(MIXED, 13, groups=("window", "entries_128"), engine=torch.arange(13)).values()
        )
    assert all(binary.assembled for binary in compiled)
    assert len(compiled) == 2
