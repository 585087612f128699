"""Conditions for fusing ops: nodes between them, options, kernels and measured times; results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.lowering import registry
from dsv4_compile.options import FUSE_PASSES
from dsv4_compile.passes import choose, pipeline, sources
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused

D, ROPE, T, EPS = 64, 16, 6, 1e-6
ops: Any = torch.ops.dsv4


class Layer:
    """Arguments of one HCA-like layer; `run` is its forward and calls `between` at named places."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.positions, self.token_to_req = torch.arange(T), torch.zeros(T, dtype=torch.int32)
        self.slots = torch.arange(T) + 3
        self.tables = torch.arange(4, dtype=torch.int32)[None]
        self.table = torch.randn(32, ROPE)
        self.q_weight, self.kv_weight = torch.randn(48, dtype=dtype), torch.randn(D, dtype=dtype)
        self.ape, self.norm_weight = torch.randn(4, 2 * D), torch.randn(D, dtype=dtype)
        self.caches = {
            "window": torch.randn(2, 64, D),
            "state": torch.randn(4, 4, 4 * D),
            "main": torch.randn(1, 64, D),
        }
        self.latent, self.kv, self.score = (
            torch.randn(T, 48, dtype=dtype),
            torch.randn(T, D, dtype=dtype),
            torch.randn(T, 4 * D),
        )
        self.rounded: Callable[[Tensor], Tensor] = lambda x: x
        self.wq_b = torch.randn(2 * D, 48, dtype=dtype)
        self.indices = torch.arange(T, dtype=torch.int32)[:, None] + 3
        self.lens = torch.ones(T, dtype=torch.int32)

    def run(self, caches: dict[str, Tensor], between: Callable[[str, dict[str, Tensor]], None]) -> list[Tensor]:
        latent, kv = self.rounded(self.latent), self.rounded(self.kv)
        qr, kv = ops.fused_q_kv_rmsnorm(latent, kv, self.q_weight, self.kv_weight, EPS)
        between("norm", caches)
        ops.kv_rope_insert(kv, caches["window"], self.slots, self.positions, self.table, 64, "plain")
        q = ops.q_norm_rope((qr @ self.wq_b.T).unflatten(-1, (2, D)), self.positions, self.table, EPS)
        between("insert", caches)
        ops.save_partial_states(self.score, self.ape, caches["state"], self.slots, self.positions, 4)
        between("save", caches)
        ops.compress_norm_rope_insert(
            caches["state"], self.slots, self.tables, self.token_to_req, self.positions, self.slots // 4,
            self.norm_weight, self.table, caches["main"], EPS, 4, 4, 64, "plain",
        )  # fmt: skip
        out, lse = ops.sparse_mla_decode(q, caches["window"], self.indices, self.lens, 64, "plain", 0.1)
        between("attention", caches)
        return [ops.inv_rope(out, self.positions, self.table), lse, qr, q]


@torch.no_grad()
def compare(
    between: Callable[[str, dict[str, Tensor]], None] = lambda place, caches: None,
    keep: slice = slice(0, 1),
    options: dict[str, Any] | None = None,
    layer: Layer | None = None,
) -> Fused:
    """Compare the results `keep` and the caches with those of the unfused graph."""
    layer = layer or Layer()

    def run(caches: dict[str, Tensor]) -> list[Tensor]:
        return layer.run(caches, between)[keep]

    expected, got = ({name: t.clone() for name, t in layer.caches.items()} for _ in range(2))
    result = fused(run, options)
    for a, b in zip(result.call(got), run(expected), strict=True):
        assert_bitwise(a, b)
    for name in expected:
        assert_bitwise(got[name], expected[name], label=name)
    return result


def test_everything_is_fused_without_nodes_between() -> None:
    result = compare()
    assert result.ops == {"preprocess_insert": 1, "sparse_mla_decode": 1}
    assert result.reasons == []
    assert not {"clone", "cat", "copy"} & set(result.targets)
    assert result.shared == []


def test_a_reader_of_the_window_between_the_ops_prevents_fusion() -> None:
    result = compare(lambda place, caches: place == "norm" and caches["main"].add_(caches["window"].sum()))
    assert "preprocess_insert" not in result.ops
    assert result.reasons == ["aten.sum uses window_cache between the ops"]


