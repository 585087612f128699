"""Hash the machine code of every kernel, compiled ahead of time for five GPUs, so that a change of it is seen.

    python tests/tools/fingerprint.py --check            which (op, target) differ from the committed table
    python tests/tools/fingerprint.py --write [OP ...]   write the committed table, or the rows of some ops
    python tests/tools/fingerprint.py --diff A.json B.json

A fingerprint covers the launches of all calls of `fingerprint_calls.py`: the PTX or AMDGCN text without line
information and symbol names, shared memory, launch options and grids. ptxas and the assembler are functions of that
text and of their version, which the table names, so they are not run. `PYTHONPATH=CHECKOUT` fingerprints a different
checkout.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind PYTHONPATH, which may name a different checkout

import torch  # noqa: E402
import triton  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

from dsv4_compile.ops.common import kernels  # noqa: E402
from tests.support.fake_triton import TARGETS, FakeDriver, code_alone, triton_driver  # noqa: E402
from tests.tools.fingerprint_calls import calls_of  # noqa: E402
from tests.tools.fingerprint_source import digest, source_of, specialized  # noqa: E402

for _file in sorted(Path(__file__).parent.glob("fingerprint_calls*.py")):
    importlib.import_module(f"tests.tools.{_file.stem}")  # registers its calls

GPUS = {
    "sm_90": ("cuda", 90, 132),
    "sm_100": ("cuda", 100, 148),
    "sm_120": ("cuda", 120, 170),
    "gfx942": ("hip", 0, 304),
    "gfx950": ("hip", 0, 256),
}
"""The fields of `kernels.gpu.Gpu` of each target."""
Table = dict[str, dict[str, str]]
"""Fingerprint by op and target."""


class Job(NamedTuple):
    """A kernel to compile: its function, and the arguments and options of a launch that it is compiled for."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    target: str


class Launch(NamedTuple):
    """A launch of a call: number of its job, grid, CTAs of a cluster and shared memory beyond the compiler's."""

    job: int
    grid: tuple[int, ...]
    cluster: int
    shared: int


class _Metadata(NamedTuple):
    shared: int = 0


class _Compiled:
    """Stands in for a compiled kernel, and notes how it is launched."""

    def __init__(self, job: int, grid: tuple[int, ...], warps: int) -> None:
        self.job, self.grid = job, grid
        self.metadata = _Metadata()
        self.packed_metadata = warps, 1, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return lambda *args: None

    def launch(self) -> Launch:
        """How it was launched last."""
        return Launch(self.job, (*self.grid, 1, 1)[:3], *self.packed_metadata[1:])


