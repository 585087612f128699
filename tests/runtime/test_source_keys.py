"""Hashes of torch's and Triton's sources are taken where the files are those that were hashed, and only there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import _compat
from dsv4_compile.runtime import source_keys


class Keys:
    """Hashes of a process: `torch` and `triton` are read from the files below `folder` where they are not known."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.read = folder, list[str]()
        self._torch: list[bytes] = []
        self._triton: list[str] = []

    def torch_key(self) -> bytes:
        if not self._torch:
            self._torch.append(self._hash("torch").encode())
        return self._torch[0]

    def set(self, key: bytes) -> None:
        assert not self._torch
        self._torch.append(key)

    def triton_key(self) -> str:
        if not self._triton:
            self._triton.append(self.hash_triton())
        return self._triton[0]

    def hash_triton(self) -> str:
        return self._hash("triton")

    def _hash(self, package: str) -> str:
        self.read.append(package)
        return "-".join(path.read_text() for path in sorted((self.folder / package).rglob("*.py")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of two packages, with a header that no hash reads."""
    for package in ("torch", "triton"):
        for name in ("__init__.py", "inner/__init__.py", "inner/code.py", "include/some.h"):
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    monkeypatch.setattr(source_keys, "_folder", lambda package: str(tmp_path / package))
    return tmp_path


@pytest.fixture
def process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that begins a new process."""

    def begin() -> Keys:
        keys = Keys(folder)

        def torch_key() -> bytes:
            return keys.torch_key()

        def triton_key() -> str:
            return keys.triton_key()

        functions: Any = (torch_key, triton_key)
        functions[0].set, functions[0].clear = keys.set, keys._torch.clear
        functions[1].__wrapped__ = keys.hash_triton
        monkeypatch.setattr(_compat.codecache, "torch_key", torch_key)
        monkeypatch.setattr(_compat.triton_compat, "triton_key", triton_key)
        monkeypatch.setattr(_compat.triton_compat, "HAS_TRITON", True)
        return keys

    yield begin


def in_use() -> tuple[bytes, str]:
    return _compat.codecache.torch_key(), _compat.triton_compat.triton_key()


def test_a_process_with_the_same_files_hashes_none(process: Any) -> None:
    process()
    hashes, saved = in_use(), source_keys.recorded()
    later = process()
    assert source_keys.take(saved)
    assert in_use() == hashes
    assert later.read == []


@pytest.mark.parametrize("name", ["torch/inner/code.py", "triton/inner/code.py", "torch/inner/new.py"])
def test_a_changed_file_is_hashed(process: Any, folder: Path, name: str) -> None:
    process()
    hashes, saved = in_use(), source_keys.recorded()
    (folder / name).write_text("new_.py"[: len("inner/code.py")])
    later = process()
    assert not source_keys.take(saved)
    assert in_use() != hashes
    assert later.read == ["torch", "triton"]


def test_a_file_of_the_same_size_that_changed_is_hashed(process: Any, folder: Path) -> None:
    process()
    in_use()
    saved, path = source_keys.recorded(), folder / "torch" / "inner" / "code.py"
    facts = path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    process()
    assert path.stat().st_size == facts.st_size
    assert not source_keys.take(saved)


def test_headers_are_not_looked_at(process: Any, folder: Path) -> None:
    process()
    saved = source_keys.recorded()
    (folder / "torch" / "include" / "some.h").write_text("changed")
    process()
    assert source_keys.take(saved)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_files_that_changed_under_a_process_are_not_recorded(process: Any, folder: Path, package: str) -> None:
    process()
    hashes = in_use()
    (folder / package / "inner" / "code.py").write_text("changed")
    assert source_keys.recorded() == {}
    assert in_use() == hashes


def test_files_that_changed_after_their_hashes_were_taken_are_not_recorded(process: Any, folder: Path) -> None:
    process()
    saved = source_keys.recorded()
    process()
    assert source_keys.take(saved)
    (folder / "triton" / "inner" / "code.py").write_text("changed")
    assert source_keys.recorded() == {}


@pytest.mark.parametrize(
    "wrong",
    [None, [], {}, {"torch": 1}, {"torch": "no hash"}, {"torch": None}, {"triton": None}, {"files": "other"}],
)
def test_what_is_no_record_is_not_taken(process: Any, wrong: Any) -> None:
    process()
    saved = source_keys.recorded()
    merged = {key: value for key, value in {**saved, **wrong}.items() if value is not None} if wrong else wrong
    later = process()
    assert not source_keys.take(merged)
    in_use()
    assert later.read == ["torch", "triton"]


def test_a_file_that_disappears_meanwhile_is_no_record(process: Any, folder: Path) -> None:
    process()
    in_use()
    (folder / "torch" / "gone.so").symlink_to(folder / "nowhere")
    assert source_keys.recorded() == {}
    assert not source_keys.take({"torch": "00", "triton": "", "files": ""})


def test_hashes_of_a_process_that_has_read_the_files_stay(process: Any) -> None:
    process()
    saved = source_keys.recorded()
    process()
    hashes = in_use()
    assert not source_keys.take(saved)
    assert in_use() == hashes


def test_torch_and_triton_have_such_hashes() -> None:
    """The names exist in the installed versions, and the files' state depends on both packages."""
    assert source_keys.take(source_keys.recorded()) is False  # known in this process
    names = {
        name for package in ("torch", "triton") for name, *_ in source_keys._files(source_keys._folder(package), "")
    }
    assert {"/_inductor/codecache.py", "/runtime/cache.py"} <= names
    assert any(name.startswith("/_C/libtriton") for name in names)
    assert not any("/include/" in name for name in names if name.endswith(".h"))
