"""Interpreters that have already imported the modules of tests: a job is forked from one, so it starts in milliseconds.

A new interpreter takes seconds to import torch, Triton and the package. Each job is a separate process all the same: it
may crash, and its changes end with it.

python -m tests.warm MODULE ...   imports the modules, then runs the jobs of standard input: one line of JSON each
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Done:
    """How a job ended: its exit status, negative for a signal, and all that it printed."""

    returncode: int
    stdout: str
    stderr: str


class WarmPython:
    """Runs modules as `python -m` would, in forks of one interpreter that starts with the first job.

    Args:
        modules: what the interpreter imports. None of them may start a thread, which a fork would lose.
        env: the environment of the interpreter and its jobs.
        limit: seconds of a job, after which it and the interpreter are killed; None for any number.
    """

    def __init__(self, modules: tuple[str, ...], env: dict[str, str], limit: float | None = None):
        self.modules, self.env, self.limit = modules, env, limit
        self.process: subprocess.Popen[str] | None = None

    def run(self, module: str, *arguments: str, **variables: str) -> Done:
        """Run `python -m module arguments`, with more environment variables, from the root of the repository."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.warm", *self.modules]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            self.process.stdin.write(json.dumps([module, arguments, variables, str(out), str(err)]) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], self.limit)[0]:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.close()
                raise TimeoutError(f"{module} took more than {self.limit} s")
            answer = self.process.stdout.readline()
            assert answer, f"the warm interpreter ended with {self.process.wait()}"
            return Done(int(answer), out.read_text(errors="replace"), err.read_text(errors="replace"))

    def close(self) -> None:
        """End the interpreter; a later job starts a new one."""
        if self.process is not None:
            self.process.communicate()
            self.process = None


def run_job(module: str, arguments: list[str], variables: dict[str, str], out: str, err: str) -> None:
    """In a fork: become `python -m module arguments`."""
    for descriptor, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(variables)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork does not look through all modules for garbage, which also copies their memory
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            # Leaves the loop, and the interpreter in the ordinary way: with functions that are registered to run at its
            # exit.
            return run_job(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
