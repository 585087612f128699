"""The two kinds of draft layers: DSpark's block with its Markov head, and MTP's layer that runs once for each draft."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import check
from ...metadata import AttentionMetadata
from ...parallel import Ranks
from ...reference.hyper_connections.mhc_pre import stream_mix
from .draft_caches import DraftCaches
from .draft_model import DraftModel, DraftNorm, DraftProjection, requests_of
from .draft_settings import DSPARK, MTP, DraftSettings
from .layers import mix_of

_ops: Any = torch.ops.dsv4


class DSparkDrafts(DraftModel):
    """DSpark: a block of N rows [anchor, noise, ...] through all stages, then one serial head of token pairs.

    Context rows come from the taps of the target alone: `main_norm(main_proj(taps))` is what each stage's keys and
    values are projected from.
    """

    kind: ClassVar[str] = DSPARK

    def __init__(self, config: Any, settings: DraftSettings) -> None:
        super().__init__(config, settings)
        size, vocabulary, rank = config.hidden_size, config.vocab_size, settings.markov_rank
        self.main_proj = DraftProjection(size, size * len(settings.taps.layers))
        self.main_norm = DraftNorm(size, config.rms_norm_eps)
        self.markov_w1 = nn.Parameter(torch.empty(vocabulary, rank), requires_grad=False)
        self.markov_w2 = nn.Parameter(torch.empty(vocabulary, rank), requires_grad=False)
        self.confidence_proj = nn.Parameter(torch.empty(1, size + rank), requires_grad=False)

    def adopt(self) -> None:
        """Run with the parameters that modules have now. Raises E208 also for a vocabulary that has been resized."""
        super().adopt()
        head, ours = self.target.get_output_embeddings(), self.markov_w1.shape[0]
        ranks: Ranks | None = getattr(head, "ranks", None)
        tokens = head.weight.shape[0] * (1 if ranks is None else ranks.size)
        why, fix = f"the DSpark layers draft {ours}", "call generate(drafts=False), or convert without the draft layers"
        check(tokens == ours, "E208", got=f"a head of {tokens} tokens", why=why, fix=fix)

    def inject(
        self,
        taps: Tensor,
        metadata: AttentionMetadata,
        next_tokens: Tensor | None = None,
        num_new: Tensor | None = None,
        caches: DraftCaches | None = None,
    ) -> None:
        """Write the context rows of tokens that the target has run.

        Args:
            taps: `[T, len(tap_layers) * D]`, see `Taps.read`.
            metadata: of these T tokens; `token_to_req` names rows of the caches.
            next_tokens: not read; for MTP.
            num_new: int `[R]`, how many of the N + 1 tokens of each request were kept, None for a prefill.
            caches: what is written; None = `self.caches`.
        """
        caches = self._begin(caches)
        keep, _ = caches.kept(metadata, num_new, self.settings.step_tokens)
        slots = caches.slots(metadata.token_to_req, metadata.positions, keep)
        main = self.main_norm(self.main_proj(taps))
        for stage in range(self.settings.stages):
            self._insert(stage, main, slots, metadata.positions, caches)

    def propose(
        self,
        anchors: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        requests: Tensor | None = None,
        caches: DraftCaches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft N tokens of each request.

        Args:
            anchors: int64 `[R]`, last token of each request, which the target has not run; -1 for padding.
            lengths: int `[R]`, tokens before the anchor, all injected; 0 for padding.
            numbers, seeds: float64 `[R, 4]` and int64 `[R]`, see `markov_drafts`.
            requests: int `[R]`, rows of the caches, None = 0 to R - 1.
            caches: what is read; None = `self.caches`.
        Returns:
            Drafts int64 `[R, N]`, -1 in padding, and the float32 logits `[R, N, V]` that they were chosen from.
        """
        return self.choose(self.block(anchors, lengths, requests, caches), anchors, lengths, numbers, seeds)

    def block(
        self, anchors: Tensor, lengths: Tensor, requests: Tensor | None = None, caches: DraftCaches | None = None
    ) -> Tensor:
        """Return the streams `[R, N, 4, D]` of the block of each request after the last stage; see `propose`."""
        caches = self._begin(caches)
        requests, keep = requests_of(caches, anchors, requests), (anchors >= 0) & (lengths > 0)
        ids = torch.nn.functional.pad(
            torch.where(keep, anchors, 0)[:, None], (0, self.num_drafts - 1), value=self.settings.noise_token
        )
        metadata = caches.block(requests, lengths.long(), keep, count=self.num_drafts, context=caches.window)
        embeds = self._embeds(ids)
        streams: Tensor = embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        for layer in self.model.layers:
            streams = layer(streams, metadata=metadata, caches=caches.layers)
        return streams

    def choose(
        self, streams: Tensor, anchors: Tensor, lengths: Tensor, numbers: Tensor, seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the drafts of a block's streams; see `propose`."""
        anchors = torch.where(lengths > 0, anchors, -1)
        drafts, logits = _ops.markov_drafts(
            self._logits(streams), anchors, self.markov_w1, self.markov_w2, numbers, seeds, lengths.long()
        )
        return drafts, logits

    def confidence(self, streams: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
        """Return float32 logits `[R, N]` that a draft is accepted, given that those before it are.

        Args:
            streams: `[R, N, 4, D]`, of `block`.
            anchors: int64 `[R]`.
            drafts: int64 `[R, N]`.
        """
        before = torch.cat((anchors[:, None], drafts[:, :-1]), 1).clamp(min=0)
        head = self.model.hc_head
        flat = streams.flatten(0, 1).float()
        mix = stream_mix(flat, head.hc_fn, self.model.norm.variance_epsilon)
        weights = torch.sigmoid(mix * head.hc_scale.float() + head.hc_base.float()) + head.eps
        hidden = (weights.unsqueeze(2) * flat).sum(1).to(streams.dtype).float().view(*before.shape, -1)
        pair = torch.cat((hidden, nn.functional.embedding(before, self.markov_w1).float()), 2)
        return (pair @ self.confidence_proj.float().t()).squeeze(2)


class MtpDrafts(DraftModel):
    """MTP: one causal layer over pairs of the target's streams at t and the token at t + 1, which drafts that at t + 2.

    The row of a pair has the position t. For more than one draft the layer's own streams, before its head, take the
    place of the target's. Rows that they leave are replaced by those of the target's streams after verification.
    """

    kind: ClassVar[str] = MTP
    keeps_streams: ClassVar[bool] = True

    def __init__(self, config: Any, settings: DraftSettings) -> None:
        super().__init__(config, settings)
        size = config.hidden_size
        self.e_proj, self.h_proj = DraftProjection(size, size), DraftProjection(size, size)
        self.enorm, self.hnorm = (DraftNorm(size, config.rms_norm_eps) for _ in range(2))

    def _pairs(self, streams: Tensor, tokens: Tensor) -> Tensor:
        """Return the layer's input `[T, N, D]` from streams `[T, N, D]` and the tokens int64 `[T]` after them."""
        embeds = self._embeds(tokens.clamp(min=0))
        return self.e_proj(self.enorm(embeds)).unsqueeze(1) + self.h_proj(self.hnorm(streams).flatten(0, 1)).view_as(
            streams
        )

    def inject(
        self,
        taps: Tensor,
        metadata: AttentionMetadata,
        next_tokens: Tensor,
        num_new: Tensor | None = None,
        caches: DraftCaches | None = None,
    ) -> None:
        """Write the rows of tokens that the target has run, and keep the streams of each request's last one.

        Args:
            taps: `[T, 4 * D]`, the target's last streams, see `Taps.read`.
            metadata: of these T tokens; `token_to_req` names rows of the caches.
            next_tokens: int64 `[T]`, the token after each. Rows of tokens that are not kept may have any, and so may
                the last row of a request: `propose` writes it again, with the anchor.
            num_new: int `[R]`, how many of the N + 1 tokens of each request were kept, None for a prefill.
            caches: what is written; None = `self.caches`.
        """
        caches = self._begin(caches)
        keep, last = caches.kept(metadata, num_new, self.settings.step_tokens)
        slots = caches.slots(metadata.token_to_req, metadata.positions, keep)
        streams = taps.unflatten(1, (self.config.hc_mult, -1))
        layer = self.model.layers[0]
        y, _, _ = _ops.mhc_pre(self._pairs(streams, next_tokens), *mix_of(layer.attn_hc, layer.input_layernorm))
        self._insert(0, y, slots, metadata.positions, caches)
        assert caches.streams is not None
        place = torch.where(last, metadata.token_to_req.long(), caches.max_batch_size)
        caches.streams.index_copy_(0, place, taps.to(caches.streams.dtype))  # the model may have been cast since

    def propose(
        self,
        anchors: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        requests: Tensor | None = None,
        caches: DraftCaches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft N tokens of each request, one after the other; see `DSparkDrafts.propose`."""
        caches = self._begin(caches)
        assert caches.streams is not None
        requests, keep = requests_of(caches, anchors, requests), (anchors >= 0) & (lengths > 0)
        streams = caches.streams[requests].unflatten(1, (self.config.hc_mult, -1))
        streams = streams.to(self.target.model.embed_tokens.weight.dtype)
        token, lengths = torch.where(keep, anchors, -1), lengths.long()
        drafts, logits = [], []
        for number in range(self.num_drafts):
            metadata = caches.block(requests, lengths - 1 + number, keep, count=1, context=caches.window - 1)
            pairs = self._pairs(streams, token).unsqueeze(1)
            out = self.model.layers[0](pairs, metadata=metadata, caches=caches.layers)
            base = self._logits(out)
            none = base.new_zeros(base.shape[2], 1)  # MTP has no head of token pairs
            token, chosen = _ops.markov_drafts(base, token, none, none, numbers, seeds, lengths + number)
            token, streams = token[:, 0], out.squeeze(1)
            drafts.append(token)
            logits.append(chosen)
        return torch.stack(drafts, 1), torch.cat(logits, 1)


KINDS: dict[str, type[DraftModel]] = {DSPARK: DSparkDrafts, MTP: MtpDrafts}
"""Draft models by kind."""
