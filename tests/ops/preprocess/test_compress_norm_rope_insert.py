from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.compress_norm_rope_insert import compress_norm_rope_insert
from dsv4_compile.ops.preprocess.save_partial_states import save_partial_states
from dsv4_compile.reference.preprocess import compress_norm_rope_insert as reference
from dsv4_compile.testing import assert_bitwise, check_op, padded, poison_, refuse_synchronization, strided
from tests.ops.preprocess.compressor_engine import EPS, Engine, one_request
from tests.support import scalar

RATIOS = pytest.mark.parametrize("ratio", [4, 128])


@pytest.mark.parametrize("scores", ["equal", "random"])
def test_ratio_4_overlaps_as_published(scores: str) -> None:
    """The entry of position 3 pools the second halves of 0..3; that of position 7 the first halves of 0..3 and the
    second halves of 4..7. They are rotated to positions 0 and 4."""
    engine = Engine(4, max_len=16)
    values, score = torch.randn(8, 32), torch.randn(8, 32) if scores == "random" else torch.zeros(8, 32)
    if scores == "equal":
        engine.ape.zero_()
    engine.run(one_request(range(8)), torch.cat((values, score), dim=1))
    biased = score + engine.ape.repeat(2, 1)
    first, second = slice(0, 16), slice(16, 32)
    windows = (
        (values[:4, second], biased[:4, second], 0),
        (
            torch.cat((values[:4, first], values[4:, second])),
            torch.cat((biased[:4, first], biased[4:, second])),
            4,
        ),
    )
    for got, (value, gate, position) in zip(engine.entries(0, 2), windows, strict=True):
        pooled = (gate.double().softmax(0) * value).sum(0)
        if scores == "equal":
            torch.testing.assert_close(pooled, value.double().mean(0))
        normed = pooled / (pooled.square().mean() + EPS).sqrt() * engine.norm_weight
        expected = scalar.rotate(normed.tolist(), engine.table[position].tolist())
        torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("ratio", "length"), [(4, 23), (128, 300), (8, 40)])
def test_whole_prompts_match_the_definition(ratio: int, length: int) -> None:
    engine = Engine(ratio)
    history = torch.randn(length, engine.width)
    engine.run(one_request(range(length)), history)
    engine.check(history)


@RATIOS
@pytest.mark.parametrize("chunks", [(1, 5, 44, 220), (126, 1, 1, 1, 141), (2, 127, 3, 138)])
def test_chunked_prompts_store_the_bytes_of_whole_ones(ratio: int, chunks: tuple[int, ...]) -> None:
    """Chunks start and end inside groups; states wait in their pages for the token that closes the group."""
    engine = Engine(ratio)
    history = torch.randn(sum(chunks), engine.width)
    start = 0
    for count in chunks:
        engine.run(one_request(range(start, start + count)), history[start : start + count])
        start += count
    engine.check(history)
    in_chunks = engine.cache.clone()
    poison_(engine.cache)
    poison_(engine.state)
    engine.run(one_request(range(start)), history)
    assert_bitwise(engine.cache.contiguous(), in_chunks)


@RATIOS
def test_requests_of_one_batch_do_not_mix(ratio: int) -> None:
    """One call holds a decode that closes a group, one that does not, a prompt, and a prompt that resumes mid-group."""
    engine = Engine(ratio, requests=4, max_len=272)
    lengths, before = (256, 131, 133, 266), (255, 130, 0, 126)
    history = [torch.randn(length, engine.width) for length in lengths]
    for request, done in enumerate(before):
        if done:
            engine.run([(request, p) for p in range(done)], history[request][:done])
    step = [(r, p) for r in range(4) for p in range(before[r], lengths[r])]
    engine.run(step, torch.cat([history[r][before[r] :] for r in range(4)]))
    for request in range(4):
        engine.check(history[request], request)


