"""Tests of hf.load: weights in their places, logits and tokens of eager transformers, what it holds in memory.

The reference is transformers' eager model in float32 on the dequantised weights. Ops quantise the inputs of e4m3
linears, as DeepSeek does and transformers does not. So logits are compared within 1e-4 for weights that were
dequantised at load, and for stored e4m3 with `quantize_input` off and wo_a in bfloat16, whose op always quantises.
Weights as they are stored are compared bit by bit, and their logits within the error of those roundings.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Experts

from dsv4_compile import hf, progress
from dsv4_compile.checkpoints.reader import Reader
from dsv4_compile.modules import stacked
from dsv4_compile.modules.linear import Fp8Linear
from tests.hf import official
from tests.hf.small import random_ids

INDEX = "model.safetensors.index.json"
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 256, "device": "cpu"}


def load(folder: Path | str, **options: Any) -> Any:
    return hf.load(folder, **SIZES | options)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, **options).logits


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return official.make(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="module")
def folder(folder_and_model: tuple[Path, Any]) -> Path:
    return folder_and_model[0]


@pytest.fixture(scope="module")
def original(folder_and_model: tuple[Path, Any]) -> Any:
    return folder_and_model[1]


@pytest.fixture(scope="module")
def floating(folder: Path) -> Any:
    return load(folder, dequantize=True, dtype=torch.float32)


def test_dequantised_logits_and_tokens_are_those_of_transformers(original: Any, floating: Any) -> None:
    ids = random_ids(2, 150)
    torch.testing.assert_close(logits(floating, ids), logits(original, ids, use_cache=False), atol=1e-4, rtol=0)
    options = {"do_sample": False, "max_new_tokens": 40, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    assert torch.equal(floating.generate(ids, **options), original.generate(ids, **options))


def test_stored_weights_are_kept_and_in_their_places(folder: Path, original: Any) -> None:
    model = load(folder)
    want = dict(original.state_dict())
    found = dict(official.weights(model))
    assert set(found) == set(want)
    assert [name for name in want if not torch.equal(found[name], want[name])] == []
    layer = model.model.layers[1]
    assert layer.mlp.experts.gate_up_proj.dtype is torch.int8
    assert layer.mlp.experts.down_proj_scale_inv.dtype is torch.float8_e8m0fnu
    assert layer.self_attn.q_a_proj.weight.dtype is layer.mlp.shared_experts.up_proj.weight.dtype is torch.float8_e4m3fn
    assert layer.self_attn.compressor.kv_proj.weight.dtype is model.lm_head.weight.dtype is torch.bfloat16
    assert layer.self_attn.sinks.dtype is layer.attn_hc.fn.dtype is layer.input_layernorm.weight.dtype is torch.float32
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_stored_weights_give_the_logits_of_their_values(tmp_path: Path) -> None:
    folder, original = official.make(tmp_path / "wo_a", wo_a=None)
    model, ids = load(folder, dtype=torch.float32), random_ids(2, 150)
    linears = [m for layer in model.model.layers for m in layer.self_attn.dsv4.modules() if isinstance(m, Fp8Linear)]
    assert len(linears) == 4 * 4 + 2
    for linear in linears:
        linear.quantize_input = False
    torch.testing.assert_close(logits(model, ids), logits(original, ids, use_cache=False), atol=1e-4, rtol=0)


def test_inputs_of_stored_e4m3_linears_are_quantised(folder: Path, original: Any) -> None:
    """The median over tokens, because rounding lets some of them choose other experts."""
    ids = random_ids(2, 30)
    want = logits(original, ids, use_cache=False)
    lost = (logits(load(folder, dtype=torch.float32), ids) - want).norm(dim=-1) / want.norm(dim=-1)
    assert 1e-3 < lost.median() < 0.15


def test_e4m3_experts_of_the_base_model_are_loaded(tmp_path: Path) -> None:
    folder, original = official.make(tmp_path / "base", experts=official.e4m3)
    assert dict(official.weights(load(folder))).keys() == original.state_dict().keys()
    model, ids = load(folder, dequantize=True, dtype=torch.float32), random_ids(1, 40)
    torch.testing.assert_close(logits(model, ids), logits(original, ids, use_cache=False), atol=1e-4, rtol=0)
    found, want = dict(official.weights(load(folder))), original.state_dict()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.parametrize("original_format", [True, False], ids=["deepseek-names", "transformers-names"])
@pytest.mark.parametrize("options", [{}, {"dequantize": True}], ids=["stored", "dequantised"])
def test_what_transformers_saves_of_a_loaded_model_loads_equal(
    folder: Path, tmp_path: Path, original_format: bool, options: dict[str, Any]
) -> None:
    model = hf.revert(load(folder, **options))
    model.save_pretrained(tmp_path, save_original_format=original_format, max_shard_size="500KB")
    again, want = load(tmp_path), model.state_dict()
    assert again.state_dict().keys() == want.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype is want[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)), name
    dequantised = dict(official.weights(load(tmp_path, dequantize=True, dtype=torch.float32)))
    values = dict(official.weights(model))
    assert [name for name in values if not torch.equal(dequantised[name], values[name])] == []


def test_few_files_are_open_and_two_tensors_are_alive_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second file is open for scales that it holds. Tensors read into their places are not counted."""
    alive, most, open_files = 0, 0, []
    read, enter, leave = Reader.read, Reader.__enter__, Reader.close

    def watched(reader: Reader, *arguments: Any) -> Tensor:
        nonlocal alive, most
        tensor = read(reader, *arguments)
        alive += tensor.nbytes
        most = max(most, alive)

        def forget(nbytes: int) -> None:
            nonlocal alive
            alive -= nbytes

        weakref.finalize(tensor, forget, tensor.nbytes)
        return tensor

    def entered(reader: Reader) -> Reader:
        open_files.append(reader)
        assert len(open_files) <= 2
        return enter(reader)

    def left(reader: Reader, *, compare: bool = True) -> None:
        open_files.remove(reader)
        leave(reader, compare=compare)

    monkeypatch.setattr(Reader, "read", watched)
    monkeypatch.setattr(Reader, "__enter__", entered)
    monkeypatch.setattr(Reader, "close", left)
    monkeypatch.setattr(sys.modules["dsv4_compile.hf.loading.fill"], "reading_threads", lambda: 1)
    gc.collect()
    load(folder, dequantize=True, dtype=torch.float32)
    largest = max(tensor.nbytes for file in official.files(folder) for tensor in load_file(file).values())
    assert 0 < most <= 2 * largest < min(file.stat().st_size for file in official.files(folder))


