"""Run the tests that compare bits under several instruction sets: `make test-isa`.

Which order a library sums in, and which function it takes for the rest of a vector, follows from the CPU. A level
limits MKL, oneDNN, ATen, the code that Inductor generates and this package's C++ kernels to the instructions of an
older CPU; one more replaces GEMMs by ones with bits that depend on their sizes. A level that this CPU lacks is skipped
with a line.

MKL takes the paths of its fast kernels on Intel CPUs alone. On others the levels let it see one, so that they run what
a reader with such a CPU runs.

python tests/tools/isa.py [--jobs N] [--sample] [--level NAME] [pytest arguments]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = ("tests/backend/test_fuse_compressors.py", "tests/ops/common/test_quant.py")
"""Files that `make test` runs at each level: fused against unfused, and quantised bytes."""
FILES = (
    *SAMPLE,
    "tests/backend/test_batch_invariant.py",
    "tests/backend/test_fuse_attention.py",
    "tests/backend/test_fuse_indexer.py",
    "tests/backend/test_fuse_latent.py",
    "tests/backend/test_fuse_output.py",
    "tests/hf/test_batch_invariant.py",
    "tests/lowering/test_calls_on_cpu.py",
    "tests/models/v41/test_invariants.py",
    "tests/models/v41/test_worked.py",
    "tests/modules/test_side_stream.py",
    "tests/modules/test_stacked.py",
    "tests/ops/attention/test_inv_rope.py",
    "tests/ops/attention/test_sparse_mla_decode_fused.py",
    "tests/ops/attention/test_sparse_mla_prefill.py",
    "tests/ops/common/test_kv_format.py",
    "tests/ops/common/test_native_sums.py",
    "tests/ops/common/test_on_cpu.py",
    "tests/ops/hyper_connections",
    "tests/ops/indexer/test_indexer_q_rope_quant.py",
    "tests/ops/moe",
    "tests/ops/preprocess/test_compress_norm_rope_insert.py",
    "tests/ops/preprocess/test_fused_q_kv_rmsnorm.py",
    "tests/ops/preprocess/test_preprocess_insert.py",
    "tests/ops/preprocess/test_q_norm_rope_kv_insert.py",
    "tests/testing/test_batch_invariant.py",
)
"""Files that compare bits of results of two paths, each within the minutes that a level may take."""


@dataclass(frozen=True)
class Level:
    """Instruction sets that libraries may use, as environment variables, and the CPU flags that they need."""

    name: str
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def _limit(aten: str, mkl: str, onednn: str, march: str) -> dict[str, str]:
    # Inductor follows ATEN_CPU_CAPABILITY; DSV4_TEST_MARCH is read by the fixture `native_kernels`.
    limits = {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn, "DSV4_TEST_MARCH": march}
    return {"ATEN_CPU_CAPABILITY": aten, **limits}


LEVELS = (
    Level("baseline", ("sse4_2",), _limit("default", "SSE4_2", "SSE41", "x86-64-v2")),
    Level("avx2", ("avx2", "fma"), _limit("avx2", "AVX2", "AVX2", "x86-64-v3")),
    Level(
        "avx512",
        ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
        _limit("avx512", "AVX512", "AVX512_CORE", "x86-64-v4"),
    ),
    Level("unlimited"),
    Level("gemms-by-size", arguments=("--gemms-by-size",)),
)


def cpu() -> tuple[str, frozenset[str]]:
    """Return the vendor and the flags of this x86-64 CPU; both empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not path.exists():
        return "", frozenset()
    facts = dict(line.split(":", 1) for line in path.read_text().split("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    return facts.get("vendor_id", ""), frozenset(facts.get("flags", "").split())


def why_skipped(level: Level, flags: frozenset[str]) -> str:
    """Return what the CPU lacks for a level, "" if nothing."""
    missing = [flag for flag in level.needs if flag not in flags]
    return f"this CPU has no {', '.join(missing)}" if missing else ""


def intel_for_mkl(folder: Path) -> Path | None:
    """Return a library that lets MKL see an Intel CPU if it is preloaded, None without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        return None
    source, library = folder / "intel.cpp", folder / "intel.so"
    names = ("mkl_serv_intel_cpu", "mkl_serv_intel_cpu_true")
    source.write_text("".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in names))
    subprocess.run([*compiler.split(), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def run(level: Level, files: tuple[str, ...], jobs: int, preload: Path | None, arguments: list[str]) -> int:
    """Run the tests of `files` at a level; return pytest's exit status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **level.environment}
    # Inductor's cache would return code of a different level: its key does not have ATEN_CPU_CAPABILITY.
    cache = Path(tempfile.gettempdir(), f"dsv4_isa_{os.getuid()}_{level.name}")
    cache.mkdir(mode=0o700, exist_ok=True)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTEST_XDIST_WORKER_COUNT", None)
    if preload is not None:
        environment["LD_PRELOAD"] = " ".join(filter(None, (str(preload), os.environ.get("LD_PRELOAD"))))
    parallel = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *parallel, *level.arguments, *files]
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run tests that compare bits under several instruction sets.")
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest")
    parser.add_argument("--sample", action="store_true", help="the files that `make test` runs")
    parser.add_argument("--level", action="append", choices=[level.name for level in LEVELS], help="this level alone")
    options, arguments = parser.parse_known_args(argv)
    vendor, flags = cpu()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        preload = intel_for_mkl(Path(folder)) if vendor not in ("", "GenuineIntel") else None
        if vendor not in ("", "GenuineIntel"):
            print(
                "MKL:", "without a C++ compiler as on this CPU" if preload is None else "as on an Intel CPU", flush=True
            )
        for level in LEVELS:
            if options.level and level.name not in options.level:
                continue
            if reason := why_skipped(level, flags):
                print(f"{level.name}: skipped, {reason}", flush=True)
                continue
            begin = time.monotonic()
            print(f"{level.name}: {' '.join(f'{k}={v}' for k, v in level.environment.items())}", flush=True)
            status = run(level, SAMPLE if options.sample else FILES, options.jobs, preload, arguments)
            print(f"{level.name}: {'failed' if status else 'passed'}, {time.monotonic() - begin:.0f} s", flush=True)
            failed += [level.name] * (status != 0)
    print("failed: " + ", ".join(failed) if failed else "equal bits at every level that ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
