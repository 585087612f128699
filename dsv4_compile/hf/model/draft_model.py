"""Draft layers of a checkpoint (`mtp.*`) as modules that read a converted target model's hidden states.

Two kinds: `DSparkDrafts`, whose layers run one block of N rows that all see each other, and `MtpDrafts`, one layer that
runs N times. Both build on a decoder stack of window layers, converted like the target's, with separate window caches.
`inject` writes rows of tokens that the target has run, `propose` drafts from them. Everything follows from tensors on
the device, so both trace into the target's graph.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ...cache import CacheFormat
from ...config import DeepseekV4Config
from ...errors import check
from ...layout import WEIGHT_TILE, cdiv
from ...modules.linear import linear, linear_fp32
from ...parallel import Ranks, all_gather
from ...reference.preprocess.fused_q_kv_rmsnorm import rms_norm
from ...sizes import check_optional_size
from .draft_caches import DraftCaches
from .draft_settings import DraftSettings, stage_config
from .taps import Taps

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""


class DraftNorm(nn.Module):
    """RMSNorm `[..., D]` in float32, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed `x` in its dtype."""
        return rms_norm(x, self.eps, self.weight).to(x.dtype)


class DraftProjection(nn.Module):
    """Linear without bias `[N, K]`, floating, or e4m3 with a scale for each block of 128x128.

    Inputs of an e4m3 weight are quantised in tiles of 128, as those of the other e4m3 linears.
    """

    def __init__(self, n: int, k: int, *, scale_dtype: torch.dtype | None = None) -> None:
        """Build it with an uninitialised weight, e4m3 if `scale_dtype` is the dtype of its scales."""
        super().__init__()
        dtype = torch.get_default_dtype() if scale_dtype is None else torch.float8_e4m3fn
        self.weight = nn.Parameter(torch.empty(n, k, dtype=dtype), requires_grad=False)
        self.weight_scale_inv: nn.Parameter | None = None
        if scale_dtype is not None:
            scale = torch.empty(cdiv(n, WEIGHT_TILE), cdiv(k, WEIGHT_TILE), dtype=scale_dtype)
            self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., N]` in the dtype of `x` `[..., K]`."""
        if self.weight_scale_inv is None:
            return linear(x, self.weight)
        out: Tensor = torch.ops.dsv4.fp8_linear(x, self.weight, self.weight_scale_inv)
        return out


PROJECTIONS = ("main_proj", "e_proj", "h_proj")
"""Names of such projections in draft models."""


