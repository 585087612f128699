from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.c128a_topk_metadata import c128a_topk_metadata
from dsv4_compile.testing import check_op, hostile_indices, padded, strided
from dsv4_compile.testing.batch import entry_row, random_batch, random_table, row, table_tensor

STALE = 12345


def buffers(capacity: int, width: int) -> list[Tensor]:
    rows = torch.full((capacity, width), STALE, dtype=torch.int32)
    return [rows, torch.full((capacity,), STALE, dtype=torch.int32), rows.clone()]


def arguments(
    tokens: list[tuple[int, int]],
    table: list[list[int]],
    num_decode_tokens: int,
    *,
    slots: list[int] | None = None,
    block_size: int = 2,
    ratio: int = 128,
    width: int = 128,
    capacity: int | None = None,
) -> list:
    requests, positions = zip(*tokens, strict=True) if tokens else ((), ())
    return [
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(requests, dtype=torch.int32),
        table_tensor(table, columns=3),
        torch.tensor([0] * len(tokens) if slots is None else slots, dtype=torch.int64),
        block_size,
        ratio,
        num_decode_tokens,
        *buffers(len(tokens) if capacity is None else capacity, width),
    ]


def test_decodes_list_slots_and_prefills_list_entries() -> None:
    args = arguments([(0, 383), (0, 127), (0, 126), (0, 383)], [[7, 9]], 3, width=4)
    c128a_topk_metadata(*args)
    decode, lens, prefill = args[-3:]
    assert decode.tolist() == [[14, 15, 18, -1], [14, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert lens.tolist() == [3, 1, 0, 0]
    assert prefill.tolist() == [[0, 1, 2, -1], [-1] * 4, [-1] * 4, [-1] * 4]


def test_padding_has_length_0() -> None:
    """Its row is that of its position and request; only its length makes it padding."""
    args = arguments([(0, 300), (0, 300)], [[7, 9]], 2, slots=[5, -1], width=3)
    c128a_topk_metadata(*args)
    assert args[-3].tolist() == [[14, 15, -1]] * 2
    assert args[-2].tolist() == [2, 0]


def test_a_row_never_lists_more_than_its_width() -> None:
    args = arguments([(0, 128 * 9)], [[0, 1, 2, 3, 4]], 1, width=4)
    c128a_topk_metadata(*args)
    assert args[-3].tolist() == [[0, 1, 2, 3]]
    assert args[-2].tolist() == [4]


@pytest.mark.parametrize("max_model_len", [1, 127, 128, 1000, 16384, 16385])
def test_the_longest_sequence_fits_the_width_of_the_layout(max_model_len: int) -> None:
    width = layout.c128a_width(max_model_len)
    table = [list(range(layout.cdiv(max_model_len, layout.KV_BLOCK)))]
    args = arguments([(0, max_model_len - 1)], table, 1, width=width)
    c128a_topk_metadata(*args)
    assert args[-2].item() == max_model_len // 128
    assert args[-3].tolist() == [row(range(max_model_len // 128), width)]


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("block_size", "ratio", "width"), [(2, 128, 128), (3, 5, 7)])
def test_every_row_of_random_batches(block_size: int, ratio: int, width: int, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        batch = random_batch(rng, max_seq_len=4 * block_size * ratio)
        table = random_table(rng, max(len(batch.seq_lens), 1), 3, hostile=hostile)
        tokens = batch.tokens()
        if hostile:
            tokens = [(rng.choice((request, -7, 10**6)), position) for request, position in tokens]
        split, capacity = rng.randint(0, len(tokens)), len(tokens) + rng.choice((0, 2))
        slots = [rng.choice((-1, 0, 9)) for _ in tokens]
        args = arguments(
            tokens, table, split, slots=slots, block_size=block_size, ratio=ratio, width=width, capacity=capacity
        )
        c128a_topk_metadata(*args)

        decode = [entry_row(table, *token, width, block_size, ratio) for token in tokens[:split]]
        counts = [min((position + 1) // ratio, width) for _, position in tokens[split:]]
        pads, prefill_pads = capacity - split, capacity - len(counts)
        assert args[-3].tolist() == [r for r, _ in decode] + [row([], width)] * pads
        lens = [n if s >= 0 else 0 for (_, n), s in zip(decode, slots[:split], strict=True)]
        assert args[-2].tolist() == lens + [0] * pads
        assert args[-1].tolist() == [row(range(n), width) for n in counts] + [row([], width)] * prefill_pads


def test_hostile_tables_requests_and_positions_give_padding() -> None:
    args = arguments([(0, 700)] * 64, [[0]], 64, width=8)
    args[0] = hostile_indices((64,), 2000, dtype=torch.int64) - 1000
    args[1], args[2] = hostile_indices((64,), 5), hostile_indices((5, 3), 15, fraction=0.8)
    c128a_topk_metadata(*args)
    assert ((args[-3] >= -1) & (args[-3] < 2**31 - 1)).all()
    assert ((args[-2] >= 0) & (args[-2] <= 8)).all()


def samples() -> list[list]:
    table = [[5, 2, 7], [1, 0, 3]]
    tokens = [(0, 700), (1, 260), (1, 261), (0, 3), (0, 4), (-1, -1)]
    plain = arguments(tokens, table, 3, capacity=9)
    views = [strided(x) if isinstance(x, Tensor) else x for x in plain]
    return [
        plain,
        [*views[:7], *(padded(x) for x in plain[7:])],
        arguments([], table, 0, capacity=3),
        arguments([], table, 0),
        arguments([(0, 200)], table, 1),
        arguments([(0, 200)], [], 0),
    ]


def test_op_contract() -> None:
    check_op(c128a_topk_metadata, samples())


def test_compiles_once_for_every_token_count() -> None:
    table = table_tensor([[5, 2, 7], [1, 0, 3]])

    def step(positions: Tensor, requests: Tensor, slots: Tensor) -> list[Tensor]:
        out = [torch.empty_like(x) for x in buffers(64, 128)]
        c128a_topk_metadata(positions, requests, table, slots, 2, 128, 4, *out)
        return [x + 1 for x in out]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 9, 33):
            args = torch.randint(700, (tokens,)), torch.randint(2, (tokens,)), torch.randint(-1, 9, (tokens,))
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, dtype=torch.int32), r"positions \[T\]"),
        (1, torch.zeros(1, dtype=torch.int32), "token_to_req has a row for every token"),
        (4, 0, "block_size is at least 1"),
        (6, 3, "num_decode_tokens is between 0 and 2"),
        (7, torch.zeros(1, 4, dtype=torch.int32), "E204"),
        (8, torch.zeros(4, dtype=torch.int64), r"decode_lens \[N\]"),
        (9, torch.zeros(4, dtype=torch.int32), r"prefill \[N, C\]"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = arguments([(0, 200), (0, 201)], [[0]], 2)
    args[position] = value
    with pytest.raises(InputError, match=message):
        c128a_topk_metadata(*args)
