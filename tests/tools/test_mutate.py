"""Which places `make mutate` changes, and which tests it runs for them; the tool that changes them is not needed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

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
    lines_run = [lines[line - 1].strip() for line in sorted(mutate.executed_lines(text))]
    assert lines_run == ["LIMIT: int = 4", "if x is None:", "return None", "return 2 * x"]


@pytest.mark.parametrize("area", mutate.AREAS)
def test_areas_have_sources_and_tests(area: str) -> None:
    source, tests = mutate.AREAS[area]
    assert list((mutate.ROOT / source).rglob("*.py")) and list((mutate.ROOT / tests).rglob("test_*.py"))


def test_tests_of_the_file_run_before_those_of_files_that_import_it_and_of_its_area() -> None:
    change = mutate.Change("hf", "dsv4_compile/hf/serving/sampling.py", 1, "core/AddNot", 0)
    of_file, near, others, area, pages = mutate.tests_of(change, mutate.ROOT)
    assert of_file == ["tests/hf/test_sampling.py"] and area == ["tests/hf"] and pages == ["tests/docs"] and not others
    assert "tests/hf/test_running_batch.py" in near and not set(of_file) & set(near)
    nothing = change._replace(file="dsv4_compile/hf/nothing.py")
    assert mutate.tests_of(nothing, mutate.ROOT) == [[], [], [], ["tests/hf"], ["tests/docs"]]
    warm_up = mutate.Change("runtime", "dsv4_compile/runtime/warmup.py", 1, "core/AddNot", 0)
    assert "tests/debug/test_strict.py" in mutate.tests_of(warm_up, mutate.ROOT)[2]


def test_tests_of_a_family_and_then_of_all_families_run_instead_of_those_of_the_area() -> None:
    change = mutate.Change("kernels", "kernels/moe/moe_route.py", 1, "core/AddNot", 0)
    *_, family, shared, _ = mutate.tests_of(change, mutate.ROOT)
    assert family == ["tests/kernels/moe"]
    assert "tests/kernels/test_every_kernel.py" in shared and all(name.count("/") == 2 for name in shared)
    assert mutate.tests_of(change._replace(file="kernels/device/rope.py"), mutate.ROOT)[-2] == ["tests/kernels"]


class Runner(mutate.Runner):
    """Runs no test: those of a changed file end with `changed`, those of the file as it was with `unchanged`."""

    def __init__(self, changed: int | None, unchanged: int | None) -> None:
        super().__init__("python", 1.0)
        self.outcomes = {True: changed, False: unchanged}
        self.limits: list[float | None] = []

    def _run(
        self, tests: Sequence[str], copy: Path, mark: str = "", seconds: float | None = None
    ) -> tuple[int | None, list[str]]:
        self.limits.append(seconds)
        return self.outcomes["changed" in (copy / SPLIT.file).read_text()], []


SPLIT = mutate.Change("metadata", "dsv4_compile/metadata/split.py", 1, "core/AddNot", 0)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "changed_by", lambda change, source: f"{source}changed")
    for name in (SPLIT.file, "tests/metadata/test_split.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "unchanged", "survives"),
    [(0, 0, True), (1, 0, False), (1, None, False), (None, 0, False), (None, None, True)],
)
def test_a_limit_kills_a_change_where_tests_take_half_of_it_without(
    checkout: Path, changed: int | None, unchanged: int | None, survives: bool
) -> None:
    runner = Runner(changed, unchanged)
    assert runner.survives(SPLIT, checkout) == survives
    assert changed is not None or runner.limits == [None, runner.seconds / 2]
    assert (checkout / SPLIT.file).read_text() == ""


@pytest.mark.parametrize("changed", [1, None])
def test_a_test_that_fails_without_a_change_is_an_error(checkout: Path, changed: int | None) -> None:
    with pytest.raises(RuntimeError, match=r"test_split\.py fails without a change"):
        Runner(changed, unchanged=1).survives(SPLIT, checkout)


def test_a_row_replaces_that_of_its_area_and_seed_alone() -> None:
    rows = [{"area": area, "seed": seed, "killed": 1} for area, seed in (("hf", 2), ("reference", 1), ("hf", 1))]
    replaced = mutate.with_row(rows, {"area": "hf", "seed": 1, "killed": 2})
    assert [(row["area"], row["seed"], row["killed"]) for row in replaced] == [
        ("reference", 1, 1),
        ("hf", 1, 2),
        ("hf", 2, 1),
    ]
