"""Not a test: runs an example in a folder as a program, where Inductor calls PyTorch instead of compiling C++.

python -m tests.package.example FILE FOLDER
"""

from __future__ import annotations

import os
import runpy
import sys

from torch._inductor import config


def main(file: str, folder: str) -> None:
    config.fallback_by_default = True
    sys.argv = [file]
    os.chdir(folder)
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
