"""Change the source in one place at a time, and count the changes that no test notices: make mutate

cosmic-ray makes the changes: other operators, comparisons, numbers and constants, loops that do not run. Of each area a
sample of lines is drawn, in the order of a seed, and each change is made in a copy of the checkout. Tests of the
changed file run first (`test_NAME*.py`), then, if they pass, those of files that import it, then tests of other areas
that import it, then those of its area, or where the area has families, of its family, then of all families, and the
pages' last: they show schemas. Of tests of kernels, those in the interpreter run before those that compile. What is not
executed is not changed: annotations, texts, `TYPE_CHECKING` blocks. A change counts as killed, and is shown, if tests
take longer than the time limit that pass in half of it without the change. The record keeps a row of each area and
seed, where a person writes the reason of each survivor, and whether the changed source is equivalent or a test
elsewhere that was not run fails; --again runs those that are not equivalent once more.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import itertools
import json
import os
import random
import re
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
"""The mark of the tests that run first for an area: in Triton's interpreter, nothing is compiled."""
UNLIKELY = ("RemoveDecorator", "ExceptionReplacer")
"""Operators with changes that fail at import, or only where an error is raised."""
PAGES = "tests/docs"
"""Tests of the pages, which are made of the source."""
ELSEWHERE = ("gpu", "vllm")
"""Folders of tests that run on a GPU, or in a different environment."""
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


def changes_of(area: str, root: Path, name: str) -> Iterator[Change]:
    """Yield every change of a file of a checkout."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (root / name).read_text(encoding="utf-8")
    lines, tree = executed_lines(source), get_ast(source)
    for kind in operator_names():
        if any(word in kind for word in UNLIKELY):
            continue
        operator = get_operator(kind)
        if operator.arguments():
            continue
        instance = operator()
        places = (start for node in ast_nodes(tree) for start, _ in instance.mutation_positions(node))
        for occurrence, (line, _) in enumerate(places):
            if line in lines:
                yield Change(area, name, line, kind, occurrence)


def sample(area: str, count: int, seed: int, root: Path = ROOT) -> list[Change]:
    """Return changes of `count` lines of an area of a checkout, one a line."""
    rng = random.Random(f"{seed} {area}")
    files = sorted((root / AREAS[area][0]).rglob("*.py"))
    lines = [(file, line) for file in files for line in sorted(executed_lines(file.read_text(encoding="utf-8")))]
    rng.shuffle(lines)
    known: dict[Path, list[Change]] = {}
    drawn: list[Change] = []
    for file, line in lines:
        if len(drawn) == count:
            break
        if file not in known:  # to look for all changes of a file takes a second
            known[file] = list(changes_of(area, root, str(file.relative_to(root))))
        if changes := [change for change in known[file] if change.line == line]:
            drawn.append(rng.choice(changes))
    return drawn


def tests_of(change: Change, copy: Path) -> list[list[str]]:
    """Return the tests of a change's file, of files that import it, of other areas that do, of its family or area.

    Each is a list of paths for one run, which may be empty. Tests outside of the folders of families follow those of
    the family, and the pages' are last.
    """
    source, tests = (copy / name for name in AREAS[change.area])
    path = Path(change.file)
    stem, family, parent = path.stem, tests / path.parent.name, ".".join(path.parent.parts)
    imports = re.compile(rf"^\s*(from \S*\b{stem} import |(from \S+ )?import .*\b{stem}\b)", re.MULTILINE)
    by_name = re.compile(rf"^\s*(from|import) \S*\b{re.escape(parent)}(\.{stem}\b| import .*\b{stem}\b)", re.MULTILINE)

    def of(name: str) -> set[Path]:
        return set(tests.rglob(f"test_{name}*.py"))

    of_file = of(stem)
    near = {test for test in tests.rglob("test_*.py") if imports.search(test.read_text(encoding="utf-8"))}
    for file in source.rglob("*.py"):
        if imports.search(file.read_text(encoding="utf-8")):
            near |= of(file.stem)
    others = {
        test
        for test in (copy / "tests").rglob("test_*.py")
        if test.relative_to(copy / "tests").parts[0] not in ELSEWHERE
        and by_name.search(test.read_text(encoding="utf-8"))
    }
    shared = set(tests.glob("test_*.py")) - of_file - near - others
    area_runs = [{family}, shared] if family.is_dir() else [{tests}]
    runs = [of_file, near - of_file, others - near - of_file, *area_runs, {copy / PAGES}]
    return [sorted(str(path.relative_to(copy)) for path in run) for run in runs]


def changed_by(change: Change, source: str) -> str:
    """Return the source after a change, or itself where there is none."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(change.operator)(), change.occurrence) or source


