"""Tests of folders that hf.load does not load: an error that names file and tensor, before memory is allocated."""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_compile import DSV4Error, hf
from tests.hf import official

module: Any = importlib.import_module("dsv4_compile.hf.loading.load")
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.make(tmp_path_factory.mktemp("official"))[0]


@pytest.fixture(autouse=True)
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*args: Any) -> None:
        raise AssertionError("memory was allocated before everything was checked")

    monkeypatch.setattr(module, "allocate", allocate)


def refused(path: Path | str, **options: Any) -> DSV4Error:
    with pytest.raises(DSV4Error) as caught:
        hf.load(path, **{"max_batch_size": 1, "max_seq_len": 64, "device": "cpu"} | options)
    return caught.value


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def edit_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / SHARD).write_bytes(change((folder / SHARD).read_bytes()))


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Rewrite the header of a shard, and leave the data as they are."""

    def edit(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return edit_bytes(edit)


def rename(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    tensors["layers.0.ffn.extra"] = tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / SHARD)


def copy_into_another(folder: Path) -> None:
    other = folder / "model-00003-of-00004.safetensors"
    name, tensor = next(iter(load_file(folder / SHARD).items()))
    save_file(load_file(other) | {name: tensor}, other)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing-shard": (lambda f: (f / SHARD).unlink(), rf"no file .*{SHARD}[\s\S]*holds \d+ tensors by the index"),
    "truncated": (
        edit_bytes(lambda data: data[:-100]),
        rf"{SHARD}: truncated, 100 of \d+[\s\S]*layers\.\S+ is the first",
    ),
    "truncated-header": (edit_bytes(lambda data: data[:40]), rf"{SHARD}: 40 bytes, too few for a safetensors header"),
    "empty": (edit_bytes(lambda data: b""), rf"{SHARD}: 0 bytes"),
    "longer": (edit_bytes(lambda data: data + b"xx"), rf"{SHARD}: 2 bytes after the last tensor"),
    "no-header": (edit_bytes(lambda data: data[:8] + b"\0" * (len(data) - 8)), rf"{SHARD}: a damaged header"),
    "git-lfs": (
        edit_bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\noid 1"),
        r"LFS pointer[\s\S]*lfs pull",
    ),
    "overlap": (
        edit_header(lambda h: next(v for k, v in h.items() if k[0] == "l").update(data_offsets=[1, 2])),
        rf"{SHARD}: a damaged header[\s\S]*begins at",
    ),
    "size-of-shape": (
        edit_header(lambda h: next(v for k, v in h.items() if k.endswith(".weight")).update(shape=[3, 3])),
        rf"{SHARD}: a damaged header[\s\S]*of shape \(3, 3\)",
    ),
    "renamed-tensor": (rename, rf"layers\.0\.ffn\.extra of {SHARD}, for which {INDEX} does not name it"),
    "two-shards": (copy_into_another, rf"of model-00003\S+, for which {INDEX} names {SHARD}"),
    "index-names-more": (
        edit_json(INDEX, lambda i: i["weight_map"].update({"layers.9.x": SHARD})),
        rf"no tensor layers\.9\.x in {SHARD}",
    ),
    "index-leaves-folder": (
        edit_json(INDEX, lambda i: i["weight_map"].update({"norm.weight": "../other.safetensors"})),
        r"index\.json with \.\./other\.safetensors, outside",
    ),
    "index-without-map": (edit_json(INDEX, lambda i: i.pop("weight_map")), "without a weight_map"),
    "index-not-json": (lambda f: (f / INDEX).write_text("{"), f"{INDEX} is not JSON"),
    "index-and-single": (lambda f: (f / "model.safetensors").write_bytes(b""), "left over from an earlier save"),
    "config-not-json": (lambda f: (f / "config.json").write_text("<html>"), "config.json is not JSON"),
    "no-weights": (lambda f: [file.unlink() for file in (*official.files(f), f / INDEX)], "no .safetensors in"),
    "generation-config": (lambda f: (f / "generation_config.json").write_text("["), "generation_config.json"),
    "numbered-without-index": (lambda f: [(f / INDEX).unlink(), (f / SHARD).unlink()], f"no file .*{SHARD}"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_named(good: Path, tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    folder = official.copied(good, tmp_path / "damaged")
    damage(folder)
    fault = refused(folder)
    assert fault.code == "E209"
    assert re.search(message, str(fault)), fault


def test_a_file_that_cannot_be_read_is_named(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith(SHARD):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert re.search(rf"E209[\s\S]*{SHARD}: cannot be read[\s\S]*Permission denied", str(refused(good)))


def cast(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name].float().to(dtype)})


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][1:].clone()})


EXPERT = "layers.2.ffn.experts.3"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (
        lambda t: t.pop("layers.3.attn.wq_b.weight"),
        r"no tensor layers\.3\.attn\.wq_b\.weight[\s\S]*q_b_proj",
    ),
    "missing-norm": (lambda t: t.pop("norm.weight"), r"no tensor norm\.weight[\s\S]*model\.norm\.weight"),
    "missing-table": (lambda t: t.pop("layers.0.ffn.gate.tid2eid"), r"no tensor layers\.0\.ffn\.gate\.tid2eid"),
    "missing-bias": (lambda t: t.pop("layers.2.ffn.gate.bias"), r"no tensor layers\.2\.ffn\.gate\.bias"),
    "missing-scale": (lambda t: t.pop("layers.1.attn.wkv.scale"), r"no tensor layers\.1\.attn\.wkv\.scale"),
    "missing-expert": (lambda t: t.pop(f"{EXPERT}.w3.weight"), rf"no tensor {EXPERT}\.w3\.weight\n"),
    "missing-expert-scale": (lambda t: t.pop(f"{EXPERT}.w2.scale"), rf"no tensor {EXPERT}\.w2\.scale\n"),
    "extra": (
        lambda t: t.update({"layers.1.attn.bias": torch.ones(2)}),
        r"too many: layers\.1\.attn\.bias of model\.saf",
    ),
    "extra-layer": (lambda t: t.update({"layers.4.attn_norm.weight": torch.ones(2)}), r"config\.json has 4 layers"),
    "extra-scale": (
        lambda t: t.update({"layers.1.attn.compressor.wkv.scale": torch.ones(1, 1)}),
        r"too many: layers\.1\.attn\.compressor\.wkv\.scale",
    ),
    "twice": (
        lambda t: t.update({"model.layers.1.self_attn.sinks": t["layers.1.attn.attn_sink"].clone()}),
        r"layers\.1\.attn\.attn_sink twice: ",
    ),
    "shape": (
        cut("layers.1.attn.wq_a.weight"),
        r"wq_a\.weight of model.safetensors of shape \[127, 128\][\s\S]*\[128, 128\]",
    ),
    "expert-shape": (cut(f"{EXPERT}.w1.weight"), rf"{EXPERT}\.w1\.weight of \S+ of shape \[127, 64\]"),
    "scale-shape": (cut(f"{EXPERT}.w2.scale"), rf"{EXPERT}\.w2\.scale of \S+ of shape \[127, 4\]"),
    "dtype": (cast("layers.1.attn.wkv.weight", torch.int32), r"wkv\.weight of \S+ of dtype I32[\s\S]*BF16"),
    "norm-dtype": (cast("norm.weight", torch.float8_e4m3fn), r"norm\.weight of \S+ of dtype F8_E4M3"),
    "scale-dtype": (cast("layers.1.attn.wkv.scale", torch.bfloat16), r"wkv\.scale of \S+ of dtype BF16"),
    "expert-dtype": (cast(f"{EXPERT}.w1.weight", torch.bfloat16), rf"{EXPERT}\.w1\.weight of \S+ of dtype BF16"),
    "compressor-dtype": (
        cast("layers.1.attn.compressor.wkv.weight", torch.float8_e4m3fn),
        r"compressor\.wkv\.weight of \S+ of dtype F8_E4M3",
    ),
    "table-dtype": (cast("layers.0.ffn.gate.tid2eid", torch.float32), r"tid2eid of \S+ of dtype F32"),
}


@pytest.mark.parametrize("dequantize", [False, True], ids=["stored", "dequantised"])
@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_does_not_fit_is_named(good: Path, tmp_path: Path, case: str, dequantize: bool) -> None:
    change, message = WRONG[case]
    fault = refused(official.changed(good, tmp_path / "wrong", change), dequantize=dequantize)
    assert fault.code == "E207"
    assert re.search(message, str(fault)), fault


def test_a_folder_of_another_size_counts_the_other_problems(good: Path, tmp_path: Path) -> None:
    folder = official.copied(good, tmp_path / "wide")
    edit_json("config.json", lambda config: config.update(q_lora_rank=64))(folder)
    assert re.search(r"; 13 more: dsv4 doctor", str(refused(folder)))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "other-model": ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
    "v4.1": (
        {"quantization_config": official.CONFIG["quantization_config"] | {"weight_block_size": [32, 32]}},
        r"weight_block_size=\[32, 32\][\s\S]*V4\.1",
    ),
    "ratio": ({"compress_ratios": [0, 4, 2, 4]}, r"compress_ratios with \[2\]"),
    "few-ratios": ({"compress_ratios": [0, 4]}, "2 compress_ratios for 4 layers"),
    "other-quantisation": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method='gptq'"),
    "static-inputs": (
        {"quantization_config": official.CONFIG["quantization_config"] | {"activation_scheme": "static"}},
        "activation_scheme='static'",
    ),
    "scoring": ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    "unread": ({"hidden_size": "wide"}, "hidden_size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_of_another_model_is_named(good: Path, tmp_path: Path, case: str) -> None:
    values, message = CONFIGS[case]
    folder = official.copied(good, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(official.CONFIG | values))
    fault = refused(folder)
    assert fault.code == "E205"
    assert re.search(message, str(fault)), fault


def test_paths_that_are_no_folder_say_what_to_pass(good: Path, tmp_path: Path) -> None:
    official.copied(good, tmp_path / "nested" / "snapshots" / "0a1b")
    for name in "abcd":
        (tmp_path / "several" / name).mkdir(parents=True)
        (tmp_path / "several" / name / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for path, message in {
        "deepseek-ai/DeepSeek-V4-Flash": r"hf download deepseek-ai/DeepSeek-V4-Flash --local-dir",
        tmp_path / "nothing": "no folder",
        good / "config.json": rf"a file[\s\S]*pass its folder, {good}",
        tmp_path / "nested": r"no config.json[\s\S]*nested/snapshots/0a1b",
        tmp_path / "several": r"several/a, \S+/b, \S+/c(?![\s\S]*several/d)",
        tmp_path / "adapter": "adapters alone are not a model",
    }.items():
        fault = refused(path)
        assert fault.code == "E209"
        assert re.search(message, str(fault)), fault


def test_memory_is_compared_before_loading(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: 2_000_000)
    fault = refused(good, max_batch_size=64, max_seq_len=65536)
    assert fault.code == "E210"
    assert re.search(r"0\.00 GB of weights and \d+\.\d\d GB of caches for 0\.00 GB free on cpu", str(fault))
    assert re.search("0.01 GB of weights", str(refused(good, dequantize=True, dtype=torch.float32)))
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    with pytest.raises(AssertionError, match="memory was allocated"):
        hf.load(good, max_batch_size=1, max_seq_len=64, device="cpu")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"device": "cuda:7"}, "E201", "torch sees 0 CUDA devices"),
        ({"device": "gpu"}, "E201", "device='gpu'"),
        ({"device": "meta"}, "E201", "device='meta'"),
        ({"dtype": torch.int8}, "E201", "dtype=torch.int8"),
        ({"dtype": "bfloat16"}, "E201", "dtype=bfloat16"),
        ({"kv_cache_dtype": "fp7"}, "E202", "fp7"),
        ({"max_batch_size": 0}, "E204", "max_batch_size=0"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "E205", "head_dim=64"),
    ],
)
def test_arguments_are_checked_before_loading(good: Path, options: dict[str, Any], code: str, message: str) -> None:
    fault = refused(good, **options)
    assert (fault.code, message in str(fault)) == (code, True), fault


def test_inference_mode_is_refused(good: Path) -> None:
    with torch.inference_mode():
        assert refused(good).code == "E208"


def test_tied_embeddings_that_differ_are_refused(good: Path, tmp_path: Path) -> None:
    folder = official.changed(good, tmp_path / "tied", lambda tensors: None, tie_word_embeddings=True)
    assert re.search(r"head\.weight of \S+ differs from embed\.weight", str(refused(folder)))


def test_a_file_that_changes_after_its_header_was_read_is_named(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = official.copied(good, tmp_path / "changing")
    monkeypatch.undo()
    allocate = module.allocate

    def shorten(*args: Any) -> None:
        allocate(*args)
        edit_bytes(lambda data: data[:-100])(folder)

    monkeypatch.setattr(module, "allocate", shorten)
    fault = refused(folder)
    assert fault.code == "E209" and SHARD in str(fault)


def test_a_table_of_experts_that_do_not_exist_is_refused(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folder = official.changed(good, tmp_path / "table", lambda t: t["layers.0.ffn.gate.tid2eid"].fill_(4))
    assert re.search(r"tid2eid of \S+ with experts 4 to 4", str(refused(folder)))
