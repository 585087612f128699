"""Tests of saving: a converted, a loaded and a reverted model are written whole by tools that look at storages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from dsv4_compile import hf
from dsv4_compile.hf.model.layer_kinds import without_rows
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.modules.linear import Linear
from dsv4_compile.modules.stacked import Projection, Stack
from dsv4_compile.runtime.captures import tensor_bytes
from tests.hf import official
from tests.hf.small import LAYERS, assert_equal_bits, random_ids, stored

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 128}
STATES = ("converted", "reverted")


def converted_model(seed: int = 0) -> Any:
    return hf.convert(tiny_model(seed, **LAYERS), **SIZES)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"eager": tiny_model(**LAYERS), "converted": converted_model(), "reverted": hf.revert(converted_model())}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def saved_by_trainer(model: Any, folder: Path) -> None:
    options = TrainingArguments(output_dir=str(folder.parent / "runs"), use_cpu=True, report_to=[])
    Trainer(model=model, args=options).save_model(str(folder))


ROADS: dict[str, Callable[[Any, Path], Any]] = {
    "safetensors.save_model": lambda m, to: save_model(m, str(to / "model.safetensors")),
    "safetensors.save_file": lambda m, to: save_file(m.state_dict(), to / "model.safetensors"),
    "save_pretrained": lambda m, to: m.save_pretrained(to),
    "save_pretrained in shards": lambda m, to: m.save_pretrained(to, max_shard_size="500KB"),
    "hub": huggingface_hub.save_torch_model,
    "hub in shards": lambda m, to: huggingface_hub.save_torch_model(m, to, max_shard_size="500KB"),
    "accelerate": lambda m, to: Accelerator(cpu=True).save_model(m, to),
    "Trainer": saved_by_trainer,
    "torch.save": lambda m, to: torch.save(m.state_dict(), to / "model.pt"),
    "pickle": lambda m, to: (to / "model.pkl").write_bytes(pickle.dumps(m.state_dict())),
    "a checkpoint of torch.distributed": lambda m, to: torch.distributed.checkpoint.save(
        {"model": m.state_dict()}, checkpoint_id=to
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("road", ROADS)
def test_every_road_writes_what_it_writes_of_the_original(
    models: dict[str, Any], tmp_path: Path, road: str, state: str
) -> None:
    for name in ("eager", state):
        (tmp_path / name).mkdir()
        ROADS[road](models[name], tmp_path / name)
    assert_equal_bits(stored(tmp_path / state), stored(tmp_path / "eager"))
    assert abs(size(tmp_path / state) - size(tmp_path / "eager")) < 4096
    for file in (tmp_path / state).glob("model.p*"):
        assert_equal_bits(torch.load(file) if file.suffix == ".pt" else pickle.loads(file.read_bytes()),
                          models["eager"].state_dict())  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_one_weight_takes_its_own_bytes(models: dict[str, Any], tmp_path: Path, state: str) -> None:
    layer = models[state].model.layers[0]
    for part in (layer.self_attn.q_a_proj.weight, layer.self_attn.q_a_proj, layer.mlp.shared_experts.up_proj.weight):
        nbytes = part.nbytes if isinstance(part, Tensor) else part.weight.nbytes
        torch.save(part, tmp_path / "part.pt")
        assert nbytes <= (tmp_path / "part.pt").stat().st_size < nbytes + 4096


def test_storages_of_parameters_span_them_alone(models: dict[str, Any]) -> None:
    for state in STATES:
        for name, tensor in models[state].state_dict().items():
            assert (tensor.untyped_storage().nbytes(), tensor.storage_offset()) == (tensor.nbytes, 0), (state, name)
    # What a reverted model has could come from transformers: nothing of it lies in a matrix.
    reverted = list(models["reverted"].parameters())
    assert all(p.untyped_storage().resizable() for p in reverted)
    assert tensor_bytes(reverted) == sum(p.nbytes for p in reverted)


@torch.no_grad()
def test_a_file_of_the_original_is_loaded_into_a_converted_model(tmp_path: Path) -> None:
    ids, eager = random_ids(2, 20), tiny_model(7, **LAYERS)
    save_model(eager, str(tmp_path / "model.safetensors"))
    model, want = converted_model(), hf.convert(eager, **SIZES)(ids).logits
    model(ids)
    load_model(model, str(tmp_path / "model.safetensors"))
    assert torch.equal(model(ids).logits, want)
    before = [p.data_ptr() for p in model.parameters()]
    model.load_state_dict(eager.state_dict())
    assert [p.data_ptr() for p in model.parameters()] == before  # written into the matrices
    assert torch.equal(model(ids).logits, want)


@torch.no_grad()
def test_copies_of_a_converted_model_hold_every_weight_once(models: dict[str, Any], tmp_path: Path) -> None:
    model, ids = models["converted"], random_ids(2, 20)
    want = model(ids).logits
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    nbytes = sum(p.nbytes for p in model.parameters())
    for twin in copies:
        assert torch.equal(twin(ids).logits, want)
        stacks = [m for layer in twin.model.layers for m in layer.self_attn.dsv4.modules() if isinstance(m, Stack)]
        matrices = [b for stack in stacks for b in stack.buffers()] + [
            layer.mlp.shared_w13 for layer in twin.model.layers
        ]
        assert tensor_bytes([*twin.parameters(), *matrices]) == nbytes
    for layer in model.model.layers:  # nor does the file hold one twice
        written = [m.__getstate__()["_buffers"] for m in layer.self_attn.dsv4.modules() if isinstance(m, Stack)]
        assert written and not any(tensor is not None for buffers in written for tensor in buffers.values())
        assert layer.mlp.shared_w13 is not None and layer.mlp.__getstate__()["shared_w13"] is None


@torch.no_grad()
def test_weights_in_shared_memory_stay_there() -> None:
    model, ids = converted_model(), random_ids(2, 20)
    want = model(ids).logits
    model.share_memory()
    held = {name: p.data_ptr() for name, p in model.named_parameters()}
    torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=0)
    assert all(p.is_shared() and p.data_ptr() == held[name] for name, p in model.named_parameters())
    other = tiny_model(5, **LAYERS)
    for name, tensor in model.state_dict().items():
        tensor.copy_(other.state_dict()[name])  # as a second process would
    torch.testing.assert_close(model(ids).logits, other(ids, use_cache=False).logits, atol=1e-4, rtol=0)


def test_weights_in_shared_memory_are_not_stacked() -> None:
    parts = [Linear(8, 16, dtype=torch.float32) for _ in range(2)]
    stack = Stack(tuple(Projection((part,)) for part in parts))
    assert stack.reason == ""
    parts[1].weight.share_memory_()
    stack.arrange()
    assert stack.reason == "a weight in shared memory"


def test_rows_are_told_from_matrices_whatever_their_storages() -> None:
    matrix, other = torch.zeros(6, 4), torch.zeros(6, 4)
    rows = torch.from_dlpack(matrix[:2]), torch.from_dlpack(matrix[2:]), matrix[1:3]
    named = {
        "first": rows[0],
        "matrix": matrix,
        "last": rows[1],
        "view": rows[2],
        "other": other,
        "tied": other.detach(),
    }
    assert list(without_rows(named)) == ["matrix", "other", "tied"]
    fake = torch.zeros(6, 4, device="meta")
    assert list(without_rows({"matrix": fake, "row": fake[1:], "other": torch.zeros(2, 4, device="meta")})) == [
        "matrix",
        "other",
    ]


def test_memory_that_several_storages_span_counts_once() -> None:
    matrix = torch.zeros(6, 4)
    assert tensor_bytes([torch.from_dlpack(matrix[2:4]), matrix, torch.from_dlpack(matrix[:2])]) == matrix.nbytes
    assert tensor_bytes([torch.from_dlpack(matrix[1:3]), torch.from_dlpack(matrix[2:5]), matrix.clone()]) == 4 * 16 + 96


@pytest.mark.parametrize("experts", [official.mxfp4, official.e4m3])
@torch.no_grad()
def test_a_loaded_model_is_written_whole_and_loaded_again(tmp_path: Path, experts: Any) -> None:
    folder, _ = official.make(tmp_path / "official", experts=experts)
    model, ids = hf.load(folder, device="cpu", **SIZES), random_ids(2, 20)
    state, want = {name: t.clone() for name, t in model.state_dict().items()}, model(ids).logits
    save_model(model, str(tmp_path / "model.safetensors"))
    assert_equal_bits(load_file(tmp_path / "model.safetensors"), state)
    for parameter in model.parameters():
        parameter.view(torch.uint8).zero_()
    load_model(model, str(tmp_path / "model.safetensors"))
    assert torch.equal(model(ids).logits, want)
    hf.revert(model)
    save_model(model, str(tmp_path / "reverted.safetensors"))
    assert_equal_bits(load_file(tmp_path / "reverted.safetensors"), state)
