"""Mistakes that implementations of DeepSeek-V4.1 have made: each changes the logits, so worked numbers find it.

Others are found by tests of single ops: rounding grids, two-level selection, look-back of n-grams, 32x32 blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.config import Rope
from dsv4_compile.models.v41 import V41Caches, V41Config, V41Format, V41Model
from dsv4_compile.models.v41.attention import Attention, Compressor, Selection
from dsv4_compile.models.v41.fetch import TableRows
from dsv4_compile.models.v41.layers import Layer
from dsv4_compile.models.v41.step import Step
from dsv4_compile.models.v41.tiny import TINY, tiny_config
from dsv4_compile.reference.common.rope import apply_rope
from tests.models.v41.worked import TOKENS, token_ids, worked_model

LOGITS = torch.tensor([-0.776645, -0.549317, -1.563573, -1.218396])
"""The first logits of the last token."""


@torch.no_grad()
def logits(model: V41Model) -> Tensor:
    caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=V41Format.plain())
    return model(token_ids(), torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), caches)[-1, :4]


def own_pre(patch: pytest.MonkeyPatch) -> None:
    def collapse(self: Layer, streams: Tensor, pre: Tensor, norm: Any) -> Tensor:
        site = self.hc_attn if norm is self.attn_norm else self.hc_ffn
        return torch.ops.dsv4.mhc_collapse(streams, site(streams)[0], norm.weight, norm.eps)

    patch.setattr(Layer, "collapse", collapse)


def without_entries(ratio: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Layers of this ratio attend their window alone."""
    select = Attention._select

    def nothing(self: Attention, *args: Any) -> Selection:
        selection = select(self, *args)
        return selection._replace(slots=torch.full_like(selection.slots, -1)) if self.ratio == ratio else selection

    return lambda patch: patch.setattr(Attention, "_select", nothing)


def rotated_before_the_key(patch: pytest.MonkeyPatch) -> None:
    compress = Compressor.forward

    def rotated(self: Compressor, x: Tensor, step: Step, state: Tensor | None) -> Tensor:
        table = torch.cat((torch.full((64, 8), 0.6), torch.full((64, 8), 0.8)), 1)
        return apply_rope(compress(self, x, step, state), step.entry_positions(self.ratio), table)

    patch.setattr(Compressor, "forward", rotated)


def norm_of_each_head(patch: pytest.MonkeyPatch) -> None:
    attend = torch.ops.dsv4.sparse_mla_mixed
    patch.setattr(
        torch.ops.dsv4,
        "sparse_mla_mixed",
        lambda q, *args: attend(q * torch.rsqrt(q.square().mean(-1, keepdim=True)), *args),
    )


def engram_after_the_layer(patch: pytest.MonkeyPatch) -> None:
    forward = Layer.forward

    def late(self: Layer, streams: Tensor, pre: Tensor, rows: TableRows | None, step: Step, *args: Any) -> Any:
        streams, pre, after, selection = forward(self, streams, pre, None, step, *args)
        if rows is not None:
            streams = self.engram(streams, rows, step.is_image)
        return streams, pre, after, selection

    patch.setattr(Layer, "forward", late)


def picks_inside_own_candidates(patch: pytest.MonkeyPatch) -> None:
    topk = torch.ops.dsv4.index_topk_blocks

    def restricted(*args: Any) -> Any:
        _, candidates = topk(*args)
        return torch.ops.dsv4.index_topk(*args[:12], candidates, args[13]), candidates

    patch.setattr(torch.ops.dsv4, "index_topk_blocks", restricted)


