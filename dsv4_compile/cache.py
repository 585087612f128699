"""Paged caches of a layer, in a choice of formats, and of a whole model, with fixed block tables.

A layer reads its window and its sources. Layers may share a source, which is allocated for its owner; of a ratio r,
`sources.source_groups(r)` has the groups of caches, with a block table each.

| tensor | rows | one page | block table |
|---|---|---|---|
| window | every token's KV, rotated | 64 tokens | window |
| entries | compressed KV entries | 256 tokens = 64 (ratio 4) or 2 (ratio 128) entries | entries_r |
| states | compressor input of recent tokens, float32 | 4 (ratio 4) or 8 (ratio 128) tokens | states_r |
| keys | compressed indexer keys, where an indexer selects | as entries | keys_r |
| key_states | the indexer compressor's state | as states | key_states_r |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter

import torch
from torch import Tensor

from . import _compat, layout
from .config import DeepseekV4Config
from .errors import check, fail
from .metadata.types import BlockTables
from .sizes import check_memory, check_optional_size, check_size
from .sources import TOPK, Group, groups_of, source_groups, window_group

_ROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Storage formats of keys and values, and of indexer keys.

    `kv` is a KV format and `indexer` an indexer format of `layout`; `kv_dtype` and `indexer_dtype` are the dtypes of
    plain rows. `hadamard` rotates indexer queries and keys before they are quantised, as DeepSeek's own code does;
    a cache that was written with it must be read with it.
    """

    kv: str
    kv_dtype: torch.dtype
    indexer: str
    indexer_dtype: torch.dtype
    hadamard: bool = False

    @property
    def kv_word(self) -> str:
        """The `kv_cache_dtype` of this KV cache."""
        return str(self.kv_dtype).removeprefix("torch.") if self.kv == "plain" else self.kv

    @classmethod
    def resolve(
        cls,
        kv_cache_dtype: str | CacheFormat = "auto",
        indexer_cache_dtype: str = "auto",
        *,
        model_dtype: torch.dtype = torch.bfloat16,
        hadamard: bool = False,
    ) -> CacheFormat:
        """Resolve the names that a user passes into formats.

        Args:
            kv_cache_dtype: `fp8_ds_mla` (584 bytes a token), `fp8` (per-tensor scale), `bfloat16`, `float16`,
                `float32`, or `auto` = rows in the model's dtype. A `CacheFormat`, which says all, is returned.
            indexer_cache_dtype: `fp8`, `mxfp4`, `bfloat16`, `float16`, `float32`, or `auto` = fp8 with a quantised
                KV cache, rows in its dtype otherwise.
        """
        if isinstance(kv_cache_dtype, CacheFormat):
            check(
                indexer_cache_dtype == "auto" and not hadamard,
                "E202",
                got=f"a CacheFormat with {indexer_cache_dtype=}, {hadamard=}",
                rule="a CacheFormat has both formats and the rotation",
                fix="pass it alone, or the names of formats",
            )
            return kv_cache_dtype
        names = (kv_cache_dtype, indexer_cache_dtype)
        check(
            all(isinstance(name, str) for name in names),
            "E202",
            got=f"{kv_cache_dtype=}, {indexer_cache_dtype=}",
            rule=f"formats are names: auto, fp8_ds_mla, fp8, mxfp4, {', '.join(_ROW_DTYPES)}",
        )
        kv, kv_dtype = _kv_format(kv_cache_dtype, model_dtype)
        if indexer_cache_dtype == "auto":
            indexer_cache_dtype = "fp8" if kv != "plain" else str(kv_dtype).removeprefix("torch.")
        if indexer_cache_dtype in ("fp8", "mxfp4"):
            return cls(kv, kv_dtype, f"indexer_{indexer_cache_dtype}", torch.uint8, hadamard)
        if indexer_cache_dtype in _ROW_DTYPES:
            return cls(kv, kv_dtype, "plain", _ROW_DTYPES[indexer_cache_dtype], hadamard)
        fail(
            "E202",
            got=f"indexer_cache_dtype={indexer_cache_dtype!r}",
            rule=f"one of auto, fp8, mxfp4, {', '.join(_ROW_DTYPES)}",
        )


def _kv_format(name: str, model_dtype: torch.dtype) -> tuple[str, torch.dtype]:
    if name == "auto":
        return "plain", model_dtype
    if name in ("fp8_ds_mla", "fp8"):
        return name, torch.uint8
    if name in _ROW_DTYPES:
        return "plain", _ROW_DTYPES[name]
    fail("E202", got=f"kv_cache_dtype={name!r}", rule=f"one of auto, fp8_ds_mla, fp8, {', '.join(_ROW_DTYPES)}")


