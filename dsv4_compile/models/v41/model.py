"""DeepSeek-V4.1 as plain modules on this package's ops: one forward for prompts, decode steps and mixed batches.

A step is a flat list of tokens, each with a position and a request, over paged caches. Hyper-connections are lagged:
each sub-layer takes the streams by the coefficients of the site before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...modules.linear import linear_fp32
from ...parallel import Ranks, all_gather, all_reduce
from ...runtime.drafting import DraftStatistics
from .cache import V41Caches, V41Format
from .calls import check_step
from .config import V41Config
from .draft_config import V41DraftConfig
from .drafts import V41Drafts
from .fetch import TableRows
from .layer_kinds import Marked
from .layers import Layer
from .linear import Linear, Norm, WeightOptions
from .step import Step, Tail, make_step


class V41Model(nn.Module):
    """Text model of DeepSeek-V4.1, in inference mode.

    Args:
        dtype: of activations and floating weights.
        quantised: weights stay e4m3 and e2m1, as they are published; otherwise they are of `dtype`.
        quantize_input: inputs of quantised weights are rounded to mxfp8 first, as DeepSeek's own kernels do.
        drafts: draft layers `mtp`, None for none. A step writes what they read of its tokens into `caches.drafts`.

    Weights are uninitialised; `load` fills them. `token_map`, int32 `[vocab_size]`, holds the tokens' compressed ids.
    A rank of a split model, see `split`, has the rows of embedding and head from `first_token` on.
    """

    ranks: Ranks | None = None
    first_token = 0
    in_step: Any = None
    """`hf.model.in_step.InStep` of a split model, which watches the calls of all ranks."""
    shared_weights: frozenset[str] = frozenset()
    """Names of the parameters that every rank of a split model has all of."""
    draft_statistics: DraftStatistics | None = None
    """Acceptance of the last `generate`, None if it ran without drafts."""

    def __init__(
        self,
        config: V41Config,
        dtype: torch.dtype,
        *,
        quantised: bool = False,
        quantize_input: bool = False,
        drafts: V41DraftConfig | None = None,
    ) -> None:
        super().__init__()
        options = WeightOptions(dtype, quantised=quantised, quantize_input=quantize_input)
        self.config, self.dtype = config, dtype
        self.window, self.image_token, self.streams = config.sliding_window, config.image_token_id, config.hc_mult
        self.vocab = config.vocab_size
        self.engram_layers = config.engram_layers
        self.embed = Linear(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(Layer(config, i, options) for i in range(config.num_layers))
        self.mtp = None if drafts is None else V41Drafts(config, drafts, options)
        for layer in self._stack():
            layer.is_tapped = drafts is not None and layer.layer in drafts.taps
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = Linear(config.vocab_size, config.hidden_size, dtype)
        self.token_map: Tensor
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int32, device="cpu"), False)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.weight.device

    def state_of_weights(self) -> tuple[Any, ...]:
        """Return what differs after a parameter was replaced, moved or written."""
        return tuple((id(tensor), tensor.data_ptr(), tensor._version) for tensor in self.parameters())

    @property
    def generation_config(self) -> V41Config:
        """Configuration with `eos_token_id`, which ends requests of a `RunningBatch`."""
        return self.config

    def new_caches(self, *, cache_format: V41Format | None = None, drafts: bool = True, **sizes: Any) -> V41Caches:
        """Return caches on the model's device. `sizes` are those of `V41Caches`; `cache_format` is the model's own.

        Without `drafts`, steps write nothing for draft layers.
        """
        settings = self.mtp.config if drafts and self.mtp is not None else None
        return V41Caches(self.config, cache_format=cache_format, device=self.device, drafts=settings, **sizes)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        requests: Tensor,
        caches: V41Caches,
        *,
        tail: Tail | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Return float32 logits `[N, V]` of a step, and write its rows into the caches.

        Args:
            ids, positions, requests: int `[T]`; tokens of a request are consecutive with ascending positions. Padding
                has a negative position or request.
            tail: tokens that layers after the last source run (None = all). See `prefill`.
            last: int64 `[N]`, rows with logits (None = all), rows of the tail where there is one.

        An id outside the vocabulary counts as token 0. Raises what `check_step` does.
        """
        if not torch.compiler.is_compiling():
            check_step(self.config, self.device, ids, positions, requests, caches)
        return self.logits(ids, positions, requests, caches, tail=tail, last=last)

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        requests: Tensor,
        caches: V41Caches,
        *,
        tail: Tail | None = None,
        last: Tensor | None = None,
        marked: bool = False,
    ) -> Tensor:
        """Return what `forward` returns, of a step that is not checked: for captures.

        A trace of a `marked` step has one layer of each kind, see `layer_kinds`.
        """
        streams, pre = self.hidden(ids, positions, requests, caches, tail, marked)
        if last is not None:
            streams, pre = streams[last], pre[last]
        hidden = torch.ops.dsv4.mhc_collapse(streams, pre, self.norm.weight, self.norm.eps)
        return all_gather(linear_fp32(hidden, self.head.weight), self.ranks)

    def encode(self, ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches) -> None:
        """Write what later tokens need of a prompt before its tail: layers up to the insertion of the last source."""
        if not torch.compiler.is_compiling():
            check_step(self.config, self.device, ids, positions, requests, caches)
        self.insert(ids, positions, requests, caches)

    def insert(self, ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches, marked: bool = False) -> None:
        """Do what `encode` does, of a step that is not checked: for captures."""
        streams, pre, rows, step = self._begin(ids, positions, requests, caches)
        selection, marks = None, Marked() if marked else None
        for layer in self._stack():
            if layer.is_last_source:
                layer.insert(streams, pre, rows.get(layer.layer), step, caches)
                return
            if marks is not None and layer.first_of_kind >= 0:
                streams, pre, step, selection = marks.call(layer, streams, pre, step, caches, selection, None)
            else:
                streams, pre, step, selection = layer(streams, pre, rows.get(layer.layer), step, caches, selection)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        requests: Tensor,
        caches: V41Caches,
        tail: Tail | None = None,
        marked: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the streams after the last layer and their coefficients pre, of the tail if there is one."""
        streams, pre, rows, step = self._begin(ids, positions, requests, caches)
        selection, marks = None, Marked() if marked else None
        taps: dict[int, Tensor] | None = None if caches.drafts is None else {}
        for layer in self._stack():
            if marks is not None and layer.first_of_kind >= 0:
                streams, pre, step, selection = marks.call(layer, streams, pre, step, caches, selection, taps)
                continue
            at_source = tail if layer.is_last_source else None
            streams, pre, step, selection = layer(
                streams, pre, rows.get(layer.layer), step, caches, selection, at_source, taps
            )
        if self.mtp is not None and taps is not None:
            assert caches.drafts is not None
            self.mtp.inject(taps, step, caches.drafts)
        return streams, pre

    def _stack(self) -> list[Layer]:
        """Return the layers in order."""
        return cast("list[Layer]", list(self.layers))

    def _begin(
        self, ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches
    ) -> tuple[Tensor, Tensor, dict[int, TableRows], Step]:
        """Return streams and pre before the first layer, the rows of engrams, and the step."""
        sizes = {"window": self.window, "image_token": self.image_token}
        step = make_step(ids, positions, requests, caches, **sizes)
        known = torch.where((ids >= 0) & (ids < self.vocab), ids, 0)
        rows = self.engram_rows(known, step, caches)
        return *self.first_streams(known), rows, step

    def first_streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the streams `[T, 4, D]` of ids of the vocabulary, and the coefficients pre before the first layer."""
        embedded = self._embedded(ids)
        streams = embedded[:, None].expand(-1, self.streams, -1).contiguous()
        return streams, self.first_pre(streams)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[T, D]` of ids of the vocabulary."""
        if self.ranks is None:
            return nn.functional.embedding(ids, self.embed.weight)
        local = ids - self.first_token
        known = (local >= 0) & (local < self.embed.weight.shape[0])
        rows = nn.functional.embedding(torch.where(known, local, 0), self.embed.weight)
        return all_reduce(torch.where(known[:, None], rows, 0), self.ranks)

    def first_pre(self, streams: Tensor) -> Tensor:
        """Return float32 `[T, N]`: before the first layer the first stream alone is taken."""
        first = torch.zeros(streams.shape[:2], dtype=torch.float32, device=streams.device)
        first[:, 0] = 1.0
        return first

    def engram_rows(self, ids: Tensor, step: Step, caches: V41Caches) -> dict[int, TableRows]:
        """Return the rows of each engram's table, which depend on token ids alone."""
        compressed, stack = self.token_map[ids], self._stack()
        return {
            layer: stack[layer].engram.rows(compressed, step.positions, step.requests, caches.histories[layer])
            for layer in self.engram_layers
        }
