"""Parts of the real model, on the meta device. Results of split models are compared in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import RankError
from dsv4_compile.models.v41 import V41Config, V41Model
from dsv4_compile.models.v41.splitting import keep_part
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks


def flash() -> V41Model:
    with torch.device("meta"):
        return V41Model(V41Config(), torch.bfloat16, quantised=True, quantize_input=True)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_four_ranks_have_a_quarter_of_v41_flash(layout: str) -> None:
    """The page says 503, 203 and 126 GB."""
    named = dict(flash().named_parameters())
    assert round(sum(parameter.nbytes for parameter in named.values()) / 1e9) == 503
    tables = [parameter.nbytes for name, parameter in named.items() if "engram.embed" in name]
    assert round(sum(tables) / 1e9) == 203
    part = flash()
    keep_part(part, Ranks(3, 4, ""), layout, quantised=True)
    assert round(sum(parameter.nbytes for parameter in part.parameters()) / 1e9) == 126


def test_ranks_that_do_not_divide_it_are_told_which_do() -> None:
    with pytest.raises(RankError, match="use 1 or 2 or 4 or 8 ranks"):
        keep_part(flash(), Ranks(0, 3, ""), "experts", quantised=True)
