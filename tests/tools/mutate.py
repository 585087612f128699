"""Change the source in one place at a time, and count the changes that no test notices: make mutate

cosmic-ray makes the changes: other operators, comparisons, numbers and constants, loops that do not run. Of each area a
sample of lines is drawn, in the order of a seed, and each change is made in a copy of the checkout. Tests of the
changed file run first (`test_NAME*.py`), then, if they pass, those of files that import it, then those of its area, or
of its family where the area has families. What is not executed is not changed: annotations, texts, `TYPE_CHECKING`
blocks. A change counts as killed if the tests of its file take longer than the time limit, and as a survivor if others
do, which may take that long without it.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    "reference": ("dsv4_compile/reference", "tests/ops"),
    "passes": ("dsv4_compile/passes", "tests/backend"),
    "metadata": ("dsv4_compile/metadata", "tests/metadata"),
    "runtime": ("dsv4_compile/runtime", "tests/runtime"),
    "hf": ("dsv4_compile/hf", "tests/hf"),
    "kernels": ("kernels", "tests/kernels"),
}
"""The source of each area, and its tests."""
MARKED = {"kernels": "interpreted"}
"""The mark of the tests that run for an area, where files have any: in Triton's interpreter, nothing is compiled."""
UNLIKELY = ("RemoveDecorator", "ExceptionReplacer")
"""Operators whose changes fail at import, or where only an error is raised otherwise."""
NO_TESTS = 5
"""Exit status of pytest where no test has the mark."""


class Change(NamedTuple):
    """A change of one place."""

    area: str
    file: str
    line: int
    operator: str
    occurrence: int


def executed_lines(source: str) -> set[int]:
    """Return the lines with expressions that run: no annotations, texts alone, imports or type checking."""
    tree, skipped = ast.parse(source), set[int]()

    def skip(node: ast.AST | None) -> None:
        if node is not None:
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            skipped.update(range(node.lineno, node.body[0].lineno))
        elif _runs_not(node):
            skip(node)
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return lines - skipped


def _runs_not(node: ast.AST) -> bool:
    """Return whether a statement is a declaration, an import, a text or for type checkers."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def changes_of(area: str, file: Path) -> Iterator[Change]:
    """Yield every change of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = file.read_text(encoding="utf-8")
    lines, tree = executed_lines(source), get_ast(source)
    for name in operator_names():
        if any(each in name for each in UNLIKELY):
            continue
        operator = get_operator(name)
        if operator.arguments():
            continue
        made = operator()
        places = (start for node in ast_nodes(tree) for start, _ in made.mutation_positions(node))
        for occurrence, (line, _) in enumerate(places):
            if line in lines:
                yield Change(area, str(file.relative_to(ROOT)), line, name, occurrence)


def sample(area: str, count: int, seed: int) -> list[Change]:
    """Return changes of `count` lines of an area, one a line."""
    rng, root = random.Random(f"{seed} {area}"), ROOT / AREAS[area][0]
    files = sorted(root.rglob("*.py"))
    lines = [(file, line) for file in files for line in sorted(executed_lines(file.read_text(encoding="utf-8")))]
    rng.shuffle(lines)
    known: dict[Path, list[Change]] = {}
    found: list[Change] = []
    for file, line in lines:
        if len(found) == count:
            break
        if file not in known:  # to look for all changes of a file takes a second
            known[file] = list(changes_of(area, file))
        if changes := [change for change in known[file] if change.line == line]:
            found.append(rng.choice(changes))
    return found


def tests_of(change: Change, copy: Path) -> list[list[str]]:
    """Return the tests of a change's file, those of files that import it, and those of its family or area.

    Each is a list of paths for one run, which may be empty.
    """
    source, tests = (copy / name for name in AREAS[change.area])
    stem, family = Path(change.file).stem, tests / Path(change.file).parent.name
    imports = re.compile(rf"^\s*(from \S*\b{stem} import |(from \S+ )?import .*\b{stem}\b)", re.MULTILINE)

    def of(name: str) -> set[Path]:
        return set(tests.rglob(f"test_{name}*.py"))

    own = of(stem)
    near = {path for path in tests.rglob("test_*.py") if imports.search(path.read_text(encoding="utf-8"))}
    for path in source.rglob("*.py"):
        if imports.search(path.read_text(encoding="utf-8")):
            near |= of(path.stem)
    runs = [own, near - own, {family if family.is_dir() else tests}]
    return [sorted(str(path.relative_to(copy)) for path in run) for run in runs]


