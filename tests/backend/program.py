"""Run a program with the package of a folder, in a fork of an interpreter that has imported only torch. Not a test.

python -m tests.backend.program <folder of the package> <program>
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    assert "dsv4_compile" not in sys.modules
    sys.path.insert(0, sys.argv[1])
    exec(compile(sys.argv[2], "<program>", "exec"), {"__name__": "__main__"})