class DraftModel(nn.Module):
    """Draft layers and what surrounds them; `convert(model, drafts=...)` attaches them to a target model.

    They share the target's embedding and output head, unless a checkpoint has separate ones (`own_embed`, `own_head`),
    as rotated checkpoints do. `state_dict` has what is not shared.

    Attributes:
        settings: kind and sizes.
        model: decoder stack of the draft layers, with their last norm and head of the hyper-connections.
        target: the converted model that they are attached to, or None.
        caches: caches for as many requests as the target's own.
    """

    kind: ClassVar[str]
    keeps_streams: ClassVar[bool] = False
    """Whether caches keep the target's last streams of each request."""
    target: Any
    caches: Any
    cache_format: Any
    _keep_in_fp32_modules_strict: ClassVar[Any] = hf.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict

    def __init__(self, config: Any, settings: DraftSettings) -> None:
        """Build modules with transformers' initialisation, of a target with the configuration `config`."""
        super().__init__()
        check(
            settings.kind == self.kind, "E201", got=f"settings of kind {settings.kind}", rule=f"these are {self.kind}"
        )
        self.config = stage_config(config, settings.stages)
        self.settings = settings
        self.model: Any = hf.DeepseekV4Model(self.config)
        del self.model.embed_tokens
        self.model.__dict__["embed_tokens"] = None
        self.own_embed: nn.Embedding | None = None
        self.own_head: nn.Linear | None = None
        # In __dict__, so that the target is no part of this module.
        self.__dict__.update(target=None, caches=None, cache_format=None)

    @property
    def num_drafts(self) -> int:
        """Tokens that `propose` drafts, N."""
        return self.settings.num_drafts

    @property
    def taps(self) -> Taps:
        """Taps of the target that `inject` reads."""
        return self.settings.taps

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target that `inject` reads."""
        return self.settings.taps.layers

    def attach(self, target: Any, caches: DraftCaches, cache_format: CacheFormat) -> None:
        """Let the converted stack draft for `target`, with `caches` for its own calls."""
        self.__dict__.update(target=target, caches=caches, cache_format=cache_format)
        self.model.__dict__["embed_tokens"] = target.model.embed_tokens

    def detach(self) -> None:
        """Forget the target and the caches."""
        self.__dict__.update(target=None, caches=None, cache_format=None)
        self.model.__dict__["embed_tokens"] = None

    def allocate_caches(
        self,
        config: DeepseekV4Config,
        cache_format: CacheFormat,
        *,
        max_batch_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DraftCaches:
        """Allocate caches for attention with `config` and hidden states of `dtype`; on "meta", to count their bytes."""
        streams = (self.config.hc_mult * self.config.hidden_size, dtype) if self.keeps_streams else None
        return DraftCaches(
            config,
            cache_format,
            max_batch_size=max_batch_size,
            step_tokens=self.settings.step_tokens,
            device=device,
            streams=streams,
            settings=self.settings,
        )

    def new_caches(self, max_batch_size: int | None = None) -> DraftCaches:
        """Allocate other caches for an attached model, for `max_batch_size` requests (None = as many as its own)."""
        self._check_attached()
        rows = check_optional_size("max_batch_size", max_batch_size) or self.caches.max_batch_size
        config, weight = self.model.layers[0].self_attn.dsv4.config, self.model.embed_tokens.weight
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        return self.allocate_caches(config, self.cache_format, max_batch_size=rows, **options)

    def adopt(self) -> None:
        """Run with the parameters that modules have now, as the target's `adopt`. Calls outside graphs do it.

        Raises E207 or E208 for parameters, modules or settings that the layers cannot run with.
        """
        self._check_attached()
        self.model.__dict__["embed_tokens"] = self.target.model.embed_tokens
        self.model.adopt()

    def _check_attached(self) -> None:
        fix = "hf.convert(model, drafts=drafts)"
        check(self.target is not None, "E208", got="a call of draft layers without a target", fix=fix)

    def _begin(self, caches: DraftCaches | None) -> DraftCaches:
        """Return the caches of a call, whose weights are compared unless it is traced."""
        if not torch.compiler.is_compiling():
            check(
                self.target is not None, "E208", got="draft layers without a target", fix="convert(model, drafts=...)"
            )
            self.adopt()
        own: DraftCaches = self.caches
        return own if caches is None else caches

    def _insert(self, stage: int, x: Tensor, slots: Tensor, positions: Tensor, caches: DraftCaches) -> None:
        """Write rows of a stage's window cache from its attention's input `[T, D]`."""
        attention = self.model.layers[stage].self_attn.dsv4
        torch.ops.dsv4.kv_rope_insert(
            rms_norm(attention.wkv(x), attention.eps, attention.kv_norm.weight).to(x.dtype),
            caches.layers[stage].window,
            slots,
            positions,
            attention.cos_sin,
            attention.attention.layer.window_block_size,
            attention.cache_format.kv,
            attention.attention.cache_scale(),
        )

    def _logits(self, streams: Tensor) -> Tensor:
        """Return the target head's float32 logits `[B, S, V]` of streams `[B, S, N, D]`."""
        normed = self.model.hc_head(streams, self.model.norm)
        return head_logits(self.target.lm_head if self.own_head is None else self.own_head, normed)

    def _embeds(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[..., D]` of tokens int64 `[...]`."""
        embedding = self.target.model.embed_tokens if self.own_embed is None else self.own_embed
        embeds: Tensor = embedding(tokens)
        return embeds


def head_logits(head: Any, hidden: Tensor) -> Tensor:
    """Return the float32 logits of a model's head, computed in float32 unless other modules stand in its place."""
    ranks: Ranks | None = getattr(head, "ranks", None)
    added = head._forward_hooks or head._forward_pre_hooks or getattr(head, "bias", None) is not None
    if not isinstance(head, nn.Linear) or added or type(head).__module__.partition(".")[0] not in _KNOWN:
        called: Tensor = head(hidden)
        return called.float()
    logits = linear_fp32(hidden.flatten(0, -2), head.weight).unflatten(0, hidden.shape[:-1])
    return logits if ranks is None else all_gather(logits, ranks)


_KNOWN = ("torch", "dsv4_compile")
"""Packages whose linears have no more than a weight."""


def requests_of(caches: DraftCaches, anchors: Tensor, requests: Tensor | None) -> Tensor:
    """Return the rows of the caches that a batch of `anchors` `[R]` has: `requests`, or the first R."""
    return torch.arange(anchors.shape[0], device=anchors.device) if requests is None else requests.long()