class Plan:
    """The launches of calls of ops on all targets, and the kernels to compile for them, each once."""

    def __init__(self, ops: Iterable[str], targets: Iterable[str] = TARGETS) -> None:
        self.jobs: list[Job] = []
        self.calls: dict[tuple[str, str], dict[str, list[Launch]]] = {}
        """Launches of each call, by op and target, and by the call's label."""
        self._known: dict[Any, int] = {}
        self._words: list[str] = []
        modules = _kernel_modules()
        for number, target in enumerate(targets):
            with _seen_as(target, modules):
                for op in ops:
                    calls = calls_of(op, number)
                    self.calls[op, target] = {label: self._launches(op, args, target) for label, args in calls.items()}

    def _launches(self, op: str, args: tuple[Any, ...], target: str) -> list[Launch]:
        """The launches of a call; none where its kernel does not support it."""
        launched: list[_Compiled] = []

        def note(function: Any, *values: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> _Compiled:
            key = function, target, *specialized(function, values, options)
            if key not in self._known:
                self._known[key] = len(self.jobs)
                self._words.append(f"{source_of(function)} {re.sub('0x[0-9a-f]+', '', str(key[1:]))}")
                self.jobs.append(Job(function, values, options, target))
            launched.append(_Compiled(self._known[key], grid, options.get("num_warps", 4)))
            return launched[-1]

        if _unsupported(op, args):
            return []
        with mock.patch.object(JITFunction, "run", note):
            kernels.launcher(op)(*args)
        return [one.launch() for one in launched]

    def source(self, op: str) -> str:
        """Return a hash of the sources and launches of the calls of `op` on all targets."""
        launches = [
            (target, label, [(self._words[one.job], *one[1:]) for one in launched])
            for (of, target), calls in self.calls.items()
            if of == op
            for label, launched in calls.items()
        ]
        return digest(*sorted(map(str, launches)))


def _unsupported(op: str, args: tuple[Any, ...]) -> str:
    check = kernels.refusal(op)
    return check(*args) if check is not None else ""


def _kernel_modules() -> list[ModuleType]:
    """Every module of kernels/, imported."""
    package = importlib.import_module("dsv4_compile.kernels")
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for folder in package.__path__:
        # Folders without __init__ are not walked.
        files = sorted(Path(folder).rglob("*.py"))
        names += [".".join((package.__name__, *file.relative_to(folder).with_suffix("").parts)) for file in files]
    return [importlib.import_module(name) for name in sorted(set(names))]


@contextmanager
def _seen_as(target: str, modules: Sequence[ModuleType]) -> Iterator[None]:
    """Let launchers see the GPU `target` wherever their arguments are."""
    (home,) = (module for module in modules if hasattr(module, "Gpu") and module.Gpu.__module__ == module.__name__)
    gpu, gpu_of = home.Gpu(*GPUS[target]), home.gpu_of
    with mock.patch.object(triton_driver, "_active", FakeDriver(TARGETS[target])):
        for module in modules:
            if getattr(module, "gpu_of", None) is gpu_of:
                module.gpu_of = lambda device: gpu  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in modules:
                if hasattr(module, "gpu_of"):
                    module.gpu_of = gpu_of  # type: ignore[attr-defined]


# The text of a compiled kernel.

_COMMENTS = {"ptx": re.compile(r"//.*"), "amdgcn": re.compile(r"(?:;|//).*")}
_FUNCTIONS = {
    "ptx": re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([A-Za-z_$][\w$]*)"),
    "amdgcn": re.compile(r"\.type\s+([A-Za-z_$][\w$.]*),@function"),
}
_LOCALS = re.compile(
    r"\.reg \.\w+ ([A-Za-z_][^;%<]*);|\.shared [^;\[]*?([A-Za-z_]\w*)\[|^([A-Za-z_]\w*):", re.MULTILINE
)
"""What inline PTX declares: registers, shared memory and labels."""


def instructions(text: str, language: str) -> str:
    """PTX or AMDGCN without comments, with functions and names of inline PTX numbered in the order of appearance."""
    text = re.sub(r"[ \t]+", " ", _COMMENTS[language].sub("", text))
    text = re.sub(r" ?\n[ \n]*", "\n", text)
    names = list(_FUNCTIONS[language].findall(text))
    functions = {name: f"function{number}" for number, name in enumerate(dict.fromkeys(names))}
    for name, number in functions.items():
        # Parameters are named after their function.
        text = re.sub(rf"(?<![\w$.]){re.escape(name)}(?![A-Za-z0-9$])", number, text)
    if language == "ptx":
        declared = (name for match in _LOCALS.findall(text) for group in match for name in re.split(r",\s*", group))
        locals_ = {name: f"local{number}" for number, name in enumerate(dict.fromkeys(filter(None, declared)))}
        if locals_:
            text = re.sub(
                rf"(?<![\w$.%])(?:{'|'.join(map(re.escape, locals_))})(?![\w$])", lambda m: locals_[m[0]], text
            )
    return text


FACTS = ("shared", "num_warps", "num_ctas", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion")
"""Metadata that a launch takes from the compiler, and the option of ptxas."""


@contextmanager
def _text_only() -> Iterator[None]:
    """Let Triton stop at the text of PTX or AMDGCN, in a separate cache, because its binaries are empty."""
    from triton.backends.amd import compiler as amd
    from triton.backends.nvidia import compiler as nvidia

    folder = f"{triton.knobs.cache.dir}-text"
    with (
        triton.knobs.cache.scope(),
        triton.knobs.compilation.scope(),
        mock.patch.object(nvidia.CUDABackend, "make_cubin", lambda *args: b""),
        mock.patch.object(amd.HIPBackend, "make_hsaco", staticmethod(lambda *args: b"")),
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.disable_line_info = True
        yield


def compiled(job: Job) -> Any:
    """The kernel of a job, compiled up to its text."""
    function, seen = job.function, job.function.device_caches
    target = TARGETS[job.target]
    with _text_only(), code_alone(target), mock.patch.object(triton_driver, "_active", FakeDriver(target)):
        # A kernel remembers the target it first saw as that of the device.
        function.device_caches = collections.defaultdict(function.create_binder)
        try:
            return JITFunction.run(function, *job.args, grid=(1,), warmup=True, **job.options)
        finally:
            function.device_caches = seen


def code_of(job: Job) -> str:
    """Return the text of a job's kernel, and the metadata for its launch."""
    kernel = compiled(job)
    language = "ptx" if "ptx" in kernel.asm else "amdgcn"
    facts = [f"{name}={getattr(kernel.metadata, name, None)}" for name in FACTS]
    return "\n".join([instructions(kernel.asm[language], language), *facts])


_JOBS: list[Job] = []
"""The jobs of the processes that compile: forks, which inherit them."""


def _digest_of(number: int) -> str:
    return digest(code_of(_JOBS[number]))


def digests(jobs: Sequence[Job], processes: int) -> list[str]:
    """The digest of each job's code, compiled in so many processes."""
    _JOBS[:] = jobs
    if processes < 2:
        return [_digest_of(number) for number in range(len(jobs))]
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_digest_of, range(len(jobs)), chunksize=1)


Detail = dict[str, dict[str, dict[str, list[str]]]]
"""The launches of each call, in words: by op, target and label."""


def detail(plan: Plan, processes: int = 1) -> Detail:
    """Every launch of a plan: its kernel, grid, cluster and the digest of its code."""
    codes = digests(plan.jobs, processes)
    details: Detail = {}
    for (op, target), calls in plan.calls.items():
        details.setdefault(op, {})[target] = {
            label: [
                f"{plan.jobs[job].function.__name__} {grid} {cluster} {shared} {codes[job]}"
                for job, grid, cluster, shared in launches
            ]
            for label, launches in calls.items()
        }
    return details


def table_of(found: Detail) -> Table:
    """Return the fingerprints by target and op. Labels of calls and names of kernels do not count."""
    table: Table = {target: {} for target in TARGETS}
    for op, targets in sorted(found.items()):
        for target, calls in targets.items():
            launches = {"; ".join(line.partition(" ")[2] for line in lines) for lines in calls.values()}
            table[target][op] = digest(*sorted(launches))
    return table


TABLE = ROOT / "dsv4_compile" / "selection" / "fingerprints.json"
SOURCES = Path(__file__).with_name("fingerprint_sources.json")
"""Hash of the sources that each row of the table was compiled from: the same ones need not be compiled again."""


def write(path: Path, table: Table) -> None:
    """Write a table with the versions that it was computed with, an op a line."""
    versions = {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    path.write_text(json.dumps({**versions, **table}, indent=1) + "\n")


def read(path: Path) -> Table:
    """Return the fingerprints of a file by target and op, without its versions."""
    return {target: ops for target, ops in json.loads(path.read_text()).items() if isinstance(ops, dict)}


def merged(old: Table, new: Table) -> Table:
    """Return the fingerprints of `old`, those of `new` in place of them where it has some."""
    targets = {target: {**old.get(target, {}), **new.get(target, {})} for target in TARGETS}
    return {target: dict(sorted(ops.items())) for target, ops in targets.items()}


def differences(a: Table, b: Table) -> list[str]:
    """Return "target op" of every fingerprint that one table lacks or that differs."""
    keys = {(target, op) for table in (a, b) for target, ops in table.items() for op in ops}
    return [f"{target} {op}" for target, op in sorted(keys) if a.get(target, {}).get(op) != b.get(target, {}).get(op)]


def main(argv: list[str] | None = None) -> int:
    """Return 1 if fingerprints differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", help="default: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    parser.add_argument("--write", action="store_true", help="write the committed table")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two tables")
    parser.add_argument("--detail", type=Path, help="write every launch of every call there")
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    options = parser.parse_args(argv)
    if options.diff:
        changed = differences(*map(read, options.diff))
    else:
        plan = Plan(options.ops or sorted(kernels.KERNELS), options.target or TARGETS)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
            triton.knobs.cache.dir = folder
            details = detail(plan, options.jobs)
        if options.detail:
            options.detail.write_text(json.dumps(details, indent=1))
        table = table_of(details)
        if options.write and not options.target:
            known = json.loads(SOURCES.read_text()) if options.ops else {}
            known |= {op: plan.source(op) for op in details}
            SOURCES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        if options.write:
            write(TABLE, merged(read(TABLE), table) if options.ops or options.target else table)
        old = {t: {op: f for op, f in ops.items() if op in details} for t, ops in read(TABLE).items() if t in table}
        changed = differences(old, {t: ops for t, ops in table.items() if ops})
    print("\n".join(changed) or "no difference")
    return bool(changed)


if __name__ == "__main__":
    raise SystemExit(main())
