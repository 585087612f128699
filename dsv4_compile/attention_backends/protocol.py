"""What an attention backend is: its name, what it supports and why not, its caches, its metadata, its attention.

A backend is one engine's way to describe a batch and to attend it. `AttentionBackend` holds the facts, as class
methods; `SparseAttention` is the module that attends; metadata is built outside of compiled code by a builder with
persistent buffers. Every backend runs on torch.ops.dsv4 on any device; some can call the kernel library they were made
for instead, where it is installed and the device is one it has kernels for.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import layout
from ..errors import check, fail
from .facts import ENGINES, CudaGraphSupport, Demand, LayerShape, Support
from .padding import padded_heads
from .workspace import Workspace


class SparseAttention(nn.Module):
    """One layer's attention over its caches, in one backend. Subclasses define `forward` by tensors.

    Args:
        layer: the layer's fixed facts.
        engine: one of `ENGINES`; ask the registry first whether the library can serve.
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
        """The scale that queries are quantised by, float32 `[1]`; None where they stay as they are."""
        return None

    def cache_scale(self) -> Tensor | None:
        """The scale of a per-tensor fp8 cache, float32 `[1]`, for whoever writes into it; None for other caches."""
        return None

    def set_scales(self, q_scale: float, kv_scale: float) -> None:
        """Per-tensor scales; E201 where the backend has none, unless both are 1."""
        check(
            q_scale == kv_scale == 1.0,
            "E201",
            got=f"{q_scale=}, {kv_scale=} for {self.backend.name}",
            rule="its caches have scales of their own",
        )

    def reserve_workspace(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Have the memory that the largest call borrows, before caches take the rest and before a capture."""


class AttentionBackend(ABC):
    """Facts of a backend. Nothing here is instantiated, imports a kernel library or touches a device."""

    name: ClassVar[str]
    model_type: ClassVar[str] = "deepseek_v4"
    """The model it attends for, as a config.json names it."""
    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_BATCH
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    cache_formats: ClassVar[Mapping[str, str]]
    """Words for a cache dtype that the backend understands -> format of `layout.KV_FORMATS`."""
    kernel_block_sizes: ClassVar[tuple[int, ...]] = (layout.KV_BLOCK,)
    head_sizes: ClassVar[tuple[int, ...]] = (layout.HEAD_DIM,)
    """Head sizes of the real models. Empty: any."""
    max_heads: ClassVar[int] = 128
    """Query heads on one device at most; 0 = any number."""
    needs_index_topk: ClassVar[bool] = True
    """Whether it is made for models whose indexer selects a fixed number of entries."""
    library: ClassVar[str] = ""
    """Import name of the kernel library; "" if there is none to call."""
    library_majors: ClassVar[tuple[int, ...]] = ()
    """Major compute capabilities the library has kernels for."""
    library_formats: ClassVar[tuple[str, ...]] = ()
    """Cache formats the library reads."""
    library_heads: ClassVar[tuple[int, ...]] = ()
    """Ascending head counts the library has kernels for. Empty: any."""

    @classmethod
    def get_name(cls) -> str:
        """The name engines select the backend by."""
        return cls.name

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int]:
        """Tokens that a block table entry of the main cache may cover."""
        return list(cls.kernel_block_sizes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """D of queries and cached vectors."""
        return list(cls.head_sizes)

    @classmethod
    def is_mla(cls) -> bool:
        """All heads share one latent key, which is the value too."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Tokens attend selected slots, not everything before them."""
        return True

    @classmethod
    @abstractmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        """The module that attends."""

    @classmethod
    @abstractmethod
    def get_builder_cls(cls) -> Callable[..., Any]:
        """What makes the main cache's metadata: a class of builders, or a function."""

    @classmethod
    def get_swa_builder_cls(cls) -> Callable[..., Any] | None:
        """What makes the window's metadata; None where `get_builder_cls` makes all of it."""
        return None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Query heads of the library's kernel that takes `num_heads`; E205 if none does."""
        return padded_heads(num_heads, cls.library_heads) if cls.library_heads else num_heads

    @classmethod
    def cache_format(cls, kv_cache_dtype: str) -> str:
        """Format of `layout` that the user's word stands for here; E202 for a word the backend does not know."""
        if kv_cache_dtype not in cls.cache_formats:
            words = ", ".join(cls.cache_formats)
            fail("E202", got=f"{cls.name}: kv_cache_dtype={kv_cache_dtype!r}", rule=f"{cls.name} knows {words}")
        return cls.cache_formats[kv_cache_dtype]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape `[P, S, width]` an engine allocates: bytes of a token for `fp8_ds_mla`, else D elements.

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
        """Whether the kernel library has kernels for a CUDA device."""
        return capability[0] in cls.library_majors

    @classmethod
    def supports(cls, demand: Demand) -> Support:
        """Whether the backend serves `demand`, with the reason either way."""
        for refusal in (cls._refuse_model(demand), cls._refuse_cache(demand), cls._refuse_device(demand)):
            if refusal:
                return Support(False, refusal)
        if demand.engine == "library":
            return Support(True, f"{cls.library} is installed and has kernels for {demand.architecture}")
        return Support(True, f"attends {cls.model_type} with {demand.kv_cache_dtype} caches on torch.ops.dsv4")

    @classmethod
    def _refuse_model(cls, demand: Demand) -> str:
        if demand.model_type != cls.model_type:
            return f"model type {demand.model_type}: it is made for {cls.model_type}"
        if cls.head_sizes and demand.head_size not in cls.head_sizes:
            return f"head size {demand.head_size}: it attends {' or '.join(map(str, cls.head_sizes))}"
        if demand.dtype not in cls.supported_dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in cls.supported_dtypes)
            return f"{str(demand.dtype).removeprefix('torch.')} queries: it takes {names}"
        if cls.max_heads and demand.num_heads > cls.max_heads:
            return f"{demand.num_heads} query heads: it takes at most {cls.max_heads}"
        if cls.needs_index_topk and not demand.index_topk:
            return "a model without index_topk: it attends what an indexer selects"
        return ""

    @classmethod
    def _refuse_cache(cls, demand: Demand) -> str:
        if demand.kv_cache_dtype not in cls.cache_formats:
            return f"kv_cache_dtype {demand.kv_cache_dtype!r}: it knows {', '.join(cls.cache_formats)}"
        if cls.kernel_block_sizes and demand.block_size not in cls.kernel_block_sizes:
            return f"block size {demand.block_size}: it takes {' or '.join(map(str, cls.kernel_block_sizes))}"
        return ""

    @classmethod
    def _refuse_device(cls, demand: Demand) -> str:
        """Only the library depends on the device."""
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


def is_importable(module: str) -> bool:
    """Whether `import module` would find something; nothing is imported."""
    return module in sys.modules or importlib.util.find_spec(module) is not None
