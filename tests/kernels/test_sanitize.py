"""tests/gpu/sanitize.py without a GPU: its plants are faults, and a tool that overlooks one proves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.gpu import sanitize, warpgroups
from tests.support.bounds import BoundsError, checked
from tests.support.fake_triton import TARGETS, compiled_for


def tool(folder: Path, finds_plant: bool, finds_more: bool) -> str:
    """A stand-in for compute-sanitizer that finds what it is told to find."""
    path = folder / "compute-sanitizer"
    planted, other = (sanitize.FOUND if finds else 0 for finds in (finds_plant, finds_more))
    path.write_text(f'#!/bin/sh\ncase "$*" in *"--launch {sanitize.PLANT}"*) exit {planted};; *) exit {other};; esac\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("finds_plant", "finds_more", "status"), [(True, False, 0), (False, False, 1), (True, True, 1)]
)
def test_only_a_tool_that_finds_its_plant_and_nothing_else_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], finds_plant: bool, finds_more: bool, status: int
) -> None:
    assert sanitize.main(["--sanitizer", tool(tmp_path, finds_plant, finds_more)]) == status
    printed = capsys.readouterr().out
    assert ("planted fault was not found" in printed) == (not finds_plant)
    assert all(f"{name}:" in printed for name in sanitize.TOOLS)


HAZARD = """========= Error: Potential RAW hazard detected at __shared__ 0x3296e in block (1,0,0) :
=========     Write Thread ({},0,0) at {}+0xc710 in kernel.py:223
=========     Read Thread ({},0,0) at {}+0x100 in kernel.py:223
=========
"""


@pytest.mark.parametrize(
    ("write", "read", "kernel", "count"),
    [(31, 320, "a_hopper_kernel", 2), (31, 96, "a_hopper_kernel", 0), (31, 320, "a_kernel", 0)],
)
def test_hazards_between_warpgroups_are_told_from_those_within_one(
    write: int, read: int, kernel: str, count: int
) -> None:
    fine = HAZARD.format(0, "b_hopper_kernel", 128, "b_hopper_kernel")
    assert sanitize.across_warpgroups(fine + HAZARD.format(write, kernel, read, kernel)) == count
    assert sanitize.across_warpgroups(fine + "hazard detected in other words\n") == 0
    assert sanitize.across_warpgroups("") == 0


def test_without_the_tool_the_run_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--sanitizer", ""]) == 1
    assert "not in PATH" in capsys.readouterr().out


@pytest.mark.interpreted
def test_the_overrun_is_one() -> None:
    with pytest.raises(BoundsError), checked(("p_out",)):
        sanitize.overrun_kernel[(1,)](torch.zeros(256, dtype=torch.int32), SIZE=256)


def test_plants_compile_and_the_race_goes_through_shared_memory() -> None:
    with compiled_for(TARGETS["sm_90"]) as compiled:
        for kernel in sanitize.PLANTS.values():
            kernel[(1,)](torch.zeros(256, dtype=torch.int32), SIZE=256)
    assert len(compiled) == len(sanitize.TOOLS)
    race = compiled[1].asm["ptx"]
    # Behind the race, Triton 3.9 changes a layout by way of shared memory, with a barrier.
    written, between, *_ = re.split(r"st\.shared\.b32 \[address\]|ld\.shared\.b32 .*\[address\]", race)
    assert "%tid.x" in written and "and.b32" in between and "bar.sync" not in between


def test_the_pattern_of_the_warpgroups_compiles_in_every_way() -> None:
    rows = torch.zeros(2, warpgroups.THREADS, dtype=torch.int32)
    with compiled_for(TARGETS["sm_90"]) as compiled:
        for way in ("one", "all", "early"):
            warpgroups.warpgroups_kernel[(1,)](rows, rows, 2, SIZE=warpgroups.THREADS, WAY=way, num_warps=4)
    arrivals = [kernel.asm["ptx"].count("cp.async.mbarrier.arrive") for kernel in compiled]
    assert arrivals[0] == arrivals[2] == 0 < arrivals[1]
