"""Sizes that steps are padded to, so that few graphs serve all: pure functions of the capacity.

print(token_buckets(8192))  # (64, 144, 240, 368, 528, 720, ...)
"""

from __future__ import annotations

import functools

from ..sizes import check_size

MOST_TOKENS = 8192
"""Most tokens of a captured prompt, or of a chunk of a longer one: above it a graph saves no time."""
RIDGE = 256
"""Tokens at which arithmetic takes as long as reading the weights: an H100 does 295 bfloat16 operations a byte."""
_MULTIPLE = 16
"""Tokens of a bucket are a multiple, so that Triton compiles one variant of a kernel for all of them."""
_EXACT_REQUESTS = 8


@functools.cache
def token_buckets(most: int) -> tuple[int, ...]:
    """Return the token counts that prompts of 1 to `most` tokens are padded to, ascending.

    A step of n tokens costs n + RIDGE: reading the weights, and arithmetic. Padding adds at most a quarter to that.
    """
    sizes, least = [], 1
    while least <= check_size("most", most):
        size = (5 * (least + RIDGE) // 4 - RIDGE) // _MULTIPLE * _MULTIPLE
        sizes.append(min(size, most))
        least = size + 1
    return tuple(sizes)


@functools.cache
def request_buckets(most: int) -> tuple[int, ...]:
    """Return the batch sizes that decodes of 1 to `most` requests are padded to: each up to 8, then a quarter apart."""
    sizes, least = [], 1
    while least <= check_size("most", most):
        size = least if least <= _EXACT_REQUESTS else 5 * least // 4
        sizes.append(min(size, most))
        least = size + 1
    return tuple(sizes)


def chunk_tokens(max_batch_size: int, max_step_tokens: int) -> int:
    """Return the most tokens of one step of prompts in a cache of that capacity."""
    return min(max(MOST_TOKENS, max_batch_size), max_batch_size * max_step_tokens)
