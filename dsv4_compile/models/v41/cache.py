"""Paged caches of a DeepSeek-V4.1 model: a window for each layer, and entries and index keys for each source.

| tensor | of | rows of a page | a request has |
|---|---|---|---|
| window | each layer | 32 tokens | a ring that covers a step |
| entries, keys | each source, which the layers after it share | 64 entries | all of its entries |
| state | sources of ratio 2 | - | a ring of tokens, float32 values and gates |
| history | each engram | - | a ring of compressed token ids, for n-grams |

Draft layers have windows alone, in `drafts`: caches of the same sizes, so that a token has one slot in all windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _compat, layout
from ...errors import check, fail
from ...rope_tables import cos_sin_cache
from ...sizes import check_memory, check_optional_size, check_size, shown
from .config import V41Config
from .draft_config import V41DraftConfig

GRID_OF = {"window": "mxfp8", "entries": "nvfp4", "keys": "mxfp4"}
"""Grid that DeepSeek's own code rounds rows of each cache to."""
MOST_DRAFTS = 6
"""Drafts of a step that the ring of state can take back."""


@dataclass(frozen=True, slots=True)
class V41Format:
    """Storage of window rows, compressed entries and index keys.

    Each is a grid as bytes (`mxfp8`, `nvfp4`, `mxfp4`), `plain` rows of `dtype`, or, for window and entries, V4's
    record `fp8_ds_mla`. With `grids`, plain rows and index queries are rounded to the model's grids (`GRID_OF`), so
    that plain rows hold what bytes decode to; without, nothing is rounded.
    """

    window: str = "mxfp8"
    entries: str = "nvfp4"
    keys: str = "mxfp4"
    dtype: torch.dtype = torch.bfloat16
    grids: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("window", layout.ROW_FORMATS), ("entries", layout.ROW_FORMATS), ("keys", _KEYS)):
            got = getattr(self, name)
            check(got in allowed, "E202", got=f"{name}={got!r}", rule=f"{name} is one of {', '.join(allowed)}")

    @classmethod
    def plain(cls, dtype: torch.dtype = torch.float32, *, grids: bool = False) -> V41Format:
        """Return rows of `dtype`, exact without `grids`."""
        return cls("plain", "plain", "plain", dtype, grids)

    def grid(self, cache: str) -> str:
        """Return the grid that rows of `window`, `entries` or `keys` are rounded to where they are plain, or ""."""
        return GRID_OF[cache] if self.grids and getattr(self, cache) == "plain" else ""

    @property
    def query_grid(self) -> str:
        """Grid that index queries are rounded to."""
        return GRID_OF["keys"] if self.grids else ""


_KEYS = ("mxfp4", "mxfp8", "plain")


class SourceCache(NamedTuple):
    """Caches that a source owns: compressed entries, index keys, and at ratio 2 the state of open pairs."""

    entries: Tensor
    keys: Tensor
    state: Tensor | None