def one_format(kv_cache_dtype: str | CacheFormat, cache_format: str | CacheFormat | None) -> str | CacheFormat:
    """Return the format that a caller named, by either keyword. Raises E202 for two."""
    check(
        cache_format is None or kv_cache_dtype == "auto",
        "E202",
        got=f"{kv_cache_dtype=} and {cache_format=}",
        rule="both keywords mean the format of keys and values",
        fix="pass kv_cache_dtype",
    )
    return kv_cache_dtype if cache_format is None else cache_format


@dataclass(slots=True)
class SourceCache:
    """Caches of a compressed source, None for those that it does not have. Ops mutate them in place.

    Attributes:
        entries, states: of the owner's compressor. keys, key_states: of its indexer's.
    """

    entries: Tensor
    states: Tensor | None = None
    keys: Tensor | None = None
    key_states: Tensor | None = None


TENSORS_OF = attrgetter(*(field.name for field in fields(SourceCache)))
"""Returns the tensors of a `SourceCache`, None for those that it does not have."""


@dataclass(slots=True)
class LayerCache:
    """Caches of one layer: the keys and values of recent tokens, and its compressed sources. Ops mutate them in place.

    Layers that share a source have the same `SourceCache`.
    """

    window: Tensor
    sources: tuple[SourceCache, ...] = ()

    def flat(self) -> list[Tensor | None]:
        """Return all tensors in a fixed order, None for those that do not exist."""
        flat: list[Tensor | None] = [self.window]
        for source in self.sources:  # in a form that Dynamo traces
            flat += [source.entries, source.states, source.keys, source.key_states]
        return flat

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that exist, by name."""
        named: dict[str, Tensor] = {"window": self.window}
        for number, source in enumerate(self.sources):
            prefix = f"sources.{number}." if number else ""
            parts = ((part.name, getattr(source, part.name)) for part in fields(source))
            named |= {f"{prefix}{role}": tensor for role, tensor in parts if tensor is not None}
        return named

    @property
    def nbytes(self) -> int:
        """Bytes of storage, page padding included."""
        return bytes_of([self])


def bytes_of(layers: Iterable[LayerCache]) -> int:
    """Return the bytes of storage of the caches of layers, page padding included; shared ones count once."""
    held = {id(tensor): tensor for layer in layers for tensor in layer.tensors().values()}
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def check_formats(config: DeepseekV4Config, layer_idx: int, cache_format: CacheFormat) -> None:
    """Raise E205 if a byte format cannot hold vectors of the model's dims."""
    check(
        cache_format.kv != "fp8_ds_mla" or (config.head_dim, config.rope_dim) == (layout.HEAD_DIM, layout.ROPE_DIM),
        "E205",
        got=f"head_dim={config.head_dim}, rope_dim={config.rope_dim} with an fp8_ds_mla cache",
        fix=f'use kv_cache_dtype="auto"; fp8_ds_mla rows hold {layout.NOPE_DIM} + {layout.ROPE_DIM} dims',
    )
    check(
        all(source.selection != TOPK for source in config.sources(layer_idx))
        or cache_format.indexer == "plain"
        or config.index_head_dim == layout.INDEXER_HEAD_DIM,
        "E205",
        got=f"index_head_dim={config.index_head_dim} with an {cache_format.indexer} cache",
        fix=f'use indexer_cache_dtype="bfloat16"; quantised indexer rows hold {layout.INDEXER_HEAD_DIM} dims',
    )


def allocate_layer_cache(
    config: DeepseekV4Config,
    layer_idx: int,
    cache_format: CacheFormat,
    num_blocks: Callable[[str], int],
    device: torch.device | str | None = None,
    owned: Mapping[int, LayerCache] | None = None,
) -> LayerCache:
    """Allocate the zeroed caches of one layer.

    Args:
        num_blocks: returns the pages of a block-table group, by its name.
        owned: caches of the layers before, by index, with the sources that this layer does not own.

    Raises E205 if a byte format cannot hold vectors of the model's dims.
    """
    check_formats(config, layer_idx, cache_format)

    def cache(group: Group) -> Tensor:
        blocks = num_blocks(group.name)
        if group.role in ("states", "key_states"):
            dim = config.head_dim if group.role == "states" else config.index_head_dim
            rows = (blocks, group.page_rows, layout.state_width(group.ratio, dim))
            return torch.zeros(rows, dtype=torch.float32, device=device)
        keys = group.role == "keys"
        return layout.allocate_cache(
            cache_format.indexer if keys else cache_format.kv,
            blocks,
            group.page_rows,
            config.index_head_dim if keys else config.head_dim,
            dtype=cache_format.indexer_dtype if keys else cache_format.kv_dtype,
            device=device,
        )

    sources = []
    for number, source in enumerate(config.sources(layer_idx)):
        if source.owner == layer_idx or owned is None:
            sources.append(SourceCache(**{group.role: cache(group) for group in source_groups(source.ratio)}))
        else:
            sources.append(owned[source.owner].sources[number])
    return LayerCache(cache(window_group()), tuple(sources))


