"""The registry of attention backends: support, requests by name that never fall back, and the automatic choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from dsv4_compile import explain, layout
from dsv4_compile.attention_backends import NAMES, CudaGraphSupport, Demand, SparseAttention, get_backend, select
from dsv4_compile.attention_backends.registry import cache_word
from dsv4_compile.cache import CacheFormat
from dsv4_compile.errors import CompileError, InputError
from dsv4_compile.selection import decisions

V4 = Demand(kv_cache_dtype="bfloat16")
V32 = Demand(
    model_type="deepseek_v32",
    head_size=layout.V32_HEAD_DIM,
    num_heads=128,
    block_size=64,
    index_topk=2048,
    has_sink=False,
    qk_nope_head_dim=128,
)
SYSTEMS = NAMES[1:]


def demand_of(name: str) -> Demand:
    """Return the demand of the model that the backend supports."""
    return V32 if get_backend(name).model_type == "deepseek_v32" else V4


@pytest.mark.parametrize("name", NAMES)
def test_backend_supports_its_model_on_any_device(name: str) -> None:
    for architecture in ("cpu", "cuda sm_80", "cuda sm_90", "cuda sm_100", "cuda sm_120", "cuda gfx942"):
        demand = replace(demand_of(name), architecture=architecture)
        assert get_backend(name).why_unsupported(demand) == ""
        assert "torch.ops.dsv4" in select(name, demand).reason


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("FLASHMLA_SPARSE_DSV4", {"head_size": 576}, "head size 576: it supports 512"),
        ("FLASHMLA_SPARSE_DSV4", {"dtype": torch.float16}, "float16 queries: it supports bfloat16"),
        ("FLASHMLA_SPARSE_DSV4", {"num_heads": 192}, "192 query heads: it supports at most 128"),
        ("FLASHMLA_SPARSE_DSV4", {"block_size": 64}, "block size 64: it supports 256"),
        ("FLASHMLA_SPARSE_DSV4", {"kv_cache_dtype": "float32"}, "kv_cache_dtype 'float32': it supports auto, fp8"),
        ("FLASHMLA_SPARSE_DSV4", {"model_type": "deepseek_v32"}, "model type deepseek_v32"),
        ("FLASHINFER_MLA_SPARSE_DSV4", {"kv_cache_dtype": "fp8_ds_mla"}, "'fp8_ds_mla': it supports auto, bfloat16"),
        ("FLASHINFER_MLA_SPARSE_DSV4", {"index_topk": None}, "index_topk=None: it attends the entries"),
        (
            "ROCM_FLASHMLA_SPARSE_DSV4",
            {"kv_cache_dtype": "fp8_ds_mla", "architecture": "cuda gfx942"},
            "e4m3fnuz",
        ),
        ("FLASHINFER_MLA_SPARSE", {"block_size": 256}, "block size 256: it supports 32 or 64"),
        ("FLASHINFER_MLA_SPARSE", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8': it supports auto, bfloat16"),
        ("FLASHINFER_MLA_SPARSE", {"qk_nope_head_dim": 192}, "qk_nope_head_dim 192"),
        ("FLASHINFER_MLA_SPARSE", {"index_topk": None}, "index_topk=None: it attends the entries"),
        ("FLASHINFER_MLA_SPARSE", {"has_sink": True}, "an attention sink"),
        ("FLASHINFER_MLA_SPARSE", {"dtype": torch.float32}, "float32 queries: it supports float16 or bfloat16"),
        ("DSV4_PAGED", {"model_type": "deepseek_v32"}, "model type deepseek_v32: it supports deepseek_v4"),
    ],
)
def test_unsupported_demand_prints_limit_and_value_and_a_request_by_name_raises_it(
    name: str, changes: dict[str, object], reason: str
) -> None:
    demand = replace(demand_of(name), **changes)
    why = get_backend(name).why_unsupported(demand)
    assert reason in why
    with pytest.raises(CompileError, match="E302") as raised:
        select(name, demand)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("name", "architecture", "kv_cache_dtype", "reason"),
    [
        ("DSV4_PAGED", "cuda sm_90", "bfloat16", "no kernel library"),
        ("ROCM_FLASHMLA_SPARSE_DSV4", "cuda gfx950", "bfloat16", "no kernel library"),
        ("FLASHMLA_SPARSE_DSV4", "cpu", "fp8_ds_mla", "cpu: flash_mla has kernels for sm_9x and sm_10x"),
        ("FLASHMLA_SPARSE_DSV4", "cuda sm_120", "fp8_ds_mla", "cuda sm_120: flash_mla has kernels"),
        ("FLASHMLA_SPARSE_DSV4", "cuda sm_90", "bfloat16", "a plain cache: flash_mla reads fp8_ds_mla"),
        ("FLASHMLA_SPARSE_DSV4", "cuda sm_90", "fp8_ds_mla", "flash_mla is not installed"),
        ("FLASHINFER_MLA_SPARSE_DSV4", "cuda sm_90", "bfloat16", "cuda sm_90: flashinfer has kernels for sm_10x"),
        ("FLASHINFER_MLA_SPARSE_DSV4", "cuda sm_100", "bfloat16", "flashinfer is not installed"),
        ("FLASHINFER_MLA_SPARSE", "cuda sm_100", "bfloat16", "flashinfer is not installed"),
    ],
)
def test_library_is_used_if_it_is_installed_and_has_kernels_and_unsupported_otherwise(
    name: str, architecture: str, kv_cache_dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = replace(demand_of(name), architecture=architecture, kv_cache_dtype=kv_cache_dtype, engine="library")
    monkeypatch.setattr("dsv4_compile.attention_backends.protocol.is_importable", lambda module: False)
    assert reason in get_backend(name).why_unsupported(demand)
    with pytest.raises(CompileError, match='pass engine="dsv4"'):
        select(name, demand)
    if "not installed" in reason:
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, get_backend(name).library, ModuleType("a kernel library"))
        assert select(name, demand).engine == "library"


def test_automatic_choice_lists_a_reason_for_every_backend_not_chosen() -> None:
    selection = select("auto", replace(V4, kv_cache_dtype="fp8_ds_mla"))
    assert selection.backend.name == "DSV4_PAGED"
    assert [name for name, _ in selection.others] == list(SYSTEMS)
    assert all(reason for _, reason in selection.others)
    assert str(selection).count("\n  not ") == len(SYSTEMS)


def test_automatic_choice_for_v32_is_the_v32_backend() -> None:
    assert select("auto", V32).backend.name == "FLASHINFER_MLA_SPARSE"


def test_automatic_choice_without_a_supported_backend_raises_all_reasons() -> None:
    with pytest.raises(CompileError, match="E302") as raised:
        select("auto", replace(V4, kv_cache_dtype="int4"))
    assert all(name in str(raised.value) for name in NAMES)


def test_suggested_fix_names_a_backend_of_the_model() -> None:
    with pytest.raises(CompileError, match=r"fix   change what the reason of FLASHINFER_MLA_SPARSE names"):
        select("auto", replace(V32, has_sink=True))
    with pytest.raises(CompileError, match=r"fix   model_type is one of deepseek_v32, deepseek_v4"):
        select("auto", replace(V4, model_type="llama"))


def test_choice_is_recorded_as_a_decision() -> None:
    with decisions.collect() as collected:
        select("auto", V4)
        select("FLASHINFER_MLA_SPARSE_DSV4", V4)
    assert [(d.op, d.impl) for d in collected] == [
        ("attention_backend", "DSV4_PAGED"),
        ("attention_backend", "FLASHINFER_MLA_SPARSE_DSV4"),
    ]
    assert "not FLASHMLA_SPARSE_DSV4" in collected[0].reason
    assert "asked for" in collected[1].reason


@pytest.mark.parametrize("name", ["flashmla", ""])
def test_unknown_name_raises_and_lists_the_known_names(name: str) -> None:
    with pytest.raises(CompileError, match=r"E302[\s\S]*FLASHMLA_SPARSE_DSV4"):
        select(name, V4)


def test_unknown_engine_raises() -> None:
    with pytest.raises(CompileError, match="E302"):
        select("auto", replace(V4, engine="cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_backend_declares_the_facts_engines_read(name: str) -> None:
    backend = get_backend(name)
    assert backend.get_name() == name
    assert backend.is_mla() and backend.is_sparse()
    assert issubclass(backend.get_impl_cls(), SparseAttention)
    assert callable(backend.get_builder_cls())
    assert backend.cudagraph_support >= CudaGraphSupport.UNIFORM_BATCH
    for word in backend.cache_formats:
        assert backend.cache_format(word) in layout.KV_FORMATS
    with pytest.raises(InputError, match="E202"):
        backend.cache_format("int4")


def test_cache_shapes_match_the_engines_allocations() -> None:
    shapes = {name: get_backend(name).get_kv_cache_shape(5, 64, 1, demand_of(name).head_size) for name in NAMES}
    assert shapes == {
        "DSV4_PAGED": (5, 64, 512),
        "FLASHMLA_SPARSE_DSV4": (5, 64, 584),
        "FLASHINFER_MLA_SPARSE_DSV4": (5, 64, 512),
        "ROCM_FLASHMLA_SPARSE_DSV4": (5, 64, 584),
        "FLASHINFER_MLA_SPARSE": (5, 64, 576),
    }
    assert get_backend("FLASHMLA_SPARSE_DSV4").get_kv_cache_shape(5, 2, 1, 512, "bfloat16") == (5, 2, 512)
    with pytest.raises(InputError, match="E205"):
        get_backend("FLASHMLA_SPARSE_DSV4").get_kv_cache_shape(5, 64, 2, 512)


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_the_head_counts_of_library_kernels(heads: int, padded: int) -> None:
    for name in ("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4"):
        assert get_backend(name).get_padded_num_q_heads(heads) == padded
    assert get_backend("ROCM_FLASHMLA_SPARSE_DSV4").get_padded_num_q_heads(heads) == heads
    with pytest.raises(InputError, match="E205"):
        get_backend("FLASHMLA_SPARSE_DSV4").get_padded_num_q_heads(129)


def test_compute_capability_is_read_from_the_architecture() -> None:
    assert [replace(V4, architecture=a).capability for a in ("cpu", "cuda sm_90", "cuda sm_121", "cuda gfx942")] == [
        None,
        (9, 0),
        (12, 1),
        None,
    ]


class Model(torch.nn.Module):
    """Two layers with a `selection` each, like attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
        for layer in self.layers:
            layer.selection = select("auto", V4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_explain_lists_the_choice_of_a_model_built_before_the_call() -> None:
    report = explain(Model(), torch.ones(3), backend="eager")
    (row,) = report.decisions
    assert (row.op, row.impl, row.count) == ("attention_backend", "DSV4_PAGED", 2)
    assert all(f"not {name}" in row.reason for name in SYSTEMS)
    assert "attention_backend" in str(report)
    assert explain(torch.sin, torch.ones(3), backend="eager").decisions == []


@pytest.mark.parametrize(
    ("name", "word", "format_word"),
    [
        ("auto", "auto", "auto"),
        ("DSV4_PAGED", "auto", "auto"),
        ("DSV4_PAGED", "float32", "float32"),
        ("FLASHMLA_SPARSE_DSV4", "auto", "fp8_ds_mla"),
        ("FLASHMLA_SPARSE_DSV4", "fp8", "fp8_ds_mla"),
        ("FLASHINFER_MLA_SPARSE_DSV4", "auto", "bfloat16"),
        ("FLASHINFER_MLA_SPARSE_DSV4", "fp8_e4m3", "fp8"),
    ],
)
def test_engine_cache_word_maps_to_a_cache_format_word(name: str, word: str, format_word: str) -> None:
    assert cache_word(name, word) == format_word
    assert CacheFormat.resolve(format_word)
