"""Which compressors join a layer's norm and insert: of which order, formats and allocations. Results are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile import layout
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Merged, merged

T, RATIO, BLOCK, EPS, LATENT = 6, 4, 64, 1e-6, 48
D, KEY_D, ROPE = 64, 32, 16
Caches = dict[str, Tensor]
ops: Any = torch.ops.dsv4


class Compressor:
    """Stores vectors of `dim` in cache `name`, beside its states; every fourth token closes an entry."""

    def __init__(self, name: str, dim: int, fmt: str = "plain", *, hadamard: bool = False, rope: int = ROPE) -> None:
        self.name, self.dim, self.fmt, self.hadamard = name, dim, fmt, hadamard
        self.dtype = torch.float32 if fmt == "plain" else torch.bfloat16
        self.score, self.ape = torch.randn(T, 4 * dim), torch.randn(RATIO, 2 * dim)
        self.weight, self.table = torch.randn(dim).to(self.dtype), torch.randn(32, rope)
        self.tables = torch.arange(4, dtype=torch.int32)[None]
        self.closed = torch.tensor([-1, -1, -1, 0, -1, -1])

    def caches(self) -> Caches:
        stored = layout.allocate_cache(self.fmt, 2, BLOCK, self.dim, dtype=self.dtype)
        return {self.name: stored, f"{self.name} states": torch.randn(4, 4, 4 * self.dim)}

    def save(self, layer: Layer, caches: Caches) -> None:
        states = caches[f"{self.name} states"]
        ops.save_partial_states(self.score, self.ape, states, layer.slots, layer.positions, 4)

    def compress(self, layer: Layer, caches: Caches) -> None:
        ops.compress_norm_rope_insert(
            caches[f"{self.name} states"], layer.slots, self.tables, layer.token_to_req, layer.positions, self.closed,
            self.weight, layer.table, caches[self.name], EPS, RATIO, 4, BLOCK, self.fmt, self.hadamard,
        )  # fmt: skip


class Layer:
    """A layer's norm and insert into the cache "window", and two compressors, to be called in any order."""

    def __init__(self, first: Compressor, second: Compressor, window: str = "window") -> None:
        self.first, self.second, self.window, dtype = first, second, window, first.dtype
        self.positions, self.slots, self.table = torch.arange(T), torch.arange(T) + 3, first.table
        self.token_to_req = torch.zeros(T, dtype=torch.int32)
        self.latent, self.kv = torch.randn(T, LATENT).to(dtype), torch.randn(T, first.dim).to(dtype)
        self.q_weight, self.kv_weight = torch.randn(LATENT).to(dtype), torch.randn(first.dim).to(dtype)

    def caches(self) -> Caches:
        dim, fmt, dtype = self.first.dim, self.first.fmt, self.first.dtype
        window = layout.allocate_cache(fmt, 2, BLOCK, dim, dtype=dtype)
        return {self.window: window, **self.first.caches(), **self.second.caches()}

    def norm(self, caches: Caches, latent: Tensor) -> Tensor:
        qr, kv = ops.fused_q_kv_rmsnorm(latent, self.kv, self.q_weight, self.kv_weight, EPS)
        window = caches[self.window]
        ops.kv_rope_insert(kv, window, self.slots, self.positions, self.table, BLOCK, self.first.fmt)
        return qr

    def run(self, order: str, caches: Caches, latent: Tensor | None = None) -> Tensor:
        """`order` of norm and insert (n), save and compress of the first (S, C) and of the second compressor (s, c)."""
        qr = latent = self.latent if latent is None else latent
        for step in order:
            if step == "n":
                qr = self.norm(caches, latent)
            else:
                compressor = self.first if step.isupper() else self.second
                (compressor.save if step in "sS" else compressor.compress)(self, caches)
        return qr


def plain_layer(**second: Any) -> Layer:
    return Layer(Compressor("main", D), Compressor("keys", **{"dim": KEY_D, **second}))


def compare(run: Callable[[Caches], Tensor], make: Callable[[], Caches]) -> Merged:
    """Results and caches, made twice alike, equal those of the graph that is not merged."""
    with torch.no_grad(), torch.random.fork_rng():
        state = torch.get_rng_state()
        got = make()
        torch.set_rng_state(state)
        expected = make()
        result = merged(run)
        assert_bitwise(result.call(got), run(expected))
        for name in expected:
            assert_bitwise(got[name], expected[name], label=name)
    return result


