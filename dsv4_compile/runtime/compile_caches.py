"""Compiled code of this process as files that travel: `collect` reads it out of the caches, `place` writes it there.

    torch.bin             torch's own artifacts: AOTAutograd's and Inductor's graphs, Triton kernels of Inductor, tuning
    inductor/XX/NAME.so   C++ of Inductor's graphs, by its place in Inductor's cache
    native.so             this package's C++ kernels
    triton/KEY/FILE       this package's Triton kernels in every variant that was built, and the code that launches them
    checked/NAME          results of self-checks, which choose kernels

Shared libraries are those that this process has loaded; kernels are those that Triton holds for its functions.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from .. import _files
from ..cpu import native
from ..errors import check, fail
from ..selection import checked

TORCH, NATIVE = "torch.bin", "native.so"
_INDUCTOR, _TRITON, _CHECKED = "inductor", "triton", "checked"
_GROUP = "__grp__"
"""Beginning of the file in which Triton lists the files of a kernel, by their absolute paths."""
_SAFE = re.compile(r"[A-Za-z0-9_.\-]{1,255}")
_DEPTHS = {_INDUCTOR: 3, _TRITON: 3, _CHECKED: 2}
_REST = {TORCH, NATIVE}


def collect(device: torch.device) -> dict[str, bytes]:
    """Return what this process has compiled or loaded from the caches for `device`, by name.

    Raises E502 if that is nothing, as where torch's caches are off.
    """
    from .._compat import cache_dir_utils

    saved = torch.compiler.save_cache_artifacts()
    check(
        saved is not None,
        "E502",
        got="nothing that torch compiled in this process",
        why="nothing ran, or torch's caches are off (TORCHINDUCTOR_FORCE_DISABLE_CACHES)",
        fix="call the compiled model first, a prompt and a step, in each batch size that is to start at once",
    )
    assert saved is not None
    files = {TORCH: saved[0]}
    folder = Path(os.path.realpath(cache_dir_utils.cache_dir()))
    triton = _triton_folder(device)
    for path in _loaded_libraries():
        if triton is not None and path.is_relative_to(triton):
            files.update(_entry(path.parent))
        elif (
            path.is_relative_to(folder)
            and len(path.relative_to(folder).parts) == 2
            and path.parent.name != native.FOLDER
        ):
            files[f"{_INDUCTOR}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    if (library := native.loaded_library()) is not None:
        files[NATIVE] = library.read_bytes()
    if device.type == "cuda":
        for kernel in _kernels():
            files.update(_entry(_folder_of(kernel)))
        for path in checked.files():
            files[f"{_CHECKED}/{path.name}"] = path.read_bytes()
    return files


def place(files: Mapping[str, bytes], device: torch.device) -> None:
    """Write what `collect` returned into the caches of this process, where the next compilation looks for it.

    Nothing outside of Inductor's and Triton's cache folders is written. Raises E501 for names that `collect` does not
    write, before anything is.
    """
    from .._compat import cache_dir_utils

    for name in files:
        _check_name(name)
    _check_torch(files.get(TORCH, b""))
    roots = {_INDUCTOR: Path(cache_dir_utils.cache_dir()), _CHECKED: checked.folder()}
    triton = _triton_folder(device)
    for name, content in files.items():
        kind, _, rest = name.partition("/")
        if kind == _TRITON:
            check(triton is not None, "E502", got=f"{name} for {device}", why="there is no GPU and no Triton here")
            assert triton is not None
            _put(triton, rest, _absolute(content, triton / PurePosixPath(rest).parent) if _is_group(rest) else content)
        elif kind in roots:
            _put(roots[kind], rest, content)
    if NATIVE in files:
        native.keep(files[NATIVE])
    if TORCH in files:
        torch.compiler.load_cache_artifacts(files[TORCH])


def _check_name(name: str) -> None:
    parts = name.split("/")
    good = len(parts) == _DEPTHS.get(parts[0], 0) and all(_SAFE.fullmatch(part) for part in parts)
    if not (name in _REST or good) or {".", ".."} & {*parts}:
        fail("E501", got=f"a file named {name!r}", why="nothing that is compiled has such a name")


def _check_torch(content: bytes) -> None:
    """Raise E501 for artifacts of torch that would be written outside of its cache folder; nothing is unpickled."""
    from .._compat import CacheArtifactManager

    artifacts = CacheArtifactManager.deserialize(content) if content else {}
    check(artifacts is not None, "E501", got=f"a {TORCH} that torch does not read")
    for kind, entries in artifacts.items():
        for entry in entries:
            key = PurePosixPath(entry.key)
            inside = not key.is_absolute() and ".." not in key.parts and "\0" not in entry.key
            check(inside, "E501", got=f"a key of {kind} in {TORCH} that leads out of torch's cache: {entry.key!r}")


def _put(root: Path, name: str, content: bytes) -> None:
    """Write a file below a cache folder that leads nowhere else, unless it is there with this content."""
    root.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    real = Path(os.path.realpath(root))
    path = real / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    check(
        Path(os.path.realpath(path)) == path,
        "E501",
        got=f"{path}, a link in a cache folder",
        why="it leads out of the cache",
        fix="remove it",
    )
    if not (path.is_file() and path.read_bytes() == content):
        _files.replace_bytes(path, content, private=True)


def _loaded_libraries() -> list[Path]:
    """Return the shared libraries that this process has mapped, without links. Raises E101 where it cannot know."""
    maps = Path("/proc/self/maps")
    check(maps.exists(), "E101", got=f"Python on {sys.platform}", rule="compiled folders are written on Linux")
    lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    names = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(Path(name) for name in names if name.endswith(".so") and os.path.isfile(name))


def _triton_folder(device: torch.device) -> Path | None:
    """Return Triton's cache folder, which this process chooses now, as Inductor would, if it has not; None on a CPU."""
    if device.type != "cuda":
        return None
    from .._compat import cache_dir_utils

    os.environ.setdefault("TRITON_CACHE_DIR", cache_dir_utils.triton_cache_dir(device.index or 0))
    return Path(os.path.realpath(os.environ["TRITON_CACHE_DIR"]))


