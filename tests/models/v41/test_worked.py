"""Worked numbers of the tiny model: 40 tokens, without rounding (A) and with the grids of caches and indexer (B)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model
from dsv4_compile.reference.common.row_format import load_rows
from tests.models.v41.worked import TOKENS, token_ids

FORMATS = {"A": V41Format.plain(), "B": V41Format.plain(grids=True), "B bytes": V41Format(dtype=torch.float32)}
CHANNELS = [0, 1, 2, 61, 62, 63]


class Run(NamedTuple):
    """Results of the last token, and values that layers passed on."""

    logits: Tensor
    caches: V41Caches
    rms: list[float]
    selections: list[Any]
    coefficients: tuple[Tensor, ...]
    experts: list[int]
    engram: list[Any]


@pytest.fixture(scope="module", params=sorted(FORMATS))
def run(request: Any, worked: V41Model) -> tuple[str, Run]:
    rms, selections, coefficients, engram = [], [], [], []
    caches = worked.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS[request.param])

    def after_layer(_: Any, inputs: Any, outputs: Any) -> None:
        rms.append(float(outputs[0][-1].double().square().mean().sqrt()))
        selections.append(outputs[3])
        engram.append(inputs[2])

    routed: list[Tensor] = []
    hooks = [layer.register_forward_hook(after_layer) for layer in worked.layers]
    hooks.append(worked.layers[0].hc_attn.register_forward_hook(lambda *call: coefficients.append(call[2])))
    hooks.append(worked.layers[7].ffn.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[0])))
    with torch.no_grad():
        logits = worked(token_ids(), torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), caches)
    for hook in hooks:
        hook.remove()
    gate, config = worked.layers[7].ffn.gate, worked.config
    image = torch.zeros(TOKENS, dtype=torch.bool)
    ids, _ = torch.ops.dsv4.moe_route_images(routed[0], gate.weight, gate.bias, gate.bias_vl, image, 2, 1.5, 1.0)
    assert config.gate_temperature == 1.0
    last = tuple(values[-1] for values in coefficients[0])
    return request.param, Run(logits[-1], caches, rms, selections, last, sorted(ids[-1].tolist()), engram)


def close(got: Tensor | list[float], want: list[float]) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=5e-6
    )


def row(caches: V41Caches, name: str, layer: int, slot: int, channels: int) -> Tensor:
    cache = caches.windows[layer] if name == "window" else getattr(caches.sources[layer], name)
    stored = getattr(caches.cache_format, name)
    return load_rows(cache, stored, 32 if name == "window" else 64, torch.tensor(slot), channels)


def test_coefficients_of_the_first_layer(run: tuple[str, Run]) -> None:
    pre, post, comb = run[1].coefficients
    close(pre, [0.462884, 0.018566, 0.915064, 0.870739])
    close(post, [0.550304, 1.036619, 0.967135, 1.145295])
    close(comb.sum(0), [1 - 1e-6] * 4)


def test_rows_of_window_entries_and_keys(run: tuple[str, Run]) -> None:
    """All 64 channels of a window row are rounded in blocks of 32, rotated ones too; keys are made before entries."""
    name, result = run
    a = name == "A"
    window = row(result.caches, "window", 0, 39, 64)[CHANNELS]
    entry = row(result.caches, "entries", 2, 1, 64)[CHANNELS]
    key = row(result.caches, "keys", 2, 1, 32)[:3]
    want = [0.255823, -0.396628, -3.458645, 0.015714, 0.269286, -0.621293]
    close(window, want if a else [0.25, -0.40625, -3.5, 0.015625, 0.28125, -0.625])
    want = [0.349372, 0.004853, -0.291403, 3.351739, -0.029425, 0.797162]
    close(entry, want if a else [0.34375, 0, -0.34375, 3.375, 0, 0.84375])
    close(key, [0.713476, 1.431554, -0.201567] if a else [0.75, 1.5, -0.25])


def test_streams_after_each_layer(run: tuple[str, Run]) -> None:
    name, result = run
    a = [1.671118, 4.393554, 4.800104, 4.981675, 5.285777, 5.440379, 6.573638, 6.610652]
    b = [1.669657, 4.372810, 4.801201, 4.984447, 5.292135, 5.468418, 6.556873, 7.081150]
    close(result.rms, a if name == "A" else b)


def test_picks_candidates_and_experts(run: tuple[str, Run]) -> None:
    """Pages of one request are in order, so slots are entries."""
    name, result = run
    picks = {layer: [x for x in result.selections[layer].slots[-1].tolist() if x >= 0] for layer in (2, 3, 4, 5, 6, 7)}
    assert picks[2] == picks[3] == [1, 7, 11, 13, 17, 18]
    assert picks[4] == picks[5] == ([3, 17, 18, 25, 28, 34] if name == "A" else [3, 18, 21, 25, 28, 34])
    assert picks[6] == picks[7] == [24, 26, 27, 32, 34, 36]
    assert result.selections[4].candidates[-1].tolist() == [6, 8, 9]
    assert result.experts == ([3, 5] if name == "A" else [4, 5])


def test_logits(run: tuple[str, Run]) -> None:
    name, result = run
    a, b = [-0.776645, -0.549317, -1.563573, -1.218396], [-1.212999, -0.410466, -1.557201, -1.100077]
    close(result.logits[:4], a if name == "A" else b)
    assert int(result.logits.argmax()) == (62 if name == "A" else 26)


def test_rows_of_the_engram(run: tuple[str, Run]) -> None:
    rows = run[1].engram[1].numbers
    assert rows[0].tolist() == [40, 113, 167, 227, 280, 430]
    assert rows[39].tolist() == [13, 101, 163, 212, 331, 422]
    assert [index for index, rows in enumerate(run[1].engram) if rows is not None] == [1, 3]


def test_bytes_of_caches_give_the_bits_of_plain_rows_on_the_grids(worked: V41Model) -> None:
    results = []
    for name in ("B", "B bytes"):
        caches = worked.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS[name])
        with torch.no_grad():
            results.append(worked(token_ids(30), torch.arange(30), torch.zeros(30, dtype=torch.int64), caches))
    assert torch.equal(*results)
