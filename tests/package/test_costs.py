"""The cost model: bytes are those of the tensors of a call, and floors follow from a machine's figures."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.selection import costs
from dsv4_compile.testing.samples import op_samples

ROW = costs.row_bytes("fp8_ds_mla")


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def results(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    result = OPS[op](*args)
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def moved(op: str, args: tuple[Any, ...], *read: int) -> int:
    """Bytes of the arguments at positions `read` and of the results."""
    return size(*(args[i] for i in read), *results(op, args))


def test_every_op_has_a_cost() -> None:
    assert set(costs.names()) == set(OPS)


@pytest.mark.parametrize("op", costs.names())
def test_costs_are_of_ops_and_grow_with_their_sizes(op: str) -> None:
    assert op in OPS
    cost = costs.of(op)
    work = cost.bytes + cost.flops
    even = dict.fromkeys(work.free_symbols, 256)
    assert {symbol.name for symbol in even} == set(costs.sizes(op)) - {"e", "s"}
    for symbol in even:
        assert work.subs(even | {symbol: 512}) > work.subs(even)


def test_norms_move_their_rows_and_weights() -> None:
    args = op_samples("fused_q_kv_rmsnorm")[0]
    qr, kv, weight = args[0], args[1], args[3].bfloat16()
    want = moved("fused_q_kv_rmsnorm", (*args[:3], weight, args[4]), 0, 1, 2) + size(weight)
    assert costs.of("fused_q_kv_rmsnorm", T=len(qr), Q=qr.shape[1], D=kv.shape[1]).bytes == want


@pytest.mark.parametrize("index", [0, 1])
def test_linear_layers_move_their_operands_and_results(index: int) -> None:
    x, weight, scale, *rest = op_samples("fp8_linear")[index]
    (rows, width), e = weight.shape, x.element_size()
    cost = costs.of("fp8_linear", T=x.numel() // width, N=rows, K=width, e=e)
    assert cost.bytes == moved("fp8_linear", (x, weight, scale, *rest), 0, 1, 2)
    assert cost.flops == 2 * (x.numel() // width) * weight.numel()


def test_grouped_products_move_their_operands_and_results() -> None:
    args = op_samples("fp8_grouped_einsum")[0]
    (tokens, groups, width), rows = args[0].shape, args[2].shape[0] // args[0].shape[1]
    cost = costs.of("fp8_grouped_einsum", T=tokens, G=groups, N=rows, K=width, s=4)
    assert cost.bytes == moved("fp8_grouped_einsum", args, 0, 1, 2, 3)
    quantised = costs.of("fp8_grouped_einsum_quant", T=tokens, G=groups, N=rows, K=width, s=4)
    assert quantised.bytes == moved("fp8_grouped_einsum_quant", args, 0, 1, 2, 3)
    assert (quantised.flops, quantised.operands) == (cost.flops, "e4m3")
    x, weight, groups = op_samples("grouped_linear")[1]
    tokens, rows, width = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    cost = costs.of("grouped_linear", T=tokens, G=groups, N=rows, K=width)
    assert cost.bytes == moved("grouped_linear", (x, weight, groups), 0, 1)
    assert cost.flops == 2 * x.shape[0] * weight.numel()


def test_hyper_connections_move_streams_coefficients_and_weights() -> None:
    for op, read in (("mhc_pre", (0, 1, 2, 3, 4)), ("mhc_post", (0, 1, 2, 3)), ("mhc_boundary", range(8))):
        args = op_samples(op)[0]
        tokens, streams, dim = args[0].shape
        assert costs.of(op, T=tokens, G=streams, D=dim).bytes == moved(op, args, *read)
    args = op_samples("mhc_head")[1]
    tokens, streams, dim = args[0].shape
    assert costs.of("mhc_head", T=tokens, G=streams, D=dim).bytes == moved("mhc_head", args, 0, 1, 2, 3, 4)
    assert costs.of("mhc_head", T=tokens, G=streams, D=dim).flops == 2 * tokens * args[1].numel()


def test_rotations_move_vectors_positions_and_a_row_of_the_table_for_each_token() -> None:
    o, positions, table = op_samples("inv_rope")[0]
    tokens, heads, dim = o.shape
    of = {"T": tokens, "H": heads, "D": dim, "rope": table.shape[1]}
    rows = size(positions[:tokens], table[:tokens])
    assert costs.of("inv_rope", **of).bytes == moved("inv_rope", (o, positions, table), 0) + rows
    values, scale = OPS["inv_rope_fp8_quant"](o[:, :2], positions, table, 1, 2)
    assert costs.of("inv_rope_fp8_quant", **(of | {"H": 2})).bytes == size(o[:, :2], values, scale) + rows
    q = op_samples("q_norm_rope")[2]
    of = {"T": q[0].shape[0], "H": q[0].shape[1], "D": q[0].shape[2], "rope": q[2].shape[1], "e": 4}
    assert costs.of("q_norm_rope", **of).bytes == moved("q_norm_rope", q, 0) + size(q[1], q[2][: len(q[1])])


def test_an_insert_moves_a_row_of_the_cache_for_each_token() -> None:
    kv, _, slots, positions, table, *_ = op_samples("kv_rope_insert")[0]
    angles = size(positions, table[: len(kv)])
    cost = costs.of("kv_rope_insert", T=len(kv), D=kv.shape[1], rope=table.shape[1], row=ROW)
    assert cost.bytes == size(kv, slots) + angles + len(kv) * ROW
    q = costs.of("q_norm_rope", T=len(kv), H=3, D=kv.shape[1], rope=table.shape[1]).bytes
    both = costs.of("q_norm_rope_kv_insert", T=len(kv), H=3, D=kv.shape[1], rope=table.shape[1], row=ROW).bytes
    assert both == q + cost.bytes - angles


def test_state_rows_are_read_and_written() -> None:
    kv_score, _, _, slots, positions, _ = op_samples("save_partial_states")[0]
    want = 2 * size(kv_score) + size(slots, positions)
    assert costs.of("save_partial_states", T=len(kv_score), width=kv_score.shape[1]).bytes == want


def test_attention_reads_every_key_of_every_token_and_multiplies_it_twice() -> None:
    q, cache, slots, *rest = op_samples("sparse_mla_decode")[1]
    assert rest[3 - 1] == "fp8_ds_mla"
    tokens, heads, dim = q.shape
    cost = costs.of("sparse_mla_decode", T=tokens, H=heads, D=dim, K=slots.shape[1], row=ROW)
    assert cost.bytes == moved("sparse_mla_decode", (q, cache, slots, *rest), 0, 2) + slots.numel() * ROW
    assert cost.flops == 2 * 2 * slots.numel() * heads * dim


@pytest.mark.parametrize(
    ("fmt", "dim", "itemsize", "want"),
    [("fp8_ds_mla", 512, 2, 584), ("indexer_fp8", 128, 2, 132), ("plain", 512, 4, 2048), ("fp8", 512, 2, 512)],
)
def test_a_cached_row_has_the_bytes_that_a_cache_has_for_it(fmt: str, dim: int, itemsize: int, want: int) -> None:
    cache = layout.allocate_cache(fmt, 9, 64, dim, dtype=torch.float32 if itemsize == 4 else torch.bfloat16)
    assert costs.row_bytes(fmt, dim, itemsize) == want == size(cache[0]) // 64


def test_floors_are_those_of_the_slower_of_memory_and_arithmetic() -> None:
    """A weight of 33.5 MB at 4.3 TB/s is 7.8 us; with 16,384 tokens the products decide, twice as fast in e4m3."""
    config = DeepseekV4Config.flash()
    width, rows = config.q_lora_rank, config.num_heads * config.head_dim
    few, many = (costs.of("fp8_linear", T=t, K=width, N=rows) for t in (1, 16384))
    assert costs.floor_us(few, costs.H200) == pytest.approx(7.8, rel=0.02)
    assert costs.floor_us(few, costs.H200, launches=2) == pytest.approx(7.8 + 2.6, rel=0.02)
    assert costs.floor_us(many, costs.H200) == pytest.approx(2 * 16384 * width * rows / 1580e12 * 1e6)
    exact = costs.of("grouped_linear", T=16384, G=1, K=width, N=rows)
    assert costs.floor_us(exact, costs.H200) == pytest.approx(2 * costs.floor_us(many, costs.H200))


def test_what_is_not_given_stays_a_symbol() -> None:
    cost = costs.of("fp8_linear", K=4096, N=1536)
    (tokens,) = cost.bytes.free_symbols
    assert cost.bytes.subs(tokens, 8) == costs.of("fp8_linear", T=8, K=4096, N=1536).bytes
    assert sympy.diff(cost.flops, tokens) == 2 * 4096 * 1536


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)costs are known of .*fp8_linear"):
        costs.of("fp16_linear")
    with pytest.raises(InputError, match=r"(?s)depends on T, N, K, e, s.*sizes \['M'\] of fp8_linear"):
        costs.of("fp8_linear", M=3)


def test_a_floor_of_open_sizes_and_sizes_below_zero_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)E201.*depends on K, N, T"):
        costs.floor_us(costs.of("fp8_linear"), costs.H200)
    with pytest.raises(InputError, match=r"(?s)E201.*'T': -3"):
        costs.of("fp8_linear", T=-3)
