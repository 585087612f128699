"""Decoder layers, experts, routers and the head of a converted model: transformers' modules, which hold the weights,
with forwards of a few ops each.

A layer mixes its streams with `mhc_pre`, between its sub-layers with `mhc_boundary`, and ends with `mhc_post`, which a
pass fuses with the next layer's `mhc_pre`, so that hidden states can be recorded where transformers records them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ..errors import check, fail
from ..layout import WEIGHT_TILE
from ..modules.stacked import are_rows, as_rows
from .shared_weights import ReadModules

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""

_ops: Any = torch.ops.dsv4
READ = (
    "attn_hc",
    "attn_hc.input_norm",
    "ffn_hc",
    "ffn_hc.input_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
)
"""Modules of a decoder layer whose parameters are read, and which are not called."""
READ_HEAD = ("norm", "hc_head.input_norm")
"""Modules of the decoder stack that are read."""
FIX = "convert(model, attention_only=True) leaves everything but attention to transformers"


class CompilableDecoderLayer(hf.DeepseekV4DecoderLayer):
    """Decoder layer whose hyper-connections and norms are one op between sub-layers."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the streams `[B, S, N, hidden]` after attention and experts."""
        rows, columns = hidden_states.shape[:2]
        streams = hidden_states.flatten(0, 1)
        y, post, comb = _ops.mhc_pre(streams, *_mix(self.attn_hc, self.input_layernorm))
        output, _ = self.self_attn(y.view(rows, columns, -1), **kwargs)
        mix = _mix(self.ffn_hc, self.post_attention_layernorm)
        streams, y, post, comb = _ops.mhc_boundary(streams, output.flatten(0, 1), post, comb, *mix)
        output = self.mlp(y.view(rows, columns, -1), input_ids=input_ids)
        streams = _ops.mhc_post(streams, output.flatten(0, 1), post, comb)
        return streams.view_as(hidden_states)


def _mix(connection: Any, norm: Any) -> tuple[Any, ...]:
    """Return the arguments of `mhc_pre` that a hyper-connection and the norm after it hold."""
    hc = connection
    return hc.fn, hc.base, hc.scale, norm.weight, norm.variance_epsilon, hc.hc_eps, hc.hc_sinkhorn_iters


class CompilableHead(hf.DeepseekV4HyperHead):
    """End of the hyper-connections, with the model's last norm."""

    def forward(self, x: Tensor, norm: Any) -> Tensor:
        """Return the normed mix `[B, S, hidden]` of the streams `[B, S, N, hidden]`."""
        mix = self.hc_fn, self.hc_base, self.hc_scale, norm.weight, norm.variance_epsilon, self.eps
        out: Tensor = _ops.mhc_head(x.flatten(0, 1), *mix)
        return out.view(*x.shape[:2], -1)


class CompilableTopKRouter(hf.DeepseekV4TopKRouter):
    """Router by the largest scores, in float32 for any dtype of the model."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[T, E]`, which are recorded, weights float32 `[T, K]` and ids int32 `[T, K]`."""
        flat = hidden_states.reshape(-1, self.hidden_dim)
        # In a graph the logits are computed only if they are recorded.
        logits = torch.nn.functional.linear(flat, self.weight)
        bias = self.e_score_correction_bias.float()
        ids, weights = _ops.moe_route(flat, self.weight, bias, None, None, self.top_k, self.routed_scaling_factor)
        return logits, weights, ids


class CompilableHashRouter(hf.DeepseekV4HashRouter):
    """Router by a table of token ids."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[T, E]`, weights float32 `[T, K]` and ids int32 `[T, K]`."""
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(flat, self.weight)
        table = input_ids.reshape(-1), self.tid2eid
        ids, weights = _ops.moe_route(flat, self.weight, None, *table, self.top_k, self.routed_scaling_factor)
        return logits, weights, ids


