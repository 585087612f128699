"""Tables of the engram in host memory: placement, equal results, and rows that are fetched ahead."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError, RankError
from dsv4_compile.models.v41 import V41Format, V41Model, load, save_folder, tables
from dsv4_compile.models.v41.splitting import keep_part
from dsv4_compile.models.v41.tables import TABLE, on_host
from dsv4_compile.models.v41.tiny import tiny_config, tiny_model
from dsv4_compile.parallel import Ranks
from dsv4_compile.runtime import host_memory
from dsv4_compile.testing import assert_bitwise
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_loading import tokenizer
from tests.models.v41.worked import token_ids

CUDA, GB = torch.device("cuda"), 10**9
FLOATS = V41Format.plain()


@torch.no_grad()
def chunks(model: V41Model, step: Any = None) -> Tensor:
    """Return logits of two steps of a prompt, after a step that encodes its first tokens."""
    caches = model.new_caches(max_batch_size=2, max_seq_len=32, cache_format=FLOATS)
    ids, positions = token_ids(), torch.arange(19)
    model.encode(ids[:7], positions[:7], torch.zeros(7).long(), caches)
    run = model if step is None else step
    return torch.cat([run(ids[a:b], positions[a:b], torch.zeros(b - a).long(), caches) for a, b in ((7, 15), (15, 19))])


def fetching(model: V41Model) -> V41Model:
    """Return a copy that fetches rows of its tables ahead."""
    model = copy.deepcopy(model)
    for layer in model._stack():
        if layer.has_engram:
            layer.engram.ahead = True
    return model


def test_rows_that_are_fetched_ahead_are_those_of_the_layer() -> None:
    model = tiny_model()
    assert_bitwise(chunks(fetching(model)), chunks(model))


def test_a_compiled_step_fetches_before_the_first_layer_and_waits_in_the_engrams() -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([name.removesuffix(".default") for name in calls])
        return graph

    model = fetching(tiny_model(**KINDS))
    torch.compiler.reset()
    got = chunks(model, torch.compile(model, backend=backend, fullgraph=True, dynamic=True))
    assert_bitwise(got, chunks(model))
    for names in graphs:
        order = ["dsv4_stream.fetch", "dsv4.mhc_collapse", "dsv4_stream.take", "dsv4.engram_gate"]
        places = [names.index(name) for name in order]
        assert places == sorted(places)
        assert "dsv4.engram_embed" not in names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v41")
    save_folder(tiny_model(image_token_id=63), path, tokenizer=tokenizer())
    return path


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_folder_is_loaded_with_tables_in_host_memory(
    folder: Path, dequantize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the device; memory of tables is in pages apart, and is locked when it is filled."""
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "dequantize": dequantize}
    want, locked = load(folder, **options), list[Tensor]()
    monkeypatch.setattr("dsv4_compile.models.v41.loading.on_host", lambda *_: True)

    def on_gpu(table: Tensor, _: torch.device) -> Tensor:
        locked.append(table.clone())
        return table

    monkeypatch.setattr(host_memory, "on_gpu", on_gpu)
    model = load(folder, engram="host", **options)
    named = [parameter for name, parameter in model.named_parameters() if TABLE.fullmatch(name)]
    assert len(named) == len(locked) == (2 if dequantize else 4)
    for parameter, filled in zip(named, locked, strict=True):
        assert parameter.data_ptr() % 4096 == 0 and not parameter.requires_grad
        assert torch.equal(parameter.view(torch.uint8), filled.view(torch.uint8))
    for got, other in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(got.view(torch.uint8), other.view(torch.uint8))
    assert [layer.engram.ahead for layer in model._stack() if layer.has_engram] == [True, True]
    assert_bitwise(chunks(model), chunks(want))


def test_engrams_after_the_last_source_read_their_table_in_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is encoded ends before them, so nobody would wait for their rows."""
    monkeypatch.setattr(host_memory, "on_gpu", lambda table, _: table)
    model = tiny_model(engram_layers=(1, 6))
    tables.lock_tables(model, torch.device("cpu"))
    assert [model._stack()[layer].engram.ahead for layer in (1, 6)] == [True, False]


def test_tables_go_to_host_memory_where_the_device_would_keep_no_room_for_caches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = V41Model(tiny_config(), torch.bfloat16, quantised=True)
    size = sum(parameter.nbytes for parameter in model.parameters())
    free = {"cuda": size, "cpu": GB}
    for module in ("dsv4_compile.models.v41.tables", "dsv4_compile.sizes"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: free[device.type])
    assert not on_host(model, "device", CUDA)
    with caplog.at_level(logging.WARNING, "dsv4_compile.models"):
        assert on_host(model, "auto", CUDA) and on_host(model, "host", CUDA)
    assert caplog.text.count("tables of the engram in host memory: 0.00 GB") == 2
    free["cuda"] = 2 * size
    assert not on_host(model, "auto", CUDA) and on_host(model, "host", CUDA)
    assert not any(on_host(model, choice, torch.device("cpu")) for choice in tables.PLACES)
    for changed, choice, what in (
        ({"cuda": size // 2}, "device", "tables of the engram included"),
        ({"cuda": size // 9}, "host", "weights without tables"),
        ({"cpu": 9}, "host", "of tables of the engram for"),
    ):
        free |= {"cuda": size, "cpu": GB} | changed
        with pytest.raises(Exception, match=f"E210(.|\n)*{what}"):
            on_host(model, choice, CUDA)
    with pytest.raises(InputError, match=r"E201(.|\n)*engram='disk'"):
        on_host(model, "disk", CUDA)


def test_a_model_with_tables_in_host_memory_is_not_split() -> None:
    with pytest.raises(RankError, match=r"E701(.|\n)*tables in host memory"):
        keep_part(fetching(tiny_model()), Ranks(0, 2, ""), "experts", quantised=False)