def test_a_writer_of_the_window_between_the_ops_prevents_fusion() -> None:
    result = compare(lambda place, caches: place == "norm" and caches["window"].mul_(2))
    assert "preprocess_insert" not in result.ops
    assert result.reasons == ["aten.mul.Tensor writes window_cache between the ops"]


@pytest.mark.parametrize(("place", "cache"), [("insert", "state"), ("save", "main"), ("insert", "main")])
def test_a_reader_of_a_compressors_cache_between_the_ops_leaves_the_compressor_unfused(place: str, cache: str) -> None:
    seen = torch.zeros(1)

    def read(at: str, caches: dict[str, Tensor]) -> None:
        if at == place:
            seen.add_(caches[cache].sum())

    result = compare(read)
    assert result.ops == {
        "preprocess_insert": 1, "save_partial_states": 1, "compress_norm_rope_insert": 1, "sparse_mla_decode": 1
    }  # fmt: skip
    name = {"state": "state_cache", "main": "compressed_cache"}[cache]
    assert result.reasons == [f"aten.sum uses {name} between the ops"]


def test_a_reader_through_an_earlier_view_prevents_fusion() -> None:
    layer, views = Layer(), []
    original = layer.run

    def run(caches: dict[str, Tensor], between: Any) -> list[Tensor]:
        views.append(caches["window"].unbind(0)[1].view(-1))
        return original(caches, lambda place, c: place == "norm" and caches["state"].add_(views.pop().sum()))

    layer.run = run  # type: ignore[method-assign]
    result = compare(layer=layer)
    assert "preprocess_insert" not in result.ops
    assert result.reasons == ["aten.sum uses window_cache between the ops"]


def test_auto_functionalized_v1_nodes_are_not_fused() -> None:
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        result = compare()
    assert result.ops["fused_q_kv_rmsnorm"] == result.ops["kv_rope_insert"] == 1
    assert result.reasons == ["kv_rope_insert is not an auto_functionalized_v2 node"]


def test_a_writer_of_states_between_save_and_compress_leaves_the_compressor_unfused() -> None:
    result = compare(lambda place, caches: place == "save" and caches["state"].mul_(2))
    assert result.ops["save_partial_states"] == 1
    assert result.ops["preprocess_insert"] == 1


def test_readers_of_the_caches_after_the_ops_do_not_prevent_fusion() -> None:
    seen = torch.zeros(1)

    def read(at: str, caches: dict[str, Tensor]) -> None:
        if at == "attention":
            for cache in caches.values():
                seen.add_(cache.sum())

    assert compare(read).ops == {"preprocess_insert": 1, "sparse_mla_decode": 1}


def test_caches_that_are_parts_of_one_tensor_leave_the_compressor_unfused() -> None:
    layer = Layer()
    allocation = torch.randn(3, 64, D)
    layer.caches = {"whole": allocation, "state": layer.caches["state"]}
    original = layer.run
    layer.run = (
        lambda caches, between: original(  # type: ignore[method-assign]
            {"window": caches["whole"][:2], "main": caches["whole"][2:], "state": caches["state"]}, between
        )
    )
    result = compare(layer=layer)
    assert result.ops["preprocess_insert"] == 1
    assert result.ops["compress_norm_rope_insert"] == 1
    assert result.reasons == ["compressed_cache is part of a tensor that kv_rope_insert writes too"]


