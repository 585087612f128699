"""The table of all persistent metadata buffers: name, shape, dtype, pad value and source of the values.

`MetadataBuffers` allocates exactly the buffers of this table, `plan_buffers` predicts their bytes, and tests check
both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from .. import layout
from ..sizes import check_memory, check_size
from ..sources import RATIOS, Group, groups_of


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
INPUTS: tuple[BufferSpec, ...] = (
    BufferSpec("query_start_loc", ("max_num_seqs_plus_1",), _I32, 0, "engine, advance", "first token of each request"),
    BufferSpec("seq_lens", ("max_num_seqs",), _I32, 0, "engine, advance", "tokens of each request, its query included"),
    BufferSpec("slot_mapping", ("max_num_batched_tokens",), _I64, -1, "engine", "raw slots; negative for padding"),
    BufferSpec("input_ids", ("max_num_batched_tokens",), _I64, 0, "engine, advance", "input token of each row"),
    BufferSpec("reserved", ("max_num_seqs",), _I32, "max_model_len", "engine", "tokens a request has pages for"),
    BufferSpec("overflow", ("max_num_seqs",), _I32, 0, "advance", "tokens of a request that ran out of pages"),
)
OF_TOKENS: tuple[BufferSpec, ...] = tuple(
    BufferSpec(name, ("max_num_batched_tokens",), dtype, 0, "refresh", meaning)
    for name, dtype, meaning in (
        ("positions", _I64, "position of each token in its request"),
        ("token_to_req", _I32, "row of each token in the block tables"),
        ("is_valid_token", torch.bool, "whether the row is a token and not padding"),
    )
)
_SLOTS = {
    "window": "slot of a token's keys and values",
    "entries": "slot of the entry that a token completes",
    "states": "slot of a token's compressor state",
    "keys": "slot of the indexer key that a token completes",
    "key_states": "slot of a token's indexer state",
}


def table_of(group: Group) -> BufferSpec:
    """Return the buffer of a group's block table."""
    shape = "max_num_seqs", f"{group.name}_blocks"
    meaning = f"pages of the {group.name} caches of each request"
    return BufferSpec(f"{group.name}_block_table", shape, _I32, layout.PAD_INDEX, "engine", meaning, group.name)


def outputs_of(group: Group) -> tuple[BufferSpec, ...]:
    """Return the buffers of a group that `refresh` fills: slots, lengths and lists of rows."""

    def output(suffix: str, dtype: torch.dtype, pad: int, meaning: str, *width: str) -> BufferSpec:
        shape = "max_num_batched_tokens", *width
        return BufferSpec(f"{group.name}_{suffix}", shape, dtype, pad, "refresh", meaning, group.name)

    outputs = [output("slots", _I64, layout.PAD_SLOT, _SLOTS[group.role])]
    if group.role == "entries":
        meaning = f"entries of ratio {group.ratio} that a token may attend"
        outputs.append(output("context_lens", _I32, layout.PAD_LEN, meaning))
    if group.listed:
        window = group.role == "window"
        rows = "the last tokens, in order of position" if window else f"all entries of ratio {group.ratio}"
        width = "window" if window else f"{group.name}_width"
        outputs.append(output("lens", _I32, layout.PAD_LEN, f"valid columns of {group.name}_indices"))
        outputs.append(output("indices", _I32, layout.PAD_INDEX, f"slots of {rows}", width))
    return tuple(outputs)


def buffers_of(groups: Collection[Group]) -> tuple[BufferSpec, ...]:
    """Return all buffers of a model with these groups of caches."""
    outputs = (spec for group in groups for spec in outputs_of(group))
    return (*INPUTS, *map(table_of, groups), *OF_TOKENS, *outputs)


BUFFERS: tuple[BufferSpec, ...] = buffers_of(groups_of())
"""All declared buffers. A captured step reads and writes no other metadata."""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Shapes and bytes of the buffers of one configuration, before allocation."""

    specs: tuple[BufferSpec, ...]
    sizes: Mapping[str, int]
    groups: tuple[Group, ...]

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
    ratios: Collection[int] = RATIOS,
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
    groups = groups_of(ratios, limits["window_block_size"])
    sizes = {**limits, "max_num_seqs_plus_1": max_num_seqs + 1}
    for group in groups:
        sizes[f"{group.name}_blocks"] = layout.cdiv(max_model_len, group.page_tokens)
        if group.listed and group.role != "window":
            sizes[f"{group.name}_width"] = layout.listed_width(group.ratio, max_model_len)
    specs = tuple(spec for spec in buffers_of(groups) if engine_slots or spec.name != "slot_mapping")
    return BufferPlan(specs, sizes, groups)
