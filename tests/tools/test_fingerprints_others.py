"""The other families' kernels compile, for five GPUs, to the machine code that the committed table says."""

from __future__ import annotations

import pytest

from tests.tools.fingerprinted import assert_is_as_in_the_table, ops_of


@pytest.mark.parametrize("op", ops_of("drafts", "engram", "metadata", "moe", "hyper_connections"))
def test_machine_code_is_as_in_the_table(op: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_is_as_in_the_table(op, tmp_path_factory.getbasetemp() / "fingerprints")