def test_scores_that_depend_on_the_norm_leave_the_compressor_unfused() -> None:
    layer = Layer()

    def run(caches: dict[str, Tensor]) -> Tensor:
        qr, kv = ops.fused_q_kv_rmsnorm(layer.latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        ops.kv_rope_insert(kv, caches["window"], layer.slots, layer.positions, layer.table, 64, "plain")
        score = layer.score * qr.sum()
        ops.save_partial_states(score, layer.ape, caches["state"], layer.slots, layer.positions, 4)
        ops.compress_norm_rope_insert(
            caches["state"], layer.slots, layer.tables, layer.token_to_req, layer.positions, layer.slots // 4,
            layer.norm_weight, layer.table, caches["main"], EPS, 4, 4, 64, "plain",
        )  # fmt: skip
        return qr

    layer.run = lambda caches, between: [run(caches)]  # type: ignore[method-assign]
    result = compare(layer=layer)
    assert result.ops["save_partial_states"] == 1
    assert result.reasons == ["an input of the group depends on fused_q_kv_rmsnorm"]


def bfloat16_layer() -> Layer:
    """Return a bfloat16 layer with float32 projections."""
    layer = Layer(torch.bfloat16)
    layer.caches = {name: t if name == "state" else t.bfloat16() for name, t in layer.caches.items()}
    layer.latent, layer.kv = layer.latent.float() * 1.01, layer.kv.float() * 1.01
    return layer


def test_a_layer_with_its_compressor_first_is_fused_too() -> None:
    layer = Layer()

    def run(caches: dict[str, Tensor], between: Any) -> list[Tensor]:
        ops.save_partial_states(layer.score, layer.ape, caches["state"], layer.slots, layer.positions, 4)
        ops.compress_norm_rope_insert(
            caches["state"], layer.slots, layer.tables, layer.token_to_req, layer.positions, layer.slots // 4,
            layer.norm_weight, layer.table, caches["main"], EPS, 4, 4, 64, "plain",
        )  # fmt: skip
        latent = layer.latent * 2  # computed after the compressor
        qr, kv = ops.fused_q_kv_rmsnorm(latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        ops.kv_rope_insert(kv, caches["window"], layer.slots, layer.positions, layer.table, 64, "plain")
        return [qr]

    layer.run = run  # type: ignore[method-assign]
    assert compare(layer=layer).ops == {"preprocess_insert": 1}


def test_a_rounded_projection_is_passed_unrounded() -> None:
    layer = bfloat16_layer()
    layer.rounded = lambda x: x.to(torch.bfloat16)
    result = compare(layer=layer)
    assert result.ops["preprocess_insert"] == 1
    assert result.targets["convert_element_type"] == 0


def test_a_projection_is_rounded_to_its_dtype_beside_weights_of_another() -> None:
    layer = bfloat16_layer()
    layer.rounded = lambda x: x.to(torch.bfloat16)
    layer.q_weight, layer.kv_weight = layer.q_weight.float() * 1.01, layer.kv_weight.float() * 1.01
    result = compare(layer=layer)
    assert result.ops["preprocess_insert"] == 1
    assert result.targets["convert_element_type"] == 0


def test_fusion_does_not_round_a_projection_that_is_not_rounded() -> None:
    layer = bfloat16_layer()
    layer.wq_b = layer.wq_b.float()
    assert compare(layer=layer).ops["preprocess_insert"] == 1


def test_latents_and_keys_of_two_dtypes_are_not_fused() -> None:
    layer = bfloat16_layer()
    layer.latent = layer.latent.bfloat16()
    result = compare(layer=layer)
    assert "preprocess_insert" not in result.ops
    assert result.reasons[0] == "qr is torch.bfloat16 and kv torch.float32"


def test_a_q_with_two_users_keeps_its_norm_and_the_rest_is_fused_with_attention() -> None:
    result = compare(keep=slice(0, 4))
    assert result.ops == {"preprocess_insert": 1, "q_norm_rope": 1, "sparse_mla_decode": 1}
    assert result.reasons == ["the result of q_norm_rope is also used by the caller"]


def test_an_output_with_users_before_the_inverse_rope_keeps_it() -> None:
    layer, seen = Layer(), torch.zeros(1)

    def run(caches: dict[str, Tensor], between: Any) -> list[Tensor]:
        q = layer.wq_b.view(1, 2, D, -1)[..., 0].expand(T, 2, D)
        out, _ = ops.sparse_mla_decode(q, caches["window"], layer.indices, layer.lens, 64, "plain", 0.1)
        seen.add_(out.sum())
        return [ops.inv_rope(out, layer.positions, layer.table)]

    layer.run = run  # type: ignore[method-assign]
    result = compare(layer=layer)
    assert result.ops == {"sparse_mla_decode": 1, "inv_rope": 1}
    assert result.reasons == ["the result of sparse_mla_decode is also used by aten.sum"]


@pytest.fixture
def kernels() -> Iterator[list[str]]:
    """Register CPU kernels for both fused ops, and yield the list of their calls."""
    from dsv4_compile.ops.common.define import REFERENCES

    called: list[str] = []
    library = torch.library.Library("dsv4", "IMPL")

    def kernel(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return REFERENCES[name](*args, **kwargs)

        return run

    for name in ("preprocess_insert", "sparse_mla_decode"):
        library.impl(name, kernel(name), "CPU")
    yield called
    library._destroy()


def test_auto_fuses_if_the_fused_op_has_a_kernel(kernels: list[str]) -> None:
    result = compare(options={})
    assert result.ops == {"preprocess_insert": 1, "sparse_mla_decode": 1}
    assert [fusion.reason for fusion in result.fusions] == ["triton: kernel for cpu"] * 2
    assert {"preprocess_insert", "sparse_mla_decode"} <= set(kernels)


@pytest.mark.parametrize(("us", "fuses"), [(3.5, True), (4.5, False)])
def test_auto_does_not_fuse_if_the_separate_ops_were_measured_faster(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, us: float, fuses: bool
) -> None:
    """Norm, insert, save and compress take 1 us each."""

    def nearest(op: str, _: str, elements: int, tokens: int, impls: list[str], within: float) -> dict[str, float]:
        return dict.fromkeys(impls, us if op == "preprocess_insert" else 1.0)

    monkeypatch.setattr(registry.measured, "nearest", nearest)
    result = compare(options={"dsv4.fuse.fuse_attention": "off"})
    times = f"measured at the nearest size: fused {us} us, separate 4.0 us"
    assert result.fusions[0].fused is fuses
    assert result.fusions[0].reason == (f"triton: kernel for cpu; {times}" if fuses else times)


@pytest.mark.parametrize(
    ("options", "ops_left", "reason"),
    [
        (
            {"dsv4.impl.save_partial_states": "eager"},
            {"preprocess_insert", "save_partial_states", "compress_norm_rope_insert", "sparse_mla_decode"},
            "dsv4.impl.save_partial_states demands an implementation of that op",
        ),
        (
            {"dsv4.impl.preprocess_insert": "eager"},
            None,
            "preprocess_insert would run its reference: the reference was asked for",
        ),
        ({"dsv4.fuse.fuse_preprocess": "off"}, None, None),
    ],
)
def test_auto_does_not_fuse_ops_that_options_exclude(
    kernels: list[str], options: dict[str, str], ops_left: set[str] | None, reason: str | None
) -> None:
    result = compare(options=options)
    unfused = {
        "fused_q_kv_rmsnorm",
        "kv_rope_insert",
        "save_partial_states",
        "compress_norm_rope_insert",
        "sparse_mla_decode",
    }
    assert set(result.ops) == (ops_left or unfused)
    assert result.reasons == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("op", "ops_left"),
    [
        ("fused_q_kv_rmsnorm", {"fused_q_kv_rmsnorm", "kv_rope_insert", "save_partial_states"}),
        ("compress_norm_rope_insert", {"preprocess_insert", "save_partial_states"}),
    ],
)
def test_an_op_whose_implementation_is_demanded_is_not_fused(op: str, ops_left: set[str]) -> None:
    result = compare(options={"dsv4.fuse": "on", f"dsv4.impl.{op}": "eager"})
    assert set(result.ops) == ops_left | {"compress_norm_rope_insert", "sparse_mla_decode"}
    assert result.reasons == [f"dsv4.impl.{op} demands an implementation of that op"]


def test_every_pass_has_an_option_and_its_source_keys_the_compile_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(pipeline.PASSES) == FUSE_PASSES
    paths = dict(sources())
    shared = ("choose", "fusion", "insert_halves", "nodes", "pipeline", "prequantized_gemm", "rewrite")
    assert {f"/passes/{name}.py" for name in (*FUSE_PASSES, "preprocess_group", *shared)} <= set(paths)
    before = choose.source_digest.__wrapped__()
    for name in FUSE_PASSES:
        edited = tmp_path / f"{name}.py"
        edited.write_bytes(paths[f"/passes/{name}.py"].read_bytes() + b"# edited\n")
        monkeypatch.setattr(
            choose, "sources", lambda path=edited, key=f"/passes/{name}.py": {*({**paths, key: path}.items())}
        )
        assert choose.source_digest.__wrapped__() != before
