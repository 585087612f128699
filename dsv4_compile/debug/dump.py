"""Sources behind a report: captured graphs, generated code, and Dynamo's bytecode through depyf where it can."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from .observe import Watch
from .report import Report
from .state import fresh_compiler


def write(folder: Path, report: Report, watch: Watch, run: Callable[[], None]) -> None:
    """Fill `folder`. Whatever depyf cannot do becomes a note of `report`, which is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in watch.captured.items():
        (folder / f"graph_{index}.py").write_text(text, encoding="utf-8")
    for index, text in watch.generated.items():
        (folder / f"graph_{index}_generated.py").write_text(text, encoding="utf-8")
    report.notes.append(f"Captured graphs and generated code are in {folder}.")
    report.notes.append(_decompile(folder / "depyf", run))
    report.save(folder / "report.txt")
    report.save(folder / "report.json")


def _decompile(folder: Path, run: Callable[[], None]) -> str:
    """Run the calls once more under depyf. Returns what to tell the user; nothing is raised or printed."""
    try:
        import depyf
    except ImportError:
        return "depyf is not installed, so Dynamo's bytecode is not decompiled: pip install 'dsv4-compile[debug]'."
    errors = io.StringIO()
    with warnings.catch_warnings(record=True), contextlib.redirect_stderr(errors), fresh_compiler():
        warnings.simplefilter("always")
        try:
            with depyf.prepare_debug(str(folder)):
                run()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"depyf stopped at {reason}; what it wrote until then is in {folder}."
    files = sum(path.is_file() for path in folder.rglob("*"))
    failed = len(re.findall(r"^\S*DecompilationError", errors.getvalue(), re.MULTILINE))
    if failed:
        return (
            f"depyf wrote {files} files to {folder}; functions it could not decompile, as is usual around a "
            f"data-dependent branch: {failed}."
        )
    return f"depyf wrote {files} files to {folder}."
