"""Sizes that steps are padded to, so that few graphs serve all: pure functions of the capacity.

print(token_buckets(8192))  # (64, 128, 192, 256, 368, 512, ...)
print({most: chunk_cost(32768, most) for most in (2048, 8192, 32768)})  # {2048: 2.4, 8192: 1.3, 32768: 1.0}
"""

from __future__ import annotations

import functools

from ..sizes import check_size

MOST_TOKENS = 8192
"""Most tokens of a captured prompt, or of a chunk of a longer one.

Every chunk reads all experts: by `chunk_cost`, four chunks of 2,048 tokens cost 1.9 times as much as 8,192 at once.
Twice as many tokens would save at most a seventh, and take twice the memory of activations, which captures hold.
"""
RIDGE = 256
"""Tokens at which arithmetic takes as long as reading the weights: an H100 does 295 bfloat16 operations a byte."""
EXPERTS_RIDGE = 3300
"""Tokens for which that holds for V4-Flash's routed experts: a token uses 6 of 256, which are read in MXFP4.

A layer's 6.4e9 weights take 1.0 ms at 0.53 bytes each, and 6 experts 0.31 us a token, at an H100's peak rates.
"""
_MULTIPLE = 16
"""Tokens of a bucket are a multiple, so that Triton compiles one variant of a kernel for all of them."""
_EXACT_TOKENS = 64
_EXACT_REQUESTS = 8


@functools.cache
def token_buckets(most: int) -> tuple[int, ...]:
    """Return the token counts that prompts of 1 to `most` tokens are padded to, ascending.

    A step of n tokens costs n + RIDGE: reading the weights, and arithmetic. Padding adds at most a quarter to that.
    Powers of two from 64 on, which chunks and prompts often have, are not padded.
    """
    sizes, below, end = list[int](), 0, _EXACT_TOKENS
    while below < check_size("most", most):
        sizes += _buckets_between(below, min(end, most))
        below, end = end, 2 * end
    return tuple(sizes)


def _buckets_between(below: int, most: int) -> list[int]:
    """Return the fewest buckets for more than `below` and up to `most` tokens, about equally far apart."""
    for count in range(1, most - below):
        ratio = ((most + RIDGE) / (below + RIDGE)) ** (1 / count)
        inner = [(below + RIDGE) * ratio**number - RIDGE for number in range(1, count)]
        sizes = [_MULTIPLE * round(size / _MULTIPLE) for size in inner] + [most]
        if all(
            4 * (size + RIDGE) <= 5 * (last + 1 + RIDGE) for last, size in zip([below, *sizes], sizes, strict=False)
        ):
            return sizes
    return [most]


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


def chunk_columns(rows: int, most: int, step_tokens: int) -> int:
    """Return the most columns of one step of a prompt of `rows` rows: `most` tokens, and `step_tokens` of a row."""
    return max(1, min(most // check_size("rows", rows), step_tokens))


def prompt_steps(rows: int, columns: int, most: int, step_tokens: int | None = None) -> tuple[int, ...]:
    """Return the buckets of the steps of a prompt `[rows, columns]`, see `chunk_columns`."""
    width = chunk_columns(rows, most, step_tokens or most)
    counts = [rows * min(width, columns - begin) for begin in range(0, check_size("columns", columns), width)]
    return tuple(next(size for size in token_buckets(most) if size >= count) for count in counts)


def chunk_cost(tokens: int, most: int) -> float:
    """Return the floor of a prompt's time in chunks of `most` tokens, relative to one step of all its tokens."""
    sizes = prompt_steps(1, tokens, most)
    return (sum(sizes) + len(sizes) * EXPERTS_RIDGE) / (tokens + EXPERTS_RIDGE)
