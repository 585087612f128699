"""Not a test: runs an example in a folder as a program.

python -m tests.package.example FILE FOLDER [cpp] [small] [traced] [ARGUMENT ...]

Inductor calls PyTorch instead of compiling C++, unless cpp is given. With small, `tiny_model()` has a layer of each
compressed kind; with traced, graphs are traced and run without a compiler. Ranks that the example starts by torchrun's
command are started by torchrun's code, which reads that command, but as forks of this process.
"""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
from typing import Any

import torch
from torch._inductor import config
from torch.distributed.launcher.api import elastic_launch

OPTIONS = ("cpp", "small", "traced")
_RUN = subprocess.run


def run(command: list[str], **options: Any) -> Any:
    """Do what subprocess.run does, with ranks that import nothing again."""
    if command[:3] != [sys.executable, "-m", "torch.distributed.run"]:
        return _RUN(command, **options)
    from torch.distributed import run as torchrun

    torchrun.elastic_launch = _launch
    torchrun.main(command[3:])
    return None


def _launch(config: Any, entrypoint: str) -> Any:
    assert entrypoint == sys.executable
    config.start_method = "fork"
    return elastic_launch(config, _script)


def _script(*arguments: str) -> None:
    assert arguments[0] == "-u"
    sys.argv = list(arguments[1:])
    runpy.run_path(arguments[1], run_name="__main__")


def main(file: str, folder: str, *options: str) -> None:
    config.fallback_by_default = "cpp" not in options
    subprocess.run = run  # type: ignore[assignment]
    if "small" in options:
        from dsv4_compile.hf import tiny
        from tests.hf.small import LAYERS

        tiny.tiny_model = functools.partial(tiny.tiny_model, **LAYERS)
    if "traced" in options:
        compile = torch.compile
        torch.compile = lambda model, **given: compile(model, **given | {"backend": "eager"})
    sys.argv = [file, *(option for option in options if option not in OPTIONS)]
    os.chdir(folder)
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
