"""Run the GPU tests file by file and record what passed: `python tests/gpu/prove.py`.

`test_lowered_<stem>.py` proves the IR lowerings of a stem's ops, `test_<stem>.py` their kernels. The rows of this GPU
in dsv4_compile/proven.json are written anew: what fails here, or has no test, is not chosen by `auto` here.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

from dsv4_compile import proven  # noqa: E402
from dsv4_compile._compat import device_architecture, triton_version  # noqa: E402
from dsv4_compile.lowering import registry  # noqa: E402
from dsv4_compile.ops._kernels import KERNELS  # noqa: E402

LOWERED = "test_lowered_"


def claims(path: Path) -> list[tuple[str, str]]:
    """(impl, op) that a test file proves when it passes."""
    stem = path.stem.removeprefix("test_")
    if not path.stem.startswith(LOWERED):
        return [("triton", op) for op, kernel in sorted(KERNELS.items()) if kernel == stem]
    stem = path.stem.removeprefix(LOWERED)
    homes = {op: lowering.lower.__module__.rpartition(".")[2] for op, lowering in registry.LOWERINGS.items()}
    return [("ir", op) for op, home in sorted(homes.items()) if home == stem]


def main() -> int:
    """0 if every file passed."""
    registry.load()
    architecture = device_architecture(torch.device("cuda"))
    stamp = {
        "architecture": architecture,
        "torch": torch.__version__.split("+")[0],
        "triton": triton_version(),
        "date": datetime.date.today().isoformat(),
    }
    rows, failed = [], []
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        command = [sys.executable, "-m", "pytest", "-q", str(path)]
        passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
        proves = claims(path)
        print(f"{'passed' if passed else 'FAILED'}  {path.name}: {', '.join(' '.join(c) for c in proves) or '-'}")
        failed += [] if passed else [path.name]
        rows += [{"impl": impl, "op": op, **stamp} for impl, op in proves if passed]
    kept = [row for row in json.loads(proven.RECORD.read_text())["proven"] if row["architecture"] != architecture]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in [*kept, *rows])
    proven.RECORD.write_text(f'{{\n  "proven": [\n{lines}\n  ]\n}}\n')
    print(f"{len(rows)} implementations proven on {architecture}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
