"""Counts of bins, and the n-th largest of a few keys, in the shared memory of a CTA on NVIDIA GPUs.

`tl.histogram` takes a ballot for each bit of each number; other GPUs use it, with fewer bins. Here an atomic
instruction counts, then a barrier follows. A CTA reserves the memory once, and each function leaves it cleared.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
"""Neighbouring bins that a thread reads at once."""
LISTED = tl.constexpr(32)
"""Most keys for `nth_largest`: one for each thread of a warp."""
_SPARE = 176
"""Bytes after the counters: three words of `read_one`, number of keys on the list, 32 keys, and two extents."""
_EXTENTS = tl.constexpr(160)
"""Offset of the extents from the end of the counters."""


@triton.constexpr_function
def _reserve(bins: int) -> str:
    """Return PTX that reserves shared memory for `bins` counters and _SPARE bytes; its address is $0."""
    return f"{{ .shared .align 16 .b8 counters[{4 * bins + _SPARE}]; mov.u32 $0, counters; }}"


_CLEAR = tl.constexpr("""{
    .reg .b32 zero;
    mov.b32 zero, 0;
    st.shared.v4.b32 [$1], {zero, zero, zero, zero};
    st.shared.v4.b32 [$1 + 16], {zero, zero, zero, zero};
    mov.b32 $0, 0;
}""")
_ADD = tl.constexpr("""{
    .reg .pred counted;
    setp.ge.s32 counted, $2, 0;
    @counted red.shared.add.u32 [$1], 1;
    mov.b32 $0, 0;
}""")
_ADD_ALL = tl.constexpr("""{
    red.shared.add.u32 [$1], 1;
    mov.b32 $0, 0;
}""")
_TAKE = tl.constexpr("""{
    .reg .b32 zero;
    mov.b32 zero, 0;
    ld.shared.v4.b32 {$0, $1, $2, $3}, [$8];
    ld.shared.v4.b32 {$4, $5, $6, $7}, [$8 + 16];
    st.shared.v4.b32 [$8], {zero, zero, zero, zero};
    st.shared.v4.b32 [$8 + 16], {zero, zero, zero, zero};
}""")
_PUT = tl.constexpr("""{
    .reg .pred put;
    setp.ne.b32 put, $5, 0;
    @put st.shared.v4.b32 [$1], {$2, $3, $4, $4};
    mov.b32 $0, 0;
}""")
_GET = tl.constexpr("""{
    .reg .b32 spare;
    ld.shared.v4.b32 {$0, $1, $2, spare}, [$3];
}""")
_ZERO = tl.constexpr("""{
    .reg .b32 zero;
    mov.b32 zero, 0;
    st.shared.b32 [$1], zero;
    mov.b32 $0, 0;
}""")
_LIST = tl.constexpr("""{
    .reg .pred listed;
    .reg .b32 i;
    setp.ne.b32 listed, $3, 0;
    @listed atom.shared.add.u32 i, [$1], 1;
    @listed mad.lo.u32 i, i, 4, $1;
    @listed st.shared.b32 [i + 16], $2;
    mov.b32 $0, 0;
}""")
_WIDEST = tl.constexpr("""{
    .reg .b32 most, least;
    mov.b32 most, 0x7fffffff;
    mov.b32 least, 0x80000000;
    st.shared.v4.b32 [$1], {most, least, most, least};
    mov.b32 $0, 0;
}""")
_WIDEN = tl.constexpr("""{
    .reg .b32 low, high, lane;
    .reg .pred first;
    redux.sync.min.s32 low, $2, 0xffffffff;
    redux.sync.max.s32 high, $3, 0xffffffff;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    @first red.shared.min.s32 [$1], low;
    @first red.shared.max.s32 [$1 + 4], high;
    mov.b32 $0, 0;
}""")
_PAIR = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
_READ = tl.constexpr("ld.shared.b32 $0, [$1];")
_STORE = tl.constexpr("""{
    .reg .pred taken;
    setp.ne.b32 taken, $3, 0;
    @taken st.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def reserve_counters(BINS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the address of BINS counters, which are zero after the next barrier. A program calls this once."""
    at = tl.zeros((), tl.int32)
    if NATIVE:
        at = tl.inline_asm_elementwise(_reserve(BINS), "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        group = at + tl.arange(0, BINS // GROUP) * (4 * GROUP)
        tl.inline_asm_elementwise(_CLEAR, "=r,r", [group], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(_ZERO, "=r,r", [at + 4 * BINS + 16], dtype=tl.int32, is_pure=False, pack=1)
        extents = at + (4 * BINS + _EXTENTS)
        tl.inline_asm_elementwise(_WIDEST, "=r,r", [extents], dtype=tl.int32, is_pure=False, pack=1)
    return at


@triton.jit
def count_bins(at, bins):
    """Count the int32 `bins` that are not negative; a barrier before the first call and after the last is needed."""
    tl.inline_asm_elementwise(_ADD, "=r,r,r", [at + 4 * bins, bins], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_all(at, bins, BINS: tl.constexpr):
    """Do what `count_bins` does without a branch for each bin: negative ones add to a word that `read_one` overwrites.

    For many bins that are negative or equal: the instruction adds up equal bins of a warp.
    """
    counter = at + 4 * tl.where(bins >= 0, bins, BINS)
    tl.inline_asm_elementwise(_ADD_ALL, "=r,r", [counter], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def block_extent(at, low, high, AGAIN: tl.constexpr, BINS: tl.constexpr):
    """Return the smallest of int32 `low` and the largest of `high`, of which each thread has one; after a barrier.

    A program calls this after `reserve_counters` and a barrier, and at most twice, the second time AGAIN.
    """
    p = at + (4 * BINS + _EXTENTS + 8 * AGAIN)
    args = [tl.zeros_like(low) + p, low, high]
    tl.inline_asm_elementwise(_WIDEN, "=r,r,r,r", args, dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return tl.inline_asm_elementwise(_PAIR, "=r,=r,r", [p], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def histogram(bins, BINS: tl.constexpr):
    """Return the counts `[BINS]` of the `bins` that are not negative, by `tl.histogram`."""
    bins = tl.ravel(bins)
    return tl.histogram(bins, BINS, mask=bins >= 0)


@triton.jit
def take_counts(at, BINS: tl.constexpr):
    """Read and clear the counters, a tensor for each member of a group. They are zero after the next barrier."""
    group = at + tl.arange(0, BINS // GROUP) * (4 * GROUP)
    return tl.inline_asm_elementwise(
        _TAKE, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [group],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_one(at, first, second, third, mask, BINS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the three int32, each as a scalar, of the one element where `mask` is set."""
    if NATIVE:
        put = [tl.zeros_like(first) + (at + 4 * BINS), first, second, third, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_PUT, "=r,r,r,r,r,r", put, dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        a, b, c = tl.inline_asm_elementwise(
            _GET, "=r,=r,=r,r", [at + 4 * BINS], dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        a = tl.sum(tl.where(mask, first, 0))
        b = tl.sum(tl.where(mask, second, 0))
        c = tl.sum(tl.where(mask, third, 0))
    return a, b, c


@triton.jit
def nth_largest(at, key, mask, number, n, BINS: tl.constexpr):
    """Return the n-th largest of the `number` keys where `mask` is set, and how many are larger and equal.

    `number` is at most LISTED.
    """
    p = at + 4 * BINS + 16
    tl.inline_asm_elementwise(_LIST, "=r,r,r,r", [p, key, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.inline_asm_elementwise(_ZERO, "=r,r", [p], dtype=tl.int32, is_pure=False, pack=1)
    o = tl.arange(0, LISTED)
    listed = tl.inline_asm_elementwise(_READ, "=r,r", [p + 16 + o * 4], dtype=tl.int32, is_pure=False, pack=1)
    before = tl.zeros((LISTED,), tl.int32)
    for i in range(number):
        other = tl.inline_asm_elementwise(_READ, "=r,r", [p + 16 + i * 4], dtype=tl.int32, is_pure=False, pack=1)
        before += ((other > listed) | ((other == listed) & (i < o))).to(tl.int32)
    live = o < number
    nth = tl.max(tl.where(live & (before == n - 1), listed, -(2**31)))
    larger = tl.sum((live & (listed > nth)).to(tl.int32))
    equal = tl.sum((live & (listed == nth)).to(tl.int32))
    return nth, larger, equal


@triton.jit
def store_in_place(pointers, values, mask, NATIVE: tl.constexpr):
    """Store int32 `values` from the threads that hold them; `tl.store` would exchange values and pointers first."""
    if NATIVE:
        args = [pointers.to(tl.int64, bitcast=True), values, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_STORE, "=r,l,r,r", args, dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointers, values, mask=mask)
