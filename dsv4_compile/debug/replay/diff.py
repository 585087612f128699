"""Two replays compared: nodes added, removed, slower, and with other shapes; and limits for CI.

Nodes are matched by op, kernel and module in their order, so a node that moved is one removed and one added. Numbers
that Inductor appends to names of kernels do not count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...columns import DEFAULT_WIDTH, clipped
from ...errors import check, fail
from ..render import page_text
from ..sections import Section, Table
from .matching import matches
from .rows import Node, Replay

NOISE_US = 0.3
NOISE_SHARE = {"cuda": 0.1, "standin": 1.0}
"""A node is slower from this share and 0.3 us on: medians of the same node in two runs differ by less. The stand-in's
times are those of a CPU that does other things too."""
_QUANTITIES = ("nodes", "us", "breaks", "recompiles", "added", "removed", "slower", "reshaped")
_LIMIT = re.compile(r"(\w+)\s*>\s*(\d+(?:\.\d+)?)")
_NUMBER = re.compile(r"_\d+$")
_KERNEL_NAME = 44


@dataclass(frozen=True, slots=True)
class Pair:
    """A node that both replays have."""

    old: Node
    new: Node

    @property
    def more_us(self) -> float:
        """Time of the new one above the old one's; 0 where one is not known."""
        return 0.0 if self.old.us is None or self.new.us is None else self.new.us - self.old.us


@dataclass(slots=True)
class Difference:
    """Nodes of `new` compared with those of `old`."""

    old: Replay
    new: Replay
    added: list[Node] = field(default_factory=list)
    removed: list[Node] = field(default_factory=list)
    slower: list[Pair] = field(default_factory=list)
    faster: list[Pair] = field(default_factory=list)
    reshaped: list[Pair] = field(default_factory=list)

    def text(self, width: int = DEFAULT_WIDTH) -> str:
        """Return the difference as plain text."""
        names = f"{self.old.target} ({self.old.device}) -> {self.new.target} ({self.new.device})"
        return page_text([names, self.verdict], self._sections(), width)

    def __str__(self) -> str:
        return self.text()

    @property
    def verdict(self) -> str:
        """One line with all counts and both times."""
        counts = ", ".join(f"{len(getattr(self, name))} {name}" for name in ("added", "removed", "slower", "reshaped"))
        times = " -> ".join("-" if r.replay_us is None else f"{r.replay_us:.1f}" for r in (self.old, self.new))
        return f"{len(self.old.nodes)} -> {len(self.new.nodes)} nodes: {counts}; {times} us a replay"

    def to_json(self) -> str:
        """Return counts and rows as JSON."""
        content: dict[str, Any] = {"schema": "dsv4.replay-diff/1", "verdict": self.verdict}
        content |= {name: [asdict(node) for node in getattr(self, name)] for name in ("added", "removed")}
        content |= {name: [asdict(pair) for pair in getattr(self, name)] for name in ("slower", "faster", "reshaped")}
        return json.dumps(content, indent=2)

    def _sections(self) -> Iterator[Section]:
        for name in ("added", "removed"):
            nodes = getattr(self, name)
            if nodes:
                yield Section(name, [Table(["node", "us", "op", "kernel", "module"], [_row(node) for node in nodes])])
        for name in ("slower", "faster"):
            pairs = getattr(self, name)
            if pairs:
                rows = [[f"{p.old.us:.2f}", f"{p.new.us:.2f}", f"{p.more_us:+.2f}", *_row(p.new)[2:]] for p in pairs]
                yield Section(name, [Table(["old us", "new us", "more", "op", "kernel", "module"], rows)])
        if self.reshaped:
            equal = Counter((p.new.op, ", ".join(p.old.shapes), ", ".join(p.new.shapes)) for p in self.reshaped)
            rows = [[str(count), *row] for row, count in equal.items()]
            yield Section("other shapes", [Table(["nodes", "op", "old", "new"], rows)])


def compare(old: Replay, new: Replay) -> Difference:
    """Return what changed from `old` to `new`."""
    difference = Difference(old, new)
    matched = matches([_key(node) for node in old.nodes], [_key(node) for node in new.nodes])
    in_both, again = {i for i, _ in matched}, {j for _, j in matched}
    difference.removed += [node for i, node in enumerate(old.nodes) if i not in in_both]
    difference.added += [node for j, node in enumerate(new.nodes) if j not in again]
    for i, j in matched:
        pair = Pair(old.nodes[i], new.nodes[j])
        if pair.old.shapes != pair.new.shapes:
            difference.reshaped.append(pair)
        least = max(NOISE_US, NOISE_SHARE[new.graphs] * (pair.old.us or 0.0))
        if abs(pair.more_us) > least:
            (difference.slower if pair.more_us > 0 else difference.faster).append(pair)
    difference.slower.sort(key=lambda pair: -pair.more_us)
    difference.faster.sort(key=lambda pair: pair.more_us)
    return difference


def _key(node: Node) -> tuple[str, ...]:
    return node.op, _NUMBER.sub("", node.name), node.module, node.kind


def _row(node: Node) -> list[str]:
    us = "-" if node.us is None else f"{node.us:.2f}"
    return [str(node.index), us, node.op, clipped(node.name, _KERNEL_NAME), node.module or "-"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest accepted numbers by quantity: nodes, us and breaks of a replay, and differences from an older one."""

    most: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Read `nodes>60, us>120, breaks>0`. E201 for anything else."""
        parts = [limit.strip() for limit in text.split(",") if limit.strip()]
        matches = [(limit, _LIMIT.fullmatch(limit)) for limit in parts]
        wrong = [limit for limit, match in matches if match is None or match[1] not in _QUANTITIES]
        check(
            not wrong,
            "E201",
            got=f"limit {wrong[0]!r}" if wrong else "",
            rule=f"limits are NAME>NUMBER with a name among {', '.join(_QUANTITIES)}",
            fix='write --fail-if "nodes>60, us>120, breaks>0"',
        )
        return cls({match[1]: float(match[2]) for _, match in matches if match})

    def exceeded(self, replay: Replay, difference: Difference | None = None) -> list[str]:
        """Return a line for each limit that is exceeded. E201 for a limit on a quantity that is not known here."""
        known: dict[str, float | None] = {
            "nodes": len(replay.nodes),
            "us": replay.replay_us,
            "breaks": replay.breaks,
            "recompiles": replay.recompiles,
        }
        if difference is not None:
            rows: dict[str, Sequence[Any]] = {name: getattr(difference, name) for name in _QUANTITIES[4:]}
            known |= {name: len(nodes_or_pairs) for name, nodes_or_pairs in rows.items()}
        lines = []
        for name, most in self.most.items():
            value = known.get(name)
            if value is None:
                fix = "pass it to --diff" if name in _QUANTITIES[4:] else "replay it more often, or leave the limit out"
                fail("E201", got=f"limit {name}>{most:g}", why=f"{name} is not known here", fix=fix)
            elif value > most:
                lines.append(f"{name} is {value:g}, limit {most:g}")
        return lines
