"""Constants of the engram's hash: primes and multipliers of each layer, and the compressed id of each token."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import check, needs
from .config import V41Config

IMAGE = -1
"""Compressed id of image tokens, which n-grams do not reach across."""
_SEED = 10007
_SPACES = str.maketrans(dict.fromkeys("\t\r\n", " "))
_LONE_SPACE, _UNKNOWN = "\ue000", "\ufffd"


@functools.cache
def consecutive_primes(least: int, count: int) -> tuple[int, ...]:
    """Return the first primes from `least` on."""
    import sympy  # type: ignore[import-untyped]  # late: it takes longer to import than this package

    values = [least - 1]
    for _ in range(count):
        values.append(int(sympy.nextprime(values[-1])))
    return tuple(values[1:])


@functools.cache
def primes(config: V41Config, layer: int) -> tuple[int, ...]:
    """Return the table sizes of a layer's hashes, those of 2-grams first: consecutive primes over all engram layers.

    Raises E205 if they do not add up to the rows that the configuration names.
    """
    index = config.engram_layers.index(layer)
    count = (config.engram_order - 1) * config.engram_heads
    values = consecutive_primes(config.engram_vocab_size, (index + 1) * count)
    mine = values[index * count :]
    rows = config.engram_rows[index]
    got = f"an engram of {rows} rows in layer {layer}"
    check(sum(mine) == rows, "E205", got=got, why=f"its {count} primes from {mine[0]} on have {sum(mine)}")
    return mine


def multipliers(config: V41Config, layer: int) -> tuple[int, ...]:
    """Return the odd factors of a layer's terms, drawn from numpy's generator of the seed 10007 * layer."""
    with needs("hf", "the engram of DeepSeek-V4.1"):
        import numpy
    bound = ((2**63 - 1) // config.engram_compressed_vocab) // 2
    drawn = numpy.random.default_rng(_SEED * layer).integers(0, bound, config.engram_order)
    return tuple(2 * int(value) + 1 for value in drawn)


def compressed_ids(config: V41Config, decode: Callable[[int], str], name: Callable[[int], str]) -> Tensor:
    """Return int32 `[vocab_size]`, equal for tokens whose texts differ in case, accents and spaces alone.

    Args:
        decode: text of a single token id, special tokens kept.
        name: name of a token in the tokenizer, for tokens that are no whole characters.

    Raises E205 if there are not as many ids as the configuration names.
    """
    numbers: dict[str, int] = {}
    ids = []
    for token in range(config.vocab_size):
        written = decode(token)
        key = name(token) if _UNKNOWN in written else _normalised(written)
        ids.append(numbers.setdefault(key, len(numbers)))
    got = f"{len(numbers)} compressed ids of {config.vocab_size} tokens"
    wanted = config.engram_compressed_vocab
    check(len(numbers) == wanted, "E205", got=got, why=f"the engram was trained with {wanted}; is it its tokenizer?")
    return token_map(config, ids)


def token_map(config: V41Config, ids: Sequence[int]) -> Tensor:
    """Return int32 `[vocab_size]`: the compressed id of each token, -1 for the image token."""
    table = torch.tensor(ids, dtype=torch.int32, device="cpu")
    if 0 <= config.image_token_id < config.vocab_size:
        table[config.image_token_id] = IMAGE
    return table


def _normalised(written: str) -> str:
    """Return a text without accents, case and repeated or outer spaces; the text itself if nothing is left."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", written))
    text = "".join(character for character in text if not unicodedata.combining(character)).lower()
    text = text.translate(_SPACES)
    while "  " in text:
        text = text.replace("  ", " ")
    text = (_LONE_SPACE if text == " " else text).strip().replace(_LONE_SPACE, " ")
    return text or written
