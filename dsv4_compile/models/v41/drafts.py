"""Draft layers of DeepSeek-V4.1 (DSpark): a block of N rows through a few stages, and a serial head of token pairs.

    context   c[p] = main_norm(main_proj(mean over streams of the inputs of the tapped layers at p))
    a stage's keys: window rows of c[p] for the 128 positions before the block, and of the block's own rows
    block     [anchor, noise, noise, ...] at positions L, L + 1, ...; all rows see all of these keys
    draft j   argmax or sample of head(norm(h_j)) + markov_head(token before)

L counts the tokens that the target has run; the anchor is the token after them. Stages are layers with a window alone,
in caches of their own. A step of the target writes context rows of all of its tokens: rows of tokens that are taken
back, and those of blocks, lie above L, where later rows replace them before a block reads their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...layout import PAD_INDEX, V41_WINDOW_BLOCK
from ...reference.common.paging import lookup_slots
from .cache import V41Caches
from .config import V41Config
from .draft_config import V41DraftConfig
from .layers import Layer
from .linear import Linear, Norm, WeightOptions, linear_of
from .step import Step


class MarkovHead(nn.Module):
    """Logits of a token by the token before it, a product of two matrices `[V, rank]`."""

    def __init__(self, vocab: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self.head = Linear(vocab, rank, dtype), Linear(vocab, rank, dtype)


class ConfidenceHead(nn.Module):
    """Logit that a draft is accepted if those before it are."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = Linear(1, size, dtype)


class Stage(Layer):
    """Layer of the block. The first one has the projection of taps, the last one the heads."""

    def __init__(self, config: V41Config, drafts: V41DraftConfig, stage: int, options: WeightOptions) -> None:
        super().__init__(drafts.stage_config(config), stage, options)
        hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, options.dtype
        if stage == 0:
            self.main_proj = linear_of(hidden, len(drafts.taps) * hidden, options)
            self.main_norm = Norm(hidden, eps, dtype)
        if stage == drafts.stages - 1:
            self.norm = Norm(hidden, eps, dtype)
            self.markov_head = MarkovHead(config.vocab_size, drafts.markov_rank, dtype)
            self.confidence_head = ConfidenceHead(hidden + drafts.markov_rank, dtype)


class V41Drafts(nn.ModuleList):
    """Stages of a model's drafts, `model.mtp`: parameters have the names of checkpoints.

    They share the target's embedding and head, so the model calls them, see `draft_steps`.
    """

    def __init__(self, config: V41Config, drafts: V41DraftConfig, options: WeightOptions) -> None:
        drafts.check(config)
        super().__init__(Stage(config, drafts, stage, options) for stage in range(drafts.stages))
        self.config = drafts
        # Numbers that a graph is built with are attributes of modules: constants in every graph.
        self.taps, self.block, self.noise_token = drafts.taps, drafts.block, drafts.noise_token
        self.window = config.sliding_window

    @property
    def first(self) -> Any:
        """First stage, with `main_proj` and `main_norm`."""
        return self[0]

    @property
    def last(self) -> Any:
        """Last stage, with `norm`, `markov_head` and `confidence_head`."""
        return self[-1]

    def inject(self, taps: Mapping[int, Tensor], step: Step, caches: V41Caches) -> None:
        """Write the context rows of the tokens of a step, whose taps `[T, D]` are given by layer."""
        tapped = torch.cat([taps[layer] for layer in self.taps], 1)
        context = self.first.main_norm(self.first.main_proj(tapped))
        for stage in self._stages():
            stage.attn.insert(context, step, caches)

    def run_block(self, streams: Tensor, pre: Tensor, step: Step, caches: V41Caches) -> tuple[Tensor, Tensor]:
        """Run the rows of blocks through all stages; return streams `[T, 4, D]` and their coefficients pre."""
        for stage in self._stages():
            streams, pre, step, _ = stage(streams, pre, None, step, caches, None)
        return streams, pre

    def confidence(self, streams: Tensor, pre: Tensor, before: Tensor) -> Tensor:
        """Return float32 `[T]`, the probability that the draft of a row is accepted if those before it are.

        Args:
            streams, pre: of `run_block`.
            before: int64 `[T]`, the token before each draft: the anchor, then drafts.
        """
        hidden = (pre.unsqueeze(2) * streams.float()).sum(1).to(streams.dtype)
        pair = nn.functional.embedding(before, self.last.markov_head.embed.weight)
        joint = torch.cat((hidden.float(), pair.float()), 1)
        return torch.sigmoid(joint @ self.last.confidence_head.proj.weight.float()[0])

    def _stages(self) -> list[Stage]:
        """Return the stages in order."""
        return cast("list[Stage]", list(self))


def block_step(
    ids: Tensor, lengths: Tensor, requests: Tensor, caches: V41Caches, *, window: int, image_token: int
) -> Step:
    """Return the indices of blocks: each row sees the `window` positions before its block, and all of its rows.

    Args:
        ids: int64 `[R, N]`, tokens of the blocks.
        lengths: int64 `[R]`, position of the first row of each block; -1 for padding.
        requests: int64 `[R]`, rows of the caches.
    """
    rows = ids.shape[1]
    live = lengths >= 0
    column = torch.arange(window + rows, device=ids.device)
    seen = torch.where(live[:, None], lengths[:, None] - window + column, PAD_INDEX)
    positions = torch.where(live[:, None], lengths[:, None] + column[:rows], PAD_INDEX)
    slots = lookup_slots(caches.window_table, requests[:, None], seen, V41_WINDOW_BLOCK)
    tokens = ids.flatten()
    return Step(
        tokens,
        tokens == image_token,
        positions.flatten(),
        torch.where(live, requests, PAD_INDEX)[:, None].expand(-1, rows).flatten(),
        slots[:, window:].flatten(),
        slots[:, None].expand(-1, rows, -1).flatten(0, 1),
    )