class V41Caches:
    """Caches of a whole model for a fixed number of requests, with block tables that never change.

    Args:
        max_batch_size: number of requests, R.
        max_seq_len: most tokens of a request, prompt and answer together.
        max_step_tokens: most tokens that one step adds to one request (None = `max_seq_len`).
        cache_format: see `V41Format`.
        drafts: draft layers that have windows, too, in the caches `drafts`; None for none.

    Raises E204 for sizes that are no positive integers or too small for drafts, and E210 for caches that the device has
    no memory for.
    """

    def __init__(
        self,
        config: V41Config,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_step_tokens: int | None = None,
        cache_format: V41Format | None = None,
        device: torch.device | str | None = None,
        drafts: V41DraftConfig | None = None,
    ) -> None:
        if cache_format is not None and not isinstance(cache_format, V41Format):
            fail(
                "E201", got=f"cache_format={shown(cache_format)}", rule="a V41Format", fix="V41Format.plain(), or None"
            )
        self.config, self.cache_format = config, cache_format or V41Format()
        self.max_batch_size = check_size("max_batch_size", max_batch_size)
        self.max_seq_len = check_size("max_seq_len", max_seq_len)
        step = check_optional_size("max_step_tokens", max_step_tokens) or self.max_seq_len
        self.max_step_tokens = min(step, self.max_seq_len)
        one = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(*self._allocate(1, "meta")))
        what = f"caches for {self.max_batch_size} sequences of {self.max_seq_len} tokens"
        check_memory(what, one * self.max_batch_size, device)
        self.drafts: V41Caches | None = None
        if drafts is not None:
            self.drafts = self._of_drafts(drafts, device)
        self.windows, self.sources, self.histories = self._allocate(self.max_batch_size, device)
        self.window_table = self._table(self._window_pages, layout.V41_WINDOW_BLOCK, self.max_seq_len, device)
        self.entry_tables = {
            ratio: self._table(pages, layout.V41_ENTRY_BLOCK, self.max_seq_len // ratio, device)
            for ratio, pages in self._entry_pages.items()
        }
        ropes = [config.rope(layer) for layer in range(config.num_layers)]
        self.rope_tables = [cos_sin_cache(rope, self.max_seq_len, device or "cpu") for rope in ropes]
        # With dynamic=True, dims of graph inputs become symbols; those of caches and tables never change.
        for tensor in (*self.tensors(), self.window_table, *self.entry_tables.values(), *self.rope_tables):
            _compat.mark_static(tensor)

    def _of_drafts(self, drafts: V41DraftConfig, device: torch.device | str | None) -> V41Caches:
        """Return the caches of draft layers: rings that hold a window and the rows of a block or a step."""
        check(
            self.max_step_tokens >= drafts.step_tokens,
            "E204",
            got=f"max_step_tokens={self.max_step_tokens} with {drafts.block} drafts",
            why="a step verifies the last token and its drafts",
            fix=f"pass at least {drafts.step_tokens}, or drafts=False",
        )
        return V41Caches(
            drafts.stage_config(self.config),
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_step_tokens=self.max_step_tokens,
            cache_format=self.cache_format,
            device=device,
        )

    @property
    def _window_pages(self) -> int:
        # A step writes max_step_tokens rows and reads the window before them: the slot of a position is the position
        # modulo the ring, so no row is overwritten that the step still reads.
        rows = min(self.config.sliding_window - 1 + self.max_step_tokens, self.max_seq_len)
        return layout.cdiv(rows, layout.V41_WINDOW_BLOCK)

    @property
    def _entry_pages(self) -> dict[int, int]:
        ratios = {self.config.ratio(source) for source in self.config.kv_sources}
        return {
            ratio: max(1, layout.cdiv(self.max_seq_len // ratio, layout.V41_ENTRY_BLOCK)) for ratio in sorted(ratios)
        }

    def _allocate(
        self, requests: int, device: torch.device | str | None
    ) -> tuple[list[Tensor], dict[int, SourceCache], dict[int, Tensor]]:
        config, formats = self.config, self.cache_format

        def rows(fmt: str, pages: int, block_size: int, channels: int) -> Tensor:
            return layout.allocate_cache(
                fmt, requests * pages, block_size, channels, dtype=formats.dtype, device=device
            )

        def window() -> Tensor:
            return rows(formats.window, self._window_pages, layout.V41_WINDOW_BLOCK, config.head_dim)

        def source(layer: int) -> SourceCache:
            ratio = config.ratio(layer)
            pages, size = self._entry_pages[ratio], layout.V41_ENTRY_BLOCK
            ring = max(8, 1 << (MOST_DRAFTS + 1).bit_length())
            state = torch.zeros((requests, ring, 2 * config.head_dim), dtype=torch.float32, device=device)
            return SourceCache(
                rows(formats.entries, pages, size, config.head_dim),
                rows(formats.keys, pages, size, config.index_head_dim),
                state if ratio > 1 else None,
            )

        def history() -> Tensor:
            # As many ids as drafts may take back, and the look-back before them.
            return torch.zeros((requests, 16 + config.engram_order), dtype=torch.int32, device=device)

        windows = [window() for _ in range(config.num_layers)]
        sources = {layer: source(layer) for layer in config.kv_sources}
        return windows, sources, {layer: history() for layer in config.engram_layers}

    def _table(self, pages: int, block_size: int, rows: int, device: torch.device | str | None) -> Tensor:
        """Return int32 `[R, B]`: logical block i of request b is page b * pages + i % pages."""
        blocks = max(pages, layout.cdiv(rows, block_size))
        first = torch.arange(self.max_batch_size, dtype=torch.int32, device="cpu")[:, None] * pages
        return (first + torch.arange(blocks, dtype=torch.int32, device="cpu")[None] % pages).contiguous().to(device)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step writes."""
        own = _tensors(self.windows, self.sources, self.histories)
        return own if self.drafts is None else own + self.drafts.tensors()

    def named(self) -> dict[str, Any]:
        """Return every tensor that a step reads or writes, nested in mappings and sequences by name."""
        written = {"windows": self.windows, "sources": self.sources, "histories": self.histories}
        tables = {"window_table": self.window_table, "entry_tables": self.entry_tables}
        drafts = {} if self.drafts is None else {"drafts": self.drafts.named()}
        return {**written, **tables, "rope_tables": self.rope_tables, **drafts}

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, page padding included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that a token of context adds, rings not counted: 890 in the model's own formats."""
        total = 0.0
        for layer, source in self.sources.items():
            rows = source.entries.shape[0] * layout.V41_ENTRY_BLOCK * self.config.ratio(layer)
            total += sum(x.untyped_storage().nbytes() for x in (source.entries, source.keys)) / rows
        return total


def _tensors(windows: list[Tensor], sources: dict[int, SourceCache], histories: dict[int, Tensor]) -> list[Tensor]:
    owned = [tensor for source in sources.values() for tensor in source if tensor is not None]
    return [*windows, *owned, *histories.values()]
