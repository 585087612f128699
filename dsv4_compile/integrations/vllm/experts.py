"""Router and experts of a decoder layer as two ops, `moe_route` and `moe_experts`.

Weights are float, e4m3 with 128x128 scales, or MXFP4 for routed experts, and stay in the format that they come in.
MXFP4 may be interleaved, which the kernels of Hopper for few tokens do not take: a decode step would lose a quarter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel import Ranks
from ...parallel.split import Split, part_of
from ...reference.moe.expert_weights import SCALE_COLUMNS, interleave_, scale_shape

_ops: Any = torch.ops.dsv4

FLOAT, E4M3, MXFP4 = "float", "e4m3", "mxfp4"


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of the experts' weights: of routed ones, of the shared one, and the dtype of scales of e4m3 weights."""

    routed: str
    shared: str
    scales: torch.dtype

    @classmethod
    def of(cls, hf: Any, index: int) -> Formats:
        """Read the formats of layer `index` in a checkpoint's configuration, as vLLM does.

        Experts are "fp4" unless `expert_dtype` says otherwise, and floating where the configuration leaves them out.
        """
        four = getattr(hf, "expert_dtype", "fp4") == "fp4"
        scales = torch.float8_e8m0fnu if four else torch.float32
        quantised = getattr(hf, "quantization_config", None)
        left_out = {f"{index}.ffn.experts", f"{index}.ffn.shared_experts"}
        if quantised:
            left_out &= {match[1] for name in unquantised(quantised) if (match := EXPERTS.match(name))}
        routed = FLOAT if f"{index}.ffn.experts" in left_out else MXFP4 if four else E4M3
        return cls(routed, FLOAT if f"{index}.ffn.shared_experts" in left_out else E4M3, scales)


EXPERTS = re.compile(r"(?:model\.)?layers\.(\d+\.ffn\.(?:shared_)?experts)(?:\.|$)")
"""Names in configurations that leave experts out of the quantisation."""


_MATRIX = re.compile(r"(?:experts\.(\d+)|shared_experts)\.w([123])\.(?:weight|scale)")
"""Names of experts' matrices: the expert's number, None for the shared one, and which of its three."""


