"""tests/gpu/prove.py without a GPU: order, time limits, and a record that a hang, a fault or a cut does not lose."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu import prove

STAMP = {"architecture": "cuda sm_90", "device": "NVIDIA H200", "torch": "2", "triton": "3", "date": "today"}
FILES = {
    "global_topk": "def test_a(): pass\ndef test_b(): pass",
    "advance": "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)",
    "batch_metadata": "import os\ndef test_a(): os.abort()",
    "fp8_linear": "def test_a(): assert 1 == 2, 'wrong sum'",
    "grouped_linear": "import pytest\ndef test_a(): pytest.skip()",  # an op with a skipped test is not proven
    "ragged_rows": "import no_such_module",
}


def files(folder: Path, **texts: str) -> list[Path]:
    for stem, text in texts.items():
        (folder / f"test_{stem}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return [folder / f"test_{stem}.py" for stem in texts]


def record_of(folder: Path, *ops: str) -> Path:
    path = folder / "proven.json"
    prove.write_record([{"impl": "triton", "op": op, **STAMP} for op in ops], path)
    return path


def ops_in(path: Path) -> list[str]:
    return sorted(row["op"] for row in json.loads(path.read_text())["proven"])


def test_a_hang_and_a_fault_take_no_other_file_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that hangs is overdue when all others have ended, however long they take."""
    ended, clock, log = dict[str, prove.Outcome](), time.monotonic, tmp_path / "test_advance.log"

    def now() -> float:
        return clock() + 1000 * (len(ended) == len(FILES) - 1 and "::test_b" in log.read_text())

    monkeypatch.setattr(prove.time, "monotonic", now)
    for outcome in prove.run_files(files(tmp_path, **FILES), tmp_path, prove.Limits(3, 500, 5000, 5000), parts={}):
        ended[outcome.path.stem.removeprefix("test_")] = outcome
    assert {stem: outcome.verdict for stem, outcome in ended.items()} == {
        "global_topk": "passed",
        "advance": "HUNG",
        "batch_metadata": "FAILED",
        "fp8_linear": "FAILED",
        "grouped_linear": "FAILED",
        "ragged_rows": "FAILED",
    }
    assert ended["global_topk"].tests == 2
    assert "test_b" in ended["advance"].reason and ended["advance"].tests == 1
    assert "wrong sum" in ended["fp8_linear"].reason
    assert "no_such_module" in ended["ragged_rows"].reason


def test_a_test_that_hangs_is_ended_before_its_file_is_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent for long as soon as its stack is in the log."""
    clock, log = time.time, tmp_path / "test_advance.log"
    monkeypatch.setattr(prove.time, "time", lambda: clock() + 1000 * (log.exists() and "Timeout" in log.read_text()))
    paths = files(tmp_path, advance=FILES["advance"])
    (outcome,) = prove.run_files(paths, tmp_path, prove.Limits(1, 60, 10, 90), parts={})
    assert (outcome.verdict, outcome.tests) == ("HUNG", 1) and outcome.seconds < 60
    assert "without a sign of life" in outcome.reason
    assert "in test_b" in (tmp_path / "test_advance.log").read_text().partition("Timeout")[2]


def test_what_finds_no_memory_beside_others_runs_once_more_alone(tmp_path: Path) -> None:
    """The second run of a part ends as it ends; a part that only then passes has passed."""
    full = f"""
def test_a():
    with open(r'{tmp_path}/NAME', 'a+') as runs:
        runs.write('x')
        assert runs.tell() > NEEDED, 'CUDA out of memory'
