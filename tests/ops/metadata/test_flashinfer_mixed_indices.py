from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.flashinfer_mixed_indices import flashinfer_mixed_indices
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from dsv4_compile.testing.batch import Batch, Table, index, random_batch, random_table, row, table_tensor, window_row

SWA_BLOCK, BLOCK = 8, 4
NAMES = [argument.name for argument in flashinfer_mixed_indices._schema.arguments]


def i32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(
    batch: Batch, num_decode_tokens: int, swa_table: Table, table: Table | None, *, window: int = 6, **given: object
) -> dict:
    """Return a batch with right window rows, and no compressed entries unless given."""
    tokens = batch.tokens()
    windows = [window_row(swa_table, *token, window, SWA_BLOCK)[0] for token in tokens[:num_decode_tokens]]
    defaults = {
        "decode_swa_indices": i32(windows).view(num_decode_tokens, window),
        "decode_compressed_indices": None,
        "decode_compressed_lens": None,
        "prefill_topk_indices": torch.empty(len(tokens) - num_decode_tokens, 0, dtype=torch.int32),
        "query_start_loc": batch.query_start_loc(),
        "seq_lens": batch.seq_lens_tensor(),
        "token_to_req": i32([max(request, 0) for request, _ in tokens]),
        "swa_block_table": table_tensor(swa_table, columns=3),
        "swa_block_size": SWA_BLOCK,
        "compressed_block_table": None if table is None else table_tensor(table, columns=3),
        "compressed_block_size": BLOCK,
        "window": window,
        "ratio": 4,
        "topk": 0,
        "decode_compressed_indices_are_local": False,
        "decode_is_valid_token": None,
        "num_rows": 0,
        "swa_block_span": 0,
        "compressed_block_span": 0,
    }
    return {**defaults, **given}


def run(**arguments: object) -> tuple[list[list[int]], list[int]]:
    indices, lens = flashinfer_mixed_indices(*(arguments[name] for name in NAMES))
    return indices.tolist(), lens.tolist()


