"""What the kernels of `sparse_mla_decode` share on the host: their arguments in groups, and how a launch is cut.

The keys of a token are cut into parts, each of which is attended by programs of its own and joined afterwards. A row
of `n` blocks of keys has min(splits, ceil(n / least)) parts of equal size, so that a short row has fewer. As many as
fill the GPU are taken, of one block or more, and no more than the largest part takes to be as small. A call that is
batch-invariant takes parts of PART_KEYS keys instead, however many tokens there are: a row's parts then follow from its
own length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import ACT_TILE, PAGE_LAYOUTS, SCALE_ROW_ALIGN, SCALES_PER_WORD, align_up, byte_pages, cdiv
from ...reference.attention.sparse_mla_decode import output_dtype
from ..host.gpu import Gpu

PART_KEYS = 256
PART_BYTES = 256 * 2**20
"""Most memory that parts take. More tokens than fit take more launches."""


SCALE_DTYPES = (torch.float32, torch.int32)
"""Of scales that are numbers, and of those packed in words."""


class Source(NamedTuple):
    """One cache, and the slots to read from it."""

    cache: Tensor
    indices: Tensor
    lens: Tensor
    block_size: int

    def tensors(self, cache_format: str) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernel takes them."""
        cache = byte_pages(self.cache, cache_format, self.block_size) if cache_format in PAGE_LAYOUTS else self.cache
        return cache, self.indices, self.lens


class Fusion(NamedTuple):
    """What is done with queries before and with outputs after attention; see the op's arguments of these names."""

    positions: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    q_norm_eps: float | None = None
    inverse_rope: bool = False
    batch_invariant: bool = False
    n_groups: int = 0
    heads_per_group: int = 0
    packed_scales: bool = False

    def rope(self) -> tuple[Any, ...]:
        """Positions, their stride, the table, its strides and its rows, as the kernels take them; None without."""
        if self.positions is None or self.cos_sin_cache is None:
            return None, 0, None, (0, 0), 0
        table = self.cos_sin_cache
        return self.positions, self.positions.stride(0), table, table.stride(), table.shape[0]

    def front(self) -> Fusion:
        """Without what is done with outputs."""
        return Fusion(self.positions, self.cos_sin_cache, self.q_norm_eps)

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of `attention_rows.store_rows`."""
        return {
            "ROPE": 0 if self.cos_sin_cache is None else self.cos_sin_cache.shape[1],
            "INVERSE": self.inverse_rope,
            "GROUPS": self.n_groups,
            "GROUP_HEADS": self.heads_per_group,
            "PACKED": self.packed_scales,
        }


PLAIN = Fusion()


class Results(NamedTuple):
    """Where results go: `out` `[T, H, D]` and `lse` `[T, H]`, or contiguous e4m3 `[G, T, K]` and `scale` `[G, n, Ta]`.

    Without a `scale` the dims of `out` and the heads of `lse` are neighbours.
    """

    out: Tensor
    lse: Tensor | None
    scale: Tensor | None = None

    def pair(self) -> tuple[Tensor, Tensor]:
        """As the op returns them."""
        if self.scale is not None:
            return self.out.transpose(0, 1), self.scale[..., : self.out.shape[1]].permute(2, 0, 1)
        assert self.lse is not None
        return self.out, self.lse

    def strides(self) -> tuple[int, int]:
        """Distance of two tokens and of two heads of `out`; nothing where it is quantised."""
        return (self.out.stride(0), self.out.stride(1)) if self.scale is None else (0, 0)

    def lse_stride(self) -> int:
        """Distance of two tokens in `lse`."""
        return 0 if self.lse is None else self.lse.stride(0)

    def padded_tokens(self) -> int:
        """Tokens for which the layout of the scales has room."""
        return 0 if self.scale is None else self.scale.shape[2]


def outputs(q: Tensor) -> Results:
    """Uninitialised `out` and `lse` for the queries `[T, H, D]`."""
    out = torch.empty(q.shape, dtype=output_dtype(q), device=q.device)
    return Results(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))


def quantized_outputs(q: Tensor, n_groups: int, heads_per_group: int, packed_scales: bool) -> Results:
    """Uninitialised values and scales for the queries `[T, H, D]`."""
    size = heads_per_group * q.shape[2]
    count = cdiv(size, ACT_TILE * (SCALES_PER_WORD if packed_scales else 1))
    values = q.new_empty((n_groups, q.shape[0], size), dtype=torch.float8_e4m3fn)
    rows = align_up(q.shape[0], SCALE_ROW_ALIGN)
    return Results(values, None, q.new_empty((n_groups, count, rows), dtype=SCALE_DTYPES[packed_scales]))


def results_for(q: Tensor, fusion: Fusion) -> Results:
    """Uninitialised memory for what `fusion` makes of the queries `[T, H, D]`."""
    if fusion.n_groups == 0:
        return outputs(q)
    return quantized_outputs(q, fusion.n_groups, fusion.heads_per_group, fusion.packed_scales)


class Cut(NamedTuple):
    """Into how many parts rows are cut at most, the fewest blocks of one, a launch's tokens, and the parts' dtype."""

    splits: int
    least: int
    tokens: int
    dtype: torch.dtype = torch.float32


def cut_of(
    tokens: int, heads: int, head_dim: int, head_blocks: int, blocks: int, block_n: int, gpu: Gpu, invariant: bool,
    splits: int = 0, packs: bool = False,
) -> Cut:  # fmt: skip
    """How to launch for rows of at most `blocks` blocks of `block_n` keys; `splits` overrules what fills the GPU.

    Kernels that can store parts as float16 (`packs`) do, except where a row's bits must not depend on being cut.
    """
    least = 1
    if splits == 0 and invariant:
        least = max(1, PART_KEYS // block_n)
        splits = max(1, cdiv(blocks, least))
    splits = splits or part_count(tokens * head_blocks, blocks, gpu)
    if splits == 1:
        return Cut(1, least, tokens)
    dtype = torch.float16 if packs and not invariant else torch.float32
    return Cut(splits, least, min(tokens, max(1, PART_BYTES // (dtype.itemsize * splits * heads * head_dim))), dtype)


def part_count(programs: int, blocks: int, gpu: Gpu) -> int:
    """Into how many parts the `blocks` of a token's keys are cut, so that `programs` fill the GPU at most once.

    The fewest whose largest is as small as it can be: 18 blocks on 8 processors make 6 parts of 3 blocks.
    """
    most = max(1, gpu.sms // programs)
    return max(1, cdiv(blocks, max(1, cdiv(blocks, most))))


def operand_dtype(q: Tensor, cache: Tensor, cache_format: str) -> torch.dtype:
    """dtype of the matrix products' operands: the keys' if the queries fit in it, else float32."""
    keys = cache.dtype if cache_format == "plain" else torch.bfloat16
    return keys if q.dtype in (keys, torch.float8_e4m3fn) else torch.float32