"""
    texts = {
        name: full.replace("NAME", name).replace("NEEDED", n) for name, n in (("advance", "1"), ("fp8_linear", "9"))
    }
    ended = list(prove.run_files(files(tmp_path, **texts), tmp_path, prove.Limits(2, 500, 60, 500), parts={}))
    verdicts = {outcome.path.stem: (outcome.verdict, outcome.tests) for outcome in ended}
    assert verdicts == {"test_advance": ("passed", 1), "test_fp8_linear": ("FAILED", 0)}
    assert len((tmp_path / "fp8_linear").read_text()) == 2


def test_a_slow_test_whose_stack_is_in_the_log_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove.time, "time", lambda: 0.0)  # a slow start is no hang
    slow = "import time, pathlib\ndef test_a():\n    log = pathlib.Path(__file__).with_name('test_advance.log')\n"
    slow += "    while 'most recent call first' not in log.read_text(): time.sleep(0.02)"
    (outcome,) = prove.run_files(files(tmp_path, advance=slow), tmp_path, prove.Limits(1, 60, 1, 90), parts={})
    assert (outcome.verdict, outcome.tests) == ("passed", 1)


def test_a_spent_budget_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is spent when the first test runs, however long an interpreter takes to start."""
    clock = time.monotonic
    monkeypatch.setattr(prove.time, "monotonic", lambda: clock() + 1000 * (tmp_path / "pid").exists())
    sleeper = f"""
import os, time
def test_a():
    with open(r'{tmp_path}/new', 'w') as file:
        file.write(str(os.getpid()))
    os.rename(r'{tmp_path}/new', r'{tmp_path}/pid')
    time.sleep(60)
"""
    paths, started = files(tmp_path, advance=sleeper, global_topk="def test_a(): pass"), clock()
    ended = list(prove.run_files(paths, tmp_path, prove.Limits(1, 5000, 60, 500), parts={}))
    assert sorted((outcome.path.stem, outcome.verdict) for outcome in ended) == [
        ("test_advance", "not run"),
        ("test_global_topk", "not run"),
    ]
    assert clock() - started < 55
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_parts_of_a_file_run_every_test_once_and_on_all_gpus(tmp_path: Path) -> None:
    tests = [
        f"def test_{i}():\n    open(r'{tmp_path}/{i}', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'])" for i in range(5)
    ]
    paths = files(tmp_path, advance="\n".join(["import os", *tests]), global_topk="def test_a(): pass")
    limits, parts = prove.Limits(4, 60, 60, 60), {"advance": 2}
    ended = {
        outcome.path.stem: outcome for outcome in prove.run_files(paths, tmp_path, limits, gpus=("3", "5"), parts=parts)
    }
    assert {name: (outcome.verdict, outcome.tests) for name, outcome in ended.items()} == {
        "test_advance": ("passed", 5),
        "test_global_topk": ("passed", 1),
    }
    assert [(tmp_path / str(i)).read_text() for i in range(5)] == ["3", "3", "5", "5", "5"]


def test_a_file_is_as_bad_as_its_worst_part() -> None:
    path = Path("test_advance.py")
    parts = [prove.Outcome(path, verdict, 2, 3.0, verdict) for verdict in ("passed", "FAILED", "not run", "HUNG")]
    assert prove.together(parts) == prove.Outcome(path, "FAILED", 8, 3.0, "FAILED")
    assert prove.together(parts[::2]).verdict == "not run"


def test_stems_with_parts_are_files() -> None:
    stems = {path.stem.removeprefix("test_") for path in prove.every_file()}
    assert prove.PARTS.keys() | prove.FIRST <= stems


def test_every_kernel_and_lowering_is_proven_by_one_file() -> None:
    prove.registry.load()
    claimed = sorted(claim for path in prove.every_file() for claim in prove.claims(path))
    every = [("triton", op) for op in prove.KERNELS] + [("ir", op) for op in prove.registry.LOWERINGS]
    assert claimed == sorted(every)


def test_the_record_is_complete_after_every_file(tmp_path: Path) -> None:
    record, paths = record_of(tmp_path, "global_topk", "advance", "old"), [Path("test_global_topk.py")]
    paths += [Path("test_advance.py"), Path("test_fp8_linear.py")]

    def run(paths: Sequence[Path]) -> Iterator[prove.Outcome]:
        assert ops_in(record) == []
        yield prove.Outcome(paths[0], "passed", 3, 1.0)
        assert ops_in(record) == ops_in(tmp_path / "out" / record.name) == ["global_topk"]
        yield prove.Outcome(paths[1], "FAILED", 0, 1.0, "wrong")
        assert ops_in(record) == ["global_topk"]
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prove.prove(paths, True, STAMP, record, tmp_path / "out", run)
    assert ops_in(record) == ["global_topk"]
    assert "test_advance" in (tmp_path / "out" / "table.txt").read_text().splitlines()[-1]


