"""Not a test: draft layers evaluated in float32 from formulas, one row at a time, with tensors of official names.

It shares no code with the package: what is tested are its formulas, masks, positions and rings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.metadata import AttentionMetadata, WindowMetadata, build_metadata
from tests.hf.official import LINEARS, SHARED
from tests.hf.small import LAYERS


def official_drafts(drafts: Any) -> dict[str, Tensor]:
    """Return the weights of draft layers under the names of checkpoints, in the dtypes that the modules have."""
    stack, last = drafts.model, len(drafts.model.layers) - 1
    out = {f"mtp.{last}.norm.weight": stack.norm.weight}
    out |= {f"mtp.{last}.hc_head_{leaf}": getattr(stack.hc_head, f"hc_{leaf}") for leaf in ("fn", "base", "scale")}
    for i, layer in enumerate(stack.layers):
        attention, moe, at = layer.self_attn, layer.mlp, f"mtp.{i}"
        out |= {f"{at}.attn.{ours}.weight": getattr(attention, theirs).weight for ours, theirs in LINEARS.items()}
        out[f"{at}.attn.q_norm.weight"], out[f"{at}.attn.kv_norm.weight"] = (
            attention.q_a_norm.weight,
            attention.kv_norm.weight,
        )
        out[f"{at}.attn.attn_sink"] = attention.sinks
        out[f"{at}.attn_norm.weight"] = layer.input_layernorm.weight
        out[f"{at}.ffn_norm.weight"] = layer.post_attention_layernorm.weight
        for sublayer, mix in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc)):
            out |= {f"{at}.hc_{sublayer}_{leaf}": getattr(mix, leaf) for leaf in ("fn", "base", "scale")}
        out[f"{at}.ffn.gate.weight"], out[f"{at}.ffn.gate.bias"] = moe.gate.weight, moe.gate.e_score_correction_bias
        for ours, theirs in SHARED.items():
            out[f"{at}.ffn.shared_experts.{ours}.weight"] = getattr(moe.shared_experts, theirs).weight
        for e in range(len(moe.experts.down_proj)):
            gate, up = moe.experts.gate_up_proj[e].chunk(2)
            for name, weight in (("w1", gate), ("w2", moe.experts.down_proj[e]), ("w3", up)):
                out[f"{at}.ffn.experts.{e}.{name}.weight"] = weight
    if drafts.kind == "dspark":
        out["mtp.0.main_proj.weight"], out["mtp.0.main_norm.weight"] = drafts.main_proj.weight, drafts.main_norm.weight
        for name in ("w1", "w2"):
            out[f"mtp.{last}.markov_head.markov_{name}.weight"] = getattr(drafts, f"markov_{name}")
        out[f"mtp.{last}.confidence_head.proj.weight"] = drafts.confidence_proj
    else:
        for name in ("e_proj", "h_proj", "enorm", "hnorm"):
            out[f"mtp.0.{name}.weight"] = getattr(drafts, name).weight
    return {name: tensor.detach().clone() for name, tensor in out.items()}


class Formulas:
    """Draft layers from their tensors, with the configuration of the target and its embedding and head."""

    def __init__(self, tensors: dict[str, Tensor], config: Any, embed: Tensor, head: Tensor) -> None:
        self.w = {name: tensor.float() for name, tensor in tensors.items()}
        self.c, self.embed, self.head = config, embed.float(), head.float()
        self.eps, self.window = config.rms_norm_eps, config.sliding_window
        self.last = max(int(name.split(".")[1]) for name in tensors)

    def rms(self, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def rope(self, x: Tensor, position: int, sign: float = 1.0) -> Tensor:
        """Rotate neighbouring pairs of the last dims of `[..., D]`: theta 10000, no YaRN."""
        dim = self.c.qk_rope_head_dim
        angle = sign * position * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((x[..., :-dim], torch.view_as_real(pairs * turn).flatten(-2)), -1)

    def mix(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return input, post and comb of a sub-layer for streams `[4, D]`."""
        flat, n = streams.flatten(), len(streams)
        mixes = self.w[f"{prefix}_fn"] @ flat * torch.rsqrt(flat.square().mean() + self.eps)
        scale, base = self.w[f"{prefix}_scale"], self.w[f"{prefix}_base"]
        pre = torch.sigmoid(mixes[:n] * scale[0] + base[:n]) + self.c.hc_eps
        post = 2 * torch.sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = torch.softmax((mixes[2 * n :] * scale[2] + base[2 * n :]).view(n, n), 1) + self.c.hc_eps
        comb = comb / (comb.sum(0, keepdim=True) + self.c.hc_eps)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + self.c.hc_eps)
            comb = comb / (comb.sum(0, keepdim=True) + self.c.hc_eps)
        return pre @ streams, post, comb

    def unmix(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post[:, None] * out + comb.t() @ streams

    def key(self, stage: int, x: Tensor, position: int) -> Tensor:
        at = f"mtp.{stage}.attn"
        return self.rope(self.rms(self.w[f"{at}.wkv.weight"] @ x, self.w[f"{at}.kv_norm.weight"]), position)

    def attention(self, stage: int, x: Tensor, position: int, keys: Tensor) -> Tensor:
        """Attend one row `[D]` to `keys` `[K, head_dim]`."""
        at, heads, dim, groups = f"mtp.{stage}.attn", self.c.num_attention_heads, self.c.head_dim, self.c.o_groups
        latent = self.rms(self.w[f"{at}.wq_a.weight"] @ x, self.w[f"{at}.q_norm.weight"])
        q = self.rope(self.rms((self.w[f"{at}.wq_b.weight"] @ latent).view(heads, dim)), position)
        scores = torch.cat((q @ keys.t() * dim**-0.5, self.w[f"{at}.attn_sink"][:, None]), 1)
        out = self.rope(torch.softmax(scores, 1)[:, :-1] @ keys, position, -1.0)
        parts = zip(out.flatten().chunk(groups), self.w[f"{at}.wo_a.weight"].chunk(groups), strict=True)
        return self.w[f"{at}.wo_b.weight"] @ torch.cat([weight @ heads_of_group for heads_of_group, weight in parts])

    def expert(self, prefix: str, x: Tensor) -> Tensor:
        limit = self.c.swiglu_limit
        gate = (self.w[f"{prefix}.w1.weight"] @ x).clamp(max=limit)
        up = (self.w[f"{prefix}.w3.weight"] @ x).clamp(-limit, limit)
        return self.w[f"{prefix}.w2.weight"] @ (silu(gate) * up)

    def experts(self, stage: int, x: Tensor) -> Tensor:
        at = f"mtp.{stage}.ffn"
        scores = softplus(self.w[f"{at}.gate.weight"] @ x).sqrt()
        chosen = (scores + self.w[f"{at}.gate.bias"]).topk(self.c.num_experts_per_tok).indices.tolist()
        total = scores[chosen].sum()
        routed = [scores[e] / total * self.expert(f"{at}.experts.{e}", x) for e in chosen]
        return self.c.routed_scaling_factor * torch.stack(routed).sum(0) + self.expert(f"{at}.shared_experts", x)

    def layer(self, stage: int, rows: list[Tensor], first: int, context: Tensor, causal: bool) -> list[Tensor]:
        """Return the streams of `rows` from position `first` on, which see `context` and all rows, or earlier ones."""
        at = f"mtp.{stage}"
        mixed = [self.mix(row, f"{at}.hc_attn") for row in rows]
        inputs = [self.rms(x, self.w[f"{at}.attn_norm.weight"]) for x, _, _ in mixed]
        block = torch.stack([self.key(stage, x, first + i) for i, x in enumerate(inputs)])
        out = []
        for i, (row, x, (_, post, comb)) in enumerate(zip(rows, inputs, mixed, strict=True)):
            keys = torch.cat((context, block[: i + 1] if causal else block))
            row = self.unmix(row, self.attention(stage, x, first + i, keys), post, comb)
            y, post, comb = self.mix(row, f"{at}.hc_ffn")
            out.append(self.unmix(row, self.experts(stage, self.rms(y, self.w[f"{at}.ffn_norm.weight"])), post, comb))
        return out

    def hidden(self, streams: Tensor) -> Tensor:
        """Return the mix of the last streams `[4, D]`, before the last norm."""
        at, flat = f"mtp.{self.last}", streams.flatten()
        mixes = self.w[f"{at}.hc_head_fn"] @ flat * torch.rsqrt(flat.square().mean() + self.eps)
        pre = torch.sigmoid(mixes * self.w[f"{at}.hc_head_scale"] + self.w[f"{at}.hc_head_base"]) + self.c.hc_eps
        return pre @ streams

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head @ self.rms(hidden, self.w[f"mtp.{self.last}.norm.weight"])

    def dspark(
        self, taps: Tensor, anchor: int, noise: int, count: int, noises: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return un-normed hidden states `[N, D]` and base logits `[N, V]` after taps `[L', K * D]` of all positions.

        Args:
            taps: of positions 0 to L' - 1.
            anchor: token at L'.
            noise: token of the other rows.
            count: rows of the block.
            noises: embeddings `[N - 1, D]` in place of that of `noise`.
        """
        length = len(taps)
        main = [self.rms(self.w["mtp.0.main_proj.weight"] @ row, self.w["mtp.0.main_norm.weight"]) for row in taps]
        embeds = [self.embed[anchor], *([self.embed[noise]] * (count - 1) if noises is None else noises)]
        rows = [embed.repeat(self.c.hc_mult, 1) for embed in embeds]
        for stage in range(self.last + 1):
            seen = range(max(0, length - self.window), length)
            context = torch.stack([self.key(stage, main[p], p) for p in seen])
            rows = self.layer(stage, rows, length, context, causal=False)
        hidden = torch.stack([self.hidden(row) for row in rows])
        return hidden, torch.stack([self.logits(row) for row in hidden])

    def markov(self, base: Tensor, previous: list[int]) -> Tensor:
        """Return l_j `[N, V]` for the token before each row."""
        at = f"mtp.{self.last}.markov_head.markov"
        return base + self.w[f"{at}_w1.weight"][previous] @ self.w[f"{at}_w2.weight"].t()

    def pair(self, streams: Tensor, token: int) -> Tensor:
        e = self.w["mtp.0.e_proj.weight"] @ self.rms(self.embed[token], self.w["mtp.0.enorm.weight"])
        h = self.rms(streams, self.w["mtp.0.hnorm.weight"]) @ self.w["mtp.0.h_proj.weight"].t()
        return e + h

    def mtp(self, streams: Tensor, tokens: list[int], depth: int) -> Tensor:
        """Return the logits `[depth, V]` of greedy drafts.

        Args:
            streams: `[L', 4, D]`, of the target at positions 0 to L' - 1.
            tokens: L' of them, the token after each position; the last is the anchor.
        """
        rows = [self.pair(streams[t], token) for t, token in enumerate(tokens)]
        logits = []
        for _ in range(depth):
            at, t = "mtp.0", len(rows) - 1
            keys = []
            for p in range(max(0, t + 1 - self.window), t):
                x, _, _ = self.mix(rows[p], f"{at}.hc_attn")
                keys.append(self.key(0, self.rms(x, self.w[f"{at}.attn_norm.weight"]), p))
            context = torch.stack(keys) if keys else torch.zeros(0, self.c.head_dim)
            (out,) = self.layer(0, [rows[t]], t, context, causal=True)
            logits.append(self.logits(self.hidden(out)))
            rows.append(self.pair(out, int(logits[-1].argmax())))
        return torch.stack(logits)


def metadata_of(model: Any, rows: int, columns: int, start: int = 0) -> AttentionMetadata:
    """Return a step's metadata of `columns` tokens, from position `start` on, of each of `rows` requests."""
    paged = model.model.dsv4_cache.paged
    return build_metadata(
        positions=(start + torch.arange(columns)).repeat(rows),
        token_to_req=torch.arange(rows, dtype=torch.int32).repeat_interleave(columns),
        is_valid_token=torch.ones(rows * columns, dtype=torch.bool),
        block_tables=paged.block_tables,
        window=paged.config.sliding_window,
        max_model_len=paged.max_seq_len,
        ratios=paged.config.compressed_ratios,
    )


def tokens_of(positions: list[int], requests: list[int], valid: list[bool] | None = None) -> AttentionMetadata:
    """Return what `inject` reads of a step's metadata."""
    count = len(positions)
    none = torch.zeros(count, 1, dtype=torch.int32)
    return AttentionMetadata(
        positions=torch.tensor(positions),
        token_to_req=torch.tensor(requests, dtype=torch.int32),
        is_valid_token=torch.tensor(valid or [True] * count),
        window=WindowMetadata(torch.full((count,), -1), none, none[:, 0]),
    )


N, W, NOISE, SIZE = 5, 32, 7, 128
GREEDY = [0.0, 0.0, 1.0, 0.0]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def drafting(kind: str, **options: Any) -> Any:
    """Return a converted model of two layers with draft layers."""
    model = tiny_model(**LAYERS)
    return hf.convert(model, max_batch_size=4, max_seq_len=256, drafts=tiny_drafts(model, kind, **options))


def formulas(model: Any) -> Formulas:
    drafts = model.dsv4_drafts
    embed, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    return Formulas(official_drafts(drafts), model.config, embed, head)


@torch.no_grad()
def inject(model: Any, taps: Tensor, start: int, request: int, tokens: Tensor | None = None, **options: Any) -> None:
    """Inject taps `[T, ...]` of one request from position `start` on."""
    positions = list(range(start, start + len(taps)))
    model.dsv4_drafts.inject(taps, tokens_of(positions, [request] * len(taps)), tokens, **options)


@torch.no_grad()
def propose(model: Any, anchors: list[int], lengths: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    count = len(anchors)
    numbers = torch.tensor([GREEDY] * count, dtype=torch.float64)
    lens = torch.tensor(lengths, dtype=torch.int32)
    seeds = torch.zeros(count, dtype=torch.int64)
    return model.dsv4_drafts.propose(torch.tensor(anchors), lens, numbers, seeds, **options)


def width(model: Any) -> int:
    return SIZE * (len(model.dsv4_drafts.tap_layers) if model.dsv4_drafts.kind == "dspark" else 4)


def taps_of(model: Any, length: int) -> Tensor:
    return torch.randn(length, width(model))


def spoil(model: Any) -> None:
    """Fill all caches with NaN, as memory that was never written may be."""
    for tensor in model.dsv4_drafts.caches.tensors().values():
        tensor.fill_(torch.nan)