def unquantised(quantisation: Any) -> list[str]:
    """Return the names that a checkpoint's `quantization_config` leaves out."""
    names = quantisation.get("ignored_layers") or quantisation.get("modules_to_not_convert") or ()
    return [str(name) for name in names]


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter of zeros on the default device. An engine that loads no weights then has experts of zeros."""
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Experts(nn.Module):
    """Router, routed experts and, unless there is none, the shared expert of one layer.

    Args:
        hf: configuration of the model, which `whole_limits` has nothing against.
        index: the layer's index; the first `num_hash_layers` route by a table of token ids.
        dtype: of floating weights.
        interleaved: keep MXFP4 weights interleaved where their sizes allow it.
        ranks: which have equal parts of the experts; `forward` returns a term of their sum. None for one rank.
        whole: ranks have whole routed experts, in their order, rather than rows of all of them.

    `w13` and `w2` are those of `reference.moe.moe_experts.ExpertsArguments`.
    """

    def __init__(
        self,
        hf: Any,
        index: int,
        dtype: torch.dtype,
        interleaved: bool = False,
        ranks: Ranks | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__()
        formats, hidden = Formats.of(hf, index), hf.hidden_size
        experts, self.top_k = hf.n_routed_experts, hf.num_experts_per_tok
        self.ranks, number = ranks, 1 if ranks is None else ranks.size
        rows = hf.moe_intermediate_size // number  # of the shared expert
        width = hf.moe_intermediate_size if whole else rows
        local_experts = range(experts) if ranks is None or not whole else range(*ranks.part(experts))
        self.own, self.whole = local_experts, whole
        self.scale, self.limit = float(hf.routed_scaling_factor), float(hf.swiglu_limit)
        hashed = index < hf.num_hash_layers
        self.gate = parameter(experts, hidden, dtype=dtype)
        self.bias = None if hashed else parameter(experts, dtype=torch.float32)
        self.tid2eid = parameter(hf.vocab_size, self.top_k, dtype=torch.int32) if hashed else None
        routed, shared = ((name, dtype, formats.scales) for name in (formats.routed, formats.shared))
        self.w13, self.w13_scale = _weight(routed, len(local_experts), 2 * width, hidden)
        self.w2, self.w2_scale = _weight(routed, len(local_experts), hidden, width)
        self.shared_w13 = self.shared_w2 = self.shared_w13_scale = self.shared_w2_scale = None
        if hf.n_shared_experts:
            self.shared_w13, self.shared_w13_scale = _weight(shared, 2 * rows, hidden)
            self.shared_w2, self.shared_w2_scale = _weight(shared, hidden, rows)
        fits = formats.routed == MXFP4 and hidden % SCALE_COLUMNS == 0 and width % SCALE_COLUMNS == 0
        self.interleaved = fits and interleaved

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Return the sum of the experts of x `[T, hidden_size]`, in its shape; `token_ids` `[T]` are its tokens.

        With ranks, the part of the sum that this rank has.
        """
        table = None if self.tid2eid is None else token_ids
        ids, weights = _ops.moe_route(x, self.gate, self.bias, table, self.tid2eid, self.top_k, self.scale)
        out: Tensor = _ops.moe_experts(
            x,
            ids,
            weights,
            self.w13,
            self.w2,
            self.w13_scale,
            self.w2_scale,
            self.shared_w13,
            self.shared_w2,
            self.shared_w13_scale,
            self.shared_w2_scale,
            self.limit,
            self.own.start,
            self.interleaved,
        )
        return out

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the part of a parameter that each tensor of the checkpoint fills, by its name there, `gate.weight`.

        All of them are filled, then `settle` is called.
        """
        yield "gate.weight", self.gate
        if self.bias is not None:
            yield "gate.bias", self.bias
        if self.tid2eid is not None:
            yield "gate.tid2eid", self.tid2eid
        for index, number in enumerate(self.own):
            for suffix, w13, w2 in (("weight", self.w13, self.w2), ("scale", self.w13_scale, self.w2_scale)):
                if w13 is not None and w2 is not None:
                    yield from _parts(f"experts.{number}", suffix, w13[index], w2[index])
        for suffix, w13, w2 in (
            ("weight", self.shared_w13, self.shared_w2),
            ("scale", self.shared_w13_scale, self.shared_w2_scale),
        ):
            if w13 is not None and w2 is not None:
                yield from _parts("shared_experts", suffix, w13, w2)

    def part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this rank has of a tensor of the checkpoint by its name, `experts.7.w1.scale`: None if nothing.

        Raises E701 unless ranks divide its rows.
        """
        match = _MATRIX.fullmatch(name)
        if self.ranks is None or match is None:
            return tensor
        if match[1] is not None and self.whole:
            others = set(range(self.gate.shape[0])) - set(self.own)
            return None if int(match[1]) in others else tensor
        return part_of(tensor, Split(1 if match[2] == "2" else 0), self.ranks)

    def settle(self) -> None:
        """Bring the weights into the order that `forward` reads, after all of them were filled."""
        for weight, scale in ((self.w13, self.w13_scale), (self.w2, self.w2_scale)):
            if self.interleaved and scale is not None:
                interleave_(weight.data, scale.data)


def _parts(name: str, suffix: str, w13: Tensor, w2: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield gate, up and down of one expert: halves of `w13`, and `w2`."""
    gate, up = w13.chunk(2)
    for number, weight in ((1, gate), (3, up), (2, w2)):
        yield f"{name}.w{number}.{suffix}", weight


def _weight(form: tuple[str, torch.dtype, torch.dtype], *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return a weight `[..., N, K]` in a format, with its scales, None if the format has none."""
    name, dtype, scales = form
    if name == FLOAT:
        return parameter(*shape, dtype=dtype), None
    if name == MXFP4:
        weight, scales = parameter(*shape[:-1], shape[-1] // 2, dtype=torch.uint8), torch.uint8
    else:
        weight = parameter(*shape, dtype=torch.float8_e4m3fn)
    return weight, parameter(*scale_shape(weight), dtype=scales)
