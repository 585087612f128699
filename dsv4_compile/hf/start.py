"""Seconds of a start, measured in a fresh process: imports, `hf.load(warm_up=True)`, the first token.

print(measure_start(folder, max_batch_size=8, max_seq_len=4096).table(80))

`dsv4 doctor FOLDER --start` prints it. The process gets its arguments as JSON and writes its figures as the last line
of its output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import progress
from ..columns import table
from ..errors import DSV4Error
from ..runtime.start_times import KINDS

PROMPT = 16
"""Tokens of the prompt before the first token."""
MEANINGS: Mapping[str, str] = {
    "import": "Python, torch, transformers, Inductor",
    **KINDS,
    "first token": f"of a prompt of {PROMPT} tokens, after warm-up",
    "other": "checks, logs, collections of garbage",
}
"""Kinds of work, in the order of a start, and their meaning."""
_IMPORTS = ("torch._inductor.compile_fx", "torch._dynamo.convert_frame", "torch._inductor.codegen.cpp_wrapper_cpu")
"""Modules that the first compilation would import."""
_PROGRAM = f"import sys; sys.path[:] = sys.argv[1].split(chr(10)); from {__name__} import main; sys.exit(main())"
"""Program of the process, which looks for modules where this one does, and not in the current folder."""


@dataclass(frozen=True, slots=True)
class Start:
    """Figures of one start.

    Attributes:
        seconds: by kind of work, see `MEANINGS`; they add up to `total`.
        total: seconds from the creation of the process to the first token.
        graphs, captures, capture_bytes: see `hf.WarmUp`.
        why: why the start failed, or "".
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    total: float = 0.0
    graphs: int = 0
    captures: int = 0
    capture_bytes: int = 0
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON holds them."""
        return asdict(self)

    def table(self, width: int) -> str:
        """Return a row for each kind of work, and the sum, in at most `width` columns."""
        if self.why:
            return f"start failed: {self.why}"
        rows = [(kind, f"{self.seconds.get(kind, 0.0):.1f}", meaning) for kind, meaning in MEANINGS.items()]
        held = f"{self.graphs} graphs, {self.captures} captures that hold {self.capture_bytes / 2**20:.0f} MiB"
        return "\n".join(table(["start", "s", ""], [*rows, ("total", f"{self.total:.1f}", held)], width))


def measure_start(folder: str | os.PathLike[str], *, empty_caches: bool = False, **arguments: Any) -> Start:
    """Start a model in a fresh process and return the seconds until its first token.

    Args:
        folder: of a checkpoint.
        empty_caches: give the process empty folders for compiled code, as a new machine has; else it has this one's.
        arguments: of `hf.load`, values that JSON holds. `warm_up` is True unless they have options.
    """
    request = {"path": os.fspath(folder), "warm_up": True, **arguments}
    with tempfile.TemporaryDirectory() if empty_caches else nullcontext() as caches:
        env = dict(os.environ)
        if caches:
            env |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        command = [sys.executable, "-c", _PROGRAM, "\n".join(sys.path), json.dumps(request), repr(time.time())]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    lines = done.stdout.splitlines()
    try:
        return Start(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        return Start(why=f"the process ended with {done.returncode} and without figures")


def _measured(request: dict[str, Any], begin: float) -> Start:
    """Return the figures of this process, which was created at `begin`, in seconds since the epoch."""
    import torch

    from .. import backend  # noqa: F401
    from ..runtime.start_times import spent
    from .loading.load import load
    from .model.warm_up import compile_and_warm_up

    for module in _IMPORTS:
        importlib.import_module(module)
    seconds, earlier = {"import": time.time() - begin}, spent()
    options = request.pop("warm_up")
    try:
        model = load(request.pop("path"), **request)
        done = compile_and_warm_up(model, {} if options is True else options)
        before = time.perf_counter()
        ids = torch.ones(1, min(PROMPT, model.model.dsv4_cache.paged.max_seq_len - 1), dtype=torch.int64)
        ids = ids.to(model.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False).tolist()
        first = time.perf_counter() - before
    except DSV4Error as fault:
        return Start(why=str(fault))
    seconds |= {kind: value - earlier[kind] for kind, value in spent().items()} | {"first token": first}
    total = time.time() - begin
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    rounded = {kind: round(value, 3) for kind, value in seconds.items()}
    return Start(rounded, round(total, 3), done.graphs, done.captures, done.capture_bytes)


def main() -> int:
    """Run the fresh process."""
    from .tiny import quiet_libraries

    quiet_libraries()
    request, begin = json.loads(sys.argv[2]), float(sys.argv[3])
    with nullcontext() if sys.stderr.isatty() else progress.listen(progress.lines(sys.stderr)):
        figures = _measured(request, begin)
    sys.stdout.write(f"{json.dumps(figures.as_dict())}\n")
    return 0
