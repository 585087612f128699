"""Compiled files are written into the caches of torch and Triton, and nowhere else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.cache import get_cache_manager

from dsv4_compile import DSV4Error
from dsv4_compile._compat import CacheArtifactManager
from dsv4_compile.runtime import compile_caches
from tests.support import fake_triton

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches/inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "caches/triton"))
    return tmp_path / "caches"


def written(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


NAMES = [
    "inductor/../x.so",
    "inductor/ab/../../x.so",
    "inductor/ab/..",
    "inductor/x.so",
    "inductor/a/b/x.so",
    "triton/KEY",
    "triton/./x",
    "checked/a/b",
    "elsewhere/ab/x.so",
    "torch.bin/x",
    "inductor/ab/x y.so",
    "/inductor/ab/x.so",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_cache_has_is_refused_before_anything_is_written(caches: Path, name: str) -> None:
    with pytest.raises(DSV4Error, match="E501"):
        compile_caches.place({"inductor/ab/good.so": b"1", name: b"2"}, CPU)
    assert not caches.exists()


@pytest.mark.parametrize("kind", ["inductor", "aot_autograd", "autotune"])
@pytest.mark.parametrize("key", ["../../outside", "/outside", "a/../../../outside"])
def test_keys_of_torch_that_lead_out_of_its_cache_are_refused(caches: Path, kind: str, key: str) -> None:
    CacheArtifactManager.deserialize(b"")  # registers kinds of artifacts
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact(kind, key, {"a": 1} if kind == "autotune" else b"content")
        content = torch.compiler.save_cache_artifacts()
    assert content is not None
    with pytest.raises(DSV4Error, match="leads out of torch's cache"):
        compile_caches.place({compile_caches.TORCH: content[0]}, CPU)
    assert not caches.exists()


def test_bytes_that_are_no_artifacts_of_torch_are_refused(caches: Path) -> None:
    with pytest.raises(DSV4Error, match="E501"):
        compile_caches.place({compile_caches.TORCH: b"\x00\x01 no artifacts"}, CPU)


def test_a_link_in_a_cache_folder_is_not_followed(caches: Path, tmp_path: Path) -> None:
    (caches / "inductor").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (caches / "inductor/ab").symlink_to(tmp_path / "outside")
    with pytest.raises(DSV4Error, match="a link in a cache folder"):
        compile_caches.place({"inductor/ab/x.so": b"1"}, CPU)
    assert not any((tmp_path / "outside").iterdir())


def test_a_kernel_is_listed_where_it_lies_now(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton lists a kernel's files by their paths."""
    before = get_cache_manager("0123")
    group = {name: before.put(content, name) for name, content in (("k.json", "{}"), ("k.cubin", b"\x7fELF"))}
    before.put_group("k.json", group)
    files = compile_caches._entry(Path(before.cache_dir))
    assert not any(str(tmp_path).encode() in content for content in files.values())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches / "other"))
    compile_caches.place(files, GPU)
    found = get_cache_manager("0123").get_group("k.json")
    assert found == {name: str(caches / "other" / Path(before.cache_dir).name / name) for name in group}
    assert Path(found["k.cubin"]).read_bytes() == b"\x7fELF"


@pytest.mark.parametrize(
    "names", [{"k.json": "/etc/passwd"}, {"k.json": "../x"}, {"k.json": ".."}, {"../k": "k"}, [], 1]
)
def test_a_kernel_that_lists_files_elsewhere_is_refused(caches: Path, names: object) -> None:
    group = json.dumps({"child_paths": names}).encode()
    with pytest.raises(DSV4Error, match="E501"):
        compile_caches.place({"triton/KEY/__grp__k.json": group}, GPU)
    assert written(caches) == []


def test_files_of_kernels_are_refused_without_a_gpu(caches: Path) -> None:
    with pytest.raises(DSV4Error, match="E502"):
        compile_caches.place({"triton/KEY/k.cubin": b""}, CPU)


def test_files_that_are_there_stay(caches: Path) -> None:
    compile_caches.place({"inductor/ab/x.so": b"1"}, CPU)
    path = caches / "inductor/ab/x.so"
    facts = os.stat(path)
    compile_caches.place({"inductor/ab/x.so": b"1"}, CPU)
    assert os.stat(path) == facts
    assert written(caches) == ["inductor/ab/x.so"]


@triton.jit
def double(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at))


def test_variants_that_triton_holds_are_found_in_a_new_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants of a kernel of this package travel, and the next process compiles none of them."""
    hits: list[bool] = []

    def listen(**compiled: Any) -> None:
        hits.append(compiled["cache_hit"])

    def build() -> None:
        for size in (16, 32):
            double.warmup(torch.float32, SIZE=size, grid=(1,))

    module = ModuleType("dsv4_compile.kernels.travelling")
    vars(module)["double"] = double
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fake_triton.triton_driver, "_active", fake_triton.FakeDriver(fake_triton.HOPPER))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    build()
    files: dict[str, bytes] = {}
    for kernel in compile_caches._kernels():
        files |= compile_caches._entry(compile_caches._folder_of(kernel))
    assert sum(name.endswith(".cubin") for name in files) == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches / "other"))
    compile_caches.place(files, GPU)
    double.device_caches.clear()
    build()
    assert hits == [False, False, True, True]
