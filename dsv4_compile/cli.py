"""Command line `dsv4`. The imports of a subcommand, torch included, happen when it runs.

Exit status: 0 success, 1 a negative result (a fault found by doctor, too many graph breaks, a wrong bench result), 2
wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from . import __version__, progress
from .columns import table, terminal_width
from .errors import CODES, DSV4Error, check

DOCS = Path(__file__).with_name("docs")
"""Folder of the pages that `dsv4 explain` prints."""
SHELLS = ("bash", "zsh", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Print errors of this package to stderr, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # pages and names may have characters that a locale lacks
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if rest and args.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        # A log gets new lines instead of one that is redrawn, so that a long compilation does not look like a hang.
        with nullcontext() if sys.stderr.isatty() else progress.listen(progress.lines(sys.stderr)):
            status = _run(args, rest)
        sys.stdout.flush()
        return status
    except DSV4Error as fault:
        print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`dsv4 doctor | head`): discard what is still buffered, without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.command == "completion":
        return _completion(args.shell)
    if args.command == "explain" and not (args.diff or str(args.target).endswith(".py")):
        return _explain_text(args.target)
    from . import ops  # noqa: F401  the package leaves this import to the command

    if args.command == "doctor":
        return _doctor(args)
    if args.command == "explain":
        return _explain(args)
    if args.command == "bench":
        from .bench.command import run

        return run(args)
    if args.command == "build":
        from .hf.build import build

        print(f"{args.out}: digest {build(args)}")
        return 0
    return _demo(rest)


def _parser(targets: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser. `targets` limits what `explain` takes: completion offers these."""
    parser = argparse.ArgumentParser(prog="dsv4", description="DeepSeek-V4 through torch.compile.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="check this environment, or a checkpoint folder; the report is ready to paste"
    )
    doctor.add_argument("path", nargs="?", help="folder of a checkpoint to check instead, without loading it")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--prove", action="store_true", help="first run every kernel once against its reference on this GPU"
    )
    doctor.add_argument(
        "--start", action="store_true", help="load the folder in a fresh process, and say where the seconds go"
    )
    started = doctor.add_argument_group("with --start")
    started.add_argument("--max-batch-size", type=int, default=1, metavar="N", help="see hf.load (%(default)s)")
    started.add_argument("--max-seq-len", type=int, default=4096, metavar="N", help="see hf.load (%(default)s)")
    started.add_argument("--device", help="default: the GPU, if there is one")
    started.add_argument("--compiled", metavar="FOLDER", help="compiled folder to start from")
    started.add_argument("--empty-caches", action="store_true", help="start as on a machine that has compiled nothing")

    explain = commands.add_parser(
        "explain",
        help="explain an error code, print a page, or report graphs, breaks and recompiles of a script",
        description="Print an error code or a page of the documentation, or run a script and report its graphs, "
        "breaks and recompiles, or with --replay the graph that it captures, node by node. The script really runs: "
        "explain only scripts that you would run yourself.",
    )
    explain.add_argument(
        "target",
        nargs="?",
        choices=targets,
        metavar="TARGET",
        help="an error code, a page, or SCRIPT.py; without it, codes and pages are listed",
    )
    explain.add_argument("--json", action="store_true", help="print the report of a script as JSON")
    explain.add_argument("--html", metavar="FILE", help="write the report of a script as one HTML page too")
    explain.add_argument("--max-breaks", type=int, metavar="N", help="exit 1 if the script has more graph breaks")
    explain.add_argument(
        "--replay", action="store_true", help="report what one replay of the script's captured graph contains"
    )
    explain.add_argument(
        "--diff", nargs=2, metavar=("OLD", "NEW"), help="compare two records, saved with --replay --json or report.save"
    )
    explain.add_argument(
        "--fail-if",
        metavar="LIMITS",
        help='exit 1 if a replay, or the newer of two, exceeds "nodes>N, us>N, breaks>N, added>N, removed>N, slower>N"',
    )

    bench = commands.add_parser(
        "bench",
        help="measure the ops of this package against eager PyTorch and stock torch.compile",
        description="Each implementation must agree with the reference before it is timed: CUDA graph replays on a "
        "GPU, the wall clock on a CPU.",
    )
    bench.add_argument("scenario", nargs="?", help="what to measure; without it, the scenarios are listed")
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
    bench.add_argument("--png", action="store_true", help="fail if pictures cannot be drawn; default folder: this one")
    bench.add_argument(
        "--turn", metavar="FILE", help="for parallel runs: compile, then wait for a lock on FILE to measure"
    )
    bench.add_argument("--trust", action="store_true", help="let auto use kernels that are not proven on this GPU")
    bench.add_argument(
        "--tune",
        action="store_true",
        help="let dsv4.impl=auto choose between IR and kernels by these measurements; without a scenario, measure all "
        "ops that have both",
    )

    build = commands.add_parser(
        "build",
        help="compile a checkpoint's model into a folder that other machines start from",
        description="Load the model, compile its graphs and kernels, and write them with versions and hashes to a "
        "folder for hf.load(FOLDER, compiled=...). The folder is code: pass its digest on with it.",
    )
    build.add_argument("folder", help="folder of the checkpoint")
    build.add_argument("--out", required=True, metavar="FOLDER", help="compiled folder to write")
    for name, required in (("max-batch-size", True), ("max-seq-len", True), ("max-step-tokens", False)):
        build.add_argument(f"--{name}", type=int, required=required, metavar="N", help="see hf.load")
    build.add_argument("--device", help="default: the GPU, if there is one")
    build.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="see hf.load")
    for name in ("dequantize", "hadamard"):
        build.add_argument(f"--{name}", action="store_true", help="see hf.load")
    for name in ("kv-cache-dtype", "indexer-cache-dtype"):
        build.add_argument(f"--{name}", default="auto", help="see hf.load")
    build.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of model.compile, repeatable"
    )
    build.add_argument("--batches", metavar="N,N", help="compile for these batch sizes alone (default: for all)")
    build.add_argument("--prompts", metavar="N,N", help="compile for prompts of these lengths alone (default: for all)")

    commands.add_parser(
        "demo", add_help=False, help="compile a small model here and compare it with eager (see --help)"
    )

    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands, error codes and pages in a shell",
        description='Bash: eval "$(dsv4 completion bash)", zsh likewise. The package shtab writes the script.',
    )
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    check(
        not args.start or args.path is not None,
        "E201",
        got="--start without a folder",
        rule="a start is of a checkpoint",
        fix="dsv4 doctor FOLDER --start",
    )
    proofs = doctor.prove() if args.prove else []
    checks = [*(doctor.examine() if args.path is None else doctor.examine_folder(args.path)), *proofs]
    broken = any(check.level == "fix" for check in checks)
    start = None
    if args.start and not broken:
        from .hf.start import measure_start

        names = ("max_batch_size", "max_seq_len", "device", "compiled", "empty_caches")
        start = measure_start(args.path, **{name: getattr(args, name) for name in names})
    rows = [check.as_dict() for check in checks]
    if args.json:
        print(json.dumps(rows if not args.start else {"checks": rows, "start": start and start.as_dict()}, indent=2))
    else:
        print(doctor.render(checks))
        if start is not None:
            print(f"\n{start.table(terminal_width())}")
        elif args.start:
            print("\nnot started: follow the notes above first")
    return int(broken or bool(start is not None and start.why))


