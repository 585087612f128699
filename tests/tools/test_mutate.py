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


def test_tests_of_the_file_run_before_those_of_its_area() -> None:
    change = mutate.Change("passes", "dsv4_compile/passes/fuse_output.py", 1, "core/AddNot", 0)
    own, area = mutate.tests_of(change, mutate.ROOT)
    assert own[0].startswith("tests/backend/test_fuse_output") and area == ["tests/backend"]
    assert mutate.tests_of(change._replace(file="dsv4_compile/passes/nothing.py"), mutate.ROOT) == [["tests/backend"]]
