"""The shared fixtures do what the tests of this repository rely on."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parent.parent / "conftest.py"


@pytest.mark.parametrize("case", [0, 1])
def test_inputs_follow_from_the_name_of_the_test(case: int, seed: int) -> None:
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_poisoned_memory_is_visible_in_library_code(poisoned_memory: None) -> None:
    assert torch.zeros(8).new_empty(8).isnan().all()


@given(st.integers())
def test_hypothesis_accepts_the_automatic_fixtures(value: int) -> None:
    assert isinstance(value, int)


def test_a_failure_prints_its_seed_and_another_seed_draws_other_inputs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("import torch\ndef test_fails(seed):\n    assert torch.rand(()) == 2, f'seed is {seed}'")
    seeds = set()
    for option in ("--seed=0", "--seed=1"):
        result = pytester.runpytest_inprocess(option, "-p", "no:cacheprovider")
        result.assert_outcomes(failed=1)
        seed = re.search(r"seed is (\d+)", str(result.stdout))[1]
        result.stdout.fnmatch_lines([f"*torch.manual_seed({seed}); pytest --seed {option[-1]} *test_fails*"])
        seeds.add(seed)
    assert len(seeds) == 2


def test_the_files_that_come_first_exist(request: pytest.FixtureRequest) -> None:
    conftest = next(plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "LONGEST"))
    assert [name for name in conftest.LONGEST if not (CONFTEST.parent / name).is_file()] == []