def survives(change: Change, copy: Path, python: str, seconds: float) -> str:
    """Return the changed line if no test in the copy of the checkout notices it, or "".

    Args:
        seconds: limit of one run of tests.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path = copy / change.file
    source = path.read_text(encoding="utf-8")
    changed = mutate_code(source, get_operator(change.operator)(), change.occurrence)
    if changed is None or changed == source:
        return ""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    mark, runs = MARKED.get(change.area), tests_of(change, copy)
    try:
        path.write_text(changed, encoding="utf-8")
        for files in filter(None, runs):
            for options in ([["-m", mark]] if mark else []) + [[]]:
                command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *files]
                try:
                    done = subprocess.run(
                        command, cwd=copy, env=environment, capture_output=True, timeout=seconds, check=False
                    )
                except subprocess.TimeoutExpired:
                    return "" if files is runs[0] else _line(changed, change)
                if done.returncode != NO_TESTS:
                    break
            if done.returncode:
                return ""
        return _line(changed, change)
    finally:
        path.write_text(source, encoding="utf-8")


def _line(changed: str, change: Change) -> str:
    return changed.splitlines()[change.line - 1].strip()


def copies(count: int, folder: Path) -> list[Path]:
    """Return copies of the files that git knows."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = [folder / str(number) for number in range(count)]
    for copy in made:
        for name in filter(None, files.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a change survives that the record does not have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=20, help="lines of each area (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--areas", default=",".join(AREAS), help="%(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="changes at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of one run of tests (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs tests")
    parser.add_argument("--out", default=str(ROOT / "examples" / "results" / "mutations.json"), help="%(default)s")
    args = parser.parse_args(argv)
    out = Path(args.out)
    record = json.loads(out.read_text()) if out.exists() else {"scenario": "mutations", "rows": []}
    reasons = {(s["file"], s["changed"]): s["reason"] for row in record["rows"] for s in row["survivors"]}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    asked = "import torch, triton; print(torch.__version__, triton.__version__)"
    versions = subprocess.run([args.python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    record |= {"machine": f"a CPU of {os.cpu_count()} cores", "torch": versions[0], "triton": versions[1]}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies(args.jobs, Path(folder)):
            free.put(copy)

        def outcome(change: Change) -> tuple[Change, str]:
            copy = free.get()
            try:
                return change, survives(change, copy, args.python, args.seconds)
            finally:
                free.put(copy)

        for area in args.areas.split(","):
            began, changes = time.monotonic(), sample(area, args.count, args.seed)
            row: dict[str, Any] = {"date": now, "commit": commit, "area": area, "changes": 0, "killed": 0}
            row |= {"seed": args.seed, "seconds": 0, "survivors": []}
            for change, changed in pool.map(outcome, changes):
                row["changes"] += 1
                row["killed"] += not changed
                if changed:
                    reason = reasons.get((change.file, changed), "")
                    failed |= not reason
                    row["survivors"].append(
                        {"file": change.file, "line": change.line, "changed": changed, "reason": reason}
                    )
                    print(f"survived: {change.file}:{change.line}  {changed}", file=sys.stderr, flush=True)
                # After each change, so that the record has what ran where the rest was cut off.
                row["seconds"] = round(time.monotonic() - began)
                record["rows"] = [each for each in record["rows"] if each["area"] != area] + [row]
                record |= {"date": now, "commit": commit, "command": "make mutate"}
                out.write_text(json.dumps(record, indent=1) + "\n")
            print(
                f"{area}: {row['killed']} of {row['changes']} killed, {row['seconds']} s", file=sys.stderr, flush=True
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
