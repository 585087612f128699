"""The `dsv4` command. Nothing a subcommand needs is imported before that subcommand runs.

Exit status: 0 success, 1 the answer is no (doctor found a fault, explain found too many breaks, bench a wrong result),
2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import resources
from typing import Any

from . import __version__, progress
from .errors import CODES, DSV4Error

PAGES = {"layout": "every byte of the caches", "metadata": "persistent buffers of a step, and who fills them"}
"""Pages that `dsv4 explain` prints beside those of the codes."""
_locks: dict[str, int] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Errors of this package go to stderr without a traceback."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        # A log cannot redraw a line; minutes without one look like a hang.
        with nullcontext() if sys.stderr.isatty() else progress.listen(progress.lines(sys.stderr)):
            status = _run(args, rest)
        sys.stdout.flush()
        return status
    except DSV4Error as fault:
        print(fault, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`dsv4 doctor | head`). What is still buffered goes nowhere, without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.command == "doctor":
        return _doctor(as_json=args.json)
    if args.command == "explain":
        return _explain(args.target, as_json=args.json, max_breaks=args.max_breaks)
    if args.command == "bench":
        return _bench(args)
    return _demo(rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsv4", description="DeepSeek-V4 attention through torch.compile.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check this environment, one verdict a line, ready to paste")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")

    explain = commands.add_parser(
        "explain",
        help="explain an error code, or what torch.compile makes of a script",
        description="Print the page of an error code, or run a script and report its graphs, breaks and recompiles. "
        "A script is run as it is: explain only scripts that you would run yourself.",
    )
    explain.add_argument(
        "target", nargs="?", help="an error code, a page, or SCRIPT.py; left out, codes and pages are listed"
    )
    explain.add_argument("--json", action="store_true", help="print the report of a script as JSON")
    explain.add_argument("--max-breaks", type=int, metavar="N", help="exit 1 if the script has more graph breaks")

    bench = commands.add_parser(
        "bench",
        help="measure the ops of this package against eager PyTorch and stock torch.compile",
        description="Each implementation must agree with the reference before it is timed: CUDA graph replays on a "
        "GPU, the wall clock on a CPU.",
    )
    bench.add_argument("scenario", nargs="?", help="what to measure; left out, the scenarios are listed")
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="COLUMN=A,B",
        help="limit a column of the table: --only tokens=1,8 --only heads=64 --only impl=ir,triton",
    )
    bench.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    bench.add_argument("--json", action="store_true", help="print the record as JSON")
    bench.add_argument("--out", metavar="FOLDER", help="write SCENARIO.json, .txt and, with matplotlib, .png there")
    bench.add_argument("--png", action="store_true", help="insist on the pictures; without --out, in this folder")
    bench.add_argument(
        "--turn", metavar="FILE", help="for runs side by side: compile, then wait for the lock of FILE to measure"
    )
    bench.add_argument(
        "--trust", action="store_true", help="let auto use kernels that have not passed their tests on this GPU"
    )
    bench.add_argument(
        "--tune",
        action="store_true",
        help="let dsv4.impl=auto choose between IR and kernels by what is measured here; without a scenario, measure "
        "all that it chooses between",
    )

    commands.add_parser(
        "demo", add_help=False, help="compile a small model here and compare it with eager (see --help)"
    )
    return parser


def _doctor(*, as_json: bool) -> int:
    from .doctor import examine, render

    checks = examine()
    print(json.dumps([check.as_dict() for check in checks], indent=2) if as_json else render(checks))
    return int(any(check.level == "fix" for check in checks))


def _explain(target: str | None, *, as_json: bool, max_breaks: int | None) -> int:
    if target is None:
        entries = {code: entry.title for code, entry in CODES.items()} | PAGES
        print("\n".join(f"{name:8}  {title}" for name, title in entries.items()))
        return 0
    if target.endswith(".py"):
        from .debug import explain_script

        return int(explain_script(target, json=as_json, max_breaks=max_breaks))
    code = target.upper()
    text = _error_page(code) if code in CODES else _page(target)
    if text is None:
        print(f"no error code or page {target!r}; `dsv4 explain` lists them", file=sys.stderr)
        return 2
    print(text)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from . import bench

    if args.scenario is None and not args.tune:
        width = max(map(len, bench.SCENARIOS))
        print("\n".join(f"{name:{width}}  {what}" for name, what in bench.SCENARIOS.items()))
        return 0
    if shapeless := [limit for limit in args.only if "=" not in limit]:
        print(f"--only takes COLUMN=A,B, got {shapeless[0]!r}", file=sys.stderr)
        return 2
    only: dict[str, set[str]] = {}
    for limit in args.only:
        column, _, values = limit.partition("=")
        only.setdefault(column, set()).update(values.split(","))
    if args.scenario is None and only:
        print("--only limits a scenario, and --tune alone measures every choice: name one of both", file=sys.stderr)
        return 2
    if args.scenario is None and args.json:
        print("--json prints one record, and --tune alone makes several: name a scenario or use --out", file=sys.stderr)
        return 2
    if args.png:
        bench.require_drawing()
    if wrong := _unwritable(args):
        print(wrong, file=sys.stderr)
        return 2
    return max(_measure(args, *each) for each in ({args.scenario: only} if args.scenario else bench.choices()).items())


def _unwritable(args: argparse.Namespace) -> str:
    """What a run could not write later, or ""."""
    from . import measured

    folder = args.out or ("." if args.png else "")
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as fault:
        return f"--out {folder}: {fault.strerror}"
    if folder and not os.access(folder, os.W_OK):
        return f"--out {folder}: nothing can be written there"
    try:
        if args.turn:
            os.close(_open_turn(args.turn))
    except OSError as fault:
        return f"--turn {args.turn}: {fault.strerror}"
    if args.tune and not os.access(measured.RECORD, os.W_OK):
        return f"--tune writes to {measured.RECORD}, which is read-only: install the package with pip install -e"
    return ""


def _measure(args: argparse.Namespace, scenario: str, only: Mapping[str, Collection[str]]) -> int:
    """Run one scenario and hand out its record as the arguments say."""
    import torch

    from . import bench, measured, proven

    if wrong := bench.complaint(scenario, only):
        print(wrong, file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU", file=sys.stderr)
        return 2
    with proven.trust() if args.trust else nullcontext():
        record = bench.run(
            scenario,
            only=only,
            device=torch.device(args.device) if args.device else None,
            so_far=partial(bench.write, folder=args.out) if args.out else None,
            turn=partial(_take_turn, args.turn) if args.turn else None,
        )
    if not record["rows"]:
        print(f"nothing is left to measure after --only {' --only '.join(args.only)}", file=sys.stderr)
        return 2
    if args.only and (missed := _missed(only, record["rows"])):
        print(f"nothing was measured of {', '.join(missed)}", file=sys.stderr)
    print(json.dumps(record, indent=1) if args.json else bench.render(record))
    if args.out or args.png:
        bench.save(record, args.out or ".")
    if args.tune:
        print(f"{measured.update(record)} sizes of both ir and triton written to {measured.RECORD}", file=sys.stderr)
    return int(any(row["status"] == "wrong" for row in record["rows"]))


def _missed(only: Mapping[str, Collection[str]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Values of `--only` that no row has: typing errors, mostly."""
    asked = ((column, value) for column, values in only.items() for value in sorted(values))
    return [f"{column}={value}" for column, value in asked if all(str(row.get(column)) != value for row in rows)]


def _take_turn(path: str) -> None:
    """Wait for the lock of the file, and keep it while this process lives."""
    import fcntl

    # A second scenario of the process has its turn already: another lock would wait for the first for ever.
    if path not in _locks:
        file = _open_turn(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        _locks[path] = file


def _open_turn(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)


def _demo(argv: Sequence[str]) -> int:
    from .hf.demo import main as demo

    return int(demo(list(argv)))


def _page(name: str) -> str | None:
    page = resources.files(__package__) / "_docs" / f"{name}.md"
    return page.read_text() if re.fullmatch("[a-z]+", name) and page.is_file() else None


def _error_page(code: str) -> str:
    """The table's entry of `code`, then what the errors page says about it."""
    entry = CODES[code]
    sections = re.split(r"^## ", _page("errors") or "", flags=re.MULTILINE)
    body = next((section for section in sections if section.startswith(f"{code}\n")), "").removeprefix(code).strip()
    return f"{code}  {entry.title}\n\n  rule  {entry.rule}\n  fix   {entry.fix}\n\n{body}"
