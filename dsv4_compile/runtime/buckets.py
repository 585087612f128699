"""Sizes to capture: a batch runs in the smallest that holds it, its rows filled up with padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from ..errors import check


def padded_buckets(max_tokens: int, tokens_each: int = 1) -> tuple[int, ...]:
    """1, 2, 4, 8, ... requests of `tokens_each` tokens, and `max_tokens`: ascending numbers of tokens.

    Args:
        max_tokens: the largest batch to capture.
        tokens_each: tokens of each request, 1 + the number of speculative ones.
    """
    check(
        0 < tokens_each <= max_tokens,
        "E204",
        got=f"{max_tokens=}, {tokens_each=}",
        fix="tokens_each is 1 to max_tokens",
    )
    sizes = []
    requests = 1
    while requests * tokens_each < max_tokens:
        sizes.append(requests * tokens_each)
        requests *= 2
    return (*sizes, max_tokens)


class Buckets:
    """Ascending, distinct sizes, none above `capacity` (E204)."""

    def __init__(self, sizes: Iterable[int], capacity: int) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        check(
            bool(self.sizes) and self.sizes[0] > 0 and self.sizes[-1] <= capacity,
            "E204",
            got=f"buckets {list(self.sizes)} with buffers of {capacity} tokens",
            fix=f"choose buckets from 1 to {capacity}",
        )

    def fit(self, size: int) -> int | None:
        """The smallest bucket of at least `size`, or None."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def __iter__(self) -> Iterator[int]:
        """Largest first, the order of capture: what it leaves in the pool has room for all others."""
        return reversed(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)
