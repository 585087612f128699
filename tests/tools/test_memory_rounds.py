"""Memory rounds of hand-written SASS."""

from __future__ import annotations

import re

import pytest

from tests.support.fake_triton import SourceLine
from tests.tools.memory_rounds import MemoryRounds, rounds_of


def rounds(*lines: str) -> MemoryRounds:
    """Return the rounds of instructions, each followed by the scoreboards it waits for and sets: "< 0 1 > 2"."""
    return rounds_of(source_line(line, number) for number, line in enumerate(lines))


def source_line(line: str, number: int) -> SourceLine:
    match = re.match(r"(.*?)(?: <((?: \d)+))?(?: > (\d))?$", line)
    assert match is not None
    text, waits, sets = match.groups(default="")
    location = f"kernel.py:{number}"
    return SourceLine(text, location, int(sets) if sets else None, tuple(int(number) for number in waits.split()))


LOAD = "LDG.E R{}, desc[UR4][R{}.64] > {}".format
LATE = "LDG.E R{}, desc[UR4][R{}.64] < {} > {}".format


@pytest.mark.parametrize(
    ("lines", "taken", "needed"),
    [
        ([], 0, 0),
        (["IADD3 R0, R1, R2, RZ", "STG.E desc[UR4][R2.64], R0"], 0, 0),
        ([LOAD(0, 2, 0), LOAD(1, 4, 1)], 1, 1),
        # An address that is loaded; one with one loaded register of two.
        ([LOAD(4, 2, 0), "IMAD.WIDE R6, R4, 0x4, R8 < 0", LOAD(0, 6, 0)], 2, 2),
        ([LOAD(5, 2, 0), LATE(0, 4, 0, 1)], 2, 2),
        (["LDG.E.128 R4, desc[UR4][R2.64] > 0", "IADD3 R6, P0, R7, R10, RZ < 0", LOAD(0, 6, 1)], 2, 2),
        # The predicate of a load.
        ([LOAD(4, 2, 0), "ISETP.GE.AND P0, PT, R4, RZ, PT < 0", "@P0 LDG.E R0, desc[UR4][R8.64] > 1"], 2, 2),
        # Atomics bring what was there, and reductions nothing.
        (["ATOMG.E.ADD PT, R5, desc[UR6][R2.64], R7 > 0", "ISETP.NE.AND P1, PT, R5, 0x3, PT < 0", LOAD(0, 8, 0)], 2, 1),
        (["RED.E.ADD desc[UR6][R12.64], R7", LOAD(0, 2, 0)], 1, 1),
        # Nothing else that sets a scoreboard takes a round.
        (["LDS R5, [R12] > 0", "FMUL R1, R5, R5 < 0", LOAD(0, 2, 0)], 1, 1),
    ],
)  # fmt: skip
def test_a_load_takes_a_round(lines: list[str], taken: int, needed: int) -> None:
    assert rounds(*lines)[:2] == (taken, needed)


def test_a_waiting_instruction_delays_later_loads_that_need_not_wait() -> None:
    first, used, second = LOAD(0, 2, 0), "FMUL R1, R0, R0 < 0", LOAD(4, 6, 1)
    assert rounds(first, second, used) == (1, 1, ())
    assert rounds(first, used, second) == (2, 1, ("kernel.py:2",))
    # Written over a register that is still being loaded; and to be stored.
    assert rounds(first, "MOV R0, RZ < 0", second) == (2, 1, ("kernel.py:2",))
    assert rounds(first, "STG.E desc[UR4][R6.64], R0 < 0", second) == (2, 1, ("kernel.py:2",))


def test_a_scoreboard_is_waited_for_without_a_register_of_the_load_that_has_set_it() -> None:
    # Before a loop and in it: the second load names the scoreboard of the first.
    first, second = LOAD(0, 2, 5), LATE(4, 6, 5, 5)
    assert rounds(first, ".L_x_0:", second, "@P0 BRA (.L_x_0)") == (2, 1, ("kernel.py:2",))
    assert rounds(first, ".L_x_0:", LOAD(4, 6, 5), "@P0 BRA (.L_x_0)") == (1, 1, ())
    # An instruction independent of the load; a different scoreboard; none.
    assert rounds(first, "MOV R8, RZ < 1 5", LOAD(4, 6, 0)) == (2, 1, ("kernel.py:2",))
    assert rounds(first, "MOV R8, RZ < 0 1", LOAD(4, 6, 0)) == (1, 1, ())
    assert rounds(first, "MOV R8, RZ", LOAD(4, 6, 0)) == (1, 1, ())


def test_of_loads_that_share_a_scoreboard_the_latest_is_waited_for() -> None:
    first, chained, used = LOAD(0, 2, 0), LATE(4, 0, 0, 1), "FMUL R1, R9, R9 < 0"
    assert rounds(LOAD(9, 2, 0), first, chained, used, LOAD(6, 10, 2))[:2] == (2, 2)
    assert rounds(LOAD(9, 2, 0), first, LATE(4, 0, 0, 0), used, LOAD(6, 10, 2)) == (3, 2, ("kernel.py:4",))
    # Also if one that is waited for already has set it before.
    assert rounds(first, LATE(4, 0, 0, 0), "FMUL R1, R0, R0 < 0", LOAD(6, 10, 2)) == (3, 2, ("kernel.py:3",))


def test_a_load_that_leaves_what_another_brought_waits_for_it() -> None:
    guarded = "@P1 LDG.E R0, desc[UR4][R4.64]"
    assert rounds(LOAD(0, 2, 0), f"{guarded} < 0 > 0")[:2] == (2, 1)
    assert rounds("MOV R0, RZ", f"{guarded} > 0", LOAD(1, 2, 0))[:2] == (1, 1)


def test_ways_through_branches_are_counted_apart() -> None:
    chain = LOAD(4, 2, 0), "IMAD.WIDE R6, R4, 0x4, R8 < 0", LOAD(0, 6, 1)
    apart = "@P0 BRA (.L_x_0)", *chain, "EXIT", ".L_x_0:", LOAD(1, 2, 0), "EXIT"
    assert rounds(*apart)[:2] == (2, 2)
    # Behind both, the later one counts; what nothing reaches does not.
    joined = "@P0 BRA (.L_x_0)", *chain, ".L_x_0:", "FMUL R1, R0, R0 < 1", LOAD(3, 10, 0), "EXIT", ".L_x_1:", *chain
    assert rounds(*joined)[:2] == (3, 2)
    # A branch on a predicate goes on; one on none does not; one that waits does so on both ways.
    assert rounds("BRA P0, (.L_x_0)", LOAD(1, 2, 0), ".L_x_0:", "EXIT")[:2] == (1, 1)
    assert rounds("BRA (.L_x_0)", LOAD(1, 2, 0), ".L_x_0:", "EXIT")[:2] == (0, 0)
    for way in ("BRA (.L_x_0) < 0", "@P0 BRA (.L_x_1) < 0"):
        assert rounds(LOAD(0, 2, 0), way, ".L_x_0:", LOAD(1, 4, 0), ".L_x_1:", "EXIT")[:2] == (2, 1)
