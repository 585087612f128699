"""The table of persistent buffers: name, shape, dtype, pad value and who refills it. One row for each, and no other.

`dsv4_compile.metadata.MetadataBuffers` allocates exactly these rows, `plan` predicts their bytes, and the tests read
the same table: a buffer that is not declared here does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from .. import layout
from ..errors import check

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
"""Tokens that one column of a group's block table covers; a name stands for that size."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One declared buffer.

    shape: names of sizes, see `sizes`. pad: what an unused element holds; a name stands for that size.
    group: the group of caches it belongs to, "" for all. filled_by: `engine` writes it before a step (or `load` does
    for it), `refresh` rewrites every row each step, `advance` moves it from one step to the next on the device.
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
    BufferSpec("slot_mapping", ("max_num_batched_tokens",), _I64, -1, "engine", "raw slots; negative marks padding"),
    BufferSpec("input_ids", ("max_num_batched_tokens",), _I64, 0, "engine, advance", "the token fed at each row"),
    BufferSpec("reserved", ("max_num_seqs",), _I32, "max_model_len", "engine", "tokens a request has pages for"),
    BufferSpec("overflow", ("max_num_seqs",), _I32, 0, "advance", "tokens a request kept where it ran out of pages"),
)
OUTPUTS: tuple[BufferSpec, ...] = (
    *(
        BufferSpec(name, ("max_num_batched_tokens",), dtype, 0, "refresh", meaning)
        for name, dtype, meaning in (
            ("positions", _I64, "position of each token in its request"),
            ("token_to_req", _I32, "row of the block tables"),
            ("is_valid_token", torch.bool, "whether the row is a token at all"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens",), _I64, layout.PAD_SLOT, "refresh", meaning, group)
        for name, meaning, group in (
            ("window_slots", "where a token's keys and values go", "window"),
            ("c4_slots", "where the entry that a token completes goes", "c4"),
            ("c4_state_slots", "where a token's compressor state goes", "c4_state"),
            ("indexer_slots", "where the indexer key that a token completes goes", "indexer"),
            ("indexer_state_slots", "where a token's indexer state goes", "indexer_state"),
            ("c128_slots", "where the entry that a token completes goes", "c128"),
            ("c128_state_slots", "where a token's compressor state goes", "c128_state"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens",), _I32, layout.PAD_LEN, "refresh", meaning, group)
        for name, meaning, group in (
            ("window_lens", "columns of window_indices that count", "window"),
            ("c4_context_lens", "entries of ratio 4 that a token sees", "c4"),
            ("c128_context_lens", "entries of ratio 128 that a token sees", "c128"),
            ("c128_lens", "columns of c128_indices that count", "c128"),
        )
    ),
    *(
        BufferSpec(name, ("max_num_batched_tokens", width), _I32, layout.PAD_INDEX, "refresh", meaning, group)
        for name, width, meaning, group in (
            ("window_indices", "window", "slots of the last tokens, in order of position", "window"),
            ("c128_indices", "c128a_width", "slots of all entries of ratio 128 that a token sees", "c128"),
        )
    ),
)
BUFFERS: tuple[BufferSpec, ...] = (*INPUTS, *TABLES, *OUTPUTS)
"""All declared buffers. Nothing of a captured step is read from, or written to, any other metadata."""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The buffers of one configuration, with their shapes, before a byte of them is allocated."""

    specs: tuple[BufferSpec, ...]
    sizes: Mapping[str, int]

    def shape(self, spec: BufferSpec) -> tuple[int, ...]:
        """Shape of a buffer in this configuration."""
        return tuple(self.sizes[name] for name in spec.shape)

    def pad(self, spec: BufferSpec) -> int:
        """What an unused element of a buffer holds in this configuration."""
        return self.sizes[spec.pad] if isinstance(spec.pad, str) else spec.pad

    def nbytes_of(self, spec: BufferSpec) -> int:
        """Bytes of one buffer."""
        return torch.Size(self.shape(spec)).numel() * spec.dtype.itemsize

    def allocate(
        self, names: Collection[str] | None = None, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """The buffers of these names (None = all), filled with their pad values."""
        return {
            spec.name: torch.full(self.shape(spec), self.pad(spec), dtype=spec.dtype, device=device)
            for spec in self.specs
            if names is None or spec.name in names
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
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
    """Shapes and bytes of the buffers that `MetadataBuffers` with these arguments allocates.

    Args:
        max_num_batched_tokens: most tokens of a step, padding included.
        max_num_seqs: most requests of a step.
        max_model_len: longest sequence, prompt and answer together.
        window: tokens a token attends directly.
        ratios: compress ratios of the model's layers; buffers of other ratios do not exist.
        window_block_size: tokens of a page of the window's cache.
        engine_slots: whether the engine says by slots of its own which tokens are padding.
    """
    given = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "window": window,
        "window_block_size": window_block_size,
    }
    low = {name: value for name, value in given.items() if value < 1}
    check(not low, "E204", got=f"metadata buffers with {low}", fix="pass positive numbers")
    strange = sorted(set(ratios) - {0, 1, layout.CSA_RATIO, layout.HCA_RATIO})
    check(not strange, "E205", got=f"ratios {strange}", fix="pass the compress ratios of the layers: 0, 1, 4, 128")
    sizes = {**given, "max_num_seqs_plus_1": max_num_seqs + 1, "c128a_width": layout.c128a_width(max_model_len)}
    groups = groups_of(ratios)
    for group in groups:
        tokens = PAGE_TOKENS[group]
        page = sizes[tokens] if isinstance(tokens, str) else tokens
        sizes[f"{group}_blocks"] = layout.cdiv(max_model_len, page)
    specs = [spec for spec in BUFFERS if spec.group in ("", *groups)]
    return BufferPlan(tuple(s for s in specs if engine_slots or s.name != "slot_mapping"), sizes)


def groups_of(ratios: Collection[int]) -> tuple[str, ...]:
    """Groups of caches, each with a block table, that layers of these compress ratios have."""
    absent = {"c4"} if layout.CSA_RATIO not in ratios else set()
    absent |= {"c128"} if layout.HCA_RATIO not in ratios else set()
    owner = {"c4": "c4", "c4_state": "c4", "indexer": "c4", "indexer_state": "c4", "c128": "c128", "c128_state": "c128"}
    return tuple(group for group in PAGE_TOKENS if owner.get(group) not in absent)
