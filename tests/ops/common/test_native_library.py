"""The library of C++ kernels: who may write it, damage, compilers that fail in every way, and several builders."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_compile import _files
from dsv4_compile.cpu import native
from dsv4_compile.cpu.native import library
from tests.audit import watched

ANSWER = 'extern "C" int answer() { return 42; }'
EVIL = """
#include <cstdio>
__attribute__((constructor)) static void run() { if (FILE* f = fopen("executed", "w")) fclose(f); }
extern "C" int answer() { return 13; }
"""
OUTPUT = 'while [ "$1" != -o ]; do shift; done; out=$2\n'
"""Lines of a compiler in sh that look for its output."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A library to build, and one that writes a file when it is loaded."""
    folder = tmp_path_factory.mktemp("libraries")
    for name, text in {"good": ANSWER, "evil": EVIL}.items():
        (folder / f"{name}.cpp").write_text(text)
        command = ["g++", "-shared", "-fPIC", "-o", str(folder / f"{name}.so"), str(folder / f"{name}.cpp")]
        subprocess.run(command, check=True)
    return {name: folder / f"{name}.so" for name in ("good", "evil")}


Compiler = Callable[[str], None]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path]) -> Compiler:
    """Let CXX be a program in sh, and the cache a new folder; `$good` is a library that it may copy to `$out`."""
    monkeypatch.setattr(native, "_state", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "compiler"

    def write(text: str) -> None:
        program.write_text(f"#!/bin/sh\n{OUTPUT}good={libraries['good']}\n{text}\n")
        program.chmod(0o755)

    monkeypatch.setenv("CXX", f"{program} --with arguments")
    return write


def build(text: Compiler | None = None) -> ctypes.CDLL | None:
    native._state.clear()
    native.build()
    return native._state["loaded"]


def kept(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "dsv4_compile").iterdir()
    return path


def test_a_library_is_kept_for_its_user_alone_and_loaded_again(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        compiler('cp "$good" "$out"; chmod 666 "$out"')
        assert build().answer() == 42
    finally:
        os.umask(before)
    path = kept(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    compiler("exit 1")
    with watched() as events:
        assert build().answer() == 42
    assert not [event for event in events if event[0] not in ("open", "ctypes.dlopen")], events
    opened = {str(name) for event, name in events if event == "open"}
    assert [name for name in opened if name.startswith(str(tmp_path))] == [str(path)]
    assert not caplog.records


@pytest.mark.parametrize("damage", ["evil", "short", "empty", "byte", "link", "hard link", "fifo", "group", "others"])
def test_a_file_that_is_not_what_was_built_is_built_again(
    damage: str, compiler: Compiler, libraries: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('cp "$good" "$out"')
    build()
    path = kept(tmp_path)
    content, evil = path.read_bytes(), tmp_path / "evil.so"
    shutil.copy(libraries["evil"], evil)
    if damage in ("link", "hard link", "fifo"):
        path.unlink()
    match damage:
        case "evil":
            path.write_bytes(evil.read_bytes())
        case "short":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "byte":
            path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
        case "link":
            path.symlink_to(evil)
        case "hard link":
            evil.write_bytes(content)
            os.link(evil, path)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.chmod(0o720 if damage == "group" else 0o702)
    assert build().answer() == 42
    assert not (tmp_path / "executed").exists() and kept(tmp_path).read_bytes() == content
    assert "built again" in caplog.text


@pytest.mark.parametrize("shared", ["all", "others", "link", "file", "owner"])
def test_a_folder_of_others_is_not_used(
    shared: str,
    compiler: Compiler,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler('cp "$good" "$out"; touch ran')
    folder = tmp_path / "cache" / "dsv4_compile"
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    folder.parent.mkdir()
    match shared:
        case "link":
            folder.symlink_to(other)
        case "file":
            folder.touch()
        case "owner":
            folder.mkdir()
            monkeypatch.setattr(_files, "_trusted", lambda: {os.geteuid() + 1})
        case _:
            folder.mkdir()
            folder.chmod(0o777 if shared == "all" else 0o702)
    assert build() is None
    (record,) = caplog.records
    assert "W603" in record.message and str(folder) in record.message and not list(other.iterdir())


def test_a_folder_left_open_to_a_group_is_closed_and_its_files_are_checked(
    compiler: Compiler, libraries: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A umask of 002 leaves folders that a group can write, and files that one of the group put there."""
    compiler('cp "$good" "$out"')
    build()
    path = kept(tmp_path)
    path.write_bytes(libraries["evil"].read_bytes())
    path.chmod(0o775)
    path.parent.chmod(0o775)
    assert build().answer() == 42 and build().answer() == 42
    assert path.parent.stat().st_mode & 0o777 == 0o700 and not (tmp_path / "executed").exists()
    first, second = (record.message for record in caplog.records)
    assert "closed to others" in first and "built again" in second


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 3", "failed with 3"),
        ("printf '\\377\\376 caf\\351 \\033[2J\\nverdict: ok' >&2; exit 1", r"caf\ufffd \x1b[2J verdict: ok"),
        ("kill -9 $$", "signal 9"),
        ("exit 0", "wrote no library"),
        (': > "$out"', "wrote no library"),
        ('ln -s "$good" "$out"', "wrote no library"),
        ('echo text > "$out"', "invalid ELF header|file too short"),
    ],
)
def test_a_compiler_that_fails_is_one_line(
    text: str, said: str, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler(text)
    assert build() is None
    (record,) = caplog.records
    assert "W603" in record.message and "torch" in record.message and "\n" not in record.message
    shown = record.message.encode("ascii", "backslashreplace").decode()
    assert any(words in shown for words in said.split("|")), shown
    assert not list((tmp_path / "cache" / "dsv4_compile").iterdir())


def test_a_compiler_that_hangs_is_ended_with_its_children(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_SECONDS", 1.5)
    monkeypatch.setattr(library, "_PATIENCE", 0.5)
    compiler(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()
    assert build() is None
    assert time.monotonic() - began < 15
    first, last = (record.message for record in caplog.records)
    assert "has compiled" in first and "did not end within 2 s" in last
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler's child is still running")
    assert not list((tmp_path / "cache" / "dsv4_compile").iterdir())


@pytest.mark.parametrize("named", ["", " ", "-O3", "none-such", "'", "./none", "/dev/null"])
def test_without_a_compiler_no_other_program_runs(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "-O3"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setattr(native, "_state", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", named)
    with watched() as events:
        assert build() is None
    assert not [event for event in events if event[0].startswith("subprocess")]
    (record,) = caplog.records
    assert "W603" in record.message and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["", ":/none", ".", "bin:/none", "/none::"])
@pytest.mark.parametrize("named", ["", "g++"])
def test_no_compiler_of_the_current_folder_runs_unless_it_is_named_so(
    path: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin").mkdir()
    for program in (tmp_path / "g++", tmp_path / "bin" / "g++"):
        program.write_text(f"#!/bin/sh\n: > {tmp_path}/ran\n")
        program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native, "_state", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("CXX", named)
    assert build() is None and not (tmp_path / "ran").exists()
    assert "W603" in caplog.text and "no C++ compiler" in caplog.text


def test_a_compiler_may_be_named_from_the_current_folder(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler('cp "$good" "$out"')
    monkeypatch.setenv("CXX", "./compiler '--with one argument'")
    assert build().answer() == 42


def test_a_folder_that_cannot_be_written_is_one_line(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('cp "$good" "$out"')
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nothing")
    assert build() is None
    (record,) = caplog.records
    assert "W603" in record.message


def test_a_full_disk_is_named_and_the_compiler_runs_once(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler(f"echo >> {tmp_path}/runs; exit 1")
    monkeypatch.setattr(library.shutil, "disk_usage", lambda folder: SimpleNamespace(free=12))
    assert build() is None
    (record,) = caplog.records
    assert "has 12 bytes left" in record.message and (tmp_path / "runs").read_text() == "\n"


def test_remains_of_killed_builders_are_removed(compiler: Compiler, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "dsv4_compile"
    for name, age in (("build-old", 10_000), ("build-new", 1)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age,) * 2)
    folder.chmod(0o700)
    compiler('cp "$good" "$out"')
    assert build().answer() == 42
    assert sorted(path.name.partition("-")[2] for path in folder.glob("build-*")) == ["new"]


def test_several_builders_all_load_a_whole_library(compiler: Compiler, tmp_path: Path) -> None:
    compiler('head -c 5000 "$good" > "$out"; sleep 0.2; cp "$good" "$out"')

    def child() -> int:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                loaded = library.load(tmp_path / "own", "key", [str(tmp_path / "compiler")], 60)
                status = int(loaded.answer() != 42)
            finally:
                os._exit(status)
        return process

    assert [os.waitpid(process, 0)[1] for process in [child() for _ in range(4)]] == [0] * 4
    (path,) = (tmp_path / "own").iterdir()
    assert path.name.startswith("key-")
