"""`python -m dsv4_compile` is the `dsv4` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
