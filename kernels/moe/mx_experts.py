"""`mx_experts`: the launches of `moe_experts` with the roundings of DeepSeek-V4.1.

x is rounded to mxfp8 in a launch before, into the order of unpacked MXFP4 rows and, for a quantised shared expert, into
its own order. Hidden states are multiplied by routing weights and rounded as they are stored. Rounded values are exact
in bfloat16, and so are all weights times their scales: GEMMs multiply bfloat16 and add in float32. Experts' results are
rounded to bfloat16, and added in the order of a token's places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import MX_TILE as _MX_TILE
from ...layout import cdiv
from ...reference.moe.expert_weights import SCALE_COLUMNS, columns, weight_format
from ...reference.moe.moe_experts import ExpertsArguments
from ...reference.moe.mx_experts import MxExperts, is_quantised
from ..device.mx_values import rounded_mxfp8
from ..host.addresses import first_byte
from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from . import moe_experts, mx_experts_sm90
from .expert_gemm import unpacked_position
from .expert_operands import Problem, Rounding, Weights, weights_of
from .moe_experts import on_sm90

MX_TILE = tl.constexpr(_MX_TILE)
ROUNDED_COLUMNS = 1024
"""Elements of x that a CTA rounds."""
BLOCK_COLUMNS = {"mxfp4": SCALE_COLUMNS, "e4m3": _MX_TILE, "float": 64}
"""K of a weight is a multiple of this, by format."""


@triton.jit
def round_experts_input_kernel(
    p_unpacked,  # [T, HIDDEN] bfloat16, contiguous, in the order of unpacked MXFP4 rows, or None
    p_rounded,  # [T, HIDDEN] bfloat16, contiguous, or None
    p_x,  # [T, HIDDEN]
    x_strides,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round COLUMNS columns of a token to mxfp8."""
    pdl_prologue(PDL)
    BLOCKS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(p_x + token * x_strides[0] + o * x_strides[1], o < HIDDEN, 0.0).to(tl.float32)
    rounded = tl.reshape(rounded_mxfp8(tl.reshape(x, (COLUMNS // MX_TILE, MX_TILE))), (COLUMNS,)).to(tl.bfloat16)
    if p_rounded is not None:
        tl.store(p_rounded + token * HIDDEN + o, rounded, o < HIDDEN)
    if p_unpacked is not None:
        tl.store(p_unpacked + token * HIDDEN + unpacked_position(o), rounded, o < HIDDEN)


def round_input(x: Tensor, unpacked: bool, natural: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return `x` `[T, D]` rounded to mxfp8 in the order of unpacked MXFP4 rows, and as it is; None where not asked."""
    (tokens, hidden), device = x.shape, x.device

    def empty() -> Tensor:
        return torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)

    results = empty() if unpacked else None, empty() if natural else None
    programs = tokens * cdiv(hidden, ROUNDED_COLUMNS)
    launch_kernel(
        round_experts_input_kernel,
        (programs,),
        *results,
        x,
        x.stride(),
        HIDDEN=hidden,
        COLUMNS=ROUNDED_COLUMNS,
        num_warps=4,
        **pdl_arguments(device, programs),
    )
    return results


def arguments_of(call: MxExperts) -> ExpertsArguments:
    """Return the call as the launches of `moe_experts` take it."""
    fields = {name: value for name, value in call._asdict().items() if name != "quantize_input"}
    return ExpertsArguments(**fields | {"ids": call.ids.contiguous(), "weights": call.weights.contiguous()})


def rounding_of(call: MxExperts) -> Rounding:
    """Return which experts' inputs are rounded."""
    return Rounding(is_quantised(call, call.w13_scale), is_quantised(call, call.shared_w13_scale))


def problem_of(call: MxExperts, operands: Weights) -> Problem:
    """Return the sizes and formats of a call."""
    w13, w2, shared = operands
    shapes = None if shared is None else (shared[0].shape, shared[1].shape)
    return Problem(w13.shape, w2.shape, shapes, call.ids.shape[1], False, rounding_of(call))


def mx_experts(call: MxExperts) -> Tensor:
    """Add each token's experts up. Inputs are rounded as by the reference; sums of GEMMs are in a fixed order."""
    out = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    arguments, gpu, rounding = arguments_of(call), gpu_of(call.x.device), rounding_of(call)
    operands = weights_of(arguments, blocks=True)
    problem, passes = problem_of(call, operands), cdiv(len(out), moe_experts.MOST_TOKENS)
    for number in range(passes):
        rows = slice(len(out) * number // passes, len(out) * (number + 1) // passes)
        x, reordered = call.x[rows], None
        if on_sm90(gpu) and mx_experts_sm90.fits(problem, len(x)):
            one = arguments._replace(x=x, ids=arguments.ids[rows], weights=arguments.weights[rows])
            mx_experts_sm90.launch(one, operands, mx_experts_sm90.plan(problem, len(x), gpu), out[rows])
            continue
        if rounding.routed or rounding.shared:
            reordered, natural = round_input(x, rounding.routed, rounding.shared)
            x = x if natural is None else natural
        one = arguments._replace(x=x, ids=arguments.ids[rows], weights=arguments.weights[rows])
        pass_plan = moe_experts.plan(problem, len(x), gpu)
        assert isinstance(pass_plan, moe_experts.ExpertsPlan), "calls with roundings have no split plans"
        moe_experts.launch(one, operands, pass_plan, out[rows], reordered)
    return out


def why_unsupported_mx_experts(call: MxExperts) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    if call.x.dtype is not torch.bfloat16:
        return f"the kernels multiply bfloat16, x is {call.x.dtype}"
    if not 0 < call.w13.shape[0] <= moe_experts.MOST_EXPERTS:
        return f"the kernels take 1 to {moe_experts.MOST_EXPERTS} experts, not {call.w13.shape[0]}"
    if rounding_of(call) == (False, True):
        return "a rounded x of the shared expert comes with quantised routed experts, these are floating"
    for name in ("w13", "w2", "shared_w13", "shared_w2"):
        weight, scale = getattr(call, name), getattr(call, f"{name}_scale")
        kind, size = weight_format(weight), columns(weight)
        if kind == "float" and weight.dtype is not torch.bfloat16:
            return f"the kernels take floating weights in bfloat16, {name} is {weight.dtype}"
        if scale is not None and scale.dtype is torch.float32:
            return f"the kernels take scales that are powers of two, in bytes, those of {name} are {scale.dtype}"
        block = BLOCK_COLUMNS[kind]
        if size % block or weight.shape[-2] % 64 or size == 0:
            return f"{name} has N of a multiple of 64 and K of {block}, not {weight.shape[-2]} and {size}"
        if not weight.is_contiguous() or first_byte(weight) % 16 or not (scale is None or scale.is_contiguous()):
            return f"{name} is read by TMA: contiguous, at an address of a multiple of 16"
    return ""
