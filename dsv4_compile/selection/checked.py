"""Results of the self-checks of kernels on this machine, in a file of torch's compile cache.

A kernel is proven with one version of Triton. With any other version, each op runs once against its reference, see
`testing.self_check`; the results are kept by architecture, versions of torch and Triton, and state of the kernels.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from getpass import getuser
from pathlib import Path

import torch

from .. import _files
from .._compat import triton_version

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 20
_used: set[Path] = set()
"""Files that results of this process came from."""
_unsaved: dict[Path, dict[str, str]] = {}
"""Results that could not be written, by file."""


def cache_folder() -> Path:
    """Return the folder of torch's compile cache."""
    default = Path(tempfile.gettempdir()) / f"torchinductor_{getuser()}"
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)


def triton_cache_folder() -> Path:
    """Return the folder of the kernels that Triton compiles; inside Inductor, without a setting, it is in torch's."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def folder() -> Path:
    """Return the folder of results."""
    return cache_folder() / "dsv4_checked"


def files() -> list[Path]:
    """Return the files that results of this process came from."""
    return sorted(path for path in _used if path.is_file())


def path_of(architecture: str, kernels: str) -> Path:
    """Return the file of the results on `architecture`; `kernels` is the state of the kernels."""
    versions = f"torch-{torch.__version__}-triton-{triton_version()}"
    return folder() / f"{architecture.replace(' ', '-')}-{versions}-{kernels}.json"


def results(architecture: str, kernels: str) -> dict[str, str]:
    """Return, by op, why its kernel failed the self-check, or "". A file that cannot be read holds nothing.

    Nor does one that other users can write: it decides which kernels run.
    """
    path = path_of(architecture, kernels)
    unsaved = _unsaved.get(path, {})
    try:
        saved = json.loads(_files.read_private(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return dict(unsaved)
    _used.add(path)
    reasons = {str(op): str(why) for op, why in saved.items()} if isinstance(saved, dict) else {}
    return reasons | unsaved


def add(architecture: str, kernels: str, found: Mapping[str, str]) -> None:
    """Add results to those of before. Where they cannot be written, this process keeps them, and the log says so."""
    path = path_of(architecture, kernels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        with _files.locked(path.parent):
            text = json.dumps({**results(architecture, kernels), **found}, indent=1, sort_keys=True)
            _files.replace(path, text, private=True)
    except OSError as error:
        if path not in _unsaved:
            _log.warning("results of self-checks are kept in this process alone: %s", error)
        _unsaved.setdefault(path, {}).update(found)
