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

from ...errors import check
from ...modules.stacked import are_rows, as_rows, in_shared_memory, release_rows
from ...parallel import Ranks, all_reduce
from .expected_modules import CALLED, READ, READ_HEAD
from .shared_weights import ReadModules
from .token_inputs import check_autocast
from .weight_types import embedding_weight

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""

_ops: Any = torch.ops.dsv4


class CompilableDecoderLayer(hf.DeepseekV4DecoderLayer):
    """Decoder layer whose hyper-connections and norms are one op between sub-layers."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the streams `[B, S, N, hidden]` after attention and experts."""
        check_autocast(hidden_states)
        rows, columns = hidden_states.shape[:2]
        streams = hidden_states.flatten(0, 1)
        y, post, comb = _ops.mhc_pre(streams, *mix_of(self.attn_hc, self.input_layernorm))
        output, _ = self.self_attn(y.view(rows, columns, -1), **kwargs)
        mix = mix_of(self.ffn_hc, self.post_attention_layernorm)
        streams, y, post, comb = _ops.mhc_boundary(streams, output.flatten(0, 1), post, comb, *mix)
        output = self.mlp(y.view(rows, columns, -1), input_ids=input_ids)
        streams = _ops.mhc_post(streams, output.flatten(0, 1), post, comb)
        return streams.view_as(hidden_states)


def mix_of(hc: Any, norm: Any) -> tuple[Any, ...]:
    """Return the arguments of `mhc_pre` that a hyper-connection and the norm after it hold."""
    return hc.fn, hc.base, hc.scale, norm.weight, norm.variance_epsilon, hc.hc_eps, hc.hc_sinkhorn_iters


class CompilableHead(hf.DeepseekV4HyperHead):
    """End of the hyper-connections, with the model's last norm."""

    def forward(self, x: Tensor, norm: Any) -> Tensor:
        """Return the normed mix `[B, S, hidden]` of the streams `[B, S, N, hidden]`."""
        check_autocast(x)
        mix = self.hc_fn, self.hc_base, self.hc_scale, norm.weight, norm.variance_epsilon, self.eps
        out: Tensor = _ops.mhc_head(x.flatten(0, 1), *mix)
        return out.view(*x.shape[:2], -1)


def _route(router: Any, x: Tensor, bias: Tensor | None, *table: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, E]` for who records them, weights float32 `[T, K]` and ids int32 `[T, K]`."""
    check_autocast(x)
    flat = x.reshape(-1, router.hidden_dim)
    # In a graph the logits are computed only if they are recorded.
    logits = torch.nn.functional.linear(flat, router.weight)
    ids, weights = _ops.moe_route(flat, router.weight, bias, *table, router.routed_scaling_factor)
    return logits, weights, ids


class CompilableTopKRouter(hf.DeepseekV4TopKRouter):
    """Router by the largest scores, in float32 for any dtype of the model."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and ids, see `_route`."""
        return _route(self, hidden_states, self.e_score_correction_bias.float(), None, None, self.top_k)


class CompilableHashRouter(hf.DeepseekV4HashRouter):
    """Router by a table of token ids."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and ids, see `_route`."""
        return _route(self, hidden_states, None, input_ids.reshape(-1), self.tid2eid, self.tid2eid.shape[1])


OWN_MATRICES = ("shared_w13", "shared_w13_scale")
"""Attributes of a `CompilableMoe` that are no parameters: matrices whose rows are those of the shared expert."""


class CompilableMoe(hf.DeepseekV4SparseMoeBlock):
    """Routed experts and the shared expert in one op, which reads weights where they are.

    `arrange` makes gate and up of the shared expert rows of one matrix. With `ranks`, each has a part of the weights,
    routed experts from `first_expert` on, and all parts are summed.
    """

    ranks: Ranks | None = None
    first_expert: int = 0
    shared_w13: Tensor | None
    shared_w13_scale: Tensor | None

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the sum of each token's experts, in the shape of `hidden_states` `[B, S, hidden]`."""
        check_autocast(hidden_states)
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
            self._gate_and_up("weight") if self.shared_w13 is None else self.shared_w13,
            down.weight,
            self._gate_and_up("weight_scale_inv") if self.shared_w13 is None else self.shared_w13_scale,
            _scale(down, "weight"),
            float(routed.limit),
            self.first_expert,
        )
        return all_reduce(out, self.ranks).view_as(hidden_states)

    def _gate_and_up(self, leaf: str) -> Tensor | None:
        """Return the shared expert's rows of gate and up, copied, for weights that must stay where they are."""
        rows: list[Any] = [
            getattr(projection, leaf, None)
            for projection in (self.shared_experts.gate_proj, self.shared_experts.up_proj)
        ]
        if rows[0] is None:
            return None
        return torch.cat([row.view(torch.uint8) for row in rows]).view(rows[0].dtype)

    def arrange(self) -> None:
        """Make the shared expert's gate and up rows of one matrix, in place, unless they are or cannot be."""
        parts = self.shared_experts.gate_proj, self.shared_experts.up_proj
        for name, leaf in (("shared_w13", "weight"), ("shared_w13_scale", "weight_scale_inv")):
            rows: list[Any] = [getattr(projection, leaf, None) for projection in parts]
            held = self.__dict__.get(name)
            # In __dict__, so that nn.Module does not register the matrix in addition to its rows.
            if rows[0] is None or any(map(in_shared_memory, rows)):
                self.__dict__[name] = None
            elif held is None or not are_rows(rows, held):
                with torch.inference_mode(False), torch.no_grad():
                    self.__dict__[name] = as_rows(rows)

    def release(self) -> None:
        """Drop the matrices, and move the parameters that are their rows to memory that is theirs alone."""
        for name, leaf in (("shared_w13", "weight"), ("shared_w13_scale", "weight_scale_inv")):
            if self.__dict__.pop(name, None) is not None:
                parts = self.shared_experts.gate_proj, self.shared_experts.up_proj
                release_rows(getattr(projection, leaf) for projection in parts)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the matrices, which a copy builds from the parameters."""
        return self.__dict__ | {"shared_w13": None, "shared_w13_scale": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.arrange()

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
        self.model = model
        self.moe = [layer.mlp for layer in model.layers]
        self.modules = [ReadModules(f"layer {i}", layer, READ, CALLED) for i, layer in enumerate(model.layers)]
        self.modules.append(ReadModules("the model", model, READ_HEAD))

    def adopt(self) -> None:
        """Let the layers run with the parameters that modules have now. Raises E208 for unsupported parameters."""
        for modules in self.modules:
            modules.check()
        tokens = embedding_weight(self.model).shape[0]
        for moe in self.moe:
            moe.arrange()
            check(
                not moe.is_hash or moe.gate.tid2eid.shape[0] >= tokens,
                "E208",
                got=f"an embedding of {tokens} tokens",
                why="the table of a hash router has fewer, and tokens beyond it would get experts of a different token",
                fix="extend mlp.gate.tid2eid of hash-routed layers, or convert with attention_only=True",
            )


SWAPS: dict[type, Any] = {
    hf.DeepseekV4DecoderLayer: CompilableDecoderLayer,
    hf.DeepseekV4HyperHead: CompilableHead,
    hf.DeepseekV4TopKRouter: CompilableTopKRouter,
    hf.DeepseekV4HashRouter: CompilableHashRouter,
    hf.DeepseekV4SparseMoeBlock: CompilableMoe,
}
"""Classes that `convert` swaps in for transformers', except those of attention and of the model."""
