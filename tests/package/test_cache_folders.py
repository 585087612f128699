"""Tests of the warnings of `dsv4 doctor` about a compile cache that others can write: its content is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsv4_compile import _files, doctor


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = os.umask(0o022)
    folder = tmp_path / "home" / "cache"
    (folder / "ab" / "cd").mkdir(parents=True)
    (folder / "ab" / "cd" / "kernel.so").touch()
    yield folder
    os.umask(before)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_of_ones_own_is_safe(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    assert _files.why_unsafe(cache) == "" == _files.why_unsafe(cache / "not" / "yet")


@pytest.mark.parametrize(
    ("path", "mode", "who"),
    [
        (".", 0o777, "anyone can write .*cache: chmod -R go-w"),
        (".", 0o1777, "anyone can write .*cache: chmod"),
        (".", 0o775, r"group \d+ can write .*cache: chmod -R g-w"),
        ("ab/cd", 0o777, "anyone can write .*/ab/cd: chmod"),
        ("ab", 0o2775, r"group \d+ can write .*/ab: chmod"),
        ("ab/cd/kernel.so", 0o666, "anyone can write .*kernel.so: chmod"),
        ("..", 0o777, "anyone can write .*home, and so replace cache: choose"),
        ("..", 0o775, r"group \d+ can write .*home, and so replace cache: choose"),
        ("..", 0o1777, ""),  # sticky
    ],
)
def test_modes(cache: Path, path: str, mode: int, who: str) -> None:
    (cache / path).chmod(mode)
    reason = _files.why_unsafe(cache)
    assert re.fullmatch(who + ".*" if who else "", reason), reason


def test_nobody_reaches_what_is_inside_a_private_folder(cache: Path) -> None:
    (cache / "ab").chmod(0o777)
    cache.chmod(0o700)
    assert _files.why_unsafe(cache) == ""


def test_other_owners(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "_trusted", lambda: {os.geteuid() + 1})
    assert f"cache belongs to user {os.geteuid()}" in _files.why_unsafe(cache)
    assert f"belongs to user {os.geteuid()}, who can replace" in _files.why_unsafe(cache / "new")


def test_the_folder_of_a_link_counts(cache: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    (public / "link").symlink_to(cache)
    assert _files.why_unsafe(public / "link") == ""
    public.chmod(0o777)
    assert "replace link" in _files.why_unsafe(public / "link")
    (cache / "ab").chmod(0o777)
    public.chmod(0o755)
    assert "/ab: chmod" in _files.why_unsafe(public / "link")


@pytest.mark.parametrize(
    ("variable", "name"), [("TORCHINDUCTOR_CACHE_DIR", "compile cache"), ("TRITON_CACHE_DIR", "Triton cache")]
)
def test_doctor_looks_at_both_caches(cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str) -> None:
    monkeypatch.setenv(variable, str(cache))
    monkeypatch.setattr(doctor, "OP_TESTS", {})

    def found() -> doctor.Check:
        return next(check for check in doctor.examine() if check.name == name)

    assert (found().level, found().value) == ("ok", str(cache))
    (cache / "ab").chmod(0o777)
    assert found().level == "warn" and "anyone can write" in found().note


def test_files_that_are_replaced_at_once_are_whole(tmp_path: Path) -> None:
    """Two threads of a process, without a lock: each writes a separate file, and moves it."""
    path = tmp_path / "results.json"

    def write(number: int) -> None:
        for _ in range(200):
            _files.replace(path, str(number) * 1000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert path.read_text() in {f"{str(number) * 1000}\n" for number in range(4)}
    assert list(tmp_path.iterdir()) == [path]
