"""The self-check of kernels that were proven with a different Triton: each op once against its reference.

`ensure` runs it where a graph is compiled, `dsv4 doctor --prove` on request. A separate process runs the kernels, so
that a fault or a hang on the GPU ends that process alone:

    main([DEVICE, OP, ...])      prints a line of JSON for each op
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from .. import progress
from .._compat import device_architecture
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher, refusal
from ..selection import proven
from .agreement import assert_agrees, results_of, written_arguments
from .samples import op_samples

log = logging.getLogger(__name__)

READY = "ready"
START_LIMIT, OP_LIMIT, END_LIMIT = 120.0, 120.0, 10.0
"""Seconds until the process has imported torch; of one op, which compiles its kernels; and of the process's end."""
_IMPORTING = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT")
"""Variables that make Python import modules before a program begins; an empty path is the current folder."""
CHILD = "DSV4_SELF_CHECK"
"""Environment variable of the process that checks; it starts no further checks."""


def ensure(devices: Iterable[torch.device]) -> str:
    """Check the kernels that `auto` would use on `devices` but for their Triton. Return why that was not done, or "".

    A check allocates, compiles and waits for the GPU, so there is none while a CUDA graph is captured. Results are
    kept, so that a kernel is checked once for each version of torch and Triton.
    """
    if proven.trusting() or CHILD in os.environ:
        return ""
    for device in devices:
        ops = proven.to_check(device_architecture(device)) if device.type == "cuda" else []
        if not ops:
            continue
        if torch.cuda.is_current_stream_capturing():
            why = "no self-check of kernels runs while a CUDA graph is captured: compile before, or dsv4 doctor --prove"
            log.warning("%s; %d ops run their reference", why, len(ops))
            return why
        check_ops(ops, device)
    return ""


def check_ops(ops: Sequence[str], device: torch.device) -> dict[str, str]:
    """Check `ops` on `device`, report progress, and keep the results: by op, why its kernel is wrong, or ""."""
    reasons: dict[str, str] = {}
    with progress.stage("check kernels", total=len(ops)) as work:
        for op, why in _in_a_process(ops, device):
            reasons[op] = why
            work.advance(op)
    failed = {op: why for op, why in reasons.items() if why}
    for op, why in failed.items():
        log.warning("the kernel of %s failed its self-check, so auto does not use it: %s", op, why)
    proven.note_checked(device_architecture(device), reasons)
    return reasons


def _in_a_process(ops: Sequence[str], device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield each op with why it is wrong, or ""; after an op that ends its process, a new process goes on."""
    waiting = list(ops)
    while waiting:
        hung = False
        with ExitStack() as stack:
            try:
                errors = stack.enter_context(tempfile.TemporaryFile())
                process = _start(waiting, device, errors)
            except OSError as fault:
                yield from ((op, f"the self-check did not start: {fault}") for op in waiting)
                return
            try:
                if not _awaited(process, START_LIMIT, lambda line: line == READY or None):
                    process.kill()
                    why = f"the self-check did not start: {_last_line(errors)}"
                    yield from ((op, why) for op in waiting)
                    return
                while waiting:
                    result = _awaited(process, OP_LIMIT, partial(_result, waiting))
                    if not result:
                        hung = result is None or not _ends(process)
                        break
                    waiting.remove(result[0])
                    yield result
            finally:
                process.kill()
                process.wait()
            if waiting:
                end = f"it took more than {OP_LIMIT:.0f} s" if hung else f"its process ended with {process.returncode}"
                yield waiting.pop(0), f"{end}: {_last_line(errors)}"


def _start(ops: Sequence[str], device: torch.device, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _program(), str(device.index or 0), *ops]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen(command, bufsize=0, env=_environment(), **streams)  # type: ignore[call-overload, no-any-return]


def _awaited(process: subprocess.Popen[bytes], limit: float, read: Callable[[str], Any]) -> Any:
    """Return what `read` makes of the first line that it knows, others being of libraries that print.

    "" if the process closed its output, None if there was no such line for `limit` seconds.
    """
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        line = _line(process, left)
        if not line:
            return line
        if (known := read(line)) is not None:
            return known
    return None


def _result(waiting: Sequence[str], line: str) -> tuple[str, str] | None:
    """Return op and fault of a line, None for other output."""
    try:
        op, why = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (op, str(why)) if op in waiting else None


def _line(process: subprocess.Popen[bytes], limit: float) -> str | None:
    """Return the next line of a process; "" if it closed its output, None if it printed nothing for `limit` seconds.

    An empty line is a space.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        # Unbuffered: a line that was read ahead would not be seen by the selector.
        line = process.stdout.readline().decode(errors="replace") if selector.select(limit) else None
        return line and (line.strip() or " ")


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a process that closed its output, a moment before it ends; return whether it ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT)
    return process.returncode is not None


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def _program() -> str:
    """Return Python code that imports what this process imports, and nothing from the current folder."""
    here = os.path.realpath(os.curdir)
    entries = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str) and entry]
    paths = [entry for entry in entries if os.path.realpath(entry) != here]
    # Last, so that of a source tree that is the current folder this package alone is imported.
    paths.append(str(Path(__file__).resolve().parents[2]))
    return f"import sys; sys.path[:] = {paths!a}; from {__name__} import main; main(sys.argv[1:])"


def _environment() -> dict[str, str]:
    """Return the environment of the process that checks; Python looks for no module in it, nor where it starts."""
    inherited = {name: value for name, value in os.environ.items() if name not in _IMPORTING}
    return inherited | {CHILD: "1", "PYTHONSAFEPATH": "1"}


def why_wrong(op: str, device: torch.device) -> str:
    """Run the kernel of `op` on its first sample that the kernel supports; return how it disagrees, or ""."""
    try:
        unsupported = refusal(op)
        for on_cpu, on_device in zip(op_samples(op), op_samples(op, device), strict=True):
            if unsupported is not None and unsupported(*on_device):
                continue
            before = [argument.clone() for argument in written_arguments(op, on_cpu)]
            want = results_of(op, REFERENCES[op](*on_cpu), on_cpu)
            got = results_of(op, launcher(op)(*on_device), on_device)
            assert_agrees(op, got, want, before, kernel=True)
            return ""
    except Exception as fault:
        return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
    return "its kernel supports no sample"


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    """Check ops one by one, and print each result at once."""
    device = torch.device("cuda", int(argv[0])) if torch.cuda.is_available() else torch.device("cpu")
    sys.stdout.write(f"{READY}\n")
    for op in argv[1:]:
        sys.stdout.flush()
        sys.stdout.write(f"{json.dumps([op, why_wrong(op, device)])}\n")
    sys.stdout.flush()
