"""`moe_experts` on Hopper for so few tokens that an expert has about one: dot products on CUDA cores.

A tensor core would multiply a weight with eight columns, seven of them padding. Here a thread takes 32 elements of K of
each row of its CTA: it unpacks MXFP4 to pairs of float16 (e2m1 -> e4m3 -> float16), multiplies them with pairs of x in
two float16 FMAs at a time, and adds sums of four or eight products up in float32. The loads of a CTA are in flight
before its first product. Tokens that share an expert read its rows from L2.

Three launches. The first scales each row of x by a power of two and stores it in float16, packed in the order of
unpacked words, of MXFP4 and of e4m3 for the shared expert. `dot_gate_up` computes the hidden states of a place, or of
a token for the shared expert, and scales eight at a time; `dot_down` adds all places of a token up, so no sums of
places are stored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...layout import MX_TILE as _MX_TILE
from ...layout import WEIGHT_TILE as _WEIGHT_TILE
from ...reference.moe.moe_experts import ExpertsArguments
from ..device.quant import MAGNITUDE, MANTISSA_BITS, NAN_BITS, ue8m0_scale
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.pdl import pdl_constants, uses_pdl
from .expert_operands import Problem, Weights

MX_TILE, WEIGHT_TILE = tl.constexpr(_MX_TILE), tl.constexpr(_WEIGHT_TILE)
NIBBLES = tl.constexpr(8)  # elements of a word of MXFP4
BYTES = tl.constexpr(4)  # elements of a word of e4m3
E4M3_GROUP = tl.constexpr(16)  # elements of four words of e4m3, which a thread loads at once
E2M1_UNIT = tl.constexpr(64.0)  # e2m1 in the lower bits of e4m3 is the value by 64
LARGEST_MXFP4, LARGEST_E4M3 = tl.constexpr(13), tl.constexpr(4)
"""Exponents of the largest element in float16: eight products with 6 / 64, or four with 448, stay below 65504."""
ROWS = tl.constexpr(4)  # rows of a CTA of `down`
STATES = tl.constexpr(8)  # hidden states of a CTA, which have one scale
SMALLEST = tl.constexpr(20)  # lowest exponent of a row's largest element that is scaled fully
NOT_FINITE = tl.constexpr(255)

UNPACK_WORD = (
    "shl.b32 a, {w}, 2; and.b32 a, a, 0x1C1C1C1C; shl.b32 b, {w}, 4; lop3.b32 lo, a, b, 0x80808080, 0xF8; "
    "shr.u32 a, {w}, 2; and.b32 a, a, 0x1C1C1C1C; lop3.b32 hi, a, {w}, 0x80808080, 0xF8; "
    "mov.b32 {{h0, h1}}, lo; cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1; "
    "{first} fma.rn.f16x2 {s}, b, {x[1]}, {s}; "
    "mov.b32 {{h0, h1}}, hi; cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1; "
    "fma.rn.f16x2 {s}, a, {x[2]}, {s}; fma.rn.f16x2 {s}, b, {x[3]}, {s}; "
)
UNPACK_BYTES = (
    "mov.b32 {{h0, h1}}, {w}; cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1; "
    "{first} fma.rn.f16x2 {s}, b, {x[1]}, {s}; "
)
ADD_HALVES = "mov.b32 {{h0, h1}}, {s}; cvt.f32.f16 f, h0; cvt.f32.f16 g, h1; add.f32 f, f, g; "


def _dot(unpack: str, pairs: int, words: int, scaled: bool) -> str:
    """Return PTX that multiplies four words with `pairs` pairs of x for each.

    Sums of `words` words are float16; they are added up in float32, each times an operand if `scaled`.
    """
    text = "{ .reg .b32 a, b, lo, hi, s, t; .reg .b16 h0, h1; .reg .f32 f, g, sum; "
    for number in range(4):
        x = [f"${5 + number * pairs + pair}" for pair in range(pairs)]
        s = "st"[number // words % 2]
        first = f"fma.rn.f16x2 {s}, a, {x[0]}, {s};" if number % words else f"mul.rn.f16x2 {s}, a, {x[0]};"
        text += unpack.format(w=f"${1 + number}", first=first, s=s, x=x)
        if number % words == words - 1:
            factor, total = f"${5 + 4 * pairs + number // words}", "$0" if number == 3 else "sum"
            add = f"fma.rn.f32 {total}, f, {factor}, sum; " if scaled else f"add.f32 {total}, f, sum; "
            start = f"mul.f32 sum, f, {factor}; " if scaled else "mov.f32 sum, f; "
            text += ADD_HALVES.format(s=s) + (start if number < words else add)
    return text + "}"


DOT_MXFP4, DOT_E4M3 = tl.constexpr(_dot(UNPACK_WORD, 4, 2, False)), tl.constexpr(_dot(UNPACK_BYTES, 2, 2, False))
SCALED_DOT_MXFP4, SCALED_DOT_E4M3 = (
    tl.constexpr(_dot(UNPACK_WORD, 4, 1, True)),
    tl.constexpr(_dot(UNPACK_BYTES, 2, 2, True)),
)
LOAD = "{{ .reg .pred p; setp.ne.b32 p, $5, 0; {zeros} @p ld.global{kind}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
ZEROS = " ".join(f"mov.b32 ${number}, 0;" for number in range(4))
LOAD_WEIGHTS = tl.constexpr(LOAD.format(zeros=ZEROS, kind=".nc.L1::no_allocate"))
LOAD_STATES = tl.constexpr(LOAD.format(zeros=ZEROS, kind=""))
LOAD_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,l,r")
MXFP4_OPERANDS = tl.constexpr("=f" + ",r" * 20)
E4M3_OPERANDS = tl.constexpr("=f" + ",r" * 12)
SCALED_MXFP4_OPERANDS = tl.constexpr(MXFP4_OPERANDS.value + ",f" * 4)
SCALED_E4M3_OPERANDS = tl.constexpr(E4M3_OPERANDS.value + ",f" * 2)


MOST_TOKENS, MOST_ELEMENTS = 6, 8192
"""Most tokens of a call, and most elements of their hidden states of one place each: with more, tensor cores win."""
MOST_BLOCK, MOST_STEPS = 128, 3
"""Most groups of K that a CTA takes at a time, and steps of fewer that it may take so that no thread is idle."""
PACK_WARPS = 8


class DotShape(NamedTuple):
    """Compile-time sizes of a launch: of x and hidden states, places of a token, experts, and of a CTA.

    A CTA takes `block` groups of K of its rows at a time.
    """

    hidden: int
    inner: int
    shared_inner: int
    top_k: int
    experts: int
    block: int
    ptx: bool


@triton.jit
def packed_element(p, K: tl.constexpr, WORD: tl.constexpr):
    """Return which element of K is at position `p` of a row packed for words of WORD elements.

    The row is WORD / 2 runs of pairs, with one pair of each word: of MXFP4, whose words hold elements 0, 2, 4 and 6 in
    lower nibbles and 1, 3, 5 and 7 in upper ones, the pairs 0 2, 4 6, 1 3 and 5 7; of e4m3, 0 1 and 2 3.
    """
    RUN: tl.constexpr = 2 * (K // WORD)
    run, word, half = p // RUN, p % RUN // 2, p % 2
    if WORD == 8:
        element = run % 2 * 4 + half * 2 + run // 2
    else:
        element = run * 2 + half
    return word * WORD + element


@triton.jit
def packed_position(k, K: tl.constexpr, WORD: tl.constexpr):
    """Return at which position of a packed row element `k` is."""
    RUN: tl.constexpr = 2 * (K // WORD)
    if WORD == 8:
        position = (k % 2 * 2 + k // 4 % 2) * RUN + k // 2 % 2
    else:
        position = k // 2 % 2 * RUN + k % 2
    return position + k // WORD * 2


@triton.jit
def load_four(p_word, live, PTX: tl.constexpr, READ_ONLY: tl.constexpr):
    """Load the four words at 16 aligned bytes, of pointers and masks of one shape; return them one by one.

    One instruction loads them, whatever layout Triton would choose for words. Only weights are READ_ONLY: their loads
    may move before the end of earlier launches.
    """
    if PTX:
        live, p_word = tl.broadcast(live.to(tl.int32), p_word.to(tl.int64))
        if READ_ONLY:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOAD_WEIGHTS, LOAD_OPERANDS, [p_word, live], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
            )
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOAD_STATES, LOAD_OPERANDS, [p_word, live], (tl.int32, tl.int32, tl.int32, tl.int32), False, 1
            )
    else:
        w0 = tl.load(p_word, live, 0)
        w1 = tl.load(p_word + 1, live, 0)
        w2 = tl.load(p_word + 2, live, 0)
        w3 = tl.load(p_word + 3, live, 0)
    return w0, w1, w2, w3


@triton.jit
def _word_dot(w, x0, x1, x2, x3):
    """Return the float32 product of words of MXFP4 [ROWS, GROUPS] with their pairs of x [1, GROUPS]."""
    o = tl.arange(0, 8)[None, None, :]  # pairs 0, 2, 1 and 3, of two halves
    x = tl.join(tl.join(x0, x1), tl.join(x2, x3))[:, :, :, :, None] >> (16 * tl.arange(0, 2))
    x = tl.reshape(x, (1, w.shape[1], 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    w = w[:, :, None] >> (o // 2 % 2 * 4 + o // 4 * 16 + o % 2 * 8)
    e4m3 = ((w & 7) << 2 | (w & 8) << 4).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return tl.sum(e4m3.to(tl.float32) * x, 2)


@triton.jit
def _bytes_dot(w, x0, x1):
    """Return the float32 product of words of e4m3 [ROWS, GROUPS] with their pairs of x [1, GROUPS]."""
    x = tl.join(x0, x1)[:, :, :, None] >> (16 * tl.arange(0, 2))
    x = tl.reshape(x, (1, w.shape[1], 4)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    e4m3 = (w[:, :, None] >> (8 * tl.arange(0, 4))).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return tl.sum(e4m3.to(tl.float32) * x, 2)


@triton.jit
def load_mxfp4(weights, row, o_g, live, K: tl.constexpr, PTX: tl.constexpr):
    """Load the words and the bytes of scales [ROWS, GROUPS] of groups `o_g` of rows, both int64.

    `row` and `o_g` are [ROWS, GROUPS] or broadcast to it, `live` too. A thread loads the bytes of its groups: their
    alignment is not known to the compiler, which would exchange wider loads through shared memory.
    """
    p_weight, p_scale = weights
    zero = tl.program_id(1)
    words = load_four(p_weight + row * (K // NIBBLES) + o_g * 4, live, PTX, True)
    return words, tl.load(p_scale + (row * (K // MX_TILE) + o_g + zero), live, 0)


@triton.jit
def load_mxfp4_states(p_x, o_g, live, K: tl.constexpr, PTX: tl.constexpr):
    """Load the pairs of groups `o_g` of a packed row, four of a word after each other."""
    a0, a1, a2, a3 = load_four(p_x + o_g * 4, live, PTX, False)
    b0, b1, b2, b3 = load_four(p_x + K // NIBBLES + o_g * 4, live, PTX, False)
    c0, c1, c2, c3 = load_four(p_x + 2 * (K // NIBBLES) + o_g * 4, live, PTX, False)
    d0, d1, d2, d3 = load_four(p_x + 3 * (K // NIBBLES) + o_g * 4, live, PTX, False)
    return a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3


@triton.jit
def dots_mxfp4(loaded, x, factors, SCALED: tl.constexpr, PTX: tl.constexpr):
    """Return float32 [ROWS, GROUPS] products of groups of 32 elements, times their scales, by E2M1_UNIT.

    Takes `load_mxfp4` and `load_mxfp4_states`, and a factor, or if SCALED a tuple of one for each 8 elements of a
    group. A scale alone might exceed float32, so factors come before it.
    """
    words, byte = loaded
    w0, w1, w2, w3 = words
    a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3 = x
    if SCALED:
        f0, f1, f2, f3 = factors
        if PTX:
            acc = tl.inline_asm_elementwise(
                SCALED_DOT_MXFP4,
                SCALED_MXFP4_OPERANDS,
                [w0, w1, w2, w3, a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3, f0, f1, f2, f3],
                tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            acc = _word_dot(w0, a0, b0, c0, d0) * f0 + _word_dot(w1, a1, b1, c1, d1) * f1
            acc += _word_dot(w2, a2, b2, c2, d2) * f2 + _word_dot(w3, a3, b3, c3, d3) * f3
    else:
        if PTX:
            acc = tl.inline_asm_elementwise(
                DOT_MXFP4,
                MXFP4_OPERANDS,
                [w0, w1, w2, w3, a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3],
                tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            acc = _word_dot(w0, a0, b0, c0, d0) + _word_dot(w1, a1, b1, c1, d1)
            acc += _word_dot(w2, a2, b2, c2, d2) + _word_dot(w3, a3, b3, c3, d3)
        acc *= factors
    return acc * ue8m0_scale(byte.to(tl.int32))


@triton.jit
def load_e4m3(weights, row, first, o_g, K: tl.constexpr, PTX: tl.constexpr):
    """Load the words of `row` [ROWS, 1], of the tile of row `first`, and scales of groups `o_g` [1, GROUPS] of 16."""
    p_weight, p_scale = weights
    live = o_g < K // E4M3_GROUP
    words = load_four(p_weight + row.to(tl.int64) * (K // BYTES) + o_g * 4, live, PTX, True)
    o_tile = first // WEIGHT_TILE * tl.cdiv(K, WEIGHT_TILE) + o_g // (WEIGHT_TILE // E4M3_GROUP)
    scale = tl.load(p_scale + o_tile, live, 0)
    if scale.dtype == tl.uint8:
        scale = ue8m0_scale(scale.to(tl.int32))
    return words, scale


@triton.jit
def load_e4m3_states(p_x, o_g, K: tl.constexpr, PTX: tl.constexpr):
    """Load the pairs of groups `o_g` of a row packed for e4m3, two of a word after each other."""
    live = o_g < K // E4M3_GROUP
    a0, a1, a2, a3 = load_four(p_x + o_g * 4, live, PTX, False)
    b0, b1, b2, b3 = load_four(p_x + K // BYTES + o_g * 4, live, PTX, False)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def dots_e4m3(loaded, x, factors, SCALED: tl.constexpr, PTX: tl.constexpr):
    """Return float32 [ROWS, GROUPS] products of groups of 16 elements, times their scales.

    Takes `load_e4m3` and `load_e4m3_states`, and if SCALED a tuple of two factors for the halves of a group.
    """
    words, scale = loaded
    w0, w1, w2, w3 = words
    a0, b0, a1, b1, a2, b2, a3, b3 = x
    if SCALED:
        f0, f1 = factors
        if PTX:
            acc = tl.inline_asm_elementwise(
                SCALED_DOT_E4M3,
                SCALED_E4M3_OPERANDS,
                [w0, w1, w2, w3, a0, b0, a1, b1, a2, b2, a3, b3, f0, f1],
                tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            acc = (_bytes_dot(w0, a0, b0) + _bytes_dot(w1, a1, b1)) * f0
            acc += (_bytes_dot(w2, a2, b2) + _bytes_dot(w3, a3, b3)) * f1
    else:
        if PTX:
            acc = tl.inline_asm_elementwise(
                DOT_E4M3,
                E4M3_OPERANDS,
                [w0, w1, w2, w3, a0, b0, a1, b1, a2, b2, a3, b3],
                tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            acc = _bytes_dot(w0, a0, b0) + _bytes_dot(w1, a1, b1)
            acc += _bytes_dot(w2, a2, b2) + _bytes_dot(w3, a3, b3)
    return acc * scale


@triton.jit
def scaled_half(x, largest):
    """Scale float32 `x` [N] to exponent `largest`; return float16 and the float32 power of two that scales it back.

    An element that is not finite makes the scale NaN.
    """
    exponent = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, 0) >> MANTISSA_BITS
    capped = tl.maximum(exponent, SMALLEST)
    factor = ((254 - capped + largest) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == NOT_FINITE, NAN_BITS, (capped - largest) << MANTISSA_BITS)
    return (x * factor).to(tl.float16), scale.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def pack_experts_input_kernel(
    p_packed,  # [1 or 2, T, HIDDEN] float16
    p_row_scale,  # [1 or 2, T] float32
    p_x,
    x_strides,
    tokens,
    HIDDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scale a token's row of x to float16, packed for MXFP4, or in later programs for e4m3."""
    # Before the next launch starts, those before this one have ended: it reads ids and weights at once.
    if PDL:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    HIDDEN_POW2: tl.constexpr = triton.next_power_of_2(HIDDEN)
    program = tl.program_id(0)
    natural = program >= tokens
    token = (program % tokens).to(tl.int64)
    o = tl.arange(0, HIDDEN_POW2)
    element = tl.where(natural, packed_element(o, HIDDEN, BYTES), packed_element(o, HIDDEN, NIBBLES))
    x = tl.load(p_x + token * x_strides[0] + element * x_strides[1], o < HIDDEN, 0.0).to(tl.float32)
    half, scale = scaled_half(x, tl.where(natural, LARGEST_E4M3, LARGEST_MXFP4))
    tl.store(p_packed + program.to(tl.int64) * HIDDEN + o, half, o < HIDDEN)
    tl.store(p_row_scale + program, scale)