class CompilableMoe(hf.DeepseekV4SparseMoeBlock):
    """Routed experts and the shared expert in one op, which reads weights where they are.

    `arrange` makes gate and up of the shared expert rows of one matrix.
    """

    shared_w13: Tensor
    shared_w13_scale: Tensor | None

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the sum of each token's experts, in the shape of `hidden_states` `[B, S, hidden]`."""
        _, weights, ids = self.gate(hidden_states, input_ids) if self.is_hash else self.gate(hidden_states)
        routed, down = self.experts, self.shared_experts.down_proj
        out: Tensor = _ops.moe_experts(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            ids,
            weights,
            routed.gate_up_proj,
            routed.down_proj,
            _scale(routed, "gate_up_proj"),
            _scale(routed, "down_proj"),
            self.shared_w13,
            down.weight,
            self.shared_w13_scale,
            _scale(down, "weight"),
            float(routed.limit),
        )
        return out.view_as(hidden_states)

    def arrange(self) -> None:
        """Make the shared expert's gate and up rows of one matrix, in place, unless they are."""
        gate, up = self.shared_experts.gate_proj, self.shared_experts.up_proj
        held, rows = self.__dict__, [gate.weight, up.weight]
        if "shared_w13" in held and are_rows(rows, held["shared_w13"]):
            return
        scales = [_scale(gate, "weight"), _scale(up, "weight")]
        with torch.inference_mode(False), torch.no_grad():
            # In __dict__, so that nn.Module does not register the matrix beside its rows.
            held["shared_w13"] = as_rows(rows, held.get("shared_w13"))
            held["shared_w13_scale"] = None if scales[0] is None else as_rows(scales, held.get("shared_w13_scale"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompilableMoe:
        super()._apply(fn, recurse)
        self.arrange()
        return self


def _scale(module: Any, name: str) -> Any:
    """Return the scales that belong to the parameter `name` of a module of transformers, None if it has none."""
    return getattr(module, f"{name}_scale_inv", None)


class ReadParts:
    """Modules that the layers and the head of a converted model read, watched from outside the graph."""

    def __init__(self, model: Any) -> None:
        self.moe = [layer.mlp for layer in model.layers]
        self.modules = [ReadModules(f"layer {i}", layer, READ) for i, layer in enumerate(model.layers)]
        self.modules.append(ReadModules("the model", model, READ_HEAD))

    def adopt(self) -> None:
        """Let the layers run with the parameters that modules have now. Raises E208 for what they cannot run with."""
        for modules in self.modules:
            modules.check()
        for moe in self.moe:
            moe.arrange()


SWAPS: dict[type, Any] = {
    hf.DeepseekV4DecoderLayer: CompilableDecoderLayer,
    hf.DeepseekV4HyperHead: CompilableHead,
    hf.DeepseekV4TopKRouter: CompilableTopKRouter,
    hf.DeepseekV4HashRouter: CompilableHashRouter,
    hf.DeepseekV4SparseMoeBlock: CompilableMoe,
}
"""Classes that `convert` swaps in for transformers', beside attention's and the model's own."""


def check_layer(layer: Any) -> None:
    """Raise E208 for a decoder layer of transformers with modules that the ops do not stand for."""
    name, mlp = f"layer {layer.self_attn.layer_idx}", layer.mlp
    modules = dict(layer.named_modules())
    for path in READ:
        if path not in modules:
            fail("E208", got=f"{name} without {path}", fix=FIX)
    experts, shared = mlp.experts, mlp.shared_experts
    silu = torch.nn.functional.silu(torch.ones(()))
    why = ""
    for hc, norm in ((layer.attn_hc, layer.input_layernorm), (layer.ffn_hc, layer.post_attention_layernorm)):
        if hc.input_norm.eps != norm.variance_epsilon:
            why = f"norms with eps {hc.input_norm.eps} and {norm.variance_epsilon}"
    for path in ("gate_proj", "up_proj", "down_proj"):
        linear = getattr(shared, path)
        if getattr(linear, "bias", None) is not None:
            why = f"{path} of the shared expert with a bias"
        if getattr(linear, "activation_scale", None) is not None:
            why = f"{path} of the shared expert with static input scales"
    if shared.gate_proj.weight.dtype is torch.float8_e4m3fn and shared.gate_proj.weight.shape[0] % WEIGHT_TILE:
        why = f"a shared expert of {shared.gate_proj.weight.shape[0]} rows in e4m3, no multiple of {WEIGHT_TILE}"
    if not hasattr(experts, "gate_up_proj") or not hasattr(experts, "limit"):
        why = f"experts of type {type(experts).__name__}"
    for what in () if why else (experts, shared):
        if not torch.equal(what.act_fn(torch.ones(())), silu):
            why = f"an activation {type(what.act_fn).__name__}"
    check(not why, "E208", got=f"{name} with {why}", why="the experts' op is SwiGLU as DeepSeek-V4 defines it", fix=FIX)
