"""Which places `make mutate` changes, and which tests it runs for them; the tool that changes them is not needed."""

from __future__ import annotations

import textwrap

import pytest

from tests.tools import mutate

SOURCE = """
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        from a import b
    LIMIT: int = 4
    SIZES: dict[str, int]
    "A text."

    def double(x: int | None = 3,
               y: "int | str" = 4) -> int | None:
        \"\"\"Return 2 * x.\"\"\"
        if x is None:
            return None

        return 2 * x
"""


def test_lines_that_run_are_changed_and_no_others() -> None:
    text = textwrap.dedent(SOURCE)
    lines = text.splitlines()
    found = [lines[line - 1].strip() for line in sorted(mutate.executed_lines(text))]
    assert found == ["LIMIT: int = 4", "if x is None:", "return None", "return 2 * x"]


@pytest.mark.parametrize("area", mutate.AREAS)
def test_areas_have_sources_and_tests(area: str) -> None:
    source, tests = mutate.AREAS[area]
    assert list((mutate.ROOT / source).rglob("*.py")) and list((mutate.ROOT / tests).rglob("test_*.py"))


def test_tests_of_the_file_run_before_those_of_files_that_import_it_and_of_its_area() -> None:
    change = mutate.Change("hf", "dsv4_compile/hf/entry.py", 1, "core/AddNot", 0)
    own, near, area = mutate.tests_of(change, mutate.ROOT)
    assert own == ["tests/hf/test_entry.py"] and area == ["tests/hf"]
    assert "tests/hf/test_running.py" in near and not set(own) & set(near)
    nothing = change._replace(file="dsv4_compile/hf/nothing.py")
    assert mutate.tests_of(nothing, mutate.ROOT) == [[], [], ["tests/hf"]]


def test_tests_of_a_family_run_instead_of_those_of_all() -> None:
    change = mutate.Change("kernels", "kernels/moe/moe_route.py", 1, "core/AddNot", 0)
    assert mutate.tests_of(change, mutate.ROOT)[-1] == ["tests/kernels/moe"]
    assert mutate.tests_of(change._replace(file="kernels/device/rope.py"), mutate.ROOT)[-1] == ["tests/kernels"]
