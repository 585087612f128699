"""The protocol of attention backends.

A backend is one engine's way to describe a batch and to compute attention over it. `AttentionBackend` holds its facts
as class methods: name, supported models, caches and devices, and its classes. `SparseAttention` is the module that
computes attention. Metadata is built outside compiled code by a builder with persistent buffers. Every backend runs on
`torch.ops.dsv4` on any device; some can call the kernel library they were made for instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import layout
from ..errors import check, fail
from .library import is_importable, padded_heads
from .types import ENGINES, CudaGraphSupport, Demand, LayerShape
from .workspace import Workspace


class SparseAttention(nn.Module):
    """Attention of one layer over its caches, in one backend. Subclasses define `forward`.

    Args:
        layer: fixed sizes of the layer.
        engine: one of `ENGINES`; `registry.select` tells whether the library can serve.
    """

    backend: ClassVar[type[AttentionBackend]]

    def __init__(self, layer: LayerShape, engine: str = "dsv4") -> None:
        super().__init__()
        check(engine in ENGINES, "E302", got=f"engine={engine!r}", fix=f"pass one of {', '.join(ENGINES)}")
        self.layer = layer
        self.engine = engine
        self.workspace: Workspace | None = None
        self.cache_format = self.backend.cache_format(layer.kv_cache_dtype)

    def query_scale(self) -> Tensor | None:
        """Return the scale of quantised queries, float32 `[1]`; None for backends that take queries unquantised."""
        return None

    def cache_scale(self) -> Tensor | None:
        """Return the scale of a per-tensor fp8 cache, float32 `[1]`; None for other caches. Cache writers need it."""
        return None

    def set_scales(self, q_scale: float, kv_scale: float) -> None:
        """Set per-tensor scales. A backend without them raises E201 unless both are 1."""
        check(
            q_scale == kv_scale == 1.0,
            "E201",
            got=f"{q_scale=}, {kv_scale=} for {self.backend.name}",
            rule="its cache formats store their own scales",
        )

    def reserve_workspace(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Reserve the memory of the largest call. Call it before caches are allocated and before graph capture."""