@triton.jit
def _shared_gate_up(p_x, p_scale, weights, first, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Return gate and up of the shared expert, float32 [STATES], for pointers to a token's packed row and its scale."""
    K: tl.constexpr = SHAPE.hidden
    BLOCK: tl.constexpr = SHAPE.block
    up_first = SHAPE.shared_inner + first
    o_row = tl.arange(0, STATES)[:, None]
    o_g = tl.arange(0, BLOCK)[None, :]
    gate_loaded = load_e4m3(weights, first + o_row, first, o_g, K, SHAPE.ptx)
    up_loaded = load_e4m3(weights, up_first + o_row, up_first, o_g, K, SHAPE.ptx)
    if PDL:
        gdc_wait()
    x = load_e4m3_states(p_x, o_g, K, SHAPE.ptx)
    gate = dots_e4m3(gate_loaded, x, None, False, SHAPE.ptx)
    up = dots_e4m3(up_loaded, x, None, False, SHAPE.ptx)
    for _ in tl.static_range(BLOCK, K // E4M3_GROUP, BLOCK):
        o_g += BLOCK
        x = load_e4m3_states(p_x, o_g, K, SHAPE.ptx)
        gate_loaded = load_e4m3(weights, first + o_row, first, o_g, K, SHAPE.ptx)
        up_loaded = load_e4m3(weights, up_first + o_row, up_first, o_g, K, SHAPE.ptx)
        gate += dots_e4m3(gate_loaded, x, None, False, SHAPE.ptx)
        up += dots_e4m3(up_loaded, x, None, False, SHAPE.ptx)
    scale = tl.load(p_scale)
    return tl.sum(gate, 1) * scale, tl.sum(up, 1) * scale


@triton.jit
def _gate_up(p_x, p_scale, weights, expert, first, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Return gate and up of an expert, float32 [STATES], for pointers to a token's packed row and its scale."""
    K: tl.constexpr = SHAPE.hidden
    BLOCK: tl.constexpr = SHAPE.block
    valid = (expert >= 0) & (expert < SHAPE.experts)
    o_gate = expert * (2 * SHAPE.inner) + first + tl.arange(0, STATES)[:, None]
    o_up = SHAPE.inner + o_gate
    o_g = tl.arange(0, BLOCK)[None, :]
    live = valid & (o_g < K // MX_TILE)
    gate_loaded = load_mxfp4(weights, o_gate, o_g, live, K, SHAPE.ptx)
    up_loaded = load_mxfp4(weights, o_up, o_g, live, K, SHAPE.ptx)
    if PDL:
        gdc_wait()
    factor = tl.load(p_scale) * E2M1_UNIT
    x = load_mxfp4_states(p_x, o_g, live, K, SHAPE.ptx)
    gate = dots_mxfp4(gate_loaded, x, factor, False, SHAPE.ptx)
    up = dots_mxfp4(up_loaded, x, factor, False, SHAPE.ptx)
    for _ in tl.static_range(BLOCK, K // MX_TILE, BLOCK):
        o_g += BLOCK
        live = valid & (o_g < K // MX_TILE)
        x = load_mxfp4_states(p_x, o_g, live, K, SHAPE.ptx)
        gate_loaded = load_mxfp4(weights, o_gate, o_g, live, K, SHAPE.ptx)
        up_loaded = load_mxfp4(weights, o_up, o_g, live, K, SHAPE.ptx)
        gate += dots_mxfp4(gate_loaded, x, factor, False, SHAPE.ptx)
        up += dots_mxfp4(up_loaded, x, factor, False, SHAPE.ptx)
    return tl.sum(gate, 1), tl.sum(up, 1)


@triton.jit
def _store_states(states, gate, up, row, first, limit, largest, INNER: tl.constexpr, WORD: tl.constexpr):
    """Store STATES hidden states, from element `first` of a row on, of gate and up [STATES], and their scale."""
    p_hidden, p_scale = states
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    half, scale = scaled_half(gate / (1 + tl.exp(-gate)) * up, largest)
    position = packed_position(first + tl.arange(0, STATES), INNER, WORD)
    tl.store(p_hidden + row * INNER + position, half)
    tl.store(p_scale + row * (INNER // STATES) + first // STATES, scale)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def dot_gate_up_kernel(
    states,  # [places, INNER] float16, packed, and [places, INNER / STATES] float32
    shared_states,  # [T, SHARED_INNER] and [T, SHARED_INNER / STATES]
    packed,  # [1 or 2, T, HIDDEN / 2] pairs, and [1 or 2, T] float32
    p_ids,  # [places]
    weights,
    shared_weights,
    tokens,
    places,
    first_expert,
    limit,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute STATES hidden states of a place, or of a token for the shared expert."""
    if PDL:
        gdc_launch_dependents()
    p_packed, p_row_scale = packed
    program = tl.program_id(0)
    shared = tokens * (SHAPE.shared_inner // STATES)
    if program >= shared:
        place = ((program - shared) % places).to(tl.int64)
        first = (program - shared) // places * STATES
        expert = (tl.load(p_ids + place) - first_expert).to(tl.int64)
        token = place // SHAPE.top_k
        p_x = p_packed + token * (SHAPE.hidden // 2)
        gate, up = _gate_up(p_x, p_row_scale + token, weights, expert, first, SHAPE, PDL)
        _store_states(states, gate, up, place, first, limit, LARGEST_MXFP4, SHAPE.inner, NIBBLES)
    else:
        if SHAPE.shared_inner > 0:  # not `elif`, which would compile the branch without a shared expert
            token = (program % tokens).to(tl.int64)
            first = program // tokens * STATES
            p_x = p_packed + (tokens + token) * (SHAPE.hidden // 2)
            gate, up = _shared_gate_up(p_x, p_row_scale + tokens + token, shared_weights, first, SHAPE, PDL)
            _store_states(shared_states, gate, up, token, first, limit, LARGEST_E4M3, SHAPE.shared_inner, BYTES)


@triton.jit
def load_places(weights, p_ids, o_row, o_g, first_expert, SHAPE: tl.constexpr):
    """Load words of groups `o_g` [1, GROUPS] of all places of a token, their scales and their mask."""
    GROUPS: tl.constexpr = SHAPE.inner // MX_TILE
    i = o_g // GROUPS
    expert = (tl.load(p_ids + i, i < SHAPE.top_k, -1) - first_expert).to(tl.int64)
    live = (i < SHAPE.top_k) & (expert >= 0) & (expert < SHAPE.experts)
    row = expert * SHAPE.hidden + o_row[:, None]
    return load_mxfp4(weights, row, o_g % GROUPS, live, SHAPE.inner, SHAPE.ptx), live


@triton.jit
def dots_of_places(loaded, live, p_x, p_scale, p_weights, o_g, SHAPE: tl.constexpr):
    """Return float32 [ROWS, GROUPS] products of `load_places` with the hidden states of all places of a token."""
    GROUPS: tl.constexpr = SHAPE.inner // MX_TILE
    weight = tl.load(p_weights + o_g // GROUPS, live, 0.0) * E2M1_UNIT
    p_factor = p_scale + 4 * o_g
    f0, f1 = tl.load(p_factor, live, 0.0) * weight, tl.load(p_factor + 1, live, 0.0) * weight
    f2, f3 = tl.load(p_factor + 2, live, 0.0) * weight, tl.load(p_factor + 3, live, 0.0) * weight
    # The hidden states of places follow each other, the runs of one do not.
    o_x = o_g % GROUPS + o_g // GROUPS * (SHAPE.inner // 2 // 4)
    x = load_mxfp4_states(p_x, o_x, live, SHAPE.inner, SHAPE.ptx)
    return tl.where(live, dots_mxfp4(loaded, x, (f0, f1, f2, f3), True, SHAPE.ptx), 0.0)


@triton.jit
def dots_of_shared(loaded, p_x, p_scale, o_g, SHAPE: tl.constexpr):
    """Return float32 [ROWS, GROUPS] products of `load_e4m3` with a token's hidden states of the shared expert."""
    live = o_g < SHAPE.shared_inner // E4M3_GROUP
    factors = tl.load(p_scale + 2 * o_g, live, 0.0), tl.load(p_scale + 2 * o_g + 1, live, 0.0)
    x = load_e4m3_states(p_x, o_g, SHAPE.shared_inner, SHAPE.ptx)
    return dots_e4m3(loaded, x, factors, True, SHAPE.ptx)


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def dot_down_kernel(
    p_out,  # [T, HIDDEN] bfloat16
    states,  # [places, INNER / 2] pairs, packed, and [places, INNER / STATES] float32
    shared_states,  # [T, SHARED_INNER / 2] and [T, SHARED_INNER / STATES]
    p_ids,  # [places]
    p_weights,  # [places] float32
    weights,
    shared_weights,
    tokens,
    first_expert,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS elements of a token's result."""
    if PDL:
        gdc_launch_dependents()
    K: tl.constexpr = SHAPE.inner
    SHARED_K: tl.constexpr = SHAPE.shared_inner
    TOP_K: tl.constexpr = SHAPE.top_k
    BLOCK: tl.constexpr = SHAPE.block
    token = (tl.program_id(0) % tokens).to(tl.int64)
    first = tl.program_id(0) // tokens * ROWS
    o_row = first + tl.arange(0, ROWS)
    o_g = tl.arange(0, BLOCK)[None, :]
    p_ids, p_weights = p_ids + token * TOP_K, p_weights + token * TOP_K
    p_x, p_scale = states
    p_x, p_scale = p_x + token * (TOP_K * K // 2), p_scale + token * (TOP_K * K // STATES)
    loaded, shared_loaded = (), ()
    for k in tl.static_range(0, TOP_K * K // MX_TILE, BLOCK):
        loaded += (load_places(weights, p_ids, o_row, o_g + k, first_expert, SHAPE),)  # type: ignore[assignment]
    if SHARED_K > 0:
        SHARED_BLOCK: tl.constexpr = min(BLOCK, triton.next_power_of_2(SHARED_K // E4M3_GROUP))
        o_shared = tl.arange(0, SHARED_BLOCK)[None, :]
        for k in tl.static_range(0, SHARED_K // E4M3_GROUP, SHARED_BLOCK):
            part = load_e4m3(shared_weights, o_row[:, None], first, o_shared + k, SHARED_K, SHAPE.ptx)
            shared_loaded += (part,)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(0, TOP_K * K // MX_TILE, BLOCK):
        acc += dots_of_places(loaded[k // BLOCK][0], loaded[k // BLOCK][1], p_x, p_scale, p_weights, o_g + k, SHAPE)
    sums = tl.sum(acc, 1)
    if SHARED_K > 0:
        p_x, p_scale = shared_states
        p_x, p_scale = p_x + token * (SHARED_K // 2), p_scale + token * (SHARED_K // STATES)
        shared = tl.zeros((ROWS, SHARED_BLOCK), tl.float32)
        for k in tl.static_range(0, SHARED_K // E4M3_GROUP, SHARED_BLOCK):
            shared += dots_of_shared(shared_loaded[k // SHARED_BLOCK], p_x, p_scale, o_shared + k, SHAPE)
        sums += tl.sum(shared, 1)
    tl.store(p_out + token * SHAPE.hidden + o_row, sums.to(p_out.dtype.element_ty))


class FewTokensPlan(NamedTuple):
    """The launches of a call: their CTAs, compile-time sizes, and whether they use PDL."""

    pack: int
    pack_pdl: bool
    gate_up: int
    gate_up_shape: DotShape
    gate_up_pdl: bool
    down: int
    down_shape: DotShape
    down_pdl: bool

    @property
    def variant(self) -> FewTokensPlan:
        """The plan without the numbers of CTAs."""
        return self._replace(pack=0, gate_up=0, down=0)


def fits(problem: Problem, tokens: int) -> bool:
    """Return whether the launches take a call: its formats, and few tokens."""
    formats = problem.w13.kind, problem.w2.kind, *(weight.kind for weight in problem.shared or ())
    taken = formats[:2] == ("mxfp4", "mxfp4") and set(formats[2:]) <= {"e4m3"}
    few = tokens <= MOST_TOKENS and tokens * problem.w2.size <= MOST_ELEMENTS
    return taken and few and not problem.interleaved


def block_of(groups: int) -> int:
    """Return how many groups of K a CTA takes at a time: all of them in few steps, or as many as it may."""
    whole = 32 * math.gcd(max(1, groups // 32), MOST_BLOCK // 32)
    return whole if groups <= MOST_STEPS * whole else min(MOST_BLOCK, 2 ** int(math.log2(groups)))


def plan_few(problem: Problem, tokens: int, gpu: Gpu) -> FewTokensPlan:
    """Return the launches of a call that fits."""
    hidden, inner, top_k, shared = problem.w13.size, problem.w2.size, problem.top_k, problem.shared
    shared_inner, ptx = shared[1].size if shared else 0, gpu.backend == "cuda"
    block = block_of(hidden // MX_TILE.value)
    shape = DotShape(hidden, inner, shared_inner, top_k, problem.w13.experts, block, ptx)
    down_shape = shape._replace(block=block_of(top_k * inner // MX_TILE.value))
    pack = (2 if shared else 1) * tokens
    gate_up = tokens * (top_k * inner + shared_inner) // STATES.value
    down = tokens * (hidden // ROWS.value)
    return FewTokensPlan(
        pack=pack,
        pack_pdl=uses_pdl(gpu, pack),
        gate_up=gate_up,
        gate_up_shape=shape,
        gate_up_pdl=uses_pdl(gpu, gate_up),
        down=down,
        down_shape=down_shape,
        down_pdl=uses_pdl(gpu, down),
    )


def launch(call: ExpertsArguments, weights: Weights, plan: FewTokensPlan, out: Tensor) -> None:
    """Fill `out` with the results of a call that fits."""
    (tokens, hidden), top_k, device, (w13, w2, shared) = call.x.shape, call.ids.shape[1], call.x.device, weights
    shape = plan.gate_up_shape

    def new(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    def new_states(rows: int, inner: int) -> tuple[Tensor, Tensor] | None:
        """Return hidden states and their scales."""
        return (new(torch.float16, rows, inner), new(torch.float32, rows, inner // STATES.value)) if inner else None

    def pairs(states: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        return None if states is None else (states[0].view(torch.int32), states[1])

    rows = 1 if shared is None else 2
    packed = new(torch.float16, rows, tokens, hidden), new(torch.float32, rows, tokens)
    launch_kernel(
        pack_experts_input_kernel,
        (plan.pack,),
        *packed,
        call.x,
        call.x.stride(),
        tokens,
        HIDDEN=hidden,
        num_warps=PACK_WARPS,
        **pdl_constants(plan.pack_pdl),
    )

    def operands(number: int) -> tuple[Any, Any]:
        """Return the words and scales of a launch's weights, and those of the shared expert."""
        routed = (w13, w2)[number]
        assert routed.scale is not None
        first = routed.values, routed.scale.view(torch.uint8)
        if shared is None:
            return first, None
        return first, (shared[number].values.view(torch.int32), shared[number].scale)

    states, shared_states = new_states(tokens * top_k, shape.inner), new_states(tokens, shape.shared_inner)
    launch_kernel(
        dot_gate_up_kernel,
        (plan.gate_up,),
        states,
        shared_states,
        pairs(packed),
        call.ids,
        *operands(0),
        tokens,
        tokens * top_k,
        call.first_expert,
        float(call.limit),
        SHAPE=shape,
        num_warps=shape.block // 32,
        **pdl_constants(plan.gate_up_pdl),
    )
    launch_kernel(
        dot_down_kernel,
        (plan.down,),
        out,
        pairs(states),
        pairs(shared_states),
        call.ids,
        call.weights,
        *operands(1),
        tokens,
        call.first_expert,
        SHAPE=plan.down_shape,
        num_warps=plan.down_shape.block // 32,
        **pdl_constants(plan.down_pdl),
    )
