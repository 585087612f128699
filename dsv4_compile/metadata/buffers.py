"""The table of all persistent metadata buffers: name, shape, dtype, pad value and source of the values.

`MetadataBuffers` allocates exactly the buffers of this table, `plan_buffers` predicts their bytes, and tests check
both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from .. import layout
from ..errors import check
from ..sizes import check_memory, check_size

WINDOW_PAGE = "window_block_size"
PAGE_TOKENS: Mapping[str, int | str] = {
    "window": WINDOW_PAGE,
    "c4": layout.KV_BLOCK,
    "c4_state": layout.state_block_size(layout.CSA_RATIO),
    "indexer": layout.KV_BLOCK,
    "indexer_state": layout.state_block_size(layout.CSA_RATIO),
    "c128": layout.KV_BLOCK,
    "c128_state": layout.state_block_size(layout.HCA_RATIO),
}
"""Tokens that one column of a group's block table covers, as a number or the name of a size."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One declared buffer.

    shape: names of sizes in `BufferPlan.sizes`. pad: value of unused elements, or the name of a size.
    group: the group of caches it belongs to, "" for all. filled_by: `engine` writes it before a step, or calls `load`;
    `refresh` rewrites every row in each step; `advance` updates it on the device between steps.
    """

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    pad: int | str
    filled_by: str
    meaning: str
    group: str = ""


_I32, _I64 = torch.int32, torch.int64
TABLES: tuple[BufferSpec, ...] = tuple(
    BufferSpec(
        f"{group}_block_table",
        ("max_num_seqs", f"{group}_blocks"),
        _I32,
        layout.PAD_INDEX,
        "engine",
        f"pages of the {group} cache of each request",
        group,
    )
    for group in PAGE_TOKENS
)
INPUTS: tuple[BufferSpec, ...] = (
    BufferSpec("query_start_loc", ("max_num_seqs_plus_1",), _I32, 0, "engine, advance", "first token of each request"),
    BufferSpec("seq_lens", ("max_num_seqs",), _I32, 0, "engine, advance", "tokens of each request, its query included"),
    BufferSpec("slot_mapping", ("max_num_batched_tokens",), _I64, -1, "engine", "raw slots; negative for padding"),
    BufferSpec("input_ids", ("max_num_batched_tokens",), _I64, 0, "engine, advance", "input token of each row"),
    BufferSpec("reserved", ("max_num_seqs",), _I32, "max_model_len", "engine", "tokens a request has pages for"),
    BufferSpec("overflow", ("max_num_seqs",), _I32, 0, "advance", "tokens of a request that ran out of pages"),
)
OUTPUTS: tuple[BufferSpec, ...] = (
    *(
        BufferSpec(name, ("max_num_batched_tokens",), dtype, 0, "refresh", meaning)
        for name, dtype, meaning in (
            ("positions", _I64, "position of each token in its request"),
            ("token_to_req", _I32, "row of each token in the block tables"),
            ("is_valid_token", torch.bool, "whether the row is a token and not padding"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens",), _I64, layout.PAD_SLOT, "refresh", meaning, group)
        for name, meaning, group in (
            ("window_slots", "slot of a token's keys and values", "window"),
            ("c4_slots", "slot of the entry that a token completes", "c4"),
            ("c4_state_slots", "slot of a token's compressor state", "c4_state"),
            ("indexer_slots", "slot of the indexer key that a token completes", "indexer"),
            ("indexer_state_slots", "slot of a token's indexer state", "indexer_state"),
            ("c128_slots", "slot of the entry that a token completes", "c128"),
            ("c128_state_slots", "slot of a token's compressor state", "c128_state"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens",), _I32, layout.PAD_LEN, "refresh", meaning, group)
        for name, meaning, group in (
            ("window_lens", "valid columns of window_indices", "window"),
            ("c4_context_lens", "entries of ratio 4 that a token may attend", "c4"),
            ("c128_context_lens", "entries of ratio 128 that a token may attend", "c128"),
            ("c128_lens", "valid columns of c128_indices", "c128"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens", width), _I32, layout.PAD_INDEX, "refresh", meaning, group)
        for name, width, meaning, group in (
            ("window_indices", "window", "slots of the last tokens, in order of position", "window"),
            ("c128_indices", "c128a_width", "slots of all entries of ratio 128 that a token may attend", "c128"),
        )
    ),
)
BUFFERS: tuple[BufferSpec, ...] = (*INPUTS, *TABLES, *OUTPUTS)
"""All declared buffers. A captured step reads and writes no other metadata."""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Shapes and bytes of the buffers of one configuration, before allocation."""

    specs: tuple[BufferSpec, ...]
    sizes: Mapping[str, int]

    def shape(self, spec: BufferSpec) -> tuple[int, ...]:
        """Return the shape of a buffer in this configuration."""
        return tuple(self.sizes[name] for name in spec.shape)

    def pad(self, spec: BufferSpec) -> int:
        """Return the value of unused elements of a buffer in this configuration."""
        return self.sizes[spec.pad] if isinstance(spec.pad, str) else spec.pad

    def nbytes_of(self, spec: BufferSpec) -> int:
        """Return the bytes of one buffer."""
        return torch.Size(self.shape(spec)).numel() * spec.dtype.itemsize

    def allocate(
        self, names: Collection[str] | None = None, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Allocate the buffers of these names (None = all), filled with their pad values. E210 without the memory."""
        check_memory("metadata buffers", self.nbytes, device)
        return {
            spec.name: torch.full(self.shape(spec), self.pad(spec), dtype=spec.dtype, device=device)
            for spec in self.specs
            if names is None or spec.name in names
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.nbytes_of(spec) for spec in self.specs)

    def __str__(self) -> str:
        head = f"{'buffer':25}{'shape':>14}  {'dtype':8}{'pad':>6}{'bytes':>14}  filled by"
        rows = [
            f"{spec.name:25}{'x'.join(map(str, self.shape(spec))):>14}  {str(spec.dtype).removeprefix('torch.'):8}"
            f"{self.pad(spec):>6}{self.nbytes_of(spec):>14,}  {spec.filled_by}"
            for spec in self.specs
        ]
        return "\n".join([head, *rows, f"{'all':53}{self.nbytes:>14,}"])


def plan_buffers(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    window: int = layout.SLIDING_WINDOW,
    ratios: Collection[int] = (layout.CSA_RATIO, layout.HCA_RATIO),
    window_block_size: int = layout.WINDOW_BLOCK,
    engine_slots: bool = False,
) -> BufferPlan:
    """Return shapes and bytes of the buffers that `MetadataBuffers` allocates for these arguments.

    Args:
        max_num_batched_tokens: most tokens of a step, padding included.
        max_num_seqs: most requests of a step.
        max_model_len: longest sequence, prompt and output together.
        window: tokens a token attends directly.
        ratios: compress ratios of the model's layers; buffers of other ratios are left out.
        window_block_size: tokens of a page of the window cache.
        engine_slots: whether the engine marks padding tokens by negative slots in its `slot_mapping`.
    """
    limits = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "window": window,
        "window_block_size": window_block_size,
    }
    limits = {name: check_size(name, value) for name, value in limits.items()}
    max_num_seqs, max_model_len = limits["max_num_seqs"], limits["max_model_len"]
    unknown = sorted(set(ratios) - {0, 1, layout.CSA_RATIO, layout.HCA_RATIO})
    check(not unknown, "E205", got=f"ratios {unknown}", fix="pass the compress ratios of the layers: 0, 1, 4, 128")
    sizes = {**limits, "max_num_seqs_plus_1": max_num_seqs + 1, "c128a_width": layout.c128a_width(max_model_len)}
    groups = groups_of(ratios)
    for group in groups:
        tokens = PAGE_TOKENS[group]
        page = sizes[tokens] if isinstance(tokens, str) else tokens
        sizes[f"{group}_blocks"] = layout.cdiv(max_model_len, page)
    specs = [spec for spec in BUFFERS if spec.group in ("", *groups)]
    return BufferPlan(tuple(s for s in specs if engine_slots or s.name != "slot_mapping"), sizes)


def groups_of(ratios: Collection[int]) -> tuple[str, ...]:
    """Return the groups of caches, each with a block table, of layers with these compress ratios."""
    absent = {"c4"} if layout.CSA_RATIO not in ratios else set()
    absent |= {"c128"} if layout.HCA_RATIO not in ratios else set()
    owner = {"c4": "c4", "c4_state": "c4", "indexer": "c4", "indexer_state": "c4", "c128": "c128", "c128_state": "c128"}
    return tuple(group for group in PAGE_TOKENS if owner.get(group) not in absent)