def _kernels() -> Iterator[Any]:
    """Yield every variant that Triton holds of the kernels of this package."""
    jit = importlib.import_module("triton.runtime.jit")
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("dsv4_compile."):
            continue
        for function in list(vars(module).values()):
            if isinstance(function, jit.JITFunction) and id(function) not in seen:
                seen.add(id(function))
                for caches in list(function.device_caches.values()):
                    yield from (kernel for kernel in list(caches[0].values()) if hasattr(kernel, "hash"))


def _folder_of(kernel: Any) -> Path:
    """Return the folder that Triton keeps a compiled kernel in."""
    cache = importlib.import_module("triton.runtime.cache")
    return Path(cache.get_cache_manager(kernel.hash).cache_dir)


def _entry(folder: Path) -> dict[str, bytes]:
    """Return the files of one entry of Triton's cache, in which paths are relative."""
    files = {}
    for path in _plain_files(folder):
        content = _relative(path.read_bytes(), folder) if path.name.startswith(_GROUP) else path.read_bytes()
        files[f"{_TRITON}/{folder.name}/{path.name}"] = content
    return files


def _plain_files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "lock")


def _is_group(name: str) -> bool:
    return PurePosixPath(name).name.startswith(_GROUP)


def _relative(content: bytes, folder: Path) -> bytes:
    """Return the list of a kernel's files with their names in place of their paths."""
    paths = json.loads(content)["child_paths"]
    names = {name: Path(path).name for name, path in paths.items() if Path(path).parent == folder}
    return json.dumps({"child_paths": names}).encode()


def _absolute(content: bytes, folder: Path) -> bytes:
    """Return the list of a kernel's files with their paths in `folder`, or raise E501 for a list of anything else."""
    try:
        names = json.loads(content)["child_paths"]
        good = isinstance(names, dict) and all(_SAFE.fullmatch(str(name)) for name in (*names, *names.values()))
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    check(good and not {".", ".."} & {*names.values()}, "E501", got="a list of a kernel's files that names others")
    return json.dumps({"child_paths": {name: str(folder / file) for name, file in names.items()}}).encode()
