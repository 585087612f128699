"""How often a compiled kernel waits for memory, one time after the other: known ahead of time, without a GPU.

Where few tokens leave a kernel little to do, its time is how many loads it waits for in a row, each half a microsecond
or more. Instructions are issued in order: one that waits for what a load brings keeps all behind it waiting, loads too
that could have been on their way. The assembler decides on that order, by registers that it would like to save.

It also decides what an instruction waits for, and writes that into it. A load names one of six scoreboards, and each
instruction a set of those that have to be clear, which takes all loads that have named one. So an instruction may wait
for a load of whose registers it needs none: the first load of a loop, say, for one in front of the loop that has named
the same scoreboard. What is waited for is therefore followed by scoreboards, and what has to be by registers.

The machine code is followed through its branches, forwards. A load takes a round, everything else no time; a loop is
gone through once. Left out are what the copy engine brings, what programs or threads wait for in each other, and the
partitions of a program, to which it jumps by a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from .fake_triton import SourceLine, source_lines

REGISTER = re.compile(r"\b(U?[RP])(\d+)\b(\.64)?")
PREDICATE = re.compile(r"U?P(T|\d+)$")
LOADS = ("LDG", "LD", "ATOMG", "ATOM")
WITHOUT_RESULT = ("ST", "RED", "BAR", "SYNCS", "UTMA", "MEMBAR", "FENCE", "WARPSYNC", "UCGA", "CCTL", "BSSY", "BSYNC")
JUMPS = ("BRA", "EXIT", "RET", "BRX")
WORDS = {".128": 4, ".64": 2}
Key = TypeVar("Key", int, str)


class MemoryRounds(NamedTuple):
    """What `memory_rounds` finds.

    Attributes:
        taken: loads that are waited for one after the other on the longest way through the kernel.
        needed: as many as their addresses make necessary.
        late: where in the source a load waits for others whose results it does not need: "file.py:12".
    """

    taken: int
    needed: int
    late: tuple[str, ...]


@dataclass
class _State:
    """Rounds: by scoreboard, when the last load that has set it is there; by register, when its value would be there if
    nothing but what it is made of mattered; and when the next instruction is issued."""

    pending: dict[int, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def with_later(self, other: _State) -> _State:
        """Of two ways to the same place, the later round of each."""
        return _State(_later(self.pending, other.pending), _later(self.made, other.made), max(self.now, other.now))

    def copy(self) -> _State:
        return _State(dict(self.pending), dict(self.made), self.now)


def _later(one: dict[Key, int], other: dict[Key, int]) -> dict[Key, int]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one | other}


class _Instruction(NamedTuple):
    kind: str
    guarded: bool
    results: list[str]
    sources: list[str]
    operands: list[str]


class Load(NamedTuple):
    """A load of a kernel: where in the source it is, "file.py:12", how often memory has been waited for when it starts,
    and how often its address makes that necessary."""

    place: str
    behind: int
    needed: int


def memory_rounds(compiled: Any) -> MemoryRounds:
    """Of a kernel compiled for NVIDIA."""
    return rounds_of(source_lines(compiled))


def rounds_of(lines: Iterable[SourceLine]) -> MemoryRounds:
    """Of instructions and labels; see `fake_triton.source_lines`."""
    loads = loads_of(lines)
    taken, needed = (max((getattr(load, name) + 1 for load in loads), default=0) for name in ("behind", "needed"))
    return MemoryRounds(taken, needed, tuple(dict.fromkeys(load.place for load in loads if load.behind > load.needed)))


def loads_of(lines: Iterable[SourceLine]) -> list[Load]:
    """As `rounds_of`, load by load, in the order of the machine code."""
    waiting: dict[str, _State] = {}
    state: _State | None = _State()
    found = []
    for line in lines:
        if line.text.endswith(":"):
            arriving = waiting.get(line.text[:-1])
            if arriving is not None:
                state = arriving.copy() if state is None else state.with_later(arriving)
            continue
        if state is None:
            continue
        instruction = _parsed(line.text)
        made = max((state.made.get(source, 0) for source in instruction.sources), default=0)
        state.now = max([state.now, *(state.pending.get(scoreboard, 0) for scoreboard in line.waits)])
        if instruction.kind in JUMPS:
            state = _after_jump(instruction, line.text, state, waiting)
            continue
        loads = instruction.kind in LOADS
        if loads:
            found.append(Load(line.place, state.now, made))
            if line.sets is not None:
                # One that waits for this scoreboard later waits for this load, the latest that has set it.
                state.pending[line.sets] = state.now + 1
        for result in instruction.results:
            kept = state.made.get(result, 0) if instruction.guarded else 0
            state.made[result] = max(made + loads, kept)
    return found


def _after_jump(instruction: _Instruction, text: str, state: _State, waiting: dict[str, _State]) -> _State | None:
    """Leave the state at the place that a branch goes to; what goes on behind it, None where nothing does."""
    target = re.search(r"\.L_\w+", text)
    if target is not None:
        before = waiting.get(target.group())
        waiting[target.group()] = state.copy() if before is None else before.with_later(state)
    conditions = [operand for operand in instruction.operands if PREDICATE.match(operand.lstrip("!").split(".")[0])]
    return state if instruction.guarded or conditions else None


def _parsed(text: str) -> _Instruction:
    match = re.match(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)$", text)
    assert match is not None
    guard, name, rest = match.groups()
    operands = [operand.strip() for operand in re.split(r",(?![^\[]*\])", rest)] if rest else []
    kind = name.split(".")[0]
    count = 0 if kind.startswith((*WITHOUT_RESULT, *JUMPS)) else _results(operands)
    width = _width(name)
    results = [register for operand in operands[:count] for register in _registers(operand, width)]
    sources = [register for operand in operands[count:] for register in _registers(operand, 1)]
    if ".WIDE" in name and operands:
        sources += _registers(operands[-1], 2)
    sources += _registers(guard or "", 1)
    return _Instruction(kind, bool(guard), results, sources, operands)


def _results(operands: list[str]) -> int:
    """How many of the first operands an instruction writes: a register and predicates behind it, or a predicate and
    what follows it."""
    if not operands:
        return 0
    if PREDICATE.match(operands[0]):
        return min(2, len(operands))
    return next((n for n in range(1, len(operands)) if not PREDICATE.match(operands[n])), len(operands))


def _width(name: str) -> int:
    """Registers of a result."""
    if ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name):
        return 2
    return next((words for suffix, words in WORDS.items() if suffix in name), 1)


def _registers(operand: str, width: int) -> list[str]:
    """Those that an operand names, `width` of them where they hold numbers; a pair where it says so."""
    found = []
    for kind, number, pair in REGISTER.findall(operand):
        words = max(2 if pair else 1, width if kind.endswith("R") and "[" not in operand else 1)
        found += [f"{kind}{int(number) + word}" for word in range(words)]
    return found
