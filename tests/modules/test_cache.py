"""Tests of caches: allocations of each layer kind and format, and block tables without overwritten rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.cache import CacheFormat, LayerCache, PagedCaches, allocate_layer_cache
from dsv4_compile.config import DeepseekV4Config

FLASH = DeepseekV4Config.flash().with_layers(1, 4, 128)
SMALL = DeepseekV4Config(
    hidden_size=8,
    num_heads=2,
    head_dim=16,
    rope_dim=4,
    o_groups=1,
    sliding_window=32,
    index_head_dim=8,
).with_layers(1, 4, 128)
PAGES = {"window": 3, "entries_4": 4, "states_4": 5, "keys_4": 6, "key_states_4": 7, "entries_128": 8, "states_128": 9}
PAGE_TOKENS = {
    "window": layout.WINDOW_BLOCK,
    "entries_4": layout.KV_BLOCK,
    "states_4": layout.state_block_size(4),
    "keys_4": layout.KV_BLOCK,
    "key_states_4": layout.state_block_size(4),
    "entries_128": layout.KV_BLOCK,
    "states_128": layout.state_block_size(128),
}


def described(cache: LayerCache) -> dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    return {name: (t.dtype, tuple(t.shape), t.stride()) for name, t in cache.tensors().items()}


def allocated(layer_idx: int, *words: str, dtype: torch.dtype = torch.bfloat16) -> LayerCache:
    return allocate_layer_cache(FLASH, layer_idx, CacheFormat.resolve(*words, model_dtype=dtype), PAGES.__getitem__)


class TestLayerCaches:
    """V4-Flash's rows and pages, byte for byte. Pages of bytes are padded to 576."""

    U8, F32 = torch.uint8, torch.float32

    def test_window_layers(self) -> None:
        assert described(allocated(0, "fp8_ds_mla")) == {"window": (self.U8, (3, 64 * 584), (37440, 1))}
        assert described(allocated(0)) == {"window": (torch.bfloat16, (3, 64, 512), (64 * 512, 512, 1))}
        assert described(allocated(0, "fp8")) == {"window": (self.U8, (3, 64, 512), (64 * 512, 512, 1))}

    @pytest.mark.parametrize(
        "words, indexer",
        [
            (("fp8_ds_mla",), (torch.uint8, (6, 64 * 132), (8640, 1))),
            (("fp8_ds_mla", "mxfp4"), (torch.uint8, (6, 64 * 68), (4608, 1))),
            (("fp8_ds_mla", "bfloat16"), (torch.bfloat16, (6, 64, 128), (64 * 128, 128, 1))),
        ],
        ids=["fp8", "mxfp4", "bfloat16"],
    )
    def test_csa_layers(self, words: tuple[str, ...], indexer: object) -> None:
        assert described(allocated(1, *words)) == {
            "window": (self.U8, (3, 64 * 584), (37440, 1)),
            "entries": (self.U8, (4, 64 * 584), (37440, 1)),
            "states": (self.F32, (5, 4, 2048), (8192, 2048, 1)),
            "keys": indexer,
            "key_states": (self.F32, (7, 4, 512), (2048, 512, 1)),
        }

    def test_hca_layers(self) -> None:
        assert described(allocated(2, "fp8_ds_mla")) == {
            "window": (self.U8, (3, 64 * 584), (37440, 1)),
            "entries": (self.U8, (8, 2 * 584), (1728, 1)),
            "states": (self.F32, (9, 8, 1024), (8192, 1024, 1)),
        }

    @pytest.mark.parametrize("word, dtype", [("auto", torch.float32), ("float16", torch.float16)])
    def test_rows_keep_one_dtype_for_keys_and_for_the_indexer(self, word: str, dtype: torch.dtype) -> None:
        cache = allocated(1, word, dtype=torch.float32)
        (source,) = cache.sources
        assert cache.window.dtype is source.entries.dtype is source.keys.dtype is dtype

    def test_nbytes_counts_the_padding_of_pages(self) -> None:
        assert allocated(0, "fp8_ds_mla").nbytes == 3 * 37440
        assert allocated(2, "fp8_ds_mla").nbytes == 3 * 37440 + 8 * 1728 + 9 * 8 * 1024 * 4
        # A bfloat16 cache of this layer has rows of 1024 bytes, without padding.
        assert allocated(2).nbytes == 3 * 64 * 1024 + 8 * 2 * 1024 + 9 * 8 * 1024 * 4

    def test_caches_start_at_zero(self) -> None:
        for tensor in allocated(1, "fp8_ds_mla").tensors().values():
            assert not tensor.any()