def respanned(row: list[int], block_size: int, span: int) -> list[int]:
    return [s // block_size * span + s % block_size if s >= 0 else -1 for s in row]


def test_a_decode_token_counts_its_whole_window() -> None:
    """Six window keys and one compressed entry: 128 window columns count, and one more."""
    compressed = {"decode_compressed_indices": i32([[0] + [-1] * 511]), "decode_is_valid_token": torch.tensor([True])}
    args = arguments(
        Batch((1,), (6,)), 1, [[3]], [[5]], window=128, decode_compressed_indices_are_local=True, **compressed
    )
    indices, lens = run(**args)
    assert indices == [row([*range(24, 30)], 128) + row([20], 512)]
    assert lens == [129]


def test_a_prefill_token_gets_its_window_and_selected_entries_mapped() -> None:
    args = arguments(Batch((9,), (9,)), 0, [[2, 0]], [[7]], topk=3, prefill_topk_indices=i32([[1, 0, 0]] * 9))
    indices, lens = run(**args)
    assert indices[8] == [19, 20, 21, 22, 23, 0, 29, 28, -1, -1]
    assert indices[2] == [16, 17, 18, -1, -1, -1] + [-1] * 4
    assert lens == [6, 6, 6, 7, 7, 7, 7, 8, 8]


def test_a_layer_without_compression_has_window_columns_only() -> None:
    indices, lens = run(**arguments(Batch((1, 3), (5, 3)), 1, [[0], [1]], None, ratio=1))
    assert indices == [row(range(5), 6), row([8], 6), row([8, 9], 6), row([8, 9, 10], 6)]
    assert lens == [6] * 4


@pytest.mark.parametrize(("lens", "expected"), [(None, [9, 9]), (i32([2, 99]), [8, 9])])
def test_given_slots_are_taken_as_they_are(lens: Tensor | None, expected: list[int]) -> None:
    args = arguments(
        Batch((1, 1), (5, 2)), 2, [[0], [1]], [[0], [0]],
        decode_compressed_indices=i32([[40, 41, -1], [7, -1, 8]]), decode_compressed_lens=lens,
    )  # fmt: skip
    indices, counted = run(**args)
    assert [r[6:] for r in indices] == [[40, 41, -1, -1], [7, -1, 8, -1]]
    assert counted == expected


def test_packed_pages_count_slots_in_rows() -> None:
    args = arguments(
        Batch((1, 9), (9, 9)), 1, [[2, 1], [3, 0]], [[7], [1]], topk=1, prefill_topk_indices=i32([[0]] * 9),
        decode_compressed_indices=i32([[5, -1]]),
    )  # fmt: skip
    plain, lens = run(**args)
    spanned, spanned_lens = run(**{**args, "swa_block_span": 20, "compressed_block_span": 10})
    assert spanned == [respanned(r[:6], SWA_BLOCK, 20) + respanned(r[6:], BLOCK, 10) for r in plain]
    assert spanned_lens == lens


def test_rows_behind_the_last_token_are_padding() -> None:
    args = arguments(Batch((1, 2), (5, 2)), 1, [[0], [1]], None)
    indices, lens = run(**args)
    assert run(**{**args, "num_rows": 5}) == (indices + [row([], 6)] * 2, [*lens, 0, 0])


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("hostile", [False, True])
def test_every_row_of_random_batches(local: bool, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    window, decode_width, topk, width = 6, 3, 5, 8
    for _ in range(25):
        batch = random_batch(rng, max_seq_len=3 * SWA_BLOCK)
        requests = len(batch.seq_lens)
        swa_table, table = (random_table(rng, requests, 3, hostile=hostile) for _ in range(2))
        tokens = batch.tokens()
        split = rng.randint(0, len(tokens))
        fraction = 0.4 if hostile else 0.0
        chosen = hostile_indices((split, decode_width), 3 * BLOCK, fraction=fraction)
        prefill = hostile_indices((len(tokens) - split, topk + 1), 3 * BLOCK, fraction=fraction)
        valid = torch.rand(split) < 0.8
        args = arguments(
            batch, split, swa_table, table, topk=topk, prefill_topk_indices=prefill, decode_compressed_indices=chosen,
            decode_compressed_indices_are_local=local, decode_is_valid_token=valid if local else None,
        )  # fmt: skip
        owners = [rng.choice((request, -3, 10**6)) if hostile else max(request, 0) for request, _ in tokens]
        indices, lens = run(**{**args, "token_to_req": i32(owners)})

        for t, (owner, (request, position)) in enumerate(zip(owners, tokens, strict=True)):
            if t >= split:
                position = position if owner == request else -1
                count = min((position + 1) // 4, topk)
                swa = window_row(swa_table, request, position, window, SWA_BLOCK)[0]
                entries = [index(table, owner, i, BLOCK) for i in prefill[t - split, :count].tolist()]
            else:
                swa, entries, count = args["decode_swa_indices"][t].tolist(), chosen[t].tolist(), decode_width
                if local:
                    entries = [index(table, owner, i, BLOCK) if valid[t] else -1 for i in entries]
                    count = sum(i >= 0 for i in entries)
            assert indices[t] == swa + row(entries, width)
            assert lens[t] == window + count


@given(
    queries=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 18)), min_size=1, max_size=4),
    columns=st.integers(0, 6),
    pads=st.integers(0, 3),
)
def test_padding_never_changes_a_token(queries: list[tuple[int, int]], columns: int, pads: int) -> None:
    query_lens = tuple(query_len for query_len, _ in queries)
    seq_lens = tuple(query_len + context for query_len, context in queries)
    tables = [[[3 * r, 3 * r + 1, 3 * r + 2] for r in range(len(queries))] for _ in range(2)]
    topk = hostile_indices((sum(query_lens), 4), 12, generator=torch.Generator().manual_seed(0))
    wide_topk = torch.nn.functional.pad(topk, (0, columns, 0, pads), value=-1)
    wide_tables = [table + [[-1] * 3] * pads for table in tables]
    batch = Batch(query_lens, seq_lens)
    wider = Batch(query_lens + (0,) * pads, seq_lens + (0,) * pads, padding=pads)
    bare, lens = run(**arguments(batch, 0, *tables, topk=4, prefill_topk_indices=topk))
    full, wide_lens = run(**arguments(wider, 0, *wide_tables, topk=4 + columns, prefill_topk_indices=wide_topk))
    for t, values in enumerate(bare):
        assert full[t] == row(values, len(full[t]))
        # The length follows from the position: more columns may hold more of the visible entries.
        assert lens[t] <= wide_lens[t]
    assert all(values == row([], len(values)) for values in full[len(bare) :])


