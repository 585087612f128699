"""Tests of sizes that callers pass: one rule for their type and range, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile import DecodeRunner, DeepseekV4Attention, DeepseekV4Config, DSV4Error, hf, sizes
from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.runtime import padded_buckets
from tests.hf.small import LAYERS

CONFIG = DeepseekV4Config(num_layers=1, compress_ratios=(1,))
NO_SIZES: tuple[Any, ...] = (128.0, 1.5, True, "128", -1, 0, 2**40, float("nan"), torch.tensor(3), np.float32(4), [1])


def converted() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=128)


def caches(**given: Any) -> PagedCaches:
    return PagedCaches(CONFIG, **{"max_batch_size": 1, "max_seq_len": 256, "device": "meta"} | given)


def buffers(**given: Any) -> MetadataBuffers:
    usual: dict[str, Any] = {"max_num_batched_tokens": 4, "max_num_seqs": 4, "max_model_len": 128, "ratios": ()}
    return MetadataBuffers(**usual | given)


def runner(**given: Any) -> DecodeRunner:
    return DecodeRunner(lambda x, *_: x, buffers(), inputs={"x": torch.zeros(4, 8)}, graphs="standin", **given)


TAKE_SIZES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "caches": (caches, ("max_batch_size", "max_seq_len", "max_step_tokens")),
    "buffers": (buffers, ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "window", "window_block_size")),
    "runner": (runner, ("tokens_each", "max_run_steps")),
    "a layer": (lambda **given: DeepseekV4Attention(CONFIG, 0, device="meta", **given), ("max_seq_len",)),
    "buckets": (padded_buckets, ("max_tokens",)),
    "buckets of a runner": (lambda size: runner(buckets=(size,)), ("size",)),
}


@dataclass
class Holder:
    held: Any


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: [1, x], lambda x: {"x": x}, Holder, lambda x: f"<{x}>"])
def test_the_text_of_a_value_reads_no_tensor_of_a_gpu(
    hold: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one waits for the GPU, and invalidates a capture."""

    class Written:
        def __repr__(self) -> str:
            return str(hold(x))

    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda")
    monkeypatch.setattr(type(x), "__repr__", torch.Tensor.__repr__)
    monkeypatch.setattr(torch._tensor_str, "_str", lambda *_, **__: pytest.fail("the tensor is read"))
    assert "FakeTensor torch.float32 [3, 4] on cuda:0" in sizes.shown(Written())
    monkeypatch.undo()
    assert sizes.shown(torch.tensor([1, 2])) == "tensor([1, 2])"


@pytest.mark.parametrize("what", TAKE_SIZES)
def test_other_types_and_ranges_are_refused(what: str) -> None:
    make, names = TAKE_SIZES[what]
    for name in names:
        for value in NO_SIZES:
            with pytest.raises(DSV4Error, match="E204"):
                make(**{name: value})


def test_a_model_is_as_it_was_after_sizes_that_are_refused() -> None:
    model, loaded = tiny_model(**LAYERS), converted()
    kinds = [type(module) for module in model.modules()]
    for value in NO_SIZES:
        for name in ("max_batch_size", "max_seq_len", "max_step_tokens"):
            with pytest.raises(DSV4Error, match=f"E204(.|\n)*{name}"):
                hf.convert(model, **{"max_batch_size": 1, "max_seq_len": 128, name: value})
            with pytest.raises(DSV4Error, match=f"E204(.|\n)*{name}"):
                hf.load("no folder", **{"max_batch_size": 1, "max_seq_len": 128, name: value})
        for name in ("max_batch_size", "max_seq_len"):
            with pytest.raises(DSV4Error, match=f"E204(.|\n)*{name}"):
                hf.new_cache(loaded, **{name: value})
        with pytest.raises(DSV4Error, match=r"E204(.|\n)*slots"):
            hf.RunningBatch(loaded, slots=value, prefill_chunk=16)
        with pytest.raises(DSV4Error, match=r"E204(.|\n)*prefill_chunk"):
            hf.RunningBatch(loaded, slots=1, prefill_chunk=value)
    assert [type(module) for module in model.modules()] == kinds


def test_integers_of_libraries_are_sizes() -> None:
    paged = caches(max_batch_size=np.int64(2), max_seq_len=np.uint16(300), max_step_tokens=np.int8(7))
    assert (paged.max_batch_size, paged.max_seq_len, paged.max_step_tokens) == (2, 512, 7)
    assert {type(value) for value in (paged.max_batch_size, paged.max_seq_len, paged.max_step_tokens)} == {int}
    assert type(buffers(max_num_seqs=np.int32(3)).max_num_seqs) is int


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: caches(max_batch_size=2**20, max_seq_len=2**30, device="cpu"),
        lambda: caches(max_batch_size=sizes.MOST, max_seq_len=sizes.MOST, device="cpu"),
        lambda: buffers(max_num_batched_tokens=2**30, max_model_len=2**30),
        lambda: runner(sampler="greedy", max_run_steps=2**31 - 256),
        lambda: hf.convert(tiny_model(**LAYERS), max_batch_size=2**20, max_seq_len=2**20),
        lambda: hf.new_cache(converted(), max_batch_size=2**30),
    ],
)
def test_what_does_not_fit_is_refused_with_its_bytes(
    allocate: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "free_memory", lambda device: 2**32)
    with pytest.raises(DSV4Error, match=r"E210(.|\n)* GB of .*4\.29 GB free on cpu"):
        allocate()


def test_rope_tables_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "free_memory", lambda device: 2**20)
    with pytest.raises(DSV4Error, match=r"E210(.|\n)*RoPE"):
        DeepseekV4Attention(CONFIG, 0, max_seq_len=2**16)


def test_the_format_of_caches_has_one_name() -> None:
    layer = DeepseekV4Attention(CONFIG, 0, kv_cache_dtype="fp8_ds_mla", device="meta")
    assert caches(kv_cache_dtype="fp8_ds_mla").cache_format == layer.cache_format
    assert caches(kv_cache_dtype=layer.cache_format).cache_format == layer.cache_format
    assert caches(cache_format=layer.cache_format).cache_format == layer.cache_format
    assert caches(dtype=torch.float32).cache_format == CacheFormat.resolve("float32")
    again = DeepseekV4Attention(CONFIG, 0, kv_cache_dtype=layer.cache_format, device="meta")
    assert again.cache_format == layer.cache_format
    wrong: tuple[dict[str, Any], ...] = (
        {"kv_cache_dtype": torch.bfloat16},
        {"kv_cache_dtype": ["fp8"]},
        {"indexer_cache_dtype": None},
        {"kv_cache_dtype": "fp8", "cache_format": "bfloat16"},
        {"kv_cache_dtype": layer.cache_format, "hadamard": True},
    )
    for options in wrong:
        with pytest.raises(DSV4Error, match="E202"):
            caches(**options)
