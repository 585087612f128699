"""Probes of `dsv4 doctor`: what this machine has, and whether it is enough.

Each probe returns one `Check`; one that raises becomes a check that says so, never the end of the report.
Levels: `ok`; `warn`, it works, but not as tested; `fix`, it does not work until the note is followed.
"""

from __future__ import annotations

import os
import platform
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from . import __version__
from ._compat import (
    TORCH_FIRST,
    TORCH_LAST,
    TRANSFORMERS_FIRST,
    TRANSFORMERS_LAST,
    TRITON_FIRST,
    TRITON_LAST,
    device_architecture,
)
from ._files import why_unsafe
from .columns import NARROWEST, terminal_width
from .errors import DSV4Error, printable
from .layout import FP8_DS_MLA, HEAD_DIM, WINDOW_BLOCK, allocate_cache
from .ops.common.kernels import KERNELS
from .selection import proven
from .selection.checked import cache_folder, triton_cache_folder

PYTHON_WINDOW = ((3, 10), (3, 13))
OPTIONAL = {
    "transformers": ("hf", TRANSFORMERS_FIRST, "needed by dsv4_compile.hf and dsv4 demo"),
    "safetensors": ("hf", (0, 4), "needed by transformers, to save models"),
    "depyf": ("debug", (0, 18), "needed to dump compiled code"),
    "rich": ("debug", (13, 0), "makes tables and progress bars"),
    "matplotlib": ("bench", (3, 5), "needed to draw plots"),
}
"""Package: the extra that brings it, its lowest version, what for."""
TESTED_TO = {"transformers": TRANSFORMERS_LAST}
"""Newest tested version of packages that rename what is used here."""
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
        "compile cache": partial(_cache, cache_folder),
        "Triton cache": partial(_cache, triton_cache_folder),
        "backend": _backend,
        **{name: partial(_optional, *facts) for name, facts in OPTIONAL.items()},
        **{f"op {name}": partial(_op, test) for name, test in OP_TESTS.items()},
    }
    return [_guarded(name, probe) for name, probe in probes.items()]


def examine_folder(path: str) -> list[Check]:
    """Examine a checkpoint folder without loading it."""
    try:
        from .hf.loading.folder_report import rows
    except ImportError as fault:
        why = fault.got if isinstance(fault, DSV4Error) else str(fault)
        return [Check("transformers", why, "fix", "pip install 'dsv4-compile[hf]'")]
    return [Check(*row) for row in rows(path)]