class AttentionBackend(ABC):
    """Facts of a backend, as class attributes and class methods. None imports a kernel library or touches a device."""

    name: ClassVar[str]
    model_type: ClassVar[str] = "deepseek_v4"
    """The supported model, as a config.json names it."""
    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_BATCH
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    cache_formats: ClassVar[Mapping[str, str]]
    """Supported words for a cache dtype -> format of `layout.KV_FORMATS`."""
    kernel_block_sizes: ClassVar[tuple[int, ...]] = (layout.KV_BLOCK,)
    head_sizes: ClassVar[tuple[int, ...]] = (layout.HEAD_DIM,)
    """Supported head sizes. Empty: any."""
    max_heads: ClassVar[int] = 128
    """Upper bound of query heads on one device; 0 = none."""
    needs_index_topk: ClassVar[bool] = True
    """Whether the model must have an indexer that selects a fixed number of entries."""
    library: ClassVar[str] = ""
    """Import name of the kernel library; "" for none."""
    library_majors: ClassVar[tuple[int, ...]] = ()
    """Major compute capabilities the library has kernels for."""
    library_formats: ClassVar[tuple[str, ...]] = ()
    """Cache formats the library reads."""
    library_heads: ClassVar[tuple[int, ...]] = ()
    """Head counts the library has kernels for, ascending. Empty: any."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name that engines select the backend by."""
        return cls.name

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int]:
        """Return the numbers of tokens that a block table entry of the extra cache may cover."""
        return list(cls.kernel_block_sizes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported D of queries and cached vectors; empty for any."""
        return list(cls.head_sizes)

    @classmethod
    def is_mla(cls) -> bool:
        """Return True: all heads share one latent vector, which is both key and value."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Return True: tokens attend selected slots, not all earlier tokens."""
        return True

    @classmethod
    @abstractmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        """Return the module class that computes attention."""

    @classmethod
    @abstractmethod
    def get_builder_cls(cls) -> Callable[..., Any]:
        """Return the builder of the extra cache's metadata: a class, or a function."""

    @classmethod
    def get_swa_builder_cls(cls) -> Callable[..., Any] | None:
        """Return the builder of the window's metadata; None if `get_builder_cls` builds all of it."""
        return None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Return the query heads of the library kernel that takes `num_heads`; E205 if none does."""
        return padded_heads(num_heads, cls.library_heads) if cls.library_heads else num_heads

    @classmethod
    def cache_format(cls, kv_cache_dtype: str) -> str:
        """Return the format of `layout` for the user's word; E202 for an unsupported word."""
        if kv_cache_dtype not in cls.cache_formats:
            words = ", ".join(cls.cache_formats)
            fail("E202", got=f"{cls.name}: kv_cache_dtype={kv_cache_dtype!r}", rule=f"{cls.name} supports {words}")
        return cls.cache_formats[kv_cache_dtype]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape `[P, S, width]` that an engine allocates; width is D, or bytes of a token for `fp8_ds_mla`.

        `block_size` counts what is stored: tokens, or compressed entries. `num_kv_heads` is 1.
        """
        check(num_kv_heads == 1, "E205", got=f"num_kv_heads={num_kv_heads}")
        fmt = cls.cache_format(cache_dtype_str)
        if fmt in layout.PAGE_LAYOUTS:
            page = layout.PAGE_LAYOUTS[fmt]
            return (num_blocks, block_size, page.data + page.scale)
        return (num_blocks, block_size, head_size)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """Return whether the kernel library has kernels for a CUDA device."""
        return capability[0] in cls.library_majors

    @classmethod
    def why_unsupported(cls, demand: Demand) -> str:
        """Return why the backend cannot serve `demand`, with the limit and the value; "" if it can."""
        return cls._unsupported_model(demand) or cls._unsupported_cache(demand) or cls._unsupported_device(demand)

    @classmethod
    def describe_support(cls, demand: Demand) -> str:
        """Return a clause on how the backend serves `demand`, for decisions."""
        if demand.engine == "library":
            return f"{cls.library} is installed and has kernels for {demand.architecture}"
        return f"supports {cls.model_type} with {demand.kv_cache_dtype} caches on torch.ops.dsv4"

    @classmethod
    def _unsupported_model(cls, demand: Demand) -> str:
        if demand.model_type != cls.model_type:
            return f"model type {demand.model_type}: it supports {cls.model_type}"
        if cls.head_sizes and demand.head_size not in cls.head_sizes:
            return f"head size {demand.head_size}: it supports {' or '.join(map(str, cls.head_sizes))}"
        if demand.dtype not in cls.supported_dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in cls.supported_dtypes)
            return f"{str(demand.dtype).removeprefix('torch.')} queries: it supports {names}"
        if cls.max_heads and demand.num_heads > cls.max_heads:
            return f"{demand.num_heads} query heads: it supports at most {cls.max_heads}"
        if cls.needs_index_topk and not demand.index_topk:
            return f"index_topk={demand.index_topk}: it attends the entries that an indexer selects"
        return ""

    @classmethod
    def _unsupported_cache(cls, demand: Demand) -> str:
        if demand.kv_cache_dtype not in cls.cache_formats:
            return f"kv_cache_dtype {demand.kv_cache_dtype!r}: it supports {', '.join(cls.cache_formats)}"
        if cls.kernel_block_sizes and demand.block_size not in cls.kernel_block_sizes:
            return f"block size {demand.block_size}: it supports {' or '.join(map(str, cls.kernel_block_sizes))}"
        return ""

    @classmethod
    def _unsupported_device(cls, demand: Demand) -> str:
        """Check the library alone: `torch.ops.dsv4` runs on any device."""
        if demand.engine != "library":
            return ""
        if not cls.library:
            return "it calls no kernel library"
        if demand.capability is None or not cls.supports_compute_capability(demand.capability):
            majors = " and ".join(f"sm_{major}x" for major in cls.library_majors)
            return f"{demand.architecture}: {cls.library} has kernels for {majors}"
        fmt = cls.cache_format(demand.kv_cache_dtype)
        if fmt not in cls.library_formats:
            return f"a {fmt} cache: {cls.library} reads {' or '.join(cls.library_formats)}"
        if not is_importable(cls.library):
            return f"{cls.library} is not installed"
        return ""
