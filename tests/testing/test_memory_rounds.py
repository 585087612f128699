"""Rounds of memory, counted in machine code that is written down here."""

from __future__ import annotations

import pytest

from dsv4_compile.testing.memory_rounds import MemoryRounds, rounds_of


def rounds(*lines: str) -> MemoryRounds:
    return rounds_of((line, f"kernel.py:{number}") for number, line in enumerate(lines))


LOAD = "LDG.E R{}, desc[UR4][R{}.64]".format


@pytest.mark.parametrize(
    ("lines", "taken", "needed"),
    [
        ([], 0, 0),
        (["IADD3 R0, R1, R2, RZ", "STG.E desc[UR4][R2.64], R0"], 0, 0),
        ([LOAD(0, 2), LOAD(1, 4)], 1, 1),
        # An address that is loaded; one of whose two registers one is.
        ([LOAD(4, 2), "IMAD.WIDE R6, R4, 0x4, R8", LOAD(0, 6)], 2, 2),
        ([LOAD(5, 2), LOAD(0, 4)], 2, 2),
        (["LDG.E.128 R4, desc[UR4][R2.64]", "IADD3 R6, P0, R7, R10, RZ", LOAD(0, 6)], 2, 2),
        # The predicate of a load.
        ([LOAD(4, 2), "ISETP.GE.AND P0, PT, R4, RZ, PT", "@P0 LDG.E R0, desc[UR4][R8.64]"], 2, 2),
        # Atomics bring what was there, and reductions nothing.
        (["ATOMG.E.ADD PT, R5, desc[UR6][R12.64], R7", "ISETP.NE.AND P1, PT, R5, 0x3, PT", LOAD(0, 2)], 2, 1),
        (["RED.E.ADD desc[UR6][R12.64], R7", LOAD(0, 2)], 1, 1),
    ],
)  # fmt: skip
def test_a_load_takes_a_round(lines: list[str], taken: int, needed: int) -> None:
    assert rounds(*lines)[:2] == (taken, needed)


def test_what_waits_keeps_loads_behind_it_that_need_not_wait() -> None:
    first, used, second = LOAD(0, 2), "FMUL R1, R0, R0", LOAD(4, 6)
    assert rounds(first, second, used) == (1, 1, ())
    assert rounds(first, used, second) == (2, 1, ("kernel.py:2",))
    # In the place of what is still being loaded; and to be stored.
    assert rounds(first, "MOV R0, RZ", second) == (2, 1, ("kernel.py:2",))
    assert rounds("LDG.E.64 R8, desc[UR4][R2.64]", "STG.E.64 desc[UR4][R6.64], R8", second)[:2] == (2, 1)
    assert rounds("LDG.E.64 R8, desc[UR4][R2.64]", "STG.E desc[UR4][R6.64], R8", second)[:2] == (2, 1)
    assert rounds("LDG.E.64 R8, desc[UR4][R2.64]", "STG.E.64 desc[UR4][R10.64], R10", second)[:2] == (1, 1)


def test_a_load_that_leaves_what_another_brought_waits_for_it() -> None:
    guarded = "@P1 LDG.E R0, desc[UR4][R4.64]"
    assert rounds(LOAD(0, 2), guarded)[:2] == (2, 1)
    assert rounds("MOV R0, RZ", guarded, LOAD(1, 2))[:2] == (1, 1)


def test_ways_through_branches_are_counted_apart() -> None:
    chain = LOAD(4, 2), "IMAD.WIDE R6, R4, 0x4, R8", LOAD(0, 6)
    apart = "@P0 BRA (.L_x_0)", *chain, "EXIT", ".L_x_0:", LOAD(1, 2), "EXIT"
    assert rounds(*apart)[:2] == (2, 2)
    # Behind both, the later one counts; what nothing reaches does not.
    joined = "@P0 BRA (.L_x_0)", *chain, ".L_x_0:", "FMUL R1, R0, R0", LOAD(3, 10), "EXIT", ".L_x_1:", *chain
    assert rounds(*joined)[:2] == (3, 2)
    # A branch on a predicate goes on; one on none does not.
    assert rounds("BRA P0, (.L_x_0)", LOAD(1, 2), ".L_x_0:", "EXIT")[:2] == (1, 1)
    assert rounds("BRA (.L_x_0)", LOAD(1, 2), ".L_x_0:", "EXIT")[:2] == (0, 0)
