"""Constants of the engram: published multipliers and primes, and texts that share a compressed id."""

from __future__ import annotations

import pytest

from dsv4_compile.errors import InputError
from dsv4_compile.models.v41 import V41Config
from dsv4_compile.models.v41.ngrams import compressed_ids, multipliers, primes
from dsv4_compile.models.v41.tiny import tiny_config


def test_published_multipliers() -> None:
    config = V41Config()
    assert multipliers(config, 1) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert multipliers(config, 14) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_published_primes_add_up_to_the_rows() -> None:
    config = V41Config()
    first, second = primes(config, 1), primes(config, 14)
    assert (first[0], first[-1], second[0], second[-1]) == (16000057, 16000463, 16000477, 16000889)
    assert (sum(first), sum(second)) == config.engram_rows


def ids(texts: list[str], names: list[str] | None = None) -> list[int]:
    """Compressed ids, first 0, of single tokens with these texts."""
    unique = 1 << 20
    for count in range(1, len(texts) + 1):
        config = tiny_config(vocab_size=len(texts), engram_compressed_vocab=count, engram_layers=(), engram_rows=())
        try:
            return compressed_ids(config, lambda token: texts[token], lambda token: (names or texts)[token]).tolist()
        except InputError:
            continue
    raise AssertionError(unique)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["Hello", "hello", " HELLO ", "hellö", "help"], [0, 0, 0, 0, 1]),
        ([" ", "\t", "  \n", "", "x"], [0, 0, 0, 1, 2]),
        (["a  b", "A\r\nb", "a b", "ab"], [0, 0, 0, 1]),
        (["ﬁ", "fi", "①", "1"], [0, 0, 1, 1]),
        (["<|end|>", "<|END|>", "<end>"], [0, 0, 1]),
    ],
)
def test_texts_that_differ_in_case_accents_and_spaces_share_an_id(texts: list[str], expected: list[int]) -> None:
    assert ids(texts) == expected


def test_parts_of_characters_are_known_by_their_names() -> None:
    assert ids(["�", "�", "a"], ["Ã", "Â", "a"]) == [0, 1, 2]


def test_another_number_of_ids_raises() -> None:
    with pytest.raises(InputError, match="2 compressed ids of 64 tokens"):
        compressed_ids(tiny_config(), lambda token: "ab"[token % 2], str)