@RATIOS
def test_rejected_drafts_leave_no_trace(ratio: int) -> None:
    """A step of four drafted tokens straddles the end of a group. Two are rejected: the token that closed the group and
    the one after it. Their positions run again with other inputs."""
    engine = Engine(ratio)
    start = 2 * ratio - 2
    history = torch.randn(2 * ratio + 2, engine.width)
    engine.run(one_request(range(start - 1)), history[: start - 1])
    drafts = torch.randn(4, engine.width)
    drafts[:2] = history[start - 1 : start + 1]
    engine.run(one_request(range(start - 1, start + 3)), drafts)
    rejected = engine.entries(0, 2)[1]
    engine.run(one_request(range(start + 1, start + 4)), history[start + 1 :])
    engine.check(history)
    assert not torch.equal(engine.entries(0, 2)[1], rejected)


@RATIOS
def test_decode_needs_the_states_of_the_window_only(ratio: int) -> None:
    """Pages that the window has left are given to others: their table entries are stale, and their rows NaN."""
    engine = Engine(ratio)
    length = 3 * ratio
    history = torch.randn(length, engine.width)
    engine.run(one_request(range(length - 1)), history[:-1])
    left = (length - ratio * layout.overlap_factor(ratio)) // engine.state_block
    gone = engine.state_table[0, :left].long()
    engine.state[gone] = torch.nan
    engine.state_table[0, :left] = torch.tensor([-1, 2**30, -(2**31)]).repeat(left)[:left].int()
    engine.run(one_request(range(length - 1, length)), history[-1:])
    torch.testing.assert_close(
        engine.entries(0, 3)[2].double(),
        torch.tensor(engine.entry_by_hand(history, length - 1)).double(),
        rtol=2e-6,
        atol=2e-6,
    )