def candidates_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Reindex layers select among all entries."""
    patch.setattr(Attention, "selects_candidates", property(lambda _: False, lambda *_: None), raising=False)


def keys_of_another_source(patch: pytest.MonkeyPatch) -> None:
    visible = Step.visible

    def one_less(self: Step, ratio: int) -> Tensor:
        return (visible(self, ratio) - 1).clamp_min(0)

    patch.setattr(Step, "visible", one_less)


def counts_of_the_request(patch: pytest.MonkeyPatch) -> None:
    """All tokens of the step see as much as its last one."""
    patch.setattr(Step, "visible", lambda self, ratio: (self.positions.max() + 1).expand_as(self.positions) // ratio)


def one_rope_table(patch: pytest.MonkeyPatch) -> None:
    """Compressed layers rotate as window-only layers do, without YaRN."""
    patch.setattr(V41Config, "rope", lambda self, _: Rope(self.rope_theta, self.rope_dim))


TRAPS = [
    own_pre,
    without_entries(1),
    without_entries(2),
    rotated_before_the_key,
    norm_of_each_head,
    engram_after_the_layer,
    picks_inside_own_candidates,
    candidates_everywhere,
    keys_of_another_source,
    counts_of_the_request,
    one_rope_table,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__qualname__.partition(".")[0])
def test_a_mistake_changes_the_logits(
    trap: Callable[[pytest.MonkeyPatch], None], worked: V41Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap(monkeypatch)
    assert (logits(worked) - LOGITS).abs().max() > 1e-3


def test_without_a_mistake_they_are_the_worked_numbers(worked: V41Model) -> None:
    torch.testing.assert_close(logits(worked), LOGITS, rtol=0, atol=5e-6)


def test_ids_are_compressed_before_they_are_hashed(worked: V41Model) -> None:
    """Ids 5 and 29 are the same compressed id, so the engram reads the same rows; 6 reads others."""
    rows = []
    for token in (5, 29, 6):
        caches = worked.new_caches(max_batch_size=1, max_seq_len=8, cache_format=V41Format.plain())
        ids = torch.tensor([3, token])
        step = worked._begin(ids, torch.arange(2), torch.zeros(2).long(), caches)
        rows.append(step[2][1].numbers)
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_nothing_of_v4_is_left_in_the_modules(worked: V41Model) -> None:
    """No position bias, head mix, hash table, head norm or indexer compressor; no gate of pooling at ratio 1."""
    names = {name for name, _ in (*worked.named_parameters(), *worked.named_buffers())}
    for leftover in ("ape", "hc_head", "tid2eid", "indexer.compressor", "position_bias"):
        assert not [name for name in names if leftover in name]
    assert "layers.2.attn.compressor.wgate.weight" in names and "layers.4.attn.compressor.wgate.weight" not in names


def test_a_source_owns_one_cache_that_the_layers_after_it_share(worked: V41Model) -> None:
    caches = worked.new_caches(max_batch_size=2, max_seq_len=100)
    assert sorted(caches.sources) == [2, 4] and len(caches.windows) == 8
    assert caches.sources[2].state is not None and caches.sources[4].state is None


def test_a_token_of_context_takes_890_bytes() -> None:
    """The real model has four sources, which its layers share; in bfloat16 a token takes 3,200 bytes."""
    for formats, size in (
        (None, 890),
        (V41Format.plain(torch.bfloat16), 3200),
        (V41Format("fp8_ds_mla", "fp8_ds_mla"), 1630),
    ):
        caches = V41Caches(
            V41Config(), max_batch_size=1, max_seq_len=1 << 14, max_step_tokens=64, cache_format=formats, device="meta"
        )
        assert caches.nbytes_per_token == pytest.approx(size, rel=0.01)
        assert sorted(caches.sources) == [2, 8, 14, 20]


def test_the_exact_tail_of_the_real_model_is_2414() -> None:
    config = V41Config()
    assert (config.exact_tail, config.last_source, config.sliding_window) == (2414, 20, 128)
    assert [tuple(config.sources(layer)) for layer in (1, 7, 19, 23, 24, 39)] == [
        (None, None),
        (2, 2),
        (14, 14),
        (20, 20),
        (20, 24),
        (20, 36),
    ]
    assert [layer for layer in range(40) if config.selects_candidates(layer) and layer in config.index_sources] == [
        24,
        28,
        32,
        36,
    ]


def test_image_tokens_take_the_image_bias_and_no_engram() -> None:
    model = worked_model()
    plain = logits(model)
    config = tiny_config(image_token_id=63)
    with_image = V41Model(config, torch.float32)
    with_image.load_state_dict(model.state_dict())
    with_image.token_map.copy_(model.token_map)
    with_image.token_map[63] = -1
    assert 63 in token_ids().tolist()
    assert (logits(with_image) - plain).abs().max() > 1e-3
    assert TINY["image_token_id"] == -1
