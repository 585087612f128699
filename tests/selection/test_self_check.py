"""Self-checks of kernels: what is compared, what a fault or a hang does, and when none runs. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.selection import checked, proven
from dsv4_compile.testing import self_check

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
OPS = ["inv_rope", "advance", "global_topk"]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the process that checks run a different program, with a device and ops as arguments."""
    start = subprocess.Popen

    def program(text: str) -> None:
        def popen(command: list[str], **how: Any) -> Any:
            return start([sys.executable, "-S", "-c", text, *command[3:]], **how)

        monkeypatch.setattr(self_check.subprocess, "Popen", popen)

    return program


def check(*ops: str) -> dict[str, str]:
    return dict(self_check._in_a_process(ops, CUDA))


PROGRAM = """
import json, os, sys, time
print("ready", flush=True)
for op in sys.argv[2:]:
    {action}
    print(json.dumps([op, ""]), flush=True)
"""


def test_every_op_is_checked_in_one_process(processes: Callable[[str], None]) -> None:
    processes(PROGRAM.format(action="pass"))
    assert check(*OPS) == dict.fromkeys(OPS, "")


def test_a_fault_ends_no_other_check(processes: Callable[[str], None]) -> None:
    processes(PROGRAM.format(action="if op == 'advance': print('illegal address', file=sys.stderr); os._exit(7)"))
    reasons = check(*OPS)
    assert reasons.pop("advance") == "its process ended with 7: illegal address"
    assert reasons == {"inv_rope": "", "global_topk": ""}


def test_a_process_that_ends_some_time_after_its_output_has_not_hung(processes: Callable[[str], None]) -> None:
    processes(PROGRAM.format(action="if op == 'advance': os.close(1); time.sleep(0.5); os._exit(7)"))
    assert check(*OPS)["advance"].startswith("its process ended with 7")


def test_a_hang_ends_no_other_check(processes: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "OP_LIMIT", 3.0)
    processes(PROGRAM.format(action="if op == 'inv_rope': time.sleep(600)"))
    reasons = check(*OPS)
    assert reasons.pop("inv_rope").startswith("it took more than 3 s")
    assert reasons == {"advance": "", "global_topk": ""}


def test_lines_that_come_together_are_all_read(processes: Callable[[str], None]) -> None:
    processes("import json, sys; print('ready', *(json.dumps([op, '']) for op in sys.argv[2:]), sep=chr(10))")
    assert check(*OPS) == dict.fromkeys(OPS, "")


def test_lines_of_other_programs_are_passed_over(processes: Callable[[str], None]) -> None:
    other = 'os.write(1, b\'\\xff text\\n{}\\n[1, 2]\\n["other", ""]\\n5\\n\')'
    processes(f"import os; {other}\n" + PROGRAM.format(action=other))
    assert check(*OPS) == dict.fromkeys(OPS, "")


def test_a_python_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none/python")
    assert all(why.startswith("the self-check did not start: ") for why in check(*OPS).values())


def test_a_process_that_does_not_start_is_not_started_again(processes: Callable[[str], None]) -> None:
    processes("raise SystemExit('no module named torch')")
    assert set(check(*OPS).values()) == {"the self-check did not start: no module named torch"}


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_is_right_passes_and_one_that_is_wrong_does_not(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "refusal", lambda op: None)
    monkeypatch.setattr(self_check, "launcher", lambda op: REFERENCES[op])
    assert self_check.why_wrong(op, CPU) == ""

    def wrong(*args: Any) -> Any:
        result = REFERENCES[op](*args)
        changed = next(x for x in self_check.results_of(op, result, args) if x.numel())
        changed[(0,) * changed.dim()] = changed[(0,) * changed.dim()] + 3
        return result

    monkeypatch.setattr(self_check, "launcher", lambda op: wrong)
    assert self_check.why_wrong(op, CPU).startswith("AssertionError: ")
    monkeypatch.setattr(self_check, "refusal", lambda op: lambda *args: "too large")
    assert self_check.why_wrong(op, CPU) == "its kernel supports no sample"