def test_window_positions_without_a_block_count_as_absent() -> None:
    engine = Engine(4)
    history = torch.randn(8, engine.width)
    engine.run(one_request(range(7)), history[:7])
    engine.state_table[0, 0] = -1
    engine.run(one_request(range(7, 8)), history[7:])
    engine.state_table[0, 0] = 0
    alone = Engine(4)
    alone.ape, alone.norm_weight = engine.ape, engine.norm_weight
    expected = scalar.rotate(alone.entry_by_hand(history[4:], 3, rope=False), engine.table[4].tolist())
    torch.testing.assert_close(engine.entries(0, 2)[1].tolist(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("fmt", ["plain", "fp8_ds_mla", "indexer_fp8"])
def test_an_entry_with_nothing_present_is_zero(fmt: str) -> None:
    dim = {"plain": 16, "fp8_ds_mla": 512, "indexer_fp8": 128}[fmt]
    engine = Engine(4, fmt=fmt, dim=dim, max_len=16)
    meta = engine.metadata(torch.tensor([0]), torch.tensor([3]))
    compress_norm_rope_insert(*engine.arguments({**meta, "state_block_table": torch.full((1, 4), -1).int()}))
    assert not engine.entries(0, 1).any()


@RATIOS
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: {"positions": m["positions"] - 1}, id="the group stays open"),
        pytest.param(
            lambda m: {"state_slot_mapping": torch.full_like(m["state_slot_mapping"], -1)}, id="no state slot"
        ),
        pytest.param(lambda m: {"state_slot_mapping": m["state_slot_mapping"] + 10**6}, id="state slot outside"),
        pytest.param(lambda m: {"slot_mapping": torch.full_like(m["slot_mapping"], -7)}, id="no compressed slot"),
        pytest.param(lambda m: {"slot_mapping": m["slot_mapping"] + 10**6}, id="compressed slot outside"),
        pytest.param(lambda m: {"positions": torch.full_like(m["positions"], -1)}, id="negative position"),
    ],
)
def test_padding_tokens_touch_no_memory(ratio: int, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    engine = Engine(ratio)
    engine.run(one_request(range(ratio)), torch.randn(ratio, engine.width))
    poison_(engine.cache)
    before = engine.cache.clone()
    meta = engine.metadata(torch.tensor([0]), torch.tensor([ratio - 1]))
    compress_norm_rope_insert(*engine.arguments({**meta, **change(meta)}))
    assert_bitwise(engine.cache.contiguous(), before)
    compress_norm_rope_insert(*engine.arguments(meta))
    assert engine.entries(0, 1).isfinite().all()


def test_tokens_with_an_illegal_request_touch_no_live_entry() -> None:
    engine = Engine(4, requests=2)
    history = torch.randn(4, engine.width)
    for request in (0, 1):
        engine.run([(request, p) for p in range(4)], history)
    meta = engine.metadata(torch.tensor([0, 1]), torch.tensor([3, 3]))
    meta["token_to_req"] = torch.tensor([2, -1], dtype=torch.int32)
    meta["slot_mapping"][:] = -1
    before = engine.cache.clone()
    compress_norm_rope_insert(*engine.arguments(meta))
    assert_bitwise(engine.cache.contiguous(), before)


def test_a_call_may_close_many_more_groups_than_are_pooled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ENTRIES_AT_A_TIME", 40)
    engine = Engine(4, requests=3, max_len=400)
    history = [torch.randn(length, engine.width) for length in (399, 260, 61)]
    step = [(r, p) for r in range(3) for p in range(len(history[r]))]
    assert len(step) // 4 > 4 * reference.ENTRIES_AT_A_TIME
    engine.run(step, torch.cat(history))
    for request in range(3):
        engine.check(history[request], request)


@RATIOS
def test_no_more_windows_are_pooled_than_groups_can_close_and_few_at_a_time(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled, pool = [], reference.pool

    def count(*args: Any) -> Tensor:
        entries = pool(*args)
        pooled.append(len(entries))
        return entries

    monkeypatch.setattr(reference, "pool", count)
    monkeypatch.setattr(reference, "ENTRIES_AT_A_TIME", 4)
    engine, tokens = Engine(ratio, max_len=768), 768
    meta = engine.metadata(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
    reference.compress_norm_rope_insert(reference.CompressArguments(*engine.arguments(meta)))
    assert sum(pooled) == tokens // ratio + 1
    assert max(pooled) == 4


@pytest.mark.parametrize("start", range(4))
def test_requests_that_all_close_as_many_groups_as_they_can_fit(start: int) -> None:
    """Five tokens each from any place in a group: T // C + R leaves room for every batch of consecutive positions."""
    requests, count = 6, 5
    engine = Engine(4, requests=requests, max_len=32)
    history = [torch.randn(start + 8 + count, engine.width) for _ in range(requests)]
    for first, last in ((0, start + 8), (start + 8, start + 8 + count)):
        step = [(r, p) for r in range(requests) for p in range(first, last)]
        engine.run(step, torch.cat([states[first:last] for states in history]))
    for request in range(requests):
        engine.check(history[request], request)


def test_layout_of_the_arguments_does_not_matter() -> None:
    engine = Engine(4, requests=2)
    history = torch.randn(8, engine.width)
    for request in (0, 1):
        engine.run([(request, p) for p in range(8)], history)
    expected = engine.cache.clone()
    poison_(engine.cache)
    meta = engine.metadata(torch.arange(16) // 8, torch.arange(16) % 8)
    meta = {name: (padded if name == "state_block_table" else strided)(value) for name, value in meta.items()}
    meta["positions"] = torch.cat((meta["positions"], torch.full((5,), 2**40)))[:16].int()
    engine.norm_weight, engine.table = strided(engine.norm_weight), strided(engine.table)
    compress_norm_rope_insert(*engine.arguments(meta))
    assert_bitwise(engine.cache.contiguous(), expected)


@pytest.mark.parametrize(
    ("ratio", "fmt", "dim", "hadamard"),
    [
        (4, "plain", 16, False),
        (128, "plain", 16, False),
        (4, "fp8", 16, False),
        (4, "fp8_ds_mla", 512, False),
        (4, "indexer_fp8", 128, True),
        (4, "indexer_mxfp4", 128, False),
    ],
)
def test_op_keeps_its_promises(ratio: int, fmt: str, dim: int, hadamard: bool) -> None:
    engine = Engine(ratio, fmt=fmt, dim=dim, hadamard=hadamard, max_len=256)
    length = ratio + 2
    engine.run(one_request(range(length)), torch.randn(length, engine.width))
    request = torch.zeros(length, dtype=torch.int64)
    full = engine.arguments(engine.metadata(request, torch.arange(length)))
    one = engine.arguments(engine.metadata(request[:1], torch.tensor([ratio - 1])))
    check_op(compress_norm_rope_insert, [full, one], utilities=fmt in ("plain", "fp8_ds_mla"))
    none = engine.arguments(engine.metadata(request[:0], torch.arange(0)))
    padding = engine.metadata(request[:3], torch.arange(3))
    padding["state_slot_mapping"].fill_(-1)
    check_op(compress_norm_rope_insert, [none, engine.arguments(padding)], utilities=fmt == "plain")


def test_empty_caches_take_and_give_nothing() -> None:
    engine = Engine(4)
    arguments = list(engine.arguments(engine.metadata(torch.tensor([0]), torch.tensor([3]))))
    compress_norm_rope_insert(engine.state[:0], *arguments[1:])
    arguments[8] = engine.cache[:0]
    compress_norm_rope_insert(*arguments)


@pytest.mark.parametrize("fmt", [*layout.KV_FORMATS, "indexer_fp8", "indexer_mxfp4"])
def test_reference_never_synchronises(fmt: str) -> None:
    dim = {"plain": 16, "fp8": 16, "fp8_ds_mla": 512}.get(fmt, 128)
    engine = Engine(4, fmt=fmt, dim=dim, hadamard=fmt.startswith("indexer"), max_len=16)
    arguments = engine.arguments(engine.metadata(torch.zeros(8, dtype=torch.int64), torch.arange(8)))
    with refuse_synchronization():
        reference.compress_norm_rope_insert(reference.CompressArguments(*arguments))


def test_compiles_once_for_every_token_count() -> None:
    engine = Engine(4)

    def step(inputs: Tensor, cache: Tensor, state: Tensor, meta: dict[str, Tensor]) -> Tensor:
        save_partial_states(inputs * 2, engine.ape, state, meta["state_slot_mapping"], meta["positions"], 4)
        weight, table = engine.norm_weight, engine.table
        compress_norm_rope_insert(state, *meta.values(), weight, table, cache, EPS, 4, 4, engine.block, "plain")
        return torch.where(cache.isnan(), 0, cache) * 2

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 8, 21):
            inputs = torch.randn(tokens, engine.width)
            meta = engine.metadata(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
            for x in (inputs, *(value for value in meta.values() if value.dim() == 1)):
                torch._dynamo.mark_dynamic(x, 0)
            results = []
            for function in (compiled, step):
                cache, state = poison_(engine.cache.clone()), poison_(engine.state.clone())
                results.append((function(inputs, cache, state, meta), cache, state))
            for got, want in zip(*results, strict=True):
                assert_bitwise(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 1}, "ratio above 1"),
        ({"ratio": 128}, r"state_cache is \[P, 4, 32\]"),
        ({"fmt": "fp8_e5m2"}, "unknown cache format"),
        ({"fmt": "fp8_ds_mla"}, "vectors of 512 dims"),
        ({"fmt": "indexer_fp8"}, "vectors of 128 dims"),
        ({"kv_scale": torch.ones(1)}, "kv_scale with plain"),
        ({"fmt": "fp8", "hadamard": True, "cache": torch.zeros(3, 8, 16, dtype=torch.uint8)}, "only indexer keys"),
        ({"cache": torch.zeros(3, 4, 16)}, r"plain cache is \[P, 8, 16\]"),
        ({"norm_weight": torch.ones(12)}, r"state_cache is \[P, 4, 48\]"),
        ({"table": torch.zeros(9, 18)}, "at most 16"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    engine = Engine(4)
    meta = engine.metadata(torch.tensor([0]), torch.tensor([3]))
    for name, value in change.items():
        setattr(engine, name, value)
    with pytest.raises(InputError, match=message):
        compress_norm_rope_insert(*engine.arguments(meta))


def test_short_metadata_is_refused() -> None:
    engine = Engine(4)
    meta = engine.metadata(torch.tensor([0, 0]), torch.tensor([3, 4]))
    for name in ("token_to_req", "positions", "slot_mapping"):
        with pytest.raises(InputError, match=f"{name} has a row for every token"):
            compress_norm_rope_insert(*engine.arguments({**meta, name: meta[name][:1]}))