def test_stored_tensors_are_read_into_their_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(reader: Reader, stored: Any, part: Any = ()) -> Tensor:
        raise AssertionError(f"{stored} was read into other memory")

    monkeypatch.setattr(Reader, "read", allocated)
    load(folder)


@pytest.mark.parametrize("options", [{}, {"dequantize": True}], ids=["stored", "dequantised"])
def test_no_weight_is_copied_after_it_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def copied(matrix: Tensor) -> None:
        assert matrix.is_meta, f"weights were stacked into a new matrix of shape {tuple(matrix.shape)}"

    monkeypatch.setattr(stacked, "_wait_for", copied)
    model = load(folder, **options)
    stacks = model.model.layers[1].self_attn.dsv4.hidden_stacks
    assert [stack.weight.data_ptr() for stack in stacks] == [stack.parts[0].weight.data_ptr() for stack in stacks]


def test_a_loaded_model_that_is_reverted_runs_in_transformers(folder: Path, original: Any) -> None:
    """Buffers that no checkpoint holds, as RoPE frequencies, are read by transformers' forward alone."""
    model = hf.revert(load(folder, dequantize=True, dtype=torch.float32))
    ids = random_ids(1, 150)
    assert torch.equal(logits(model, ids, use_cache=False), logits(original, ids, use_cache=False))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_progress_counts_megabytes_and_names_the_rate_and_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["dsv4_compile.hf.loading.fill"]
    monkeypatch.setattr(module, "_MEGA", 1000)
    events: list[progress.Event] = []
    with progress.listen(events.append):
        load(folder)
    loading = [event for event in events if event.stage == "load"]
    assert {event.note.split()[-1] for event in loading[1:]} == {file.name for file in official.files(folder)}
    assert re.search(r"MB, \d+\.\d+ GB/s, \d+ threads: \d+% read, \d+% place, ", loading[1].note)
    assert [event.done for event in loading] == sorted(event.done for event in loading)
    assert loading[4].eta is not None and 0 < loading[4].done < loading[4].total
    assert loading[-1].finished and loading[-1].done == loading[-1].total


