"""Memory rounds of a compiled kernel: dependent loads, one after the other, counted in SASS without a GPU.

A kernel with few tokens takes as long as the loads it waits for one after the other, half a microsecond or more each.
Instructions issue in order: one that waits for a load delays all after it, other loads too. `ptxas` chooses the order,
and the scoreboards: a load names one of six, and an instruction waits until all that it names are clear. So it may wait
for a load without needing its registers, such as one before a loop with the same scoreboard. `taken` therefore
follows scoreboards, `needed` registers.

SASS is followed forwards through its branches. A load takes one round, other instructions no time; a loop runs once.
TMA copies, waits for other CTAs or threads, and warp-specialised partitions (jumps by a table) are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tests.support.fake_triton import SourceLine, source_lines

REGISTER = re.compile(r"\b(U?[RP])(\d+)\b(\.64)?")
PREDICATE = re.compile(r"U?P(T|\d+)$")
LOADS = ("LDG", "LD", "ATOMG", "ATOM")
WITHOUT_RESULT = ("ST", "RED", "BAR", "SYNCS", "UTMA", "MEMBAR", "FENCE", "WARPSYNC", "UCGA", "CCTL", "BSSY", "BSYNC")
JUMPS = ("BRA", "EXIT", "RET", "BRX")
WORDS = {".128": 4, ".64": 2}
Key = TypeVar("Key", int, str)


class MemoryRounds(NamedTuple):
    """Memory rounds of a kernel.

    Attributes:
        taken: loads that are waited for one after the other on the longest path.
        needed: rounds that their addresses make necessary.
        late: source lines, "file.py:12", of loads that wait for others without needing their results.
    """

    taken: int
    needed: int
    late: tuple[str, ...]


@dataclass
class _State:
    """Rounds at a point of the code.

    Attributes:
        pending: by scoreboard, when the last load that names it has arrived.
        made: by register, when its value can be known at the earliest.
        now: when the next instruction issues.
    """

    pending: dict[int, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def with_later(self, other: _State) -> _State:
        """Return the later round of each, of two paths to one label."""
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
    """A load: its source line, "file.py:12", the rounds before it issues, and those that its address needs."""

    place: str
    before: int
    needed: int


def memory_rounds(compiled: Any) -> MemoryRounds:
    """Return the memory rounds of a kernel compiled for NVIDIA."""
    return rounds_of(source_lines(compiled))


def rounds_of(lines: Iterable[SourceLine]) -> MemoryRounds:
    """Return the memory rounds of instructions and labels (`fake_triton.source_lines`)."""
    loads = loads_of(lines)
    taken, needed = (max((getattr(load, name) + 1 for load in loads), default=0) for name in ("before", "needed"))
    return MemoryRounds(taken, needed, tuple(dict.fromkeys(load.place for load in loads if load.before > load.needed)))


def loads_of(lines: Iterable[SourceLine]) -> list[Load]:
    """Return every load, in the order of the code."""
    waiting: dict[str, _State] = {}
    state: _State | None = _State()
    loads_in_order = []
    for line in lines:
        if line.text.endswith(":"):
            arriving = waiting.get(line.text[:-1])
            if arriving is not None:
                state = arriving.copy() if state is None else state.with_later(arriving)
            continue
        if state is None:
            continue
        instruction = _parsed(line.text)
        ready = max((state.made.get(source, 0) for source in instruction.sources), default=0)
        state.now = max([state.now, *(state.pending.get(scoreboard, 0) for scoreboard in line.waits)])
        if instruction.kind in JUMPS:
            state = _after_jump(instruction, line.text, state, waiting)
            continue
        loads = instruction.kind in LOADS
        if loads:
            loads_in_order.append(Load(line.place, state.now, ready))
            if line.sets is not None:
                # A later wait for this scoreboard waits for its last load.
                state.pending[line.sets] = state.now + 1
        for result in instruction.results:
            previous = state.made.get(result, 0) if instruction.guarded else 0
            state.made[result] = max(ready + loads, previous)
    return loads_in_order


def _after_jump(instruction: _Instruction, text: str, state: _State, waiting: dict[str, _State]) -> _State | None:
    """Record the state at the target of a branch; return the state after the branch, None if it is always taken."""
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
    """Return how many of the first operands are written: a register and predicates, or a predicate and one more."""
    if not operands:
        return 0
    if PREDICATE.match(operands[0]):
        return min(2, len(operands))
    return next((n for n in range(1, len(operands)) if not PREDICATE.match(operands[n])), len(operands))


def _width(name: str) -> int:
    """Return the number of registers of a result."""
    if ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name):
        return 2
    return next((words for suffix, words in WORDS.items() if suffix in name), 1)


def _registers(operand: str, width: int) -> list[str]:
    """Return the registers that an operand names: `width` of them for values, two for a pair."""
    registers = []
    for kind, number, pair in REGISTER.findall(operand):
        words = max(2 if pair else 1, width if kind.endswith("R") and "[" not in operand else 1)
        registers += [f"{kind}{int(number) + word}" for word in range(words)]
    return registers
