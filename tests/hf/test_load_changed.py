"""Tests of shards that change between the reading of their header and of their tensors, or while they are read."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_compile import DSV4Error, hf
from dsv4_compile.checkpoints.reader import Reader
from dsv4_compile.loading import load_attention_from_safetensors
from dsv4_compile.modules import DeepseekV4Attention
from tests.hf import official

module: Any = importlib.import_module("dsv4_compile.hf.loading.load")
PREFIX = "layers.1.attn."


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.make(tmp_path_factory.mktemp("official"))[0]


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Replace a file by one with other tensors, by a rename as downloads do."""

    def edit(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file.with_suffix(".new"), metadata={"format": "pt"})
        file.with_suffix(".new").replace(file)

    return edit


def norm_of(tensors: dict[str, Tensor]) -> str:
    return next(name for name in tensors if name.endswith("norm.weight"))


def one_element_norm(tensors: dict[str, Tensor]) -> None:
    tensors[norm_of(tensors)] = tensors[norm_of(tensors)][:1].clone()


def other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors[norm_of(tensors)] = tensors[norm_of(tensors)].float()


def other_shape(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("weight") and tensors[name].dim() == 2)
    tensors[name] = tensors[name].t().contiguous()


def renamed_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["layers.9.x"] = tensors.pop(norm_of(tensors))


def in_place(data: Callable[[bytes], bytes], keep_time: bool = False) -> Callable[[Path], None]:
    """Rewrite a file at its inode, and restore its time of change if asked."""

    def edit(file: Path) -> None:
        facts = file.stat()
        new = data(file.read_bytes())
        with file.open("r+b") as stream:
            stream.write(new)
            stream.truncate()
        if keep_time:
            os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    return edit


def header_of_other_shapes(data: bytes) -> bytes:
    """Return the bytes of a file with a header that describes the same places with other shapes."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    entry = next(entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 2)
    entry["shape"].reverse()
    text = json.dumps(header, separators=(",", ":")).encode()
    return data[:8] + text.ljust(length) + data[8 + length :]


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked_out(file: Path) -> None:
    copy = file.parent.parent / "outside.safetensors"
    copy.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(copy)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "one-element-norm": with_tensors(one_element_norm),
    "other-dtype": with_tensors(other_dtype),
    "other-shape": with_tensors(other_shape),
    "renamed-tensor": with_tensors(renamed_tensor),
    "equal-file": with_tensors(lambda tensors: None),
    "truncated": in_place(lambda data: data[:-100]),
    "emptied": in_place(lambda data: b""),
    "grown": in_place(lambda data: data + b"x"),
    "rewritten": in_place(lambda data: data[:-4] + b"abcd"),
    "header-rewritten": in_place(header_of_other_shapes, keep_time=True),
    "fifo": fifo,
    "removed": Path.unlink,
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "linked-out": linked_out,
}


def shard_with(folder: Path, prefix: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return folder / next(file for name, file in index.items() if name.startswith(prefix))


@pytest.mark.parametrize("case", CHANGES)
def test_a_shard_that_changed_since_its_header_was_read_is_named(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder = official.copied(good, tmp_path / "changing")
    shard, allocate = shard_with(folder, PREFIX), module.allocate

    def change(*args: Any) -> None:
        allocate(*args)
        CHANGES[case](shard)

    monkeypatch.setattr(module, "allocate", change)
    with pytest.raises(DSV4Error, match=r"\[E209\]") as caught:
        hf.load(folder, max_batch_size=1, max_seq_len=64, device="cpu")
    assert shard.name in str(caught.value)


@pytest.mark.parametrize("case", ["one-element-norm", "header-rewritten", "truncated", "fifo", "linked-out"])
def test_an_attention_layer_sees_a_changed_shard_and_stays(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder = official.copied(good, tmp_path / "changing")
    config = hf.load(folder, max_batch_size=1, max_seq_len=64, device="cpu").model.layers[1].self_attn.dsv4.config
    layer = DeepseekV4Attention(config, 1, fp8=True, max_seq_len=64)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    enter = Reader.__enter__

    def change(reader: Reader) -> Reader:
        CHANGES[case](reader.source.file)
        return enter(reader)

    monkeypatch.setattr(Reader, "__enter__", change)
    with pytest.raises(DSV4Error, match=r"\[E209\]"):
        load_attention_from_safetensors(layer, folder, prefix=PREFIX)
    assert all(
        torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
        for name, tensor in layer.state_dict().items()
    )


@pytest.mark.parametrize("case", ["truncated", "emptied", "grown", "rewritten"])
def test_a_shard_that_changes_while_it_is_read_is_named(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A mapped file that shrinks would end the process with SIGBUS."""
    folder = official.copied(good, tmp_path / "changing")
    shard, fill = shard_with(folder, PREFIX), Reader.fill
    waiting = [shard]

    def change(reader: Reader, *args: Any) -> Tensor:
        tensor = fill(reader, *args)
        if reader.source.file == shard and waiting:
            CHANGES[case](waiting.pop())
        return tensor

    monkeypatch.setattr(Reader, "fill", change)
    with pytest.raises(DSV4Error, match=r"\[E209\]") as caught:
        hf.load(folder, max_batch_size=1, max_seq_len=64, device="cpu")
    assert shard.name in str(caught.value) and not waiting


def test_a_read_of_another_shape_than_its_place_does_not_broadcast(good: Path) -> None:
    from dsv4_compile.hf.loading.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(good)
    stored = checkpoint.tensors["norm.weight"]
    with Reader(checkpoint.sources[stored.file]) as reader:
        for shape in ((2, *stored.shape), (stored.shape[0] + 1,)):
            with pytest.raises(DSV4Error, match=r"E207[\s\S]*of shape"):
                reader.copy(stored, (), torch.empty(shape, dtype=torch.bfloat16))
        with pytest.raises(DSV4Error, match=r"E207[\s\S]*of shape \(1,\)"):
            reader.copy(stored, (slice(0, 1),), torch.empty(stored.shape, dtype=torch.bfloat16))


def test_parts_are_those_of_the_whole_tensor(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_compile.checkpoints import header, reader

    monkeypatch.setattr(reader, "CHUNK", 1000)
    file = good.parent / "parts.safetensors"
    whole = torch.arange(3 * 50 * 40, dtype=torch.int32).float().view(3, 50, 40)
    save_file({"x": whole, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}, file)
    tensors, source, problem = header.read_header(file.parent, file)
    assert problem is None and source is not None
    parts = [(), (1,), (slice(1, 3),), (2, slice(5, 9)), (slice(None), slice(5, 9)), (slice(0, 2), 3, slice(1, 4))]
    with Reader(source) as opened:
        for part in parts:
            want = whole[part]
            assert torch.equal(opened.read(tensors["x"], part), want)
            for dtype in (torch.float32, torch.bfloat16):
                destination = torch.empty(want.shape, dtype=dtype)
                opened.copy(tensors["x"], part, destination)
                assert torch.equal(destination, want.to(dtype))
            columns = torch.empty(*want.shape[:-1], 2 * want.shape[-1])[..., ::2]  # not contiguous
            opened.copy(tensors["x"], part, columns)
            assert torch.equal(columns, want)
        scalar = torch.empty((), dtype=torch.bfloat16)
        opened.copy(tensors["scalar"], (), scalar)
        assert scalar == 2.5
        opened.copy(tensors["empty"], (), torch.empty(0, 3))