@pytest.mark.parametrize("order", ["nSCsc", "nscSC", "scSCn", "scnSC", "SCnsc", "nsSCc", "sSncC"])
@pytest.mark.parametrize("keys", [{}, {"dim": D, "hadamard": True}], ids=["short-keys", "hadamard"])
def test_both_compressors_are_merged_in_whichever_order_they_are_written(order: str, keys: dict[str, Any]) -> None:
    layer = plain_layer(**keys)
    result = compare(lambda caches: layer.run(order, caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1}
    assert result.reasons == []


def test_each_layer_has_its_own_compressors_where_they_are_written_in_front() -> None:
    layers = [
        Layer(Compressor(f"main {i}", D), Compressor(f"keys {i}", KEY_D, hadamard=True), f"window {i}")
        for i in range(2)
    ]

    def run(caches: Caches) -> Tensor:
        return layers[0].run("scSCn", caches) + layers[1].run("scSCn", caches)

    result = compare(run, lambda: {**layers[0].caches(), **layers[1].caches()})
    assert result.ops == {"preprocess_insert": 2}
    assert [len(fusion.ops) for fusion in result.fusions] == [6, 6]


def test_an_indexers_compressor_alone_stays_and_is_said_to() -> None:
    layer = plain_layer()
    result = compare(lambda caches: layer.run("scn", caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": 1, "compress_norm_rope_insert": 1}
    assert result.reasons == ["an indexer's compressor is merged beside a main one only"]


def test_a_second_compressor_of_keys_and_values_is_not_taken_for_an_indexers() -> None:
    first, second = (Compressor(name, layout.HEAD_DIM, "fp8_ds_mla", rope=64) for name in ("main", "other"))
    layer = Layer(first, second)
    result = compare(lambda caches: layer.run("nSCsc", caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": 1, "compress_norm_rope_insert": 1}
    assert result.reasons == ["another compressor of keys and values is merged already"]


def test_a_second_compressor_of_plain_vectors_is_what_the_merged_op_takes() -> None:
    layer = plain_layer(dim=D)
    assert compare(lambda caches: layer.run("nSCsc", caches), layer.caches).ops == {"preprocess_insert": 1}


def test_a_norm_of_what_another_norm_has_given_is_merged_too() -> None:
    layer = plain_layer()

    def run(caches: Caches) -> Tensor:
        return layer.run("n", {"window": caches["second window"]}, layer.run("n", caches))

    make = layer.caches
    result = compare(run, lambda: {**make(), "second window": make()["window"]})
    assert result.ops == {"preprocess_insert": 2}


def in_one_allocation(caches: Caches, *names: str) -> Caches:
    """`caches`, of which those called `names` are views of one tensor, one behind the other."""
    whole = torch.cat([caches[name].flatten() for name in names])
    parts = whole.split([caches[name].numel() for name in names])
    return {**caches, **{name: part.view_as(caches[name]) for name, part in zip(names, parts, strict=True)}}


@pytest.mark.parametrize(
    ("together", "apart", "reason"),
    [
        (("window", "main"), 2, "window_cache and compressed_cache are views of one allocation"),
        (("main states", "keys states"), 1, "state_cache and indexer_state_cache are views of one allocation"),
    ],
)
def test_caches_in_one_allocation_keep_apart_what_writes_them(
    together: tuple[str, ...], apart: int, reason: str
) -> None:
    layer = plain_layer()
    result = compare(lambda c: layer.run("nSCsc", c), lambda: in_one_allocation(layer.caches(), *together))
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": apart, "compress_norm_rope_insert": apart}
    assert result.reasons[0] == reason


def test_caches_in_one_allocation_keep_layers_apart_that_write_them_again() -> None:
    layer = plain_layer()

    def run(caches: Caches) -> Tensor:
        return layer.run("nSC", caches, layer.run("nSC", caches) * 2)

    result = compare(run, lambda: in_one_allocation(layer.caches(), "window", "main"))
    assert result.reasons == ["window_cache and compressed_cache are views of one allocation"] * 2


@torch.no_grad()
def test_compiled_code_copies_no_cache_of_an_allocation_with_others() -> None:
    layer = plain_layer()
    caches = in_one_allocation(layer.caches(), "window", "main")
    options = {"dsv4.fuse": "on", "dsv4.impl": "eager", "fx_graph_cache": False}
    compiled = torch.compile(lambda c: layer.run("nSC", c), backend="dsv4", fullgraph=True, options=options)
    _, codes = run_and_get_code(compiled, caches)
    # All ops are references, and Inductor has nothing to generate but copies.
    assert [code.count("preprocess_insert.default(") for code in codes] == [1]
    assert "cpp_fused" not in codes[0]
