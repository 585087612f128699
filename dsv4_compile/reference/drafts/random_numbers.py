"""Counter-based random numbers: Philox 4x32-10, keyed by a request's seed, counted by position and stream.

A number depends on nothing but its seed, position and stream, so a request draws the same numbers in any batch, in any
step and on every rank, without state. Key and counter, as 32-bit words:

    key     = (seed & 0xFFFFFFFF, seed >> 32)
    counter = (position & 0xFFFFFFFF, position >> 32, stream, 0)

Of the four words of the result the first two, w0 and w1, make a float64 of 53 random bits in [0, 1):

    uniform = ((w0 >> 5) * 2**26 + (w1 >> 6)) * 2**-53

The position is that of the token that is drafted, tested or chosen. At one position a draft, its test and the token
that replaces it take their numbers from different streams: the distribution is wrong if they share one.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROPOSAL, ACCEPTANCE, RESIDUAL = 0, 1, 2
"""Streams: to sample a draft, to test a draft, and to sample a token that was not drafted."""
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Return the float64 number in [0, 1) of each seed, position and stream.

    Args:
        seeds: int64, from 0 on.
        positions: int64, from 0 on, of a shape that broadcasts with seeds.
        stream: PROPOSAL, ACCEPTANCE or RESIDUAL, or an int64 tensor of these that broadcasts with the others.

    Returns:
        float64 of the shape that the arguments broadcast to.
    """
    zero = torch.zeros_like(positions)
    counter = positions & _WORD, positions >> 32 & _WORD, zero + stream, zero
    words = philox((seeds & _WORD, seeds >> 32 & _WORD), counter)
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of Philox 4x32-10. All words are int64 below 2**32, of shapes that broadcast."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two words; no intermediate passes 2**49."""
    low, high = factor * (word & 0xFFFF), factor * (word >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
