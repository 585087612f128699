"""Probes of `dsv4 doctor`: what this machine has, and whether it is enough.

Each probe returns one `Check`; one that raises becomes a check that says so, never the end of the report.
Levels: `ok`; `warn`, it works, but not as tested; `fix`, it does not work until the note is followed.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from getpass import getuser
from importlib import metadata
from pathlib import Path

import torch

from . import __version__
from ._compat import TORCH_FIRST, TORCH_LAST, TRITON_FIRST, TRITON_LAST, device_architecture
from .doctor_ops import OP_TESTS
from .ops.common.kernels import KERNELS
from .selection.proven import is_proven, tested_with

PYTHON_WINDOW = ((3, 10), (3, 13))
OPTIONAL = {
    "transformers": ("hf", (5, 17), "needed by dsv4_compile.hf and dsv4 demo"),
    "safetensors": ("hf", (0, 4), "needed to load checkpoints"),
    "depyf": ("debug", (0, 18), "needed to dump compiled code"),
    "rich": ("debug", (13, 0), "makes tables and progress bars"),
    "matplotlib": ("bench", (3, 5), "needed to draw plots"),
}
"""Package: the extra that brings it, its lowest version, what for."""
REFUSED_FROM = {"transformers": (5, 24)}
"""First unsupported version of packages that have changed since."""
VERDICTS = {
    "ok": "all is well",
    "warn": "works, with the warnings above",
    "fix": "follow the notes of the lines marked fix",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    value: str
    level: str = "ok"
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        """The line as JSON holds it."""
        return asdict(self)


def examine() -> list[Check]:
    """Run every probe, the small op tests included. Takes a few seconds, and touches the GPU if there is one."""
    probes: dict[str, Callable[[str], Check]] = {
        "dsv4_compile": _package,
        "python": _python,
        "torch": _torch,
        "triton": _triton,
        "device": _device,
        "kernels": _kernels,
        "C++ compiler": _compiler,
        "compile cache": _cache,
        "backend": _backend,
        **{name: partial(_optional, *facts) for name, facts in OPTIONAL.items()},
        **{f"op {name}": partial(_op, test) for name, test in OP_TESTS.items()},
    }
    return [_guarded(name, probe) for name, probe in probes.items()]


def render(checks: list[Check]) -> str:
    """The report as a block of text to paste, verdict last."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.level:<4}  {check.name:<{width}}  {check.value}")
        if check.note:
            lines.append(f"{'':<4}  {'':<{width}}    {check.note}")
    levels = [check.level for check in checks]
    worst = next((level for level in ("fix", "warn") if level in levels), "ok")
    return "\n".join([*lines, "", f"verdict: {VERDICTS[worst]}"])


def _guarded(name: str, probe: Callable[[str], Check]) -> Check:
    try:
        return probe(name)
    except Exception as fault:
        summary = (str(fault).splitlines() or [""])[0]
        return Check(name, "could not be examined", "fix", f"{type(fault).__name__}: {summary}")


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def _window(name: str, version: str, window: tuple[tuple[int, int], tuple[int, int]], *, advice: str) -> Check:
    low, high = window
    tested = f"tested: {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if _release(version) < low:
        return Check(name, version, "fix", f"{tested}; {advice}")
    return Check(name, version) if _release(version) <= high else Check(name, version, "warn", f"newer than {tested}")


def _package(name: str) -> Check:
    return Check(name, f"{__version__} at {Path(__file__).parent}")


def _python(name: str) -> Check:
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    checked = _window(name, platform.python_version(), PYTHON_WINDOW, advice="use a newer Python")
    return Check(name, value, checked.level, checked.note)


def _torch(name: str) -> Check:
    return _window(name, torch.__version__, (TORCH_FIRST, TORCH_LAST), advice="pip install 'torch>=2.11'")


def _triton(name: str) -> Check:
    window, advice = (TRITON_FIRST, TRITON_LAST), "install the triton that your torch build names"
    try:
        found = _window(name, metadata.version("triton"), window, advice=advice)
    except metadata.PackageNotFoundError:
        if torch.cuda.is_available():
            return Check(name, "not installed", "fix", advice)
        return Check(name, "not installed", note="not needed without a GPU")
    return replace(found, note=f"{found.note}; sm_90 has the kernels of other GPUs") if found.level == "warn" else found


def _device(name: str) -> Check:
    if not torch.cuda.is_available():
        return Check(name, "CPU only", note="every op runs, by its reference or by Inductor's C++ code")
    facts = torch.cuda.get_device_properties(0)
    return Check(
        name,
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        note="" if facts.major == 9 else "not sm_90: correct, but tuned for another GPU",
    )


def _kernels(name: str) -> Check:
    if not torch.cuda.is_available():
        return Check(name, "not needed without a GPU")
    architecture = device_architecture(torch.device("cuda"))
    proven = [op for op in KERNELS if is_proven("triton", op, architecture)]
    versions = ", ".join(sorted(tested_with(architecture)))
    value = f"{len(proven)} of {len(KERNELS)} proven on {architecture}" + (f" with Triton {versions}" if proven else "")
    if len(proven) == len(KERNELS):
        return Check(name, value)
    return Check(
        name, value, "warn", "the reference, in PyTorch, runs for the rest: python tests/gpu/prove.py tests them"
    )


def _compiler(name: str) -> Check:
    # The one that Inductor calls; it looks for no other.
    wanted = os.environ.get("CXX") or ("clang++" if platform.system() == "Darwin" else "g++")
    if found := shutil.which(wanted):
        return Check(name, found)
    level = "warn" if torch.cuda.is_available() else "fix"
    other = next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    return Check(name, f"no {wanted}", level, f"torch.compile on a CPU needs it, or CXX={other or 'another compiler'}")


def _cache(name: str) -> Check:
    default = Path(tempfile.gettempdir()) / f"torchinductor_{getuser()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
        return Check(name, str(folder), "warn", "anyone can write it, and what it holds is run: chmod o-w")
    return Check(name, str(folder))


def _backend(name: str) -> Check:
    if any(entry.name == "dsv4" for entry in metadata.entry_points(group="torch_dynamo_backends")):
        return Check(name, 'torch.compile(model, backend="dsv4")')
    return Check(name, "entry point not installed", "warn", 'pip install -e . makes backend="dsv4" known by name')


def _optional(extra: str, lowest: tuple[int, int], purpose: str, name: str) -> Check:
    get = f"pip install 'dsv4-compile[{extra}]'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "not installed", note=f"{purpose}: {get}")
    if _release(version) < lowest:
        return Check(name, version, "warn", f"{purpose}, from {lowest[0]}.{lowest[1]} on: {get}")
    if name in REFUSED_FROM and _release(version) >= REFUSED_FROM[name]:
        return Check(name, version, "warn", f"{purpose}, before {'.'.join(map(str, REFUSED_FROM[name]))}: {get}")
    return Check(name, version)


def _op(test: Callable[[torch.device], None], name: str) -> Check:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    test(device)
    return Check(name, f"right on {device}, {(time.perf_counter() - begin) * 1e3:.0f} ms")
