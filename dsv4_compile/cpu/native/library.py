"""The library of C++ kernels as a file: built, kept and loaded so that no other user decides what this process runs.

Its name ends in the digest of its content. It is loaded through the descriptor that its owner, mode and content were
read from, so that nothing can be exchanged between the check and the load, whoever can write the folders above.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ... import progress
from ..._files import AS_IT_IS, check_private, make_private_folder, replace_bytes, synced

_log = logging.getLogger("dsv4_compile.cpu")
_COMPILERS = ("g++", "c++", "clang++")
_PATIENCE = 20.0
"""Seconds after which a line says that a compiler is still running."""
_ROOM = 1 << 20
"""Bytes that a library takes, amply."""
_SHOWN = 400
"""Characters of a compiler's last words that are shown."""
_descriptors: list[int] = []
"""Open files of loaded libraries: the dynamic loader knows a library by the name of its descriptor."""
loaded: list[Path] = []
"""Files of loaded libraries."""


class Unusable(OSError):
    """The compiler or the folder is of no use, whatever the flags."""


def find_compiler() -> list[str]:
    """Return the C++ compiler, CXX with its arguments or the first on PATH. Raises Unusable if there is none."""
    named = shlex.split(os.environ.get("CXX", ""), posix=os.name != "nt")
    words = named or [next(filter(_which, _COMPILERS), "")]
    if not words[0]:
        raise Unusable(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH, and CXX is not set")
    program = None if words[0].startswith("-") else _which(words[0])
    if program is None:
        raise Unusable(f"no C++ compiler: CXX names {words[0]!r}, which is not a program on PATH")
    return [os.path.abspath(program), *words[1:]]  # it runs in a different folder


def _which(name: str) -> str | None:
    """Return the path of a program, by PATH without its relative entries, which lead into the current folder."""
    entries = filter(os.path.isabs, os.get_exec_path())
    return shutil.which(name, path=os.pathsep.join(entries) or os.devnull)


def load(folder: Path, key: str, command: Sequence[str], seconds: float) -> ctypes.CDLL:
    """Load the library `key` of `folder`; build it there if no whole one is there.

    Args:
        folder: made if it does not exist, for this user alone.
        key: name of everything that the library is made of.
        command: the compiler and its arguments but for the output.
        seconds: time after which the compiler and its processes are stopped.

    Raises:
        Unusable: others can write the folder, or the compiler did not end by itself.
        OSError: the compiler or the dynamic loader failed.
    """
    try:
        make_private_folder(folder)
    except OSError as error:
        raise Unusable(str(error)) from None
    for path in sorted(folder.glob(f"{key}-*.so")):
        try:
            return _load(path)
        except OSError as error:
            _log.warning("C++ kernels for this CPU are built again: %s", error)
            with suppress(OSError):
                path.unlink()
    built = _build(folder, key, command, seconds)
    try:
        return _load(built)
    except OSError:
        built.unlink(missing_ok=True)
        raise


def keep(folder: Path, key: str, content: bytes) -> None:
    """Keep a library that was built elsewhere as `load` looks for it. OSError where that fails."""
    make_private_folder(folder)
    path = folder / f"{key}-{hashlib.sha256(content).hexdigest()[:32]}.so"
    if not path.exists():
        replace_bytes(path, content, private=True)


def _load(path: Path) -> ctypes.CDLL:
    """Load a library that nobody else can write and that is as it was built. OSError for any other."""
    descriptor = os.open(path, os.O_RDONLY | AS_IT_IS)
    try:
        check_private(descriptor, path)
        if not path.stem.endswith(f"-{_digest(descriptor)}"):
            raise OSError(f"{path} has changed since it was built")
        content = Path(f"/proc/self/fd/{descriptor}")
        library = ctypes.CDLL(str(content if content.exists() else path))
    except BaseException:
        os.close(descriptor)
        raise
    _descriptors.append(descriptor)
    loaded.append(path)
    return library


def _digest(descriptor: int) -> str:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return hashlib.sha256(file.read()).hexdigest()[:32]


def _build(folder: Path, key: str, command: Sequence[str], seconds: float) -> Path:
    """Return a new library, written next to its final path, synced and then moved there."""
    _remove_remains(folder, 2 * seconds + 60)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as temporary:
        new = Path(temporary, "kernels.so")
        _run([*command, "-o", str(new)], Path(temporary), seconds)
        if not new.is_file() or new.is_symlink() or not new.stat().st_size:
            raise Unusable(f"{command[0]} ended without an error and wrote no library")
        new.chmod(stat.S_IRWXU)
        with synced(new) as descriptor:
            path = folder / f"{key}-{_digest(descriptor)}.so"
        new.replace(path)
    with suppress(OSError), synced(folder):  # some file systems sync no folders
        pass
    return path


def _remove_remains(folder: Path, seconds: float) -> None:
    """Remove what processes that were killed while they built have left."""
    for remains in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - remains.lstat().st_mtime > seconds:
                shutil.rmtree(remains, ignore_errors=True)


def _run(command: Sequence[str], folder: Path, seconds: float) -> None:
    """Run a compiler in a process group, and end the whole group. Raises OSError with its last words if it fails."""
    with tempfile.TemporaryFile(dir=folder) as said, progress.stage("compile C++ kernels"):
        how = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT, "cwd": folder}
        process = subprocess.Popen(command, start_new_session=True, **how)  # type: ignore[call-overload]
        try:
            _wait(process, command[0], seconds)
        finally:
            with suppress(OSError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4 * _SHOWN))
        last = " ".join(said.read().decode(errors="replace").split())[-_SHOWN:]
    if process.returncode < 0:
        raise Unusable(f"{command[0]} was ended by signal {-process.returncode}: {last}")
    if process.returncode:
        failed = f"{command[0]} failed with {process.returncode}"
        if (free := shutil.disk_usage(folder).free) < _ROOM:  # for the compiler's words neither, nor with other flags
            raise Unusable(f"{failed}, and {folder.parent} has {free} bytes left: {last}")
        raise OSError(f"{failed}: {last}")


def _wait(process: subprocess.Popen[bytes], name: str, seconds: float) -> None:
    try:
        process.wait(min(_PATIENCE, seconds))
    except subprocess.TimeoutExpired:
        if seconds > _PATIENCE:
            _log.warning(
                "%s has compiled C++ kernels for %.0f s, and is stopped after %.0f s", name, _PATIENCE, seconds
            )
        try:
            process.wait(max(0.0, seconds - _PATIENCE))
        except subprocess.TimeoutExpired:
            raise Unusable(f"{name} did not end within {seconds:.0f} s") from None
