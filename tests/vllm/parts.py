"""Router, experts and hyper-connections against vLLM's own, on the arguments of vLLM's layers in every step.

vLLM runs its own modules with the plug-in's attention (`DSV4_VLLM=1`), eagerly. This package's modules hold the same
checkpoint, loaded by their own loader, and compute each call again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.integrations.vllm import model as plugin
from dsv4_compile.integrations.vllm.layer_parts import LayerParts
from dsv4_compile.integrations.vllm.weights import LayerWeights

NEAR = 2e-2
"""Largest error of a row that went to the same experts."""


class PartsModel(plugin.DeepseekV4Model):
    """The plug-in's model with `LayerParts` next to each of vLLM's layers; `errors` has those of all rows, by part."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.errors: dict[str, list[Tensor]] = {}
        dtype = vllm_config.model_config.dtype
        parts = [LayerParts(self.config, index, dtype) for index in range(len(self.layers))]
        self.__dict__["beside"] = parts, LayerWeights(dict(enumerate(parts)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        checkpoint = list(weights)
        _ = list(self.beside[1].others(checkpoint))
        return super().load_weights(checkpoint)

    def compare(self) -> None:
        """Compare every call from now on."""
        parts, weights = self.beside
        weights.finish()
        for layer, layer_parts in zip(self.layers, parts, strict=True):
            layer.ffn.forward = self.beside_experts(layer.ffn.forward, layer_parts)
            layer.hc_pre = self.beside_pre(layer.hc_pre, layer, layer_parts)
            layer.hc_post = self.beside_post(layer.hc_post)
        self.hc_head_op.forward = self.beside_head(self.hc_head_op.forward)

    def record(self, part: str, got: Tensor, want: Tensor) -> None:
        got, want = got.float().flatten(1), want.float().flatten(1)
        self.errors.setdefault(part, []).append((got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-6))

    def beside_experts(self, plain: Any, own: LayerParts) -> Any:
        def forward(x: Tensor, input_ids: Tensor) -> Tensor:
            got = own.ffn(x, input_ids)
            want = plain(x.clone(), input_ids)
            self.record("table and experts" if own.ffn.bias is None else "router and experts", got, want)
            return want

        return forward

    def beside_pre(self, plain: Any, layer: Any, own: LayerParts) -> Any:
        def pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            connection, norm = (
                (own.hc_attn, layer.attn_norm) if fn is layer.hc_attn_fn else (own.hc_ffn, layer.ffn_norm)
            )
            _, *got = connection(x, None)
            y, post, comb = plain(x, fn, scale, base)
            for name, ours, theirs in zip(("input", "post", "comb"), got, (norm(y.clone()), post, comb), strict=True):
                self.record(name, ours, theirs)
            return y, post, comb

        return pre

    def beside_post(self, plain: Any) -> Any:
        def post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            shaped = post.reshape(residual.shape[:2]), comb.reshape(*residual.shape[:2], -1)
            got = torch.ops.dsv4.mhc_post(residual, x, *shaped)
            want = plain(x, residual, post, comb)
            self.record("streams", got, want)
            return want

        return post

    def beside_head(self, plain: Any) -> Any:
        def head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, hc_eps: float) -> Tensor:
            got = torch.ops.dsv4.mhc_head(x, fn, base, scale, self.norm.weight, eps, hc_eps)
            want = plain(x, fn, scale, base, eps, hc_eps)
            self.record("head", got, self.norm(want.clone()))
            return want

        return head

    def summary(self) -> dict[str, Any]:
        """Return the number of rows, the median and the worst of their errors, and how many are near, by part."""
        errors = {name: torch.cat(rows).nan_to_num(torch.inf) for name, rows in self.errors.items()}
        return {
            name: {
                "rows": rows.numel(),
                "median": float(rows.median()),
                "worst": float(rows.max()),
                "near": int((rows <= NEAR).sum()),
            }
            for name, rows in errors.items()
        }


class PartsForCausalLM(plugin.DeepseekV4ForCausalLM):
    """The class that the tests register in the place of the plug-in's."""

    model_cls = PartsModel
