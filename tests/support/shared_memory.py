"""Shared-memory allocation of a kernel compiled for NVIDIA, and whether an mbarrier keeps its memory for itself.

The compiler reuses the memory of buffers after their last use. If it sees the last use of an mbarrier too
early, the mbarrier is overwritten, or overwrites the buffer that took its memory: scales became NaN in 1 to 100 of
10,000 GEMMs on an H200.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from dsv4_compile._compat import triton_ir, triton_nvidia, triton_passes, triton_release

BYTES = {"i1": 1, "i8": 1, "f8E4M3FN": 1, "f8E5M2": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}
BARRIER = re.compile(r"(\d+x)?1xi64")
"""Type of a buffer of mbarriers."""
REDUCES_AT_ONCE = triton_release() < (3, 8)
"""Whether the scratch of a reduction holds all results of every warp at once."""
PTX = 86
"""PTX version that memory is allocated for; the allocation is the same for all."""


class Place(NamedTuple):
    """Bytes `start` to `stop` of a CTA's shared memory, the most that `line` may take, and its basic block."""

    start: int
    stop: int
    barrier: bool
    block: str
    line: str


def barriers_given_away(compiled: Any) -> list[tuple[str, str]]:
    """Return pairs of lines of the compiled kernel: an mbarrier, and a buffer that may be in its memory.

    An invalidated mbarrier may be reused, so kernels that invalidate some are not checked.
    """
    text = compiled.asm.get("ttgir", "")
    if "ttng.init_barrier" not in text or "ttng.inval_barrier" in text:
        return []
    return _given_away(text, compiled.metadata.target.arch, compiled.metadata.shared)


@functools.cache
def _given_away(text: str, arch: int, shared: int) -> list[tuple[str, str]]:
    text = _allocated(text, arch)
    assert f"ttg.shared = {shared} : i32" in text, "places are not those of the compiled kernel"
    reached, pairs = _reached(text), []
    for one, other in combinations(_places(text), 2):
        both = one.block == other.block or one.block in reached[other.block] or other.block in reached[one.block]
        if one.barrier + other.barrier and both and one.start < other.stop and other.start < one.stop:
            pairs.append((one.line, other.line) if one.barrier else (other.line, one.line))
    return pairs


def _allocated(text: str, arch: int) -> str:
    """Return the IR of a kernel after the compiler allocated shared memory."""
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    triton_nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        module = triton_ir.parse_mlir_module(file.name, context)
    module.context = context
    steps = triton_ir.pass_manager(context)
    triton_passes.ttgpuir.add_combine_tensor_select_and_if(steps)
    triton_passes.ttgpuir.add_allocate_warp_groups(steps)
    triton_passes.convert.add_scf_to_cf(steps)
    triton_passes.gluon.add_inliner(steps)
    triton_nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, arch, PTX)
    steps.run(module, "allocate")
    shared: str = module.str_nodebug()
    return shared


def _blocks(text: str) -> Iterable[tuple[str, str]]:
    """Yield the lines of the kernel with the basic block of each; nested lines belong to the block around them."""
    block = "^entry"
    for line in text.splitlines():
        if label := re.match(r"  (\^bb\d+)", line):
            block = label[1]
        yield block, line


def _reached(text: str) -> dict[str, set[str]]:
    """Return the blocks that may come after each."""
    reached: dict[str, set[str]] = {}
    for block, line in _blocks(text):
        after = reached.setdefault(block, set())
        if line.startswith("    cf."):
            after.update(re.findall(r"\^bb\d+", line))
    known = -1
    while known != (known := sum(map(len, reached.values()))):
        for after in reached.values():
            after.update(*[reached[block] for block in after])
    return reached


def _places(text: str) -> list[Place]:
    """Return all allocations."""
    layouts, places = dict(re.findall(r"^#(\w+) = (.*)$", text, re.MULTILINE)), []
    for block, line in _blocks(text):
        if start := re.search(r"allocation\.offset = (\d+)", line):
            allocated = re.search(r"!ttg\.memdesc<([^,>]+)", line)
            barrier = allocated is not None and BARRIER.fullmatch(allocated[1]) is not None
            size = _bytes(allocated[1]) if allocated else _scratch(line, layouts)
            places.append(Place(int(start[1]), int(start[1]) + size, barrier, block, line.strip()))
    return places


def _scratch(line: str, layouts: Mapping[str, str]) -> int:
    """Return the scratch bytes of an operation: Triton 3.9 prints them, for 3.6 and 3.7 an upper bound.

    The bound is the tensor that changes its layout, or the results of a reduction for each warp; 1 for others, such
    as arguments of warpgroups and scalars that are broadcast to all threads.
    """
    if said := re.search(r"allocation\.size = (\d+)", line):
        return int(said[1])
    source, _, result = line.partition("->")
    tensor = re.search(r"tensor<([^,>]+), .*?#(\w+)[,>}]", source)
    if tensor is not None and "ttg.convert_layout" in line:
        return _bytes(tensor[1])
    if tensor is not None and line.strip().startswith("})") and REDUCES_AT_ONCE:
        results = re.findall(r"tensor<([^,>]+)|\b([if]\d+|bf16)\b", result)
        return _warps(layouts[tensor[2]]) * sum(_bytes(shape or scalar) for shape, scalar in results)
    return 1


def _warps(layout: str) -> int:
    """Return the number of warps of a blocked or linear layout."""
    if counted := re.search(r"warpsPerCTA = \[([^\]]*)\]", layout):
        return math.prod(map(int, counted[1].split(",")))
    bases = re.search(r"warp = \[(.*?)\](?:, block|\})", layout)
    assert bases is not None, layout
    return 2 ** bases[1].count("[")


def _bytes(shape: str) -> int:
    *sizes, element = shape.split("x")
    return math.prod(map(int, sizes)) * BYTES[element]