def test_results_are_kept_and_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(self_check, "device_architecture", lambda device: "cuda sm_90")
    reasons = {"inv_rope": "", "advance": "wrong"}
    monkeypatch.setattr(self_check, "_in_a_process", lambda ops, device: iter(reasons.items()))
    events: list[str] = []
    with self_check.progress.listen(lambda event: events.append(str(event))):
        assert self_check.check_ops([*reasons], CUDA) == reasons
    assert any("check kernels 1/2 inv_rope" in event for event in events)
    (path,) = (tmp_path / "dsv4_checked").iterdir()
    assert json.loads(path.read_text()) == reasons
    proven.forget()


@pytest.mark.parametrize("path", ["", os.pathsep, "."])
def test_the_process_imports_nothing_from_the_current_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "torch", "sitecustomize", "usercustomize", "encodings", "_collections_abc", "dsv4_compile"):
        (tmp_path / f"{name}.py").write_text(f"import os; os.write(2, b'{name} was imported'); os._exit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    if path:  # the start of Python alone
        program = self_check._program().partition("from ")[0] + "import json; print(json.__file__)"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=self_check._environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "") and str(tmp_path) not in done.stdout
    else:
        assert check("inv_rope")["inv_rope"].startswith("RuntimeError: 0 active drivers")


def test_results_of_several_processes_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def child(number: int) -> int:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                for i in range(50):
                    checked.add("cuda sm_90", "abc", {f"op{number}_{i}": ""})
                status = 0
            finally:
                os._exit(status)
        return process

    assert [os.waitpid(process, 0)[1] for process in [child(i) for i in range(4)]] == [0] * 4
    assert len(checked.results("cuda sm_90", "abc")) == 200
    assert list((tmp_path / "dsv4_checked").iterdir()) == [checked.path_of("cuda sm_90", "abc")]


def test_results_that_cannot_be_written_are_kept_in_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checked, "_unsaved", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nothing")
    for op in ("inv_rope", "advance"):
        checked.add("cuda sm_90", "abc", {op: ""})
    assert len(caplog.records) == 1
    assert checked.results("cuda sm_90", "abc") == {"inv_rope": "", "advance": ""}
    assert checked.results("cuda sm_100", "abc") == {}


@pytest.mark.parametrize("planted", ["group", "link", "fifo", "folder", "deep", "huge", "list", "bytes"])
def test_a_file_that_is_not_ours_holds_no_results(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    checked.add("cuda sm_90", "abc", {"inv_rope": ""})
    path = checked.path_of("cuda sm_90", "abc")
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    if planted == "group":
        path.chmod(0o660)
    else:
        path.unlink()
    match planted:
        case "link":
            (tmp_path / "other").write_bytes(content)
            path.symlink_to(tmp_path / "other")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "deep":
            path.write_text("[" * 100_000)
        case "huge":
            path.write_text(json.dumps({"inv_rope": "x" * (2 << 20)}))
        case "list":
            path.write_text("[1]")
        case "bytes":
            path.write_bytes(b"\xff\xfe\x00")
    assert checked.results("cuda sm_90", "abc") == {}
    checked.add("cuda sm_90", "abc", {"advance": ""})
    assert checked.results("cuda sm_90", "abc") == {"advance": ""}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lists of ops that were checked on a GPU where one is to be checked."""
    lists: list[list[str]] = []
    monkeypatch.setattr(self_check, "device_architecture", lambda device: "cuda sm_90")
    monkeypatch.setattr(proven, "to_check", lambda architecture: ["inv_rope"])
    monkeypatch.setattr(self_check, "check_ops", lambda ops, device: lists.append(ops))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(self_check.CHILD, raising=False)
    return lists


def test_kernels_are_checked_where_a_graph_for_a_gpu_is_compiled(asked: list[list[str]]) -> None:
    assert self_check.ensure([CPU]) == "" and asked == []
    assert self_check.ensure([CPU, CUDA]) == "" and asked == [["inv_rope"]]


def test_nothing_is_checked_while_a_graph_is_captured(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "while a CUDA graph is captured" in self_check.ensure([CUDA])
    assert asked == []


def test_nothing_is_checked_in_a_process_that_checks_or_trusts(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with proven.trust():
        self_check.ensure([CUDA])
    monkeypatch.setitem(os.environ, self_check.CHILD, "1")
    self_check.ensure([CUDA])
    assert asked == []