class PagedCaches:
    """Caches of a whole model for a fixed number of requests, with block tables that never change.

    Dims of the caches never become symbols of a graph, even with `dynamic=True`: a graph serves caches of one size.

    Each request owns its pages. Window and state pages form a ring, large enough that one step of up to
    `max_step_tokens` new tokens a request never overwrites a token that the step still reads.

    Args:
        config: the model's attention configuration.
        max_batch_size: number of requests, R.
        max_seq_len: most tokens of a request, prompt and answer together.
        max_step_tokens: most tokens one forward may add to one request (None = `max_seq_len`).
        kv_cache_dtype, indexer_cache_dtype, hadamard: storage formats of all layers, see `CacheFormat.resolve`.
        dtype: the model's dtype, that of `auto` rows.
        cache_format: in place of these four.

    Raises E204 for sizes that are no positive integers and E210 for caches that the device has no memory for.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_step_tokens: int | None = None,
        kv_cache_dtype: str | CacheFormat = "auto",
        indexer_cache_dtype: str = "auto",
        hadamard: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        cache_format: str | CacheFormat | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check(
            isinstance(config, DeepseekV4Config),
            "E201",
            got=f"config of type {type(config).__name__}",
            rule="config is a dsv4_compile.DeepseekV4Config",
            fix="pass one, or DeepseekV4Config.from_hf(config) for that of transformers",
        )
        formats = one_format(kv_cache_dtype, cache_format)
        self.config = config
        self.cache_format = CacheFormat.resolve(formats, indexer_cache_dtype, model_dtype=dtype, hadamard=hadamard)
        self.max_batch_size = check_size("max_batch_size", max_batch_size)
        self.max_seq_len = layout.align_up(check_size("max_seq_len", max_seq_len), layout.KV_BLOCK)
        step_tokens = check_optional_size("max_step_tokens", max_step_tokens)
        self.max_step_tokens = min(step_tokens or self.max_seq_len, self.max_seq_len)
        self._groups = groups_of(config.compressed_ratios)
        self._pages = {group.name: self._pages_per_request(group) for group in self._groups}
        one = bytes_of(self._allocate(1, "meta"))
        what = f"caches for {self.max_batch_size} sequences of {self.max_seq_len} tokens"
        check_memory(what, one * self.max_batch_size, device)
        self.layers = self._allocate(self.max_batch_size, device)
        for layer in self.layers:
            for tensor in layer.tensors().values():
                _compat.mark_static(tensor)
        self.block_tables = BlockTables.of({group.name: self._block_table(group, device) for group in self._groups})

    def _allocate(self, requests: int, device: torch.device | str | None) -> list[LayerCache]:
        """Return the zeroed caches of all layers for a number of requests."""

        def pages(group: str) -> int:
            return requests * self._pages[group]

        layers: dict[int, LayerCache] = {}
        for i in range(self.config.num_layers):
            layers[i] = allocate_layer_cache(self.config, i, self.cache_format, pages, device, layers)
        return [*layers.values()]

    def _pages_per_request(self, group: Group) -> int:
        """Return the pages of a request: all of its blocks, or a ring that covers what a step reaches."""
        if group.role in ("entries", "keys"):
            return self.max_seq_len // group.page_tokens
        pooled = layout.overlap_factor(group.ratio) * group.ratio
        reach = self.config.sliding_window if group.role == "window" else pooled
        # A step writes max_step_tokens rows and reads `reach - 1` older ones. At any offset they fit into a ring of
        # that many rows, because the slot of a position is the position modulo the ring.
        return layout.cdiv(min(reach - 1 + self.max_step_tokens, self.max_seq_len), group.page_tokens)

    def _block_table(self, group: Group, device: torch.device | str | None) -> Tensor:
        """Return int32 `[R, B]`: logical block i of request b is page b * pages + i % pages."""
        blocks, pages = layout.cdiv(self.max_seq_len, group.page_tokens), self._pages[group.name]
        first = torch.arange(self.max_batch_size, dtype=torch.int32)[:, None] * pages
        return (first + torch.arange(blocks, dtype=torch.int32)[None] % pages).contiguous().to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return bytes_of(self.layers)
