"""Window caches of draft layers: a ring of rows for each request, addressed by position."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cache import CacheFormat, LayerCache, PagedCaches
from ...config import DeepseekV4Config
from ...layout import WINDOW_BLOCK, align_up
from ...metadata import AttentionMetadata, WindowMetadata
from .draft_settings import DraftSettings


class DraftCaches:
    """Caches of draft layers for `max_batch_size` requests of any length.

    The row of position p is p modulo the ring, which holds a window and the rows of one step: context rows of later
    positions replace those of drafts that were rejected.

    Attributes:
        layers: window cache of each draft layer.
        ring: rows of a request.
        streams: `[max_batch_size + 1, N * D]`, the target's streams at the last row of each request, for MTP; rows of
            tokens that are not kept are written to the last row, which is never read.
        settings: of the draft layers that they are for.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        cache_format: CacheFormat,
        *,
        max_batch_size: int,
        step_tokens: int,
        device: torch.device | str | None = None,
        streams: tuple[int, torch.dtype] | None = None,
        settings: DraftSettings | None = None,
    ) -> None:
        """Allocate caches.

        Args:
            config: attention of the draft layers.
            cache_format: format of their rows.
            max_batch_size: number of requests.
            step_tokens: most tokens that a step verifies for a request.
            device: where they are.
            streams: elements and dtype of a row of `streams`, None for drafts that need none.
            settings: of the draft layers.
        """
        self.window, self.settings = config.sliding_window, settings
        with torch.inference_mode(False):  # later calls write the caches in any mode
            paged = PagedCaches(
                config,
                max_batch_size=max_batch_size,
                max_seq_len=self.window + step_tokens,
                max_step_tokens=step_tokens,
                cache_format=cache_format,
                device=device,
            )
            self.streams: Tensor | None = None
            if streams is not None:
                width, dtype = streams
                self.streams = torch.zeros(max_batch_size + 1, width, dtype=dtype, device=device)
        self.max_batch_size = paged.max_batch_size
        self.layers: list[LayerCache] = paged.layers
        self.ring = self.layers[0].window.shape[0] // max_batch_size * WINDOW_BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(layer.nbytes for layer in self.layers) + (0 if self.streams is None else self.streams.nbytes)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        named = {f"layers.{i}.{name}": t for i, each in enumerate(self.layers) for name, t in each.tensors().items()}
        return named if self.streams is None else {**named, "streams": self.streams}

    def slots(self, requests: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Return the slots int64 of positions of requests, of any shape, -1 where `keep` is False."""
        return torch.where(keep, requests.long() * self.ring + positions % self.ring, -1)

    def block(self, requests: Tensor, first: Tensor, keep: Tensor, *, count: int, context: int) -> AttentionMetadata:
        """Return the metadata of `count` rows of each request, which all see the same rows.

        These are up to `context` rows before the block, and all rows of the block, later ones too.

        Args:
            requests: int `[R]`, rows of the caches.
            first: int64 `[R]`, position of the first row of each block.
            keep: bool `[R]`, False for padding, which has no slots and length 0.
        """
        device = first.device
        column = torch.arange(align_up(context + count, WINDOW_BLOCK), device=device)
        before = first.clamp(max=context)
        length = torch.where(keep, before + count, 0)
        seen = self.slots(requests[:, None], (first - before)[:, None] + column, column < length[:, None])
        positions = first[:, None] + torch.arange(count, device=device)
        whole = keep[:, None].expand(-1, count)

        def each(rows: Tensor) -> Tensor:
            return rows[:, None].expand(-1, count, *rows.shape[1:]).flatten(0, 1).contiguous()

        return AttentionMetadata(
            positions=torch.where(whole, positions, 0).flatten(),
            token_to_req=each(torch.where(keep, requests, 0).to(torch.int32)),
            is_valid_token=whole.flatten(),
            window=WindowMetadata(
                self.slots(requests[:, None], positions, whole).flatten(),
                each(seen.to(torch.int32)),
                each(length.to(torch.int32)),
            ),
        )

    def kept(self, metadata: AttentionMetadata, num_new: Tensor | None, step_tokens: int) -> tuple[Tensor, Tensor]:
        """Return which tokens' rows are written, and which of these are the last of their request: bool `[T]` each.

        Args:
            metadata: of the tokens; requests are rows of the caches.
            num_new: int `[R]`, tokens that each request keeps of the `step_tokens` that it has in a row; None for a
                prefill, in any order, of which each request keeps as many rows as later tokens see.
            step_tokens: tokens of each request with `num_new`.
        """
        valid = metadata.is_valid_token
        if num_new is not None:
            number = torch.arange(step_tokens, device=valid.device)
            keep = valid.unflatten(0, (-1, step_tokens)) & (number < num_new[:, None])
            return keep.flatten(), (keep & (number == num_new[:, None] - 1)).flatten()
        positions = torch.where(valid, metadata.positions, -1)
        requests = metadata.token_to_req.long()
        ends = positions.new_full((self.max_batch_size,), -1).scatter_reduce(0, requests, positions, "amax")
        left = ends[requests] - positions
        return valid & (left < self.window), valid & (left == 0)
