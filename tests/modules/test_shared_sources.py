"""Layers that read the compressed source of an earlier layer: one cache, no compressor, the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import DeepseekV4Config
from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.errors import DSV4Error
from dsv4_compile.metadata import build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.sources import ALL, TOPK, Source, groups_of
from dsv4_compile.testing import assert_bitwise

SMALL = DeepseekV4Config(
    hidden_size=32, num_heads=2, head_dim=32, rope_dim=8, q_lora_rank=16, o_groups=1, o_lora_rank=16, sliding_window=16,
    index_n_heads=2, index_head_dim=16, index_topk=4, yarn=None, max_position_embeddings=1024,
)  # fmt: skip
FORMAT = CacheFormat.resolve("float32")


def shared(*ratios: int, owners: Any) -> DeepseekV4Config:
    return replace(SMALL.with_layers(*ratios), source_layers=owners)


def test_sources_name_ratio_owner_and_selection() -> None:
    config = shared(1, 4, 4, 128, 4, 128, owners=(0, 1, 1, 3, 1, 3))
    assert [config.sources(i) for i in (0, 1, 4, 5)] == [
        (),
        (Source(4, 1, TOPK),),
        (Source(4, 1, TOPK),),
        (Source(128, 3, ALL),),
    ]
    assert SMALL.with_layers(4, 4).sources(1) == (Source(4, 1, TOPK),)


@pytest.mark.parametrize(
    ("ratios", "owners"),
    [
        ((4, 4), (1, 1)),
        ((4, 128), (0, 0)),
        ((4, 4, 4), (0, 0, 1)),
        ((4, 4), (0,)),
        ((4, 4), (-1, 0)),
        ((4,), (True,)),
        ((4,), 0),
    ],
)
def test_an_owner_is_an_earlier_layer_of_the_same_ratio(ratios: tuple[int, ...], owners: object) -> None:
    with pytest.raises(DSV4Error, match=r"(?s)E205.*an earlier layer of its ratio.*source_layers"):
        shared(*ratios, owners=owners)


def test_a_source_is_allocated_once() -> None:
    sizes = {"max_batch_size": 2, "max_seq_len": 512, "cache_format": FORMAT}
    one = PagedCaches(SMALL.with_layers(4), **sizes)
    caches = PagedCaches(shared(4, 128, 4, 4, owners=(0, 1, 0, 0)), **sizes)
    first, other, *readers = caches.layers
    assert all(reader.sources[0] is first.sources[0] for reader in readers)
    assert other.sources[0] is not first.sources[0]
    windows = len({layer.window.data_ptr() for layer in caches.layers})
    assert windows == 4
    of_source = one.nbytes - one.layers[0].window.untyped_storage().nbytes()
    of_windows = 4 * first.window.untyped_storage().nbytes()
    assert caches.nbytes == of_windows + of_source + other.nbytes - other.window.untyped_storage().nbytes()
    assert set(caches.block_tables.tensors()) == {group.name for group in groups_of()}


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_reader_gives_what_a_layer_with_the_same_source_of_its_own_gives(ratio: int) -> None:
    """Both get the hidden states of the owner, so that compressors of equal weights would write equal entries."""
    torch.manual_seed(0)
    configs = SMALL.with_layers(ratio, ratio), shared(ratio, ratio, owners=(0, 0))
    options = {"cache_format": FORMAT, "dtype": torch.float32}
    (owner, alone), (_, reader) = ([DeepseekV4Attention(config, i, **options) for i in (0, 1)] for config in configs)
    for parameter in (*owner.parameters(), *alone.parameters()):
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    weights = owner.state_dict()
    compressed = {name for name in weights if "compressor." in name}
    alone.load_state_dict(alone.state_dict() | {name: weights[name] for name in compressed})
    assert set(alone.state_dict()) - set(reader.state_dict()) == compressed
    reader.load_state_dict({name: value for name, value in alone.state_dict().items() if name not in compressed})
    separate, common = (
        PagedCaches(config, max_batch_size=2, max_seq_len=512, cache_format=FORMAT) for config in configs
    )
    lens = torch.zeros(2, dtype=torch.int64)
    for queries in ((140, 9), (1, 1), (3, 1), (1, 200)):
        lens += torch.tensor(queries)
        hidden = torch.randn(sum(queries), SMALL.hidden_size)
        outputs = []
        for caches, layer in ((separate, alone), (common, reader)):
            metadata = build_batch_metadata(
                query_start_loc=torch.tensor([0, queries[0], sum(queries)]),
                seq_lens=lens,
                num_tokens=sum(queries),
                block_tables=caches.block_tables,
                window=SMALL.sliding_window,
                max_model_len=caches.max_seq_len,
                ratios=(ratio,),
            )
            owner(hidden, metadata, caches.layers[0])
            outputs.append(layer(hidden, metadata, caches.layers[1]))
        assert outputs[0].abs().max() > 0
        assert_bitwise(outputs[1], outputs[0])
