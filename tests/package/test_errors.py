"""Tests that the table of error codes, the code that raises them, and the page that explains them agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo

from dsv4_compile import DSV4Error
from dsv4_compile.errors import CODES, DSV4Warning, check, error

CODE = re.compile(r"[EW]\d{3}")


def _used(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the places with a code as an argument, such as `fail("E201", ...)`, by code."""
    used: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for value in node.args:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str) and CODE.fullmatch(value.value):
                        used.setdefault(value.value, []).append(f"{path}:{value.lineno}")
    return used


def test_every_code_the_library_raises_is_in_the_table(trees: dict[str, ast.Module]) -> None:
    assert {code: places for code, places in _used(trees).items() if code not in CODES} == {}


def test_every_code_in_the_table_is_raised_somewhere(trees: dict[str, ast.Module]) -> None:
    assert sorted(set(CODES) - set(_used(trees))) == []


def test_codes_are_in_order_and_in_a_known_range() -> None:
    assert list(CODES) == sorted(CODES)
    assert all(re.fullmatch(r"E[1-578]\d\d|W6\d\d", code) for code in CODES)


def test_message_has_rule_got_why_fix_and_a_command_for_more() -> None:
    fault = error("E202", got="'fp7'", why="a typing mistake", fix="pass 'fp8'")
    assert str(fault) == (
        "[E202] unknown cache format\n"
        f"  rule  {CODES['E202'].rule}\n"
        "  got   'fp7'\n"
        "  why   a typing mistake\n"
        "  fix   pass 'fp8'\n"
        "  more  dsv4 explain E202"
    )
    assert fault.code == "E202"


@pytest.mark.parametrize(
    ("code", "base"), [("E101", ImportError), ("E201", ValueError), ("E301", RuntimeError)], ids=["E1", "E2", "E3"]
)
def test_errors_are_also_of_the_builtin_class_a_caller_would_catch(code: str, base: type[Exception]) -> None:
    with pytest.raises(base) as caught:
        check(False, code, got="nothing")
    assert isinstance(caught.value, DSV4Error)


def test_every_code_has_a_section_in_the_errors_page(root: Path) -> None:
    page = (root / "dsv4_compile" / "docs" / "errors.md").read_text()
    assert re.findall(r"^## (\S+)$", page, re.MULTILINE) == list(CODES)


EXAMPLES = dict(
    re.findall(
        r"^## (\S+)$.*?^```python\n(.*?)^```$",
        (Path(__file__).resolve().parents[2] / "dsv4_compile" / "docs" / "errors.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


@pytest.mark.parametrize("code", [code for code in CODES if code[0] == "W"])
def test_example_of_the_errors_page_gives_the_warning_it_explains(code: str) -> None:
    with pytest.warns(DSV4Warning, match=rf"\[{code}\]"):
        exec(compile(EXAMPLES[code], f"errors.md, {code}", "exec"), {})


@pytest.mark.parametrize("code", [code for code in CODES if code[0] == "E"])
def test_example_of_the_errors_page_raises_the_error_it_explains(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.__version__)  # restored after the example that changes it
    # Dynamo wraps an error of a backend and keeps its text.
    with pytest.raises((DSV4Error, torch._dynamo.exc.BackendCompilerFailed), match=rf"\[{code}\]"):
        exec(compile(EXAMPLES[code], f"errors.md, {code}", "exec"), {})