def test_the_generation_configuration_comes_along(folder: Path, tmp_path: Path) -> None:
    copy = official.copied(folder, tmp_path / "with")
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": 7}))
    generation = load(copy).generation_config
    assert (generation.do_sample, generation.temperature, generation.eos_token_id) == (True, 0.6, 7)
    assert load(folder).generation_config.eos_token_id == 1


def test_arguments_of_convert_are_passed_on(folder: Path) -> None:
    model = load(folder, kv_cache_dtype="float16", max_step_tokens=64, attention_only=True, dequantize=True)
    cache = model.model.dsv4_cache.paged
    assert (cache.cache_format.kv_dtype, cache.max_step_tokens, cache.max_batch_size) == (torch.float16, 64, 2)
    assert type(model.model.layers[0].mlp).__name__ == "DeepseekV4SparseMoeBlock"


def test_scales_in_another_file_and_without_an_index(folder: Path, tmp_path: Path, original: Any) -> None:
    tensors = {name: tensor for file in official.files(folder) for name, tensor in load_file(file).items()}
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".scale")}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    save_file(scales, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = dict(official.weights(load(tmp_path, dequantize=True, dtype=torch.float32)))
    assert [name for name, want in original.state_dict().items() if not torch.equal(found[name], want)] == []


def nested(folder: Path, target: Path) -> Path:
    """Copy a folder with its files one level deeper."""
    copy = official.copied(folder, target)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"] = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    (copy / INDEX).write_text(json.dumps(index))
    (copy / "weights").mkdir()
    for file in official.files(copy):
        file.rename(copy / "weights" / file.name)
    return copy


def test_files_in_subfolders_are_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested(folder, tmp_path / "nested")
    monkeypatch.chdir(tmp_path)
    assert load("nested/").config.num_hidden_layers == 4


def test_links_of_the_hubs_cache_and_links_inside_the_folder_are_found(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--deepseek-ai--DeepSeek-V4-Flash"
    (repository / "blobs").mkdir(parents=True)
    snapshot = nested(folder, repository / "snapshots" / "0a1b")
    for i, file in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        blob = file.rename(repository / "blobs" / f"{i:040x}")
        file.symlink_to(Path("../" * len(file.relative_to(repository).parent.parts)) / "blobs" / blob.name)
    want = load(folder).state_dict()
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert all(torch.equal(tensor, want[name]) for name, tensor in load(path).state_dict().items())
    copy = official.copied(folder, tmp_path / "copy")
    (copy / "config.json").rename(copy / "v4.json")
    (copy / "config.json").symlink_to("v4.json")
    assert load(copy).config.num_hidden_layers == 4


def test_other_encodings_of_the_same_numbers_load_equal(folder: Path, tmp_path: Path, original: Any) -> None:
    def encode(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("tid2eid"):
                tensors[name] = tensor.to(torch.int32)
            elif ".ffn.experts." in name:
                tensors[name] = tensor.view(torch.uint8)
            elif name.endswith(".scale"):
                tensors[name] = tensor.float() if ".attn.w" in name else tensor.view(torch.uint8)
            elif tensor.dtype is torch.bfloat16:
                tensors[name] = tensor.float()

    encoded = official.changed(folder, tmp_path / "encoded", encode)
    for options in ({}, {"dequantize": True, "dtype": torch.float32}):
        found = dict(official.weights(load(encoded, **options)))
        assert [name for name, want in original.state_dict().items() if not torch.equal(found[name], want)] == []


@pytest.mark.parametrize("stored", [False, True], ids=["without-head", "with-head"])
def test_tied_embeddings_are_one_parameter(folder: Path, tmp_path: Path, stored: bool) -> None:
    def tie(tensors: dict[str, Tensor]) -> None:
        del tensors["head.weight"]
        if stored:
            tensors["head.weight"] = tensors["embed.weight"].clone()

    model = load(official.changed(folder, tmp_path / "tied", tie, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(logits(model, random_ids(1, 5))).all()


def test_the_default_dtype_and_device_of_the_caller_do_not_matter(folder: Path, original: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = load(folder, dequantize=True, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = random_ids(1, 40)
    torch.testing.assert_close(logits(model, ids), logits(original, ids, use_cache=False), atol=1e-4, rtol=0)


def test_a_second_load_wraps_no_class_again(folder: Path) -> None:
    load(folder)
    before = FP8Experts.__init__
    load(folder)
    assert FP8Experts.__init__ is before