def _explain(args: argparse.Namespace) -> int:
    if args.diff:
        from .debug.replay.command import diff

        return diff(*args.diff, as_json=args.json, fail_if=args.fail_if)
    if args.replay:
        from .debug.replay.command import replay

        return replay(args.target, as_json=args.json, html=args.html, fail_if=args.fail_if)
    from .debug import explain_script

    return int(explain_script(args.target, json=args.json, max_breaks=args.max_breaks, html=args.html))


def _explain_text(target: str | None) -> int:
    """Print an error code or a page, or without a target the list of both."""
    entries = {code: entry.title for code, entry in CODES.items()} | _titles()
    if target is None:
        print("\n".join(table([], [*entries.items()], terminal_width())))
        return 0
    code = next((code for code in CODES if target.upper() in (code, code[1:])), None)
    text = _error_page(code) if code else _page(target)
    if text is None:
        near = [name for name in entries if target and target in name][:3]
        near = near or difflib.get_close_matches(target, entries) or difflib.get_close_matches(target.upper(), CODES)
        advice = f"did you mean {' or '.join(near)}?" if near else "`dsv4 explain` lists them"
        print(f"no error code or page {target!r}; {advice}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _completion(shell: str) -> int:
    try:
        import shtab
    except ImportError:
        check(False, "E101", got="no shtab", fix="pip install 'dsv4-compile[debug]'")
    print(shtab.complete(_parser([*CODES, *_titles()]), shell))
    return 0


def _demo(argv: Sequence[str]) -> int:
    from .hf.demo import main as demo

    return int(demo(list(argv)))


def _titles() -> dict[str, str]:
    """Return the title of every page by the name that `dsv4 explain` takes."""
    pages = {page.relative_to(DOCS).with_suffix("").as_posix(): page for page in DOCS.rglob("*.md")}
    return {
        name: pages[name].read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for name in sorted(pages)
    }


def _page(name: str) -> str | None:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8") if name in _titles() else None


def _error_page(code: str) -> str:
    """Return the table entry of `code` and its section of the errors page."""
    entry = CODES[code]
    sections = re.split(r"^## ", _page("errors") or "", flags=re.MULTILINE)
    body = next((section for section in sections if section.startswith(f"{code}\n")), "").removeprefix(code).strip()
    return f"{code}  {entry.title}\n\n  rule  {entry.rule}\n  fix   {entry.fix}\n\n{body}"