def render(checks: list[Check]) -> str:
    """Return the report as a block of text to paste, verdict last."""
    names = max(len(check.name) for check in checks)
    room = max(terminal_width() - names - 8, NARROWEST // 2)
    # Paths stay whole: the report is there to paste.
    wrap = textwrap.TextWrapper(room, break_long_words=False, break_on_hyphens=False).wrap
    lines = []
    for check in checks:
        # Names and values come from files and libraries: none begins a line, nor moves the cursor.
        head = printable(f"{check.level:<4}  {check.name:<{names}}  ")
        for line in [*(wrap(printable(check.value)) or [""]), *(f"  {line}" for line in wrap(printable(check.note)))]:
            lines.append(f"{head}{line}")
            head = " " * len(head)
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
        check = _window(name, metadata.version("triton"), window, advice=advice)
    except metadata.PackageNotFoundError:
        if torch.cuda.is_available():
            return Check(name, "not installed", "fix", advice)
        return Check(name, "not installed", note="not needed without a GPU")
    return replace(check, note=f"{check.note}; sm_90 has the kernels of other GPUs") if check.level == "warn" else check


def _device(name: str) -> Check:
    if not torch.cuda.is_available():
        return Check(name, "CPU only", note="every op runs, by its reference or by Inductor's C++ code")
    facts = torch.cuda.get_device_properties(0)
    return Check(
        name,
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        note="" if facts.major == 9 else "not sm_90: correct, but tuned for a different GPU",
    )


def _kernels(name: str) -> Check:
    """Count the kernels that `auto` uses on this GPU, and say why it does not use the others."""
    if not torch.cuda.is_available():
        return Check(name, "not needed without a GPU")
    architecture = device_architecture(torch.device("cuda"))
    reasons = {op: proven.why_unproven("triton", op, architecture) for op in KERNELS}
    used = [op for op, why in reasons.items() if not why]
    versions = ", ".join(sorted(proven.tested_with(architecture)))
    value = f"{len(used)} of {len(KERNELS)} proven on {architecture}" + (f" with Triton {versions}" if versions else "")
    if len(used) == len(KERNELS):
        return Check(name, value)
    by_reason: dict[str, list[str]] = {}
    for op, why in reasons.items():
        if why:
            by_reason.setdefault(why, []).append(op)
    whys = "; ".join(f"{_few(ops)}: {why}" for why, ops in by_reason.items())
    advice = "dsv4 doctor --prove" if proven.to_check(architecture) else "python tests/gpu/prove.py"
    return Check(name, value, "warn", f"the reference, in PyTorch, runs for the rest ({whys}): {advice} tests them")


def _few(ops: Sequence[str]) -> str:
    """Name up to three ops, and the number of the others."""
    more = f" and {len(ops) - 3} more" if len(ops) > 3 else ""
    return ", ".join(ops[:3]) + more


def prove() -> list[Check]:
    """Run each kernel of this GPU once against its reference, and keep what `auto` goes by.

    Only a kernel that was proven on such a GPU with a different Triton is used because of this; others are reported.
    """
    if not torch.cuda.is_available():
        return [Check("self-check", "not needed without a GPU")]
    from .testing.self_check import check_ops

    device = torch.device("cuda", torch.cuda.current_device())
    architecture = device_architecture(device)
    reasons = check_ops(sorted(KERNELS), device)
    checks = [Check(f"kernel {op}", "disagrees with its reference", "fix", why) for op, why in reasons.items() if why]
    right = f"{len(reasons) - len(checks)} of {len(reasons)} agree with their references on {architecture}"
    return [Check("self-check", right), *checks]


def _compiler(name: str) -> Check:
    # The one that Inductor calls; it looks for no other.
    named = (os.environ.get("CXX") or "").split()  # arguments may follow
    wanted = named[0] if named else "clang++" if platform.system() == "Darwin" else "g++"
    if not wanted.startswith("-") and (path := shutil.which(wanted)):
        return Check(name, " ".join([path, *named[1:]]))
    level = "warn" if torch.cuda.is_available() else "fix"
    other = next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    return Check(name, f"no {wanted}", level, f"torch.compile on a CPU needs it, or CXX={other or 'another compiler'}")


def _cache(folder: Callable[[], Path], name: str) -> Check:
    why = why_unsafe(folder())
    return Check(name, str(folder()), "warn", f"what it holds is run, and {why}") if why else Check(name, str(folder()))


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
    check = _window(name, version, (lowest, TESTED_TO.get(name, _release(version))), advice=get)
    return replace(check, note=f"{check.note}; {get}") if check.note else check


def _op(test: Callable[[torch.device], None], name: str) -> Check:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    test(device)
    return Check(name, f"right on {device}, {(time.perf_counter() - begin) * 1e3:.0f} ms")


# Ops on inputs so small that the right answer is known without computing it.


def _expect(got: Tensor, wanted: Tensor) -> None:
    if not torch.equal(got, wanted.to(got)):
        raise ArithmeticError(f"wrong result: {got.flatten()[:4].tolist()} instead of {wanted.flatten()[:4].tolist()}")


def _ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def norm(device: torch.device) -> None:
    """Rows of equal values are their own root mean square, so they normalise to ones."""
    ones = torch.ones(2, HEAD_DIM, device=device)
    q, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(4 * ones, 2 * ones, ones[0], 3 * ones[0], 0.0)
    _expect(q, ones)
    _expect(kv, 3 * ones)


def cache_round_trip(device: torch.device) -> None:
    """Powers of two survive the 584-byte row exactly, and a slot of -1 is not written."""
    k = torch.full((2, HEAD_DIM), 0.5, dtype=torch.bfloat16, device=device)
    cache = allocate_cache("fp8_ds_mla", 1, WINDOW_BLOCK, device=device)
    torch.ops.dsv4.quantize_and_insert_k_cache(k, cache, _ints(device, 3, -1).long(), WINDOW_BLOCK)
    out = torch.zeros(1, 4, HEAD_DIM, dtype=torch.bfloat16, device=device)
    table, lens = _ints(device, 0)[None], _ints(device, 4)
    torch.ops.dsv4.dequantize_and_gather_k_cache(out, cache, lens, None, table, WINDOW_BLOCK, 0)
    _expect(out[0, 3], k[0])
    untouched = cache[0, : 3 * FP8_DS_MLA.data]
    _expect(untouched, torch.zeros_like(untouched))


def attention(device: torch.device) -> None:
    """One key with score 0 against a sink of 0 halves the value; a row of -1 gives 0 and a log-sum-exp of +inf."""
    cache = torch.zeros(1, WINDOW_BLOCK, HEAD_DIM, device=device)
    cache[0, 5, 1] = 8.0
    q = torch.zeros(2, 1, HEAD_DIM, device=device)
    indices, lens = _ints(device, 5, -1)[:, None], _ints(device, 1, 0)
    sink = torch.zeros(1, device=device)
    out, lse = torch.ops.dsv4.sparse_mla_decode(q, cache, indices, lens, WINDOW_BLOCK, "plain", 1.0, sink)
    _expect(out[0, 0], cache[0, 5] / 2)
    _expect(out[1], torch.zeros_like(out[1]))
    _expect(lse[:, 0], torch.tensor([0.0, torch.inf]))


OP_TESTS: dict[str, Callable[[torch.device], None]] = {
    "fused_q_kv_rmsnorm": norm,
    "quantize_and_insert_k_cache": cache_round_trip,
    "sparse_mla_decode": attention,
}
