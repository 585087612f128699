"""State slots beyond the cache at tokens that close a group, in the bounds-checking interpreter."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.testing import assert_bitwise, hostile_values
from tests.kernels.preprocess.test_compress_norm_rope_insert import CACHE, assert_same_entries, both, engine_after

interpreted = pytest.mark.interpreted


@interpreted
def test_tokens_whose_state_slot_is_beyond_the_cache_store_no_entry() -> None:
    engine, args = engine_after(16, 4, dim=16)
    bound = len(args[0]) * engine.state_block
    beyond = [value for value in hostile_values(bound) if value >= bound]
    assert len(beyond) == 4 and bound in beyond
    slots = args[1].clone()
    slots[3::4] = torch.tensor(beyond)
    ours, theirs = both((args[0], slots, *args[2:]))
    assert_same_entries(engine, ours, theirs)
    assert_bitwise(ours, args[CACHE])
