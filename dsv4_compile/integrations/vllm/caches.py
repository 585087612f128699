"""Owners of a layer's caches in vLLM: what they ask for, what they are bound to, and who describes a step to them.

vLLM finds an owner by its name in the static forward context. It asks for a spec, groups owners with equal blocks,
makes one metadata builder for each group, and binds views of one storage that holds the pages of all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ... import layout
from ._compat import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowMLASpec,
    block_layouts,
    row_fields,
)
from .geometry import CacheKind, row_bytes
from .step import StepBuffers


class CacheOwner(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """One cache of one layer.

    Args:
        kind: the cache.
        prefix: the owner's name in vLLM's static forward context, which it enters.
        buffers: tensors of the step, shared by all owners.

    `pages` is the cache as this package's ops take it, None before vLLM has bound one. `table` is the owner's group in
    `buffers`, None before vLLM has grouped it.
    """

    pages: Tensor | None
    _views: Tensor

    def __init__(self, kind: CacheKind, prefix: str, buffers: StepBuffers, vllm_config: Any) -> None:
        super().__init__()
        self.kind, self.prefix, self._shared = kind, prefix, (buffers,)  # in a tuple: not a child module
        self._views = torch.empty(0)
        self.register_buffer("pages", None, persistent=False)
        self.table: int | None = None
        owners = vllm_config.compilation_config.static_forward_context
        assert prefix not in owners, prefix
        owners[prefix] = self

    @property
    def step_buffers(self) -> StepBuffers:
        """Tensors of the step, shared by all owners."""
        return self._shared[0]

    @property
    def ready(self) -> bool:
        """Whether vLLM has bound a cache and has grouped it."""
        return self.pages is not None and self.table is not None

    def get_attn_backend(self) -> type[Any]:
        """Return the backend with the builder that describes a step to this cache."""
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the spec of the cache, see `spec_of`."""
        return spec_of(self.kind)

    @property
    def kv_cache(self) -> Tensor:
        """The cache as vLLM sees it, `[P, rows, row]`, which it zeroes blocks of; empty before vLLM has bound one.

        vLLM binds by assignment, or by `bind_kv_cache`. E803 if the views are no pages of this kind.
        """
        return self._views

    @kv_cache.setter
    def kv_cache(self, views: Tensor) -> None:
        self._views = views
        # AOTAutograd mutates no views of one storage in two dtypes. DLPack gives each a storage, with the same memory.
        self.pages = from_dlpack(self.kind.pages_of(views.unsqueeze(1))) if views.numel() else None
        self.step_buffers.bindings += 1

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Bind vLLM's views `[P, 1, rows, row]`."""
        self.kv_cache = kv_cache.squeeze(1)


def spec_of(kind: CacheKind) -> Any:
    """Return vLLM's spec of a cache."""
    shared: dict[str, Any] = {
        "block_size": kind.block_tokens,
        "num_kv_heads": 1,
        "head_size": kind.head_size,
        "dtype": kind.dtype,
        "alignment": layout.FP8_DS_MLA.align,
        **row_fields(kind.tokens_per_row, kind.row if kind.row != kind.head_size else None),
    }
    if kind.window is not None:
        return SlidingWindowMLASpec(sliding_window=kind.window, **shared)
    return MLAAttentionSpec(**shared)


class PagedBackend(AttentionBackend):  # type: ignore[misc]
    """Attention backend of all caches of the plug-in: their layers attend by themselves."""

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM prints."""
        return "DSV4_COMPILE"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Raise NotImplementedError: there is no attention outside the model's graph."""
        raise NotImplementedError("attention runs in the layer, inside the model's graph")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Return the class of the builders, one for each group of caches."""
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts with pages of unlike caches side by side in a block."""
        return block_layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return `[P, rows, row]` for versions that ask the backend; later ones have it in the spec."""
        packed = cache_dtype_str == "fp8_ds_mla" and head_size == layout.HEAD_DIM
        return num_blocks, block_size, row_bytes(layout.FP8_DS_MLA) if packed else head_size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return any size: blocks are never divided, since each cache asks for the block that its pages have."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the block of the caches that are kept whole, which vLLM's own layers of a model take too."""
        return layout.KV_BLOCK


class StepBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Copies the block table of one group of caches, and once a step what all groups share, into the step's buffers.

    A captured graph reads these buffers, and all other metadata is derived inside it, so any batch can be replayed.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        owners: list[CacheOwner] = [context[name] for name in layer_names]
        self.step = owners[0].step_buffers
        self.table = self.step.add_table(tuple(layer_names), kv_cache_spec.block_size)
        for owner in owners:
            owner.table = self.table

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepBuffers:
        """Fill the buffers for the step that `common_attn_metadata` describes."""
        common = common_attn_metadata
        self.step.load_table(self.table, common.block_table_tensor)
        if self.table == 0:
            self.step.load(common.query_start_loc, common.slot_mapping)
        return self.step
