"""`dsv4 explain --replay` and `--diff`: reports on stdout, and an exit status that says whether limits hold."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ...columns import terminal_width
from ...errors import DSV4Error, check, error
from .diff import Limits, compare
from .entry import replay_of_script
from .report import ReplayReport

_MOST_BYTES = 64 << 20
OK, EXCEEDED, FAILED = 0, 1, 2
"""Exit status: limits hold, a limit is exceeded, or the script raised or captured nothing."""


def replay(script: str, *, as_json: bool, html: str | None, fail_if: str | None) -> int:
    """Run a script, report the capture that it replays most, and return the exit status."""
    limits = Limits.parse(fail_if or "")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report, script_report = replay_of_script(script)
    if script_report.failure is not None or report is None:
        sys.stdout.write((script_report.to_json() if as_json else script_report.text(terminal_width())) + "\n")
        if script_report.failure is None:
            sys.stderr.write(f"{script} captures no graph: use a DecodeRunner, or dsv4.cudagraph=full\n")
        return FAILED
    if html is not None:
        report.save(html)
    sys.stdout.write((report.to_json() if as_json else report.text(terminal_width())) + "\n")
    return _judge(limits.exceeded(report))


def diff(old: str, new: str, *, as_json: bool, fail_if: str | None) -> int:
    """Compare two saved records, and return the exit status."""
    limits = Limits.parse(fail_if or "")
    difference = compare(_load(old), _load(new))
    sys.stdout.write((difference.to_json() if as_json else difference.text(terminal_width())) + "\n")
    return _judge(limits.exceeded(difference.new, difference))


def _load(path: str) -> ReplayReport:
    rule, fix = "a diff takes records of replays", "write one with `dsv4 explain --replay SCRIPT.py --json > FILE`"
    file = Path(path)
    check(file.is_file(), "E201", got=f"no file {path!r}", rule=rule, fix=fix)
    size = file.stat().st_size
    check(size <= _MOST_BYTES, "E201", got=f"{path!r} of {size:,} bytes", rule=f"{rule}, of at most {_MOST_BYTES:,}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise error("E201", got=f"{path!r}, which cannot be read", why=str(fault), rule=rule, fix=fix) from None
    try:
        return ReplayReport.from_json(text)
    except DSV4Error as fault:
        raise error("E201", got=f"{path!r}: {fault.got}", why=fault.why or fault.rule, rule=rule, fix=fix) from None


def _judge(exceeded: list[str]) -> int:
    for line in exceeded:
        sys.stderr.write(f"{line}\n")
    return EXCEEDED if exceeded else OK