def samples() -> list[tuple]:
    batch, tables = Batch((1, 2, 9), (20, 2, 15), padding=1), ([[5, 2, 7], [1, 0, 3], [4, 6, 8]],) * 2
    topk, chosen = hostile_indices((10, 5), 12), hostile_indices((3, 4), 12)
    full = arguments(
        batch, 3, *tables, topk=5, prefill_topk_indices=topk, decode_compressed_indices=chosen,
        decode_compressed_indices_are_local=True, decode_is_valid_token=torch.tensor([True, False, True]),
    )  # fmt: skip
    as_slots = {**full, "decode_compressed_indices_are_local": False, "decode_compressed_lens": i32([1, 2, 9])}
    cases = [
        full,
        {key: strided(value) if isinstance(value, Tensor) else value for key, value in full.items()},
        {**full, "prefill_topk_indices": padded(topk), "num_rows": 16, "swa_block_span": 30},
        {**as_slots, "compressed_block_span": 9, "decode_compressed_indices": padded(chosen)},
        arguments(Batch((), ()), 0, [], None),
        arguments(Batch((1,), (9,)), 1, [[0, 1, 2]], None),
        arguments(Batch((2,), (9,)), 0, [[0, 1, 2]], None, ratio=1),
    ]
    return [tuple(case[name] for name in NAMES) for case in cases]


def test_op_contract() -> None:
    check_op(flashinfer_mixed_indices, samples())


def test_outputs_are_contiguous_int32() -> None:
    """Rows begin on 16-byte boundaries only if nothing lies between them."""
    for args in samples():
        indices, lens = flashinfer_mixed_indices(*args)
        assert (indices.dtype, lens.dtype) == (torch.int32, torch.int32)
        assert (indices.shape[1] - args[NAMES.index("window")]) % 4 == 0
        assert_bitwise(indices, indices.contiguous(), strides=True)


def test_compiles_once_for_every_token_count() -> None:
    table = [[5, 2, 7], [1, 0, 3]]

    def step(topk: Tensor, token_to_req: Tensor, starts: Tensor, seq_lens: Tensor, windows: Tensor) -> list[Tensor]:
        blocks = i32(table)
        sizes = (SWA_BLOCK, blocks, BLOCK, 6, 4, 5)
        out = flashinfer_mixed_indices(windows, None, None, topk, starts, seq_lens, token_to_req, blocks, *sizes)
        return [x + 1 for x in out]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 9, 22):
            batch = arguments(Batch((1, tokens), (20, tokens)), 1, table, table)
            topk = hostile_indices((tokens, 5), 12)
            torch._dynamo.mark_dynamic(topk, 0)
            torch._dynamo.mark_dynamic(batch["token_to_req"], 0)
            args = [topk, *(batch[name] for name in ("token_to_req", "query_start_loc", "seq_lens"))]
            args.append(batch["decode_swa_indices"])
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 7}, "6 instead of 7"),
        ({"topk": 1}, "topk is between 0 and 0"),
        ({"decode_compressed_indices": torch.zeros(3, 4, dtype=torch.int32)}, "has Td rows"),
        ({"decode_compressed_lens": i32([])}, "decode_compressed_lens has a row for every token"),
        ({"decode_compressed_indices_are_local": True}, "comes with decode_is_valid_token"),
        ({"decode_is_valid_token": i32([1])}, "decode_is_valid_token"),
        ({"token_to_req": i32([0, 1])}, "token_to_req has a row for every token"),
        ({"seq_lens": i32([0])}, "one element more than seq_lens"),
        ({"ratio": 0}, "ratio is at least 1"),
        ({"swa_block_span": 7}, "at least the block size, 8"),
        ({"num_rows": 2}, "E204"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict, message: str) -> None:
    args = {**arguments(Batch((1, 2), (5, 2)), 1, [[0], [1]], None), **changes}
    with pytest.raises(InputError, match=message):
        run(**args)