def test_named_files_leave_the_rows_of_others(tmp_path: Path) -> None:
    record, path = record_of(tmp_path, "global_topk", "advance"), Path("test_advance.py")
    prove.prove([path], False, STAMP, record, tmp_path, lambda paths: [prove.Outcome(path, "HUNG")])
    assert ops_in(record) == ["global_topk"]
    prove.prove([Path("test_global_topk.py")], False, STAMP, record, tmp_path, lambda paths: [])
    assert ops_in(record) == []
    other = STAMP | {"architecture": "gfx942"}
    prove.prove([path], True, other, record, tmp_path, lambda paths: [prove.Outcome(path, "passed", 1)])
    assert ops_in(record) == ["advance"]


def test_a_file_that_was_not_run_keeps_its_rows(tmp_path: Path) -> None:
    record, paths = record_of(tmp_path, "advance", "global_topk", "old"), [Path("test_advance.py")]
    prove.prove(paths, True, STAMP, record, tmp_path, lambda paths: [prove.Outcome(paths[0], "not run")])
    assert ops_in(record) == ["advance"]


def test_a_row_of_a_kernel_has_its_fingerprint_and_one_without_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prove.registry.load()
    record, path = record_of(tmp_path), Path("test_ragged_from_dense.py")
    lowered = Path("test_lowered_global_topk.py")
    known = {"ragged_from_dense": "0123456789abcdef"}
    monkeypatch.setattr(prove.proven, "fingerprint", lambda op, architecture: known.get(op, ""))
    paths = [path, lowered]
    prove.prove(paths, True, STAMP, record, tmp_path, lambda paths: [prove.Outcome(p, "passed", 1) for p in paths])
    rows = {row["impl"]: row for row in json.loads(record.read_text())["proven"]}
    kernel, lowering = rows["triton"], rows["ir"]
    assert kernel == {"impl": "triton", "op": "ragged_from_dense", "fingerprint": "0123456789abcdef", **STAMP}
    assert lowering == {"impl": "ir", "op": "global_topk", **STAMP}
    assert "not recorded: global_topk_ragged has no fingerprint" in capsys.readouterr().out


@pytest.mark.parametrize("of", [1, 2, 3])
def test_parts_of_a_run_have_every_file_once_and_are_about_as_long(of: int) -> None:
    paths = prove.every_file()
    parts = [prove.share(paths, f"{index}/{of}") for index in range(1, of + 1)]
    assert sorted(path for paths_of_part in parts for path in paths_of_part) == paths
    lengths = [
        sum(prove.PARTS.get(path.stem.removeprefix("test_"), 1) for path in paths_of_part) for paths_of_part in parts
    ]
    assert max(lengths) - min(lengths) <= 1


def test_a_second_part_adds_its_rows_to_those_of_the_first(tmp_path: Path) -> None:
    record, stems = record_of(tmp_path, "old"), ("global_topk", "advance")
    paths = [Path(f"test_{stem}.py") for stem in stems]
    for index in (1, 2):
        half = prove.share(paths, f"{index}/2")
        prove.prove(half, False, STAMP, record, tmp_path, lambda paths: [prove.Outcome(p, "passed", 1) for p in paths])
    assert ops_in(record) == ["advance", "global_topk", "old"]


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "half"])
def test_a_part_that_does_not_exist_is_wrong_usage(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as stop:
        prove.main(["advance", "--part", part])
    assert stop.value.code == 2 and f"--part {part}" in capsys.readouterr().err


def test_what_decoding_needs_comes_first_and_lowerings_last() -> None:
    every = prove.every_file()
    stems = [path.stem.removeprefix("test_") for path in prove.by_value(every)]
    assert stems[: len(prove.FIRST)] == list(prove.FIRST)
    assert [stem.startswith("lowered_") for stem in stems] == sorted(stem.startswith("lowered_") for stem in stems)
    assert len(stems) == len(every)


def test_without_a_gpu_nothing_is_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(prove, "prove", lambda *args: pytest.fail("run"))
    with pytest.raises(SystemExit) as stop:
        prove.main(["advance"])
    assert stop.value.code == 2 and capsys.readouterr().err.endswith("no CUDA device\n")