def paged(requests: int, max_seq_len: int, max_step_tokens: int | None = None) -> PagedCaches:
    return PagedCaches(
        SMALL,
        max_batch_size=requests,
        max_seq_len=max_seq_len,
        max_step_tokens=max_step_tokens,
        cache_format=CacheFormat.resolve("float32"),
    )


def tables(caches: PagedCaches) -> dict[str, Tensor]:
    return caches.block_tables.tensors()


def pages(caches: PagedCaches, group: str) -> int:
    """Return the number of pages of a group, from the tensor that it indexes."""
    swa, csa, hca = caches.layers
    tensors = {"window": swa.window}
    for ratio, layer in ((4, csa), (128, hca)):
        tensors |= {f"{role}_{ratio}": tensor for role, tensor in layer.tensors().items() if role != "window"}
    assert csa.window.shape == hca.window.shape == swa.window.shape
    return tensors[group].shape[0]


REACH = {"window": 32, "states_4": 8, "key_states_4": 8, "states_128": 128}
"""Number of positions that a token reads, itself included: the window, or all that its compressed entry pools."""

sizes = st.integers(1, 900)


@given(max_seq_len=st.integers(1, 2000), step=st.integers(1, 200), start=sizes, requests=st.integers(1, 3))
def test_positions_within_reach_of_one_step_have_distinct_slots(
    max_seq_len: int, step: int, start: int, requests: int
) -> None:
    """A step writes all of its tokens before it reads the oldest row that its first token needs."""
    caches = paged(requests, max_seq_len, step)
    first = min(start, caches.max_seq_len - 1)
    end = min(first + caches.max_step_tokens, caches.max_seq_len)
    for group, table in tables(caches).items():
        size = PAGE_TOKENS[group]
        positions = torch.arange(max(first - REACH.get(group, caches.max_seq_len) + 1, 0), end)
        slots = table[:, positions // size].long() * size + positions % size
        assert slots.unique().numel() == slots.numel(), f"{group}: positions {positions[0]} to {end}"
        assert int(slots.min()) >= 0
        assert int(slots.max()) < pages(caches, group) * size


@pytest.mark.parametrize("max_seq_len", [256, 1024])
def test_a_ring_has_no_spare_page(max_seq_len: int) -> None:
    """One page less would not hold the rows that the largest step reaches."""
    for step in range(1, 256):
        caches = paged(1, max_seq_len, step)
        for group, reach in REACH.items():
            rows, size = min(reach - 1 + step, max_seq_len), PAGE_TOKENS[group]
            assert (pages(caches, group) - 1) * size < rows <= pages(caches, group) * size, f"{group}, step {step}"


def test_block_tables_cover_the_longest_sequence_with_distinct_pages_per_request() -> None:
    caches = paged(3, 700, 40)
    assert caches.max_seq_len == 768
    for group, table in tables(caches).items():
        assert table.dtype is torch.int32
        assert table.shape == (3, 768 // PAGE_TOKENS[group])
        assert table.is_contiguous()
        owners = [set(row.tolist()) for row in table]
        assert sum(map(len, owners)) == len(set.union(*owners)) == pages(caches, group), group


def test_worked_ring() -> None:
    """A window of 32 and steps of 98 tokens need 129 rows at once, one more than 2 pages of 64 hold."""
    caches = paged(2, 512, 98)
    assert pages(caches, "window") == 2 * 3
    assert caches.block_tables.window.tolist() == [[0, 1, 2] * 2 + [0, 1], [3, 4, 5] * 2 + [3, 4]]
    assert pages(paged(2, 512, 97), "window") == 2 * 2


def test_models_without_a_layer_kind_have_no_tables_for_it() -> None:
    config = SMALL.with_layers(1, 128)
    caches = PagedCaches(config, max_batch_size=1, max_seq_len=256, cache_format=CacheFormat.resolve("float32"))
    assert set(tables(caches)) == {"window", "entries_128", "states_128"}
    assert [set(layer.tensors()) for layer in caches.layers] == [{"window"}, {"window", "entries", "states"}]


def test_nbytes_is_the_sum_of_the_layers_and_shrinks_with_the_step() -> None:
    full, stepped = paged(2, 2048), paged(2, 2048, 64)
    assert full.nbytes == sum(t.untyped_storage().nbytes() for layer in full.layers for t in layer.tensors().values())
    assert stepped.nbytes < full.nbytes / 2
    assert stepped.layers[1].sources[0].entries.shape == full.layers[1].sources[0].entries.shape


@pytest.mark.parametrize("sizes", [(0, 256, None), (1, 0, None), (1, 256, 0), (1, 256, -1), (-2, 256, None)])
def test_sizes_must_be_positive(sizes: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="E204"):
        paged(*sizes)


@pytest.mark.parametrize(
    "words, layer_idx, message",
    [
        (("fp8_ds_mla", "bfloat16"), 0, "head_dim=16"),
        (("float32", "fp8"), 1, "index_head_dim=8"),
        (("float32", "mxfp4"), 1, "index_head_dim=8"),
    ],
    ids=["fp8_ds_mla", "indexer-fp8", "indexer-mxfp4"],
)
def test_quantised_formats_raise_for_dims_they_cannot_hold(
    words: tuple[str, str], layer_idx: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"E205(.|\n)*{message}"):
        allocate_layer_cache(SMALL, layer_idx, CacheFormat.resolve(*words), PAGES.__getitem__)


def test_a_layer_ignores_dims_of_formats_it_does_not_use() -> None:
    cache = allocate_layer_cache(SMALL, 2, CacheFormat.resolve("float32", "fp8"), PAGES.__getitem__)
    assert set(cache.tensors()) == {"window", "entries", "states"}


def test_names_of_formats() -> None:
    assert CacheFormat.resolve() == CacheFormat("plain", torch.bfloat16, "plain", torch.bfloat16)
    assert CacheFormat.resolve("auto", model_dtype=torch.float32).kv_dtype is torch.float32
    assert CacheFormat.resolve("fp8_ds_mla") == CacheFormat("fp8_ds_mla", torch.uint8, "indexer_fp8", torch.uint8)
    assert CacheFormat.resolve("fp8", "mxfp4", hadamard=True) == CacheFormat(
        "fp8", torch.uint8, "indexer_mxfp4", torch.uint8, hadamard=True
    )
    assert CacheFormat.resolve("fp8_ds_mla", "float16").indexer_dtype is torch.float16


@pytest.mark.parametrize("words", [("int8",), ("auto", "int8"), ("mxfp4",), ("auto", "fp8_ds_mla")])
def test_unknown_formats_raise(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"E202(.|\n)*{words[-1]}"):
        CacheFormat.resolve(*words)


def test_dims_of_caches_stay_static_in_a_dynamic_graph() -> None:
    """A dynamic dim of a cache is a hazard that `explain` reports; the token dim stays dynamic."""
    caches = PagedCaches(SMALL, max_batch_size=3, max_seq_len=256, cache_format=CacheFormat.resolve())
    sizes: list[list[type]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> torch.fx.GraphModule:
        tensors = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
        sizes.append([type(size) for tensor in tensors if isinstance(tensor, Tensor) for size in tensor.shape])
        return gm

    def step(cache: Tensor, rows: Tensor) -> Tensor:
        return cache.sum() + rows

    for layer in caches.layers:
        for cache in layer.tensors().values():
            torch.compile(step, backend=backend, dynamic=True, fullgraph=True)(cache, torch.ones(5))
            assert sizes.pop() == [int] * cache.dim() + [torch.SymInt]
            torch.compiler.reset()
