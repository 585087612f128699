"""Not a test: what tests ask of kernels compiled ahead of time, so that only changed kernels are compiled again.

    pytest tests/kernels --compile=all       compile every kernel; a recorded answer that differs fails its test
    pytest tests/kernels --compile=record    compile every kernel, and write what these files ask

Kernels are known by a hash of all they are compiled from: sources, types of arguments, constants, options, target and
the version of Triton. `compiled_facts.json` has, by test file and kernel, the answers of functions of the compiled
kernel: registers, how often an instruction occurs. Assertions are evaluated on them in every run. A kernel or a
question that the record does not have is compiled or asked then, and whatever fails to compile is never recorded.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from tests.support import fake_triton
from tests.support.fake_triton import TARGETS, FakeDriver, triton_driver
from tests.tools.fingerprint_source import launch_digest, source_of

FILE = Path(__file__).with_suffix(".json")
TOOLS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH")
"""Environment variables that put other tools in place of Triton's: the record is of Triton's own."""
RUN = JITFunction.run
Facts = dict[str, Any]
"""Answers by question, of one kernel."""


class Record:
    """The committed facts, and the questions of this process.

    Attributes:
        asked: the facts that each test file of this process asked for, by test file and kernel.
        compiled: how many kernels this process compiled that the record does not have.
    """

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Facts]] = {}
        self.compiled = 0

    @functools.cached_property
    def mode(self) -> str:
        """Return "changed", which trusts the record, "all", which compares with it, or "record", which replaces it."""
        return os.environ.get("DSV4_COMPILE", "changed")

    @functools.cached_property
    def known(self) -> dict[str, dict[str, Facts]]:
        """The facts of the record by test file and kernel; none of a different version of Triton."""
        recorded = json.loads(FILE.read_text()) if FILE.exists() else {"triton": ""}
        same = recorded["triton"] == triton.__version__ and not any(map(os.environ.get, TOOLS))
        return recorded["files"] if same and self.mode != "record" else {}

    @property
    def file(self) -> str:
        """The test file that runs, from the root of the repository."""
        return os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]

    def facts(self, key: str) -> Facts | None:
        """Return what is recorded of a kernel for the test file that runs, None for an unknown kernel."""
        return self.known.get(self.file, {}).get(key)

    def answer(self, key: str, question: str, compute: Callable[[], Any]) -> Any:
        """Return a recorded answer, or compute one; AssertionError if both are there and differ."""
        facts = self.facts(key) or {}
        if self.mode == "changed" and question in facts:
            value = facts[question]
        else:
            value = json.loads(json.dumps(compute()))
            assert question not in facts or facts[question] == value, (
                f"{question}: {value}, but {FILE.name} has {facts[question]} for the same sources"
            )
        self.asked.setdefault(self.file, {}).setdefault(key, {})[question] = value
        return value

    def write(self) -> None:
        """Replace the rows of the test files that ran; several processes may write theirs."""
        with FILE.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            recorded = json.loads(text) if text else {}
            files = {**(recorded["files"] if recorded.get("triton") == triton.__version__ else {}), **self.asked}
            file.truncate(0)
            file.write(f'{{"triton": "{triton.__version__}", "files": {{')
            for number, (name, kernels) in enumerate(sorted(files.items())):
                rows = [f'"{key}": {json.dumps(facts)}' for key, facts in sorted(kernels.items())]
                file.write(f'{"," * (number > 0)}\n"{name}": {{\n ' + ",\n ".join(rows) + "\n}")
            file.write("\n}}\n")


RECORD = Record()


class Metadata(NamedTuple):
    """Metadata of a compiled kernel that tests and launchers read."""

    name: str
    shared: int
    num_warps: int
    launch_pdl: bool | None


class Text:
    """A text of a compiled kernel, "ptx" or "ttgir"; only answers about it are recorded."""

    def __init__(self, kernel: Kernel, stage: str) -> None:
        self._kernel, self._stage = kernel, stage

    def _ask(self, what: str, *args: Any) -> Any:
        question = f"{self._stage}.{what}({', '.join(map(repr, args))})"
        return self._kernel.answer(question, lambda real: getattr(real.asm[self._stage], what)(*args))

    def count(self, part: str) -> int:
        return self._ask("count", part)

    def index(self, part: str, start: int = 0) -> int:
        return self._ask("index", part, start)

    def findall(self, pattern: str) -> list[Any]:
        return self._kernel.answer(
            f"{self._stage}.findall({pattern!r})", lambda real: re.findall(pattern, real.asm[self._stage])
        )

    def __contains__(self, part: str) -> bool:
        return self._ask("__contains__", part)


class Kernel:
    """A launch of a kernel, compiled where the record does not have what is asked of it.

    Attributes:
        hash: digest of all that the kernel is compiled from.
        packed_metadata: warps, cluster and bytes of shared memory, which launchers may replace.
        metadata: see `Metadata`; launchers may replace it.
    """

    def __init__(self, function: Any, values: tuple[Any, ...], options: dict[str, Any], target: str) -> None:
        self._call, self._target = (function, values, options), target
        self._real: Any = None
        self.hash = self._key()
        if RECORD.mode != "changed" or RECORD.facts(self.hash) is None:
            self._compiled()  # at once: it fails where it is launched
            RECORD.compiled += RECORD.facts(self.hash) is None
        self.metadata = Metadata(*self.answer("metadata", _metadata))
        self.packed_metadata = self.metadata.num_warps, 1, self.metadata.shared

    def _key(self) -> str:
        function, values, options = self._call
        with mock.patch.object(triton_driver, "_active", FakeDriver(TARGETS[self._target])):
            return launch_digest(function, values, options, self._target, _checks())

    def _compiled(self) -> Any:
        if self._real is None:
            function, values, options = self._call
            with (
                mock.patch.object(JITFunction, "run", RUN),
                fake_triton.compiled_for(TARGETS[self._target]) as compiled,
            ):
                function.run(*values, grid=(1,), warmup=True, **options)
            assert self._key() == self.hash, "a constant of the kernel has changed since the launch"
            (self._real,) = compiled
        return self._real

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args: None

    def answer(self, question: str, function: Callable[[Any], Any]) -> Any:
        """Return what the record says, or `function` of the compiled kernel."""
        return RECORD.answer(self.hash, question, lambda: function(self._compiled()))

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(compiled kernel, *args)`, as JSON gives it back: a function of a module, and its globals.

        Other sources of the function are a different question.
        """
        words = ", ".join([source_of(function), *map(repr, args)])
        return self.answer(f"{function.__name__}({words})", lambda real: function(real, *args))

    @property
    def asm(self) -> dict[str, Text]:
        """The kernel's texts."""
        cuda = TARGETS[self._target].backend == "cuda"
        return {stage: Text(self, stage) for stage in ("ttgir", *(("ptx", "sass") if cuda else ("amdgcn",)))}

    @property
    def assembled(self) -> bool:
        """Whether there is machine code."""
        return self.answer("assembled", lambda real: bool(fake_triton.machine_code(real)))

    def resources(self) -> dict[str, int]:
        """Return resources per thread, see `fake_triton.resources`."""
        return self.ask(fake_triton.resources)


def _metadata(real: Any) -> list[Any]:
    return [getattr(real.metadata, name, None) for name in Metadata._fields]


@functools.cache
def _checks() -> str:
    """Return a hash of the checks of every compiled kernel: only kernels that pass are recorded."""
    return source_of(fake_triton.compiled_for.__wrapped__)


@contextmanager
def compiled_for(target: str) -> Iterator[list[Kernel]]:
    """Let every launch in the block compile its kernel for `target`, as `fake_triton.compiled_for` does, if it changed.

    Yields the kernels in order, to be asked about. AssertionError as there.
    """
    launched: list[Kernel] = []

    def note(function: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Kernel:
        launched.append(Kernel(function, values, options, target))
        return launched[-1]

    with (
        mock.patch.object(triton_driver, "_active", FakeDriver(TARGETS[target])),
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(CompiledKernel, "__getitem__", lambda self, grid: lambda *args: None),
    ):
        yield launched