class Runner:
    """Runs tests in copies of a checkout; each must pass without a change.

    Args:
        python: the interpreter.
        seconds: limit of one run of tests.
    """

    def __init__(self, python: str, seconds: float) -> None:
        self.python, self.seconds = python, seconds
        self._sound: set[str] = set()

    def survives(self, change: Change, copy: Path) -> bool:
        """Return whether no test in the copy notices a change.

        Raises RuntimeError if the test that fails fails without the change as well.
        """
        path = copy / change.file
        source = path.read_text(encoding="utf-8")
        changed = changed_by(change, source)
        if changed == source:
            return False
        mark = MARKED.get(change.area)
        marks = [mark, f"not {mark}"] if mark else [""]
        for marked, files in itertools.product(marks, filter(None, tests_of(change, copy))):
            try:
                path.write_text(changed, encoding="utf-8")
                status, failed = self._run(files, copy, marked)
            finally:
                path.write_text(source, encoding="utf-8")
            if status is None:  # these tests may take as long without the change
                return not self._quick(files, copy, marked, change)
            if status:
                self._check_sound(failed or files, copy)
                return False
        return True

    def _quick(self, files: Sequence[str], copy: Path, mark: str, change: Change) -> bool:
        """Return whether tests pass in half the limit without the change, which a busy machine does not double."""
        status, failed = self._run(files, copy, mark, self.seconds / 2)
        if status:
            raise RuntimeError(f"{' '.join(failed or files)} fails without a change")
        if status == 0:
            print(f"time limit: {change.file}:{change.line}", file=sys.stderr, flush=True)
        return status == 0

    def _check_sound(self, tests: Sequence[str], copy: Path) -> None:
        unknown = [test for test in tests if test not in self._sound]
        if unknown and self._run(unknown, copy)[0] not in (0, None):
            raise RuntimeError(f"{' '.join(unknown)} fails without a change")
        self._sound.update(unknown)

    def _run(
        self, tests: Sequence[str], copy: Path, mark: str = "", seconds: float | None = None
    ) -> tuple[int | None, list[str]]:
        """Return the exit status of tests, or of those with a mark, and those that failed.

        The status is None where they passed the limit, `seconds` if given.
        """
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [self.python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", mark, *tests]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds or self.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, []
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", done.stdout, re.MULTILINE)
        return 0 if done.returncode == NO_TESTS else done.returncode, failed


def line_of(source: str, change: Change) -> str:
    """Return the line of a change."""
    return source.splitlines()[change.line - 1].strip()


def recorded(area: str, survivor: dict[str, Any], root: Path) -> Change | None:
    """Return the change that a survivor of the record is, where the source still has its line."""
    source = (root / survivor["file"]).read_text(encoding="utf-8")
    for change in changes_of(area, root, survivor["file"]):
        # The line as it was first: a change takes a parse.
        if line_of(source, change) != survivor["was"]:
            continue
        if line_of(changed_by(change, source), change) == survivor["changed"]:
            return change
    return None


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows, sorted by area, with one that replaces that of its area and seed."""
    others = [other for other in rows if (other["area"], other["seed"]) != (row["area"], row["seed"])]
    return sorted([*others, row], key=lambda each: ([*AREAS].index(each["area"]), each["seed"]))


def copies(count: int, folder: Path) -> list[Path]:
    """Return copies of the last commit: a checkout that someone works in may import what git does not know."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    folders = [folder / str(number) for number in range(count)]
    for copy in folders:
        copy.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(copy)], input=archive, check=True)
    return folders


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a change survives that the record does not explain."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=20, help="lines of each area (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--again", action="store_true", help="run survivors of the record again, of any seed")
    parser.add_argument("--areas", default=",".join(AREAS), help="%(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="changes at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of one run of tests (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs tests")
    parser.add_argument("--out", default=str(ROOT / "examples" / "results" / "mutations.json"), help="%(default)s")
    args = parser.parse_args(argv)
    out = Path(args.out)
    record = json.loads(out.read_text()) if out.exists() else {"scenario": "mutations", "rows": []}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    asked = "import torch, triton; print(torch.__version__, triton.__version__)"
    versions = subprocess.run([args.python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    record |= {"machine": f"a CPU of {os.cpu_count()} cores", "torch": versions[0], "triton": versions[1]}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record |= {"date": now, "commit": commit, "command": "make mutate"}
    failed = False
    runner = Runner(args.python, args.seconds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        root, *checkouts = copies(1 + args.jobs, Path(folder))
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in checkouts:
            free.put(copy)

        def outcome(change: Change) -> bool:
            copy = free.get()
            try:
                return runner.survives(change, copy)
            finally:
                free.put(copy)

        def write(row: dict[str, Any]) -> None:
            record["rows"] = with_row(record["rows"], row)
            out.write_text(json.dumps(record, indent=1) + "\n")

        for area in args.areas.split(","):
            rows = [row for row in record["rows"] if row["area"] == area]
            if args.again:
                left = [(row, survivor) for row in rows for survivor in row["survivors"] if not survivor["equivalent"]]
                matched = [(row, survivor, recorded(area, survivor, root)) for row, survivor in left]
                asked_again = [(row, survivor, change) for row, survivor, change in matched if change is not None]
                failed |= len(asked_again) < len(left)  # their lines have changed since: draw those rows again
                outcomes = pool.map(outcome, [change for *_, change in asked_again])
                for (row, known_survivor, change), survived in zip(asked_again, outcomes, strict=True):
                    known_survivor.pop("killed_at", None)
                    if survived:
                        failed |= not known_survivor["reason"]
                        print(
                            f"survived: {change.file}:{change.line}  {known_survivor['changed']}",
                            file=sys.stderr,
                            flush=True,
                        )
                    else:
                        known_survivor["killed_at"] = commit
                    write(row)
                continue
            began, changes = time.monotonic(), sample(area, args.count, args.seed, root)
            known = {(s["file"], s["changed"]): s for row in rows if row["seed"] == args.seed for s in row["survivors"]}
            row: dict[str, Any] = {"date": now, "commit": commit, "area": area, "changes": 0, "killed": 0}
            row |= {"seed": args.seed, "seconds": 0, "survivors": []}
            for change, survived in zip(changes, pool.map(outcome, changes), strict=True):
                row["changes"] += 1
                row["killed"] += not survived
                if survived:
                    source = (root / change.file).read_text(encoding="utf-8")
                    changed, was = line_of(changed_by(change, source), change), line_of(source, change)
                    before = known.get((change.file, changed), {})
                    survivor = {"file": change.file, "line": change.line, "was": was, "changed": changed}
                    survivor |= {name: before.get(name, False) for name in ("equivalent", "elsewhere")}
                    survivor["reason"] = before.get("reason", "")
                    failed |= not survivor["reason"]
                    row["survivors"].append(survivor)
                    print(f"survived: {change.file}:{change.line}  {changed}", file=sys.stderr, flush=True)
                # After each change, so that the record has what ran where the rest was cut off.
                row["seconds"] = round(time.monotonic() - began)
                write(row)
            print(
                f"{area}: {row['killed']} of {row['changes']} killed, {row['seconds']} s", file=sys.stderr, flush=True
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
