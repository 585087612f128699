"""Tests of the `dsv4` command: output, exit status and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from dsv4_compile import __version__, cli, doctor
from dsv4_compile.errors import CODES, fail


@pytest.mark.parametrize("code", list(CODES))
def test_explain_prints_the_rule_the_fix_and_the_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", code]) == 0
    out = capsys.readouterr().out
    entry = CODES[code]
    assert out.startswith(f"{code}  {entry.title}\n\n  rule  {entry.rule}\n  fix   {entry.fix}\n\n")
    assert len(out) > len(entry.title + entry.rule + entry.fix) + 100
    assert "## " not in out


def test_explain_alone_lists_every_code_and_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a row is a line
    assert cli.main(["explain"]) == 0
    docs = root / "dsv4_compile" / "docs"
    pages = [page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*CODES, *sorted(pages)]


def test_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"dsv4 {__version__}\n")


def test_explain_accepts_a_code_in_lower_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "e204"]) == 0
    assert capsys.readouterr().out.startswith("E204  ")


def test_explain_of_a_missing_script_asks_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "nothing.py"]) == 2
    assert "fix   pass the path of a script" in capsys.readouterr().err


def test_a_limit_without_values_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gemm", "--only", "tokens"]) == 2
    assert capsys.readouterr().err == "--only takes COLUMN=A,B, got 'tokens'\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_pages_are_printed_in_any_locale(root: Path, encoding: str) -> None:
    foreign = [page for page in (root / "dsv4_compile" / "docs").rglob("*.md") if not page.read_bytes().isascii()]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if encoding != "ascii":
        environment["PYTHONIOENCODING"] = encoding
    assert foreign
    for name in (*(page.relative_to(root / "dsv4_compile" / "docs").with_suffix("") for page in foreign), None):
        command = [sys.executable, "-m", "dsv4_compile", "explain", *([] if name is None else [str(name)])]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout) > 1000


@pytest.mark.parametrize("page", ["layout", "kernel-notes/attention"])
def test_explain_prints_a_page(page: str, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert cli.main(["explain", page]) == 0
    assert capsys.readouterr().out == (root / "dsv4_compile" / "docs" / f"{page}.md").read_text() + "\n"


@pytest.mark.parametrize("target", ["E999", "nothing", "../pyproject", "errors/..", ""])
def test_explain_of_an_unknown_target_is_an_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", target]) == 2
    assert capsys.readouterr().err.startswith(f"no error code or page {target!r}")


def test_explain_passes_a_script_to_the_debug_package(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def explain_script(path: str, **options: object) -> int:
        seen.update(options, path=path)
        return 1

    monkeypatch.setitem(sys.modules, "dsv4_compile.debug", types.SimpleNamespace(explain_script=explain_script))
    assert cli.main(["explain", "model.py", "--json", "--max-breaks", "0"]) == 1
    assert seen == {"path": "model.py", "json": True, "max_breaks": 0, "html": None}


def test_demo_gets_every_argument_that_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    demo = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 0)
    monkeypatch.setitem(sys.modules, "dsv4_compile.hf.demo", demo)
    assert cli.main(["demo", "--compare", "--steps", "3", "--help"]) == 0
    assert seen == [["--compare", "--steps", "3", "--help"]]


def test_errors_of_the_package_end_the_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = types.SimpleNamespace(main=lambda argv: fail("E101", got="transformers 4.0"))
    monkeypatch.setitem(sys.modules, "dsv4_compile.hf.demo", demo)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("[E101] ")


def test_a_reader_that_closes_the_pipe_is_no_error(root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dsv4_compile", "explain", "layout"]
    done = subprocess.run(
        command, cwd=root, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["explain", "E208"], ["explain", "layout"]])
def test_text_is_printed_without_importing_torch(arguments: list[str], root: Path) -> None:
    command = [sys.executable, "-m", "dsv4_compile", *arguments]
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=True)
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "dsv4_compile.cli" in modules
    assert not {"torch", "sympy", "triton", "transformers"} & {*modules}


def test_a_script_run_by_the_command_has_the_ops(tmp_path: Path, root: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(hasattr(torch.ops.dsv4, 'moe_route'))\n")
    command = [sys.executable, "-m", "dsv4_compile", "explain", str(script)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("True\n"), done.stderr


def test_bare_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "near"), [("preformance", "performance"), ("perf", "performance"), ("E2088", "E208"), ("e2088", "E208")]
)
def test_explain_of_an_unknown_target_names_the_nearest(
    target: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", target]) == 2
    assert f"did you mean {near}" in capsys.readouterr().err


def test_explain_accepts_a_code_without_its_letter(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "208"]) == 0
    assert capsys.readouterr().out.startswith("E208  ")


def test_an_interrupt_ends_the_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dsv4_compile.hf.demo", types.SimpleNamespace(main=interrupted))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_completion_offers_codes_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {"E208", "performance", "doctor", "--replay"} <= {*script.replace("'", " ").replace("(", " ").split()}
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("argv", [["fly"], ["doctor", "--fast"], ["explain", "E201", "E202"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: dsv4" in capsys.readouterr().err


def test_doctor_finds_the_ops_correct_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["torch"]["value"] == torch.__version__
    ops = [check for name, check in checks.items() if name.startswith("op ")]
    assert len(ops) >= 3
    assert {check["level"] for check in ops} == {"ok"}


def test_doctor_report_ends_with_the_verdict() -> None:
    checks = [doctor.Check("torch", "2.9", "fix", "tested: 2.11 to 2.15"), doctor.Check("python", "3.11")]
    assert doctor.render(checks) == (
        "fix   torch   2.9\n"
        "                tested: 2.11 to 2.15\n"
        "ok    python  3.11\n"
        "\n"
        "verdict: follow the notes of the lines marked fix"
    )


def test_doctor_reports_a_probe_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> doctor.Check:
        raise OSError("no such driver\nand more")

    monkeypatch.setattr(doctor, "_device", broken)
    device = next(check for check in doctor.examine() if check.name == "device")
    assert device == doctor.Check("device", "could not be examined", "fix", "OSError: no such driver")


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.1", "fix"),
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.15.1a0+git1", "ok"),
        ("2.16.0", "warn"),
        ("3.0", "warn"),
    ],
)
def test_doctor_distinguishes_tested_versions_of_torch(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor._torch("torch").level == level


@pytest.mark.parametrize(
    ("version", "level"), [("3.5.1", "fix"), ("3.6.0", "ok"), ("3.9.0+git1", "ok"), ("3.10.0", "warn")]
)
def test_doctor_warns_of_a_triton_that_hopper_kernels_were_not_tested_with(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    check = doctor._triton("triton")
    assert check.level == level and ("sm_90" in check.note) == (level == "warn")


@pytest.mark.parametrize(("architecture", "level"), [("cuda sm_90", "ok"), ("cuda sm_120", "warn")])
def test_doctor_counts_the_kernels_that_auto_uses_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, architecture: str, level: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "device_architecture", lambda device: architecture)
    monkeypatch.setattr(
        doctor.proven, "why_unproven", lambda impl, op, where: "" if where == "cuda sm_90" else "changed"
    )
    monkeypatch.setattr(doctor.proven, "to_check", lambda where: [])
    monkeypatch.setattr(doctor.proven, "tested_with", lambda where: {"3.7.1", "3.6.0"} if "90" in where else set())
    check, total = doctor._kernels("kernels"), len(doctor.KERNELS)
    proven = f"{total} of {total} proven on cuda sm_90 with Triton 3.6.0, 3.7.1"
    assert (check.level, check.value) == (level, proven if level == "ok" else f"0 of {total} proven on cuda sm_120")


@pytest.mark.parametrize(
    ("unchecked", "advice"), [(["advance"], "dsv4 doctor --prove"), ([], "python tests/gpu/prove.py")]
)
def test_doctor_says_why_auto_does_not_use_a_kernel(
    monkeypatch: pytest.MonkeyPatch, unchecked: list[str], advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "device_architecture", lambda device: "cuda sm_90")
    why = {"advance": "triton has changed since it was proven on NVIDIA H200 (cuda sm_90), 2026-11-23"}
    monkeypatch.setattr(doctor.proven, "why_unproven", lambda impl, op, where: why.get(op, ""))
    monkeypatch.setattr(doctor.proven, "to_check", lambda where: unchecked)
    check = doctor._kernels("kernels")
    assert check.level == "warn" and f"advance: {why['advance']}" in check.note and advice in check.note


def test_doctor_proves_kernels_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dsv4_compile.testing import self_check

    assert [check.value for check in doctor.prove()] == ["not needed without a GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "device_architecture", lambda device: "cuda sm_90")
    wrong = {"inv_rope": "AssertionError: 3 is not 4"}
    monkeypatch.setattr(self_check, "check_ops", lambda ops, device: {op: wrong.get(op, "") for op in ops})
    monkeypatch.setattr(doctor, "examine", list)
    assert cli.main(["doctor", "--prove"]) == 1
    report = capsys.readouterr().out
    assert f"{len(doctor.KERNELS) - 1} of {len(doctor.KERNELS)} agree with their references" in report
    assert "3 is not 4" in report


@pytest.mark.parametrize(
    ("there", "named", "level", "note"),
    [
        (("g++", "clang++"), "", "ok", ""),
        (("clang++",), "clang++", "ok", ""),
        (("clang++",), "", "fix", "torch.compile on a CPU needs it, or CXX=clang++"),
        ((), "", "fix", "torch.compile on a CPU needs it, or CXX=another compiler"),
    ],
)
def test_doctor_checks_the_compiler_that_inductor_calls(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], named: str, level: str, note: str
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    check = doctor._compiler("C++ compiler")
    assert (check.level, check.note) == (level, note)


def test_doctor_finds_an_op_with_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.dsv4, "fused_q_kv_rmsnorm", lambda qr, kv, *rest: (qr, kv), raising=False)
    norm = next(check for check in doctor.examine() if check.name == "op fused_q_kv_rmsnorm")
    assert norm.level == "fix"
    assert "wrong result" in norm.note
