"""Fusion of compressors with a layer's norm and insert, by order, format and allocation; results are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile import layout
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused

T, RATIO, BLOCK, EPS, LATENT = 6, 4, 64, 1e-6, 48
D, KEY_D, ROPE = 64, 32, 16
Caches = dict[str, Tensor]
ops: Any = torch.ops.dsv4


class Compressor:
    """A compressor with vectors of `dim` in cache `name`, and its states; every fourth token completes an entry."""

    def __init__(self, name: str, dim: int, fmt: str = "plain", *, hadamard: bool = False, rope: int = ROPE) -> None:
        self.name, self.dim, self.fmt, self.hadamard = name, dim, fmt, hadamard
        self.dtype = torch.float32 if fmt == "plain" else torch.bfloat16
        self.score, self.ape = torch.randn(T, 4 * dim), torch.randn(RATIO, 2 * dim)
        self.weight, self.table = torch.randn(dim).to(self.dtype), torch.randn(32, rope)
        self.tables = torch.arange(4, dtype=torch.int32)[None]
        self.closed = torch.tensor([-1, -1, -1, 0, -1, -1])
        self.eps, self.saved_apart = EPS, 0

    def caches(self) -> Caches:
        stored = layout.allocate_cache(self.fmt, 2, BLOCK, self.dim, dtype=self.dtype)
        return {self.name: stored, f"{self.name} states": torch.randn(4, 4, 4 * self.dim)}

    def save(self, layer: Layer, caches: Caches) -> None:
        states = caches[f"{self.name} states"]
        slots = layer.slots + self.saved_apart if self.saved_apart else layer.slots
        ops.save_partial_states(self.score, self.ape, states, slots, layer.positions, 4)

    def compress(self, layer: Layer, caches: Caches) -> None:
        ops.compress_norm_rope_insert(
            caches[f"{self.name} states"], layer.slots, self.tables, layer.token_to_req, layer.positions, self.closed,
            self.weight, layer.table, caches[self.name], self.eps, RATIO, 4, BLOCK, self.fmt, self.hadamard,
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
        """Run in `order`: norm and insert (n), save and compress of the first (S, C) and second compressor (s, c)."""
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


def compare(run: Callable[[Caches], Tensor], make: Callable[[], Caches]) -> Fused:
    """Compare results and caches, which `make` returns twice, with those of the unfused graph."""
    with torch.no_grad(), torch.random.fork_rng():
        state = torch.get_rng_state()
        got = make()
        torch.set_rng_state(state)
        expected = make()
        result = fused(run)
        assert_bitwise(result.call(got), run(expected))
        for name in expected:
            assert_bitwise(got[name], expected[name], label=name)
    return result


@pytest.mark.parametrize("order", ["nSCsc", "nscSC", "scSCn", "scnSC", "SCnsc", "nsSCc", "sSncC"])
def test_both_compressors_are_fused_in_any_order_of_the_calls(order: str) -> None:
    layer = plain_layer(**({} if order.startswith("n") else {"dim": D, "hadamard": True}))
    result = compare(lambda caches: layer.run(order, caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1}
    assert result.reasons == []


def test_compressors_before_the_norm_are_fused_with_their_own_layer() -> None:
    layers = [
        Layer(Compressor(f"main {i}", D), Compressor(f"keys {i}", KEY_D, hadamard=True), f"window {i}")
        for i in range(2)
    ]

    def run(caches: Caches) -> Tensor:
        return layers[0].run("scSCn", caches) + layers[1].run("scSCn", caches)

    result = compare(run, lambda: {**layers[0].caches(), **layers[1].caches()})
    assert result.ops == {"preprocess_insert": 2}
    assert [len(fusion.ops) for fusion in result.fusions] == [6, 6]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"eps": 0.5}, "the compressor has eps 0.5"), ({"saved_apart": 2}, "a different state_slot_mapping")],
)
def test_a_compressor_with_another_eps_or_other_state_slots_is_not_fused(change: dict[str, Any], reason: str) -> None:
    layer = plain_layer()
    vars(layer.first).update(change)
    result = compare(lambda caches: layer.run("nSC", caches), layer.caches)
    assert "preprocess_insert" not in result.ops or "compress_norm_rope_insert" in result.ops
    assert any(reason in why for why in result.reasons), result.reasons


def test_an_indexers_compressor_alone_is_not_fused_and_is_reported() -> None:
    layer = plain_layer()
    result = compare(lambda caches: layer.run("scn", caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": 1, "compress_norm_rope_insert": 1}
    assert result.reasons == ["an indexer's compressor is only fused together with a main compressor"]


def test_a_second_compressor_of_keys_and_values_is_not_fused_as_an_indexers() -> None:
    first, second = (Compressor(name, layout.HEAD_DIM, "fp8_ds_mla", rope=64) for name in ("main", "other"))
    layer = Layer(first, second)
    result = compare(lambda caches: layer.run("nSCsc", caches), layer.caches)
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": 1, "compress_norm_rope_insert": 1}
    assert result.reasons == ["another compressor of keys and values is already fused"]


def test_a_second_compressor_of_plain_vectors_is_fused() -> None:
    layer = plain_layer(dim=D)
    assert compare(lambda caches: layer.run("nSCsc", caches), layer.caches).ops == {"preprocess_insert": 1}


def test_a_norm_of_the_result_of_another_norm_is_fused_too() -> None:
    layer = plain_layer()

    def run(caches: Caches) -> Tensor:
        return layer.run("n", {"window": caches["second window"]}, layer.run("n", caches))

    make = layer.caches
    result = compare(run, lambda: {**make(), "second window": make()["window"]})
    assert result.ops == {"preprocess_insert": 2}


def in_one_allocation(caches: Caches, *names: str) -> Caches:
    """Return `caches` with those called `names` as consecutive views of one tensor."""
    allocation = torch.cat([caches[name].flatten() for name in names])
    parts = allocation.split([caches[name].numel() for name in names])
    return {**caches, **{name: piece.view_as(caches[name]) for name, piece in zip(names, parts, strict=True)}}


@pytest.mark.parametrize(
    ("names", "unfused", "reason"),
    [
        (("window", "main"), 2, "window_cache and compressed_cache are views of one allocation"),
        (("main states", "keys states"), 1, "state_cache and indexer_state_cache are views of one allocation"),
    ],
)
def test_ops_that_write_caches_of_one_allocation_are_not_fused(
    names: tuple[str, ...], unfused: int, reason: str
) -> None:
    layer = plain_layer()
    result = compare(lambda c: layer.run("nSCsc", c), lambda: in_one_allocation(layer.caches(), *names))
    assert result.ops == {"preprocess_insert": 1, "save_partial_states": unfused, "compress_norm_rope_insert": unfused}
    assert result.reasons[0] == reason


def test_layers_that_write_caches_of_one_allocation_again_are_not_fused() -> None:
    layer = plain_layer()

    def run(caches: Caches) -> Tensor:
        return layer.run("nSC", caches, layer.run("nSC", caches) * 2)

    result = compare(run, lambda: in_one_allocation(layer.caches(), "window", "main"))
    assert result.reasons == ["window_cache and compressed_cache are views of one allocation"] * 2


@torch.no_grad()
def test_compiled_code_copies_no_cache_of_a_shared_allocation() -> None:
    layer = plain_layer()
    caches = in_one_allocation(layer.caches(), "window", "main")
    options = {"dsv4.fuse": "on", "dsv4.impl": "eager", "fx_graph_cache": False}
    compiled = torch.compile(lambda c: layer.run("nSC", c), backend="dsv4", fullgraph=True, options=options)
    _, codes = run_and_get_code(compiled, caches)
    # All ops run their references, so generated kernels could only be copies.
    assert [code.count("ON_CPU.preprocess_insert(") for code in codes] == [1]
    assert "cpp_fused" not in codes[0]
