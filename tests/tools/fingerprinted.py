"""Not a test: compare the fingerprints of a family's kernels with the committed table.

A file for each family, because test processes share the work by files.
"""

from __future__ import annotations

import json
from pathlib import Path

import triton

from dsv4_compile.ops.common.kernels import KERNELS
from tests.tools import fingerprint


def ops_of(*families: str) -> list[str]:
    """Return the ops with kernels in `families`."""
    return [op for op, home in KERNELS.items() if home.split(".")[-2] in families]


def assert_is_as_in_the_table(op: str, folder: Path) -> None:
    """Fail if a kernel of `op` does not compile, or its code differs from the table.

    The text of PTX and AMDGCN is a function of the sources and of Triton's version, so a different version compiles
    only, and the sources that the table was compiled from are not compiled again. `folder` holds the kernels that this
    process has compiled: ops share them.
    """
    plan = fingerprint.Plan([op])
    same = json.loads(fingerprint.TABLE.read_text())["triton"] == triton.__version__
    if same and json.loads(fingerprint.SOURCES.read_text()).get(op) == plan.source(op):
        return
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        compiled_table = fingerprint.table_of(fingerprint.detail(plan))
    table = fingerprint.read(fingerprint.TABLE)
    if not same:
        return
    committed = {target: {op: ops[op]} for target, ops in table.items() if op in ops}
    assert fingerprint.differences(committed, compiled_table) == [], (
        f"the machine code has changed. If that is meant: python tests/tools/fingerprint.py --write {op}, and `auto` "
        "uses the kernel again after python tests/gpu/prove.py on a GPU"
    )
