"""Engram tables in locked host memory, which the GPU reads: equal bits, bounds, captures, and a whole model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.models.v41 import V41Model, compile, generate, load, save_folder
from dsv4_compile.models.v41.fetch import fetch, take
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.runtime import host_memory
from dsv4_compile.testing import assert_bitwise, poisoned_empty
from tests.gpu.engram.test_engram_embed import arguments
from tests.models.v41.test_loading import tokenizer
from tests.models.v41.worked import token_ids

CUDA = torch.device("cuda")
PROMPTS = (range(19), range(5, 12), range(1))


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, as a tensor of the GPU."""
    memory = host_memory.empty(tuple(tensor.shape), tensor.dtype)
    memory.view(torch.uint8).copy_(tensor.view(torch.uint8).cpu())
    return host_memory.on_gpu(memory, tensor.device)


def cases(tokens: int, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return arguments of `engram_embed`, some rows outside the table, on the device and with tables of the host."""
    rows, table, scale = arguments(tokens, 1000, seed)
    return (rows, table, scale), (rows, to_host(table), to_host(scale))


def same(got: Tensor, want: Tensor) -> None:
    assert_bitwise(got.isnan(), want.isnan())
    assert_bitwise(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_memory_of_the_host_is_a_tensor_of_the_gpu_and_takes_none_of_its_memory() -> None:
    before, size = torch.cuda.memory_allocated(), 64 << 20
    memory = host_memory.empty((size,), torch.uint8)
    memory.random_()
    table = host_memory.on_gpu(memory, CUDA)
    assert table.is_cuda and table.data_ptr() == memory.data_ptr()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(table[-1000:].cpu(), memory[-1000:])
    table[5] = 9
    torch.cuda.synchronize()
    assert memory[5] == 9
    del table
    gc.collect()
    again = host_memory.on_gpu(memory, CUDA)  # locked memory would be refused
    assert int(again[5]) == 9


@pytest.mark.parametrize("tokens", [1, 6, 130, 4000])
def test_kernel_and_reference_read_the_bits_of_a_table_on_the_device(tokens: int) -> None:
    device, host = cases(tokens, tokens)
    want = REFERENCES["engram_embed"](*device)
    for embed in (launcher("engram_embed"), REFERENCES["engram_embed"], torch.ops.dsv4.engram_embed):
        with poisoned_empty():
            got: Tensor = embed(*host)
        same(got, want)


def test_no_row_outside_the_table_is_read() -> None:
    """Rows around the view are NaN with scales of 2^127; negative rows and rows beyond it are zeros."""
    _, table, scale = arguments(1, 1000)
    table.view(torch.uint8)[:] = 0x7F
    table.view(torch.uint8)[100:900] = 0x38
    scale[:] = 254
    scale[100:900] = 127
    table, scale = to_host(table)[100:900], to_host(scale)[100:900]
    rows = torch.tensor([[-1, -(2**40), 0, 799, 800, 2**40]], device=CUDA)
    out = launcher("engram_embed")(rows, table, scale).view(6, -1)
    assert out.mean(1).tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_captured_fetches_on_a_side_stream_follow_their_inputs() -> None:
    """Work of the current stream overlaps; results wait for the side stream in every replay."""
    device, host = cases(6)
    other = torch.randn(512, 512, device=CUDA)

    def step() -> Tensor:
        values = fetch(*host)
        for _ in range(3):
            torch.mm(other, other)
        return take(values, host[0], torch.bfloat16)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(5):
        host[0].copy_(arguments(6, 1000, seed)[0])
        graph.replay()
        same(out, REFERENCES["engram_embed"](host[0], *device[1:]).bfloat16())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v41")
    save_folder(tiny_model(image_token_id=63), path, tokenizer=tokenizer())
    return path


def generated(model: V41Model, **options: Any) -> list[list[int]]:
    ids = token_ids()
    prompts = [ids[some.start : some.stop] for some in PROMPTS]
    caches = model.new_caches(max_batch_size=5, max_seq_len=128)
    return generate(model, prompts, max_new_tokens=16, stop=[], caches=caches, **options)


def test_a_model_with_tables_in_host_memory_gives_the_tokens_of_one_on_the_device(folder: Path) -> None:
    device, host = (load(folder, device=CUDA, engram=memory) for memory in ("device", "host"))
    for name in ("embed", "embed_scale"):
        one, other = (getattr(model.layers[1].engram, name) for model in (device, host))
        assert other.is_cuda and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    want = generated(device)
    assert generated(host) == want
    caches = host.new_caches(max_batch_size=5, max_seq_len=128)
    steps = compile(host, caches=caches, backend=None, buckets=[2, 3, 5])
    ids = token_ids()
    prompts = [ids[some.start : some.stop] for some in PROMPTS]
    for _ in range(3):
        assert generate(host, prompts, max_new_tokens=16, stop=[], forward=steps) == want


def test_a_compiled_step_reads_tables_in_host_memory(folder: Path) -> None:
    host = load(folder, device=CUDA, engram="host")
    caches = host.new_caches(max_batch_size=3, max_seq_len=64)
    steps = compile(host, caches=caches, buckets=[3])
    assert steps.captured is not None
    rows = torch.arange(3, device=CUDA)
    inputs = token_ids()[:3].to(CUDA), torch.zeros_like(rows), rows
    steps.captured.load(*inputs)
    eager = host.new_caches(max_batch_size=3, max_seq_len=64)
    for position in range(8):
        with torch.no_grad():
            want = host(*inputs, eager)
        got, likeliest = steps.captured.step()
        torch.testing.assert_close(got, want, rtol=0, atol=0.25)
        inputs = likeliest.clone(), torch.full_like(rows, position + 1), rows
