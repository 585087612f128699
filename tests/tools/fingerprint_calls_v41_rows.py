"""Calls for fingerprints of kernels, continued: rows of DeepSeek-V4.1's caches."""

from __future__ import annotations

from itertools import product

from dsv4_compile import layout
from tests.tools.fingerprint_calls import (
    F32,
    FLASH,
    KEY_D,
    SCALE,
    TOKENS,
    Calls,
    D,
    cache,
    ints,
    longs,
    register,
    rope,
    zeros,
)

FORMATS = {
    "window": ("mxfp8", layout.V41_WINDOW_BLOCK, D),
    "entry": ("nvfp4", layout.V41_ENTRY_BLOCK, D),
    "index key": ("mxfp4", layout.V41_ENTRY_BLOCK, KEY_D),
}
"""Format, rows of a page and channels of each cache."""


@register
def rope_quantize_insert() -> Calls:
    """Yield rows of each cache."""
    for tokens in TOKENS:
        for name, (fmt, page, dim) in FORMATS.items():
            rows = zeros(tokens, dim), cache(fmt, page, dim), longs(tokens), longs(tokens), rope(), page, fmt
            yield f"{name}, {tokens} tokens", rows


@register
def compress_pairs() -> Calls:
    """Yield values and gates of one projection, and the ring of a step with drafts."""
    for tokens in TOKENS:
        inputs = zeros(tokens, 2 * D, dtype=F32).chunk(2, dim=1)
        state = zeros(32, 8, 2 * D, dtype=F32)
        yield f"{tokens} tokens", (*inputs, state, longs(tokens), longs(tokens), zeros(D), 1e-20)


@register
def sparse_mla_mixed() -> Calls:
    """Yield a window with entries, and alone, of all heads and of a rank's, and V4's records."""
    pairs = {"entries": ("mxfp8", "nvfp4"), "window": ("mxfp8", ""), "records": ("fp8_ds_mla", "fp8_ds_mla")}
    for (name, (window, entry)), tokens, heads in product(pairs.items(), TOKENS, (FLASH.heads, FLASH.heads // 4)):
        page, entry_page = layout.V41_WINDOW_BLOCK, layout.V41_ENTRY_BLOCK
        second = (cache(entry, entry_page), ints(tokens, FLASH.topk)) if entry else (None, None)
        rows = cache(window, page), ints(tokens, layout.SLIDING_WINDOW), *second
        formats = window, page, entry or "plain", entry_page
        label = f"{name}, {tokens} tokens, {heads} heads"
        yield label, (zeros(tokens, heads, D), *rows, *formats, SCALE, zeros(heads, dtype=F32))
