"""Text tables: columns that share a width, cells that wrap between words, equal cells merged."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest

DEFAULT_WIDTH = 96
NARROWEST, WIDEST = 60, 160
"""Fewest and most columns of a terminal that tables are laid out for."""
GAP = "  "

_LONGEST_CELL = 4096
"""Characters of a cell that are shown."""
_LONGEST_PIECE = 48
"""Characters of a name that is not broken at all, if it has no separator."""
_PIECES = re.compile(r"[^\s/._,:=-]*[/._,:=-]+|[^\s/._,:=-]+")
"""Matches a separator of paths, names or lists, after which a word longer than its column breaks."""
_NUMBER = re.compile(r"-?\d[\d,.]*")


def terminal_width() -> int:
    """Return the columns of the terminal, or of the variable COLUMNS; without both, `DEFAULT_WIDTH`."""
    return min(max(shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns, NARROWEST), WIDEST)


def clipped(line: str, width: int) -> str:
    """Return `line`, or its beginning and "..." if it is longer than `width`."""
    return line if len(line) <= width else f"{line[: width - 3]}..."


def is_numeric(cells: Sequence[str]) -> bool:
    """Return whether a column holds numbers, "-" and empty cells alone, and at least one number."""
    values = [cell for cell in cells if cell not in ("", "-")]
    return bool(values) and all(map(_NUMBER.fullmatch, values))


def wrap(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` characters, broken between words.

    A longer word is broken after a separator, as `/`, and one without a separator anywhere.
    """
    lines, line = [], ""
    for word in text.split():
        pieces = [word] if len(word) <= width else _pieces(word, width)
        for i, piece in enumerate(pieces):
            longer = f"{line} {piece}" if line and i == 0 else f"{line}{piece}"
            if len(longer) > width and line:
                lines.append(line)
                longer = piece
            line = longer
    return [*lines, line]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, merge: bool = False) -> Iterator[str]:
    """Yield the lines of a table of at most `width` columns, if its longest names fit.

    Args:
        headers: names of the columns, or none. Columns without a cell that has text are left out.
        rows: as many cells each.
        merge: rows that follow each other and have equal last cells share one, which wraps next to them.
    """
    shown = [i for i in range(len(rows[0]) if rows else 0) if any(row[i] for row in rows)] or range(len(headers))
    cells = [[clipped(row[i], _LONGEST_CELL) for i in shown] for row in ([headers] if headers else []) + [*rows]]
    if not cells or not shown:
        return
    widths = _widths([*zip(*cells, strict=True)], width)
    numeric = [is_numeric(column) for column in zip(*cells[bool(headers) :], strict=True)] or [False] * len(widths)
    groups = [[*group] for _, group in groupby(cells, lambda row: row[-1])] if merge else [[row] for row in cells]
    for group in groups:
        left = [line for row in group for line in _lines(row[:-1], widths, numeric)]
        last = wrap(group[0][-1], widths[-1])
        blank = " " * len(left[0])
        for start, end in zip_longest(left, last):
            yield f"{blank if start is None else start}{_aligned(end or '', widths[-1], numeric[-1])}".rstrip()


def _lines(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of all cells of a row but the last."""
    wrapped = [wrap(cell, width) for cell, width in zip(row, widths, strict=False)]
    for line in zip_longest(*wrapped, fillvalue="") if wrapped else [()]:
        yield "".join(_aligned(*cell) + GAP for cell in zip(line, widths, numeric, strict=False))


def _aligned(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _pieces(word: str, width: int) -> list[str]:
    pieces = _PIECES.findall(word)
    return [piece[start : start + width] for piece in pieces for start in range(0, len(piece), width)]


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of columns: the widest shrink to their longest words, then to pieces of these."""
    widths = [max(map(len, column)) for column in columns]
    words = [{word for cell in column for word in cell.split()} for column in columns]
    pieces = [{piece for word in column for piece in _pieces(word, _LONGEST_PIECE)} for column in words]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for texts in (words, pieces):
        least = [max(map(len, column), default=0) for column in texts]
        while excess > 0:
            column = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            if widths[column] <= least[column]:
                break
            widths[column] -= 1
            excess -= 1
    return widths
