"""The kernel that fills a step's metadata against the reference, to the bit, every access checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.metadata import batch_metadata as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.ops.metadata.batch_metadata import ARGUMENTS, CONTEXT_LENS, GROUPS, TOKENS
from dsv4_compile.testing import assert_bitwise, padded, strided
from dsv4_compile.testing.batch import Batch, random_batch, random_table, table_tensor
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OUTPUTS = ARGUMENTS[ARGUMENTS.index("positions") :]
PAGE_TOKENS = {"window": 64, "c4": 256, "c4_state": 4, "indexer": 256, "indexer_state": 4, "c128": 256, "c128_state": 8}
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


def compare(values: dict[str, Any]) -> dict[str, Any]:
    """Run both; all memory behind the buffers must be equal."""
    ours, theirs = ({name: copied(value) for name, value in values.items()} for _ in range(2))
    with checked(mutated=MUTATED) as launched:
        launcher("batch_metadata")(*ours.values())
    REFERENCES["batch_metadata"](*theirs.values())
    for name in OUTPUTS:
        if values.get(name) is not None:
            assert_bitwise(ours[name], theirs[name], label=name)
            memory = (torch.empty(0, dtype=torch.uint8).set_(x[name].untyped_storage()) for x in (ours, theirs))
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
) -> dict[str, Any]:
    rng = random.Random(rows)
    values: dict[str, Any] = dict.fromkeys(ARGUMENTS)
    values |= {"query_start_loc": batch.query_start_loc(), "seq_lens": batch.seq_lens_tensor()}
    values |= {"slot_mapping": engine, "window_block_size": 64}
    for group in groups:
        columns = -(-max_len // PAGE_TOKENS[group])
        table = random_table(rng, len(batch.seq_lens), columns, hostile=hostile)
        values[f"{group}_block_table"] = table_tensor(table, columns)
    dtypes = TOKENS | {name: dtype for group in groups for name, dtype in GROUPS[group].items()}
    dtypes |= dict.fromkeys(CONTEXT_LENS, torch.int32)
    widths = {"window_indices": window, "c128_indices": layout.c128a_width(max_len)}
    for name, dtype in dtypes.items():
        shape = (rows, widths[name]) if name in widths else (rows,)
        values[name] = torch.full(shape, 1 if dtype is torch.bool else 12345, dtype=dtype)
    return values


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
@pytest.mark.parametrize("groups", [(), ("window",), ("c4", "indexer_state"), ("c128",)])
def test_groups_that_are_absent(groups: tuple[str, ...]) -> None:
    compare(arguments(MIXED, 13, groups=groups))
    values = arguments(MIXED, 13, groups=groups)
    compare(values | dict.fromkeys(CONTEXT_LENS))


@interpreted
def test_slots_that_no_index_can_hold() -> None:
    values = arguments(Batch((2,), (400,)), 2)
    for group in ("window", "c128", "c4_state"):
        table = values[f"{group}_block_table"]
        values[f"{group}_block_table"] = torch.full_like(table, 2**31 - 1)
    compare(values)
    values["window_block_table"] = values["window_block_table"].long() * 2**20
    compare(values)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides_of_inputs_and_rows(spread: Any) -> None:
    values = arguments(MIXED, 13, engine=torch.arange(12))
    inputs = ("query_start_loc", "seq_lens", "slot_mapping", *(f"{group}_block_table" for group in GROUPS))
    values |= {name: spread(values[name]) for name in inputs}
    values |= {name: padded(values[name]) for name in ("window_indices", "c128_indices")}
    compare(values)
    compare(values | {name: values[name].long() for name in inputs})


@interpreted
def test_none_and_one() -> None:
    for rows in (0, 1, 3):
        compare(arguments(Batch((), ()), rows))
        compare(arguments(Batch((1,), (1,)), rows))
        compare(arguments(Batch((1, 1), (129, 4)), rows, engine=torch.zeros(0, dtype=torch.int64)))


@interpreted
def test_tables_narrower_than_their_requests() -> None:
    values = arguments(MIXED, 13)
    tables = {name: table for name, table in values.items() if name.endswith("block_table")}
    for rows, columns in ((5, 1), (2, 3), (0, 3), (5, 0)):
        compare(values | {name: table[:rows, :columns] for name, table in tables.items()})


def test_buffers_with_gaps_are_unsupported() -> None:
    values, why_unsupported = arguments(MIXED, 13), refusal("batch_metadata")
    assert why_unsupported is not None
    assert why_unsupported(*values.values()) == ""
    for name in ("positions", "window_indices", "c128_lens"):
        spread = strided(values[name])
        reason = why_unsupported(**(values | {name: spread}))
        assert reason == f"the last dim of {name} is contiguous, this one has stride {spread.stride(-1)}"


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    decode = arguments(Batch((1,) * 6, (9,) * 6), 6, max_len=16_384, window=128)
    with compiled_for(target) as compiled:
        launcher("batch_metadata")(*decode.values())
        launcher("batch_metadata")(*arguments(MIXED, 13, groups=("window", "c128"), engine=torch.arange(13)).values())
    assert all(binary.assembled for binary in compiled)
    assert len(compiled) == 2
