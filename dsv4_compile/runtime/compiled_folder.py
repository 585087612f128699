"""Folders of compiled code: a manifest with versions, machine, configuration and hashes, and the files that it lists.

What such a folder holds is run: torch's cache artifacts are pickles and code, the others machine code. Hashes find
damage; only the digest of the manifest, compared with one that came another way, says who made it. Nothing is used
before the manifest and every file have been read once, within bounds, and no link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .._files import AS_IT_IS, replace
from ..checkpoints.json_text import parse
from ..checkpoints.paths import folder_of, shown, why_bad_file_name
from ..errors import check, fail

MANIFEST = "compiled.json"
FORMAT = 1
MOST_MANIFEST = 4 << 20
"""Bytes of the longest manifest: 20,000 files."""
MOST_FILES = 20_000
MOST_BYTES = 8 << 30
"""Bytes of all files together; V4-Flash's kernels have less than 1 GB."""
_KEYS = {"format", "made_for", "configuration", "files"}
_FILE_KEYS = {"bytes", "sha256"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AGAIN = "build it again with `dsv4 build` or hf.save_compiled"
_NEW_FOLDER = "pass a folder that does not exist, or one that hf.save_compiled wrote"


class Compiled(NamedTuple):
    """A compiled folder that was read and is as its manifest says.

    Attributes:
        folder: where it is.
        digest: SHA-256 of the manifest, which has those of all files.
        made_for: versions and machine.
        configuration: model, sizes, formats and options.
        files: content by name.
    """

    folder: Path
    digest: str
    made_for: Mapping[str, Any]
    configuration: Mapping[str, Any]
    files: Mapping[str, bytes]


def write(
    path: str | os.PathLike[str],
    files: Mapping[str, bytes],
    made_for: Mapping[str, Any],
    configuration: Mapping[str, Any],
) -> str:
    """Write a compiled folder in place of one at `path`, the manifest last, and return its digest.

    Raises E501 for a folder that holds other files.
    """
    folder = folder_of(path)
    if os.path.lexists(folder):
        known = os.path.isdir(folder) and (not os.listdir(folder) or os.path.isfile(folder / MANIFEST))
        check(known, "E501", got=f"{folder}, which holds something else", fix=_NEW_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in _names(folder):
        (folder / name).unlink()
    entries = {}
    for name, content in sorted(files.items()):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"format": FORMAT, "made_for": made_for, "configuration": configuration, "files": entries}
    replace(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def read(path: str | os.PathLike[str], digest: str | None = None) -> Compiled:
    """Read a compiled folder and check every file against the manifest.

    Args:
        digest: what `write` returned; None trusts whoever could write the folder.

    Raises E501 for a folder that is damaged, has other files than its manifest lists, or another digest.
    """
    folder = folder_of(path)
    check(os.path.isdir(folder), "E501", got=f"no folder {shown(str(folder))}", fix=_AGAIN)
    text = _content(folder, MANIFEST, MOST_MANIFEST)
    actual = hashlib.sha256(text).hexdigest()
    if digest is not None:
        why = "its manifest differs from the one that was built"
        check(actual == digest, "E501", got=f"{folder} with digest {actual}", why=why, fix=f"expected was {digest}")
    manifest = _parsed(folder, text)
    entries = manifest["files"]
    present = set(_names(folder)) - {MANIFEST}
    if extra := sorted(present - entries.keys()):
        _damaged(folder, f"{shown(extra[0])}, which its manifest does not list")
    if missing := sorted(entries.keys() - present):
        _damaged(folder, f"no file {shown(missing[0])}, which its manifest lists")
    files = {}
    for name, entry in entries.items():
        content = _content(folder, name, entry["bytes"])
        if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
            _damaged(folder, f"{shown(name)}, which differs from its hash")
        files[name] = content
    return Compiled(folder, actual, manifest["made_for"], manifest["configuration"], files)


def difference(kind: str, stored: Any, now: Any) -> str:
    """Return the first field in which two trees of plain values differ, with both values, or ""."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for name in sorted({*stored, *now}):
            missing = "nothing"
            if why := difference(f"{kind}.{name}", stored.get(name, missing), now.get(name, missing)):
                return why
        return ""
    return "" if stored == now and type(stored) is type(now) else f"{kind} was {shown(stored)} and is {shown(now)}"


def _damaged(folder: Path, got: str, why: str = "") -> NoReturn:
    fail("E501", got=f"{folder} with {got}", why=why, fix=_AGAIN)


def _parsed(folder: Path, text: bytes) -> dict[str, Any]:
    """Return the manifest, of which every key and name has been checked."""
    try:
        manifest = parse(text, most_values=4 * MOST_FILES, most_nested=2 * MOST_FILES)
    except ValueError as fault:
        _damaged(folder, f"a {MANIFEST} that is no manifest", str(fault))
    if manifest.get("format") != FORMAT or manifest.keys() != _KEYS:
        form = shown(manifest.get("format"))
        _damaged(folder, f"a {MANIFEST} of format {form} and keys {shown(sorted(manifest))}", f"known is {FORMAT}")
    if not all(isinstance(manifest[name], dict) for name in _KEYS - {"format"}):
        _damaged(folder, f"a {MANIFEST} whose parts are no objects")
    total = 0
    for name, entry in manifest["files"].items():
        if (why := why_bad_file_name(name)) or name == MANIFEST:
            _damaged(folder, f"a file named {shown(name)}", why)
        good = isinstance(entry, dict) and entry.keys() == _FILE_KEYS and type(entry["bytes"]) is int
        if not good or entry["bytes"] < 0 or not _SHA256.fullmatch(str(entry["sha256"])):
            _damaged(folder, f"an entry {shown(entry)} for {shown(name)}")
        total += entry["bytes"]
    if total > MOST_BYTES or len(manifest["files"]) > MOST_FILES:
        most = f"at most {MOST_FILES} files of {MOST_BYTES} bytes together are read"
        _damaged(folder, f"{len(manifest['files'])} files of {total} bytes", most)
    return manifest


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of all files below a folder, or raise E501 for links, too many files, and other things."""
    count = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            mode = path.lstat().st_mode
            count += 1
            if count > 2 * MOST_FILES:
                _damaged(folder, f"more than {2 * MOST_FILES} files and folders")
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                _damaged(folder, f"{shown(path.relative_to(folder).as_posix())}, a link or no plain file")
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix()


def _content(folder: Path, name: str, most: int) -> bytes:
    """Return a plain file of the folder, at most `most` bytes and one more."""
    real = Path(os.path.realpath(folder))
    file = real / name
    if Path(os.path.realpath(file)) != file:
        _damaged(folder, f"{shown(name)}, a link")
    try:
        descriptor = os.open(file, os.O_RDONLY | AS_IT_IS)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                _damaged(folder, f"{shown(name)}, no plain file")
            content = opened.read(most + 1)
    except OSError as fault:
        _damaged(folder, f"{shown(name)}, which cannot be read", str(fault))
    if name == MANIFEST and len(content) > most:
        _damaged(folder, f"a {MANIFEST} of more than {most} bytes")
    return content
