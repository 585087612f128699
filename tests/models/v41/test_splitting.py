"""Parts of the real model, on the meta device. Results of split models are compared in tests/parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4_compile.errors import RankError
from dsv4_compile.models.v41 import V41Config, V41Model, load, save_folder
from dsv4_compile.models.v41.splitting import keep_part, split_of
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks
from dsv4_compile.parallel.fake_group import fake_mesh
from dsv4_compile.parallel.split import part_of
from tests.models.v41.test_loading import tokenizer


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


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_ranks_divide_dequantised_weights_within_blocks_of_scales(layout: str, tmp_path: Path) -> None:
    """Half of an expert's 96 rows ends within a block: ranks cannot divide its scales, but floating weights."""
    sizes = {"hidden_size": 128, "o_groups": 4, "o_lora_rank": 64, "image_token_id": 63}
    save_folder(tiny_model(intermediate_size=96, **sizes), tmp_path, tokenizer=tokenizer())
    full = load(tmp_path, device="cpu", dequantize=True)
    with fake_mesh(2, torch.device("cpu")) as mesh:
        with pytest.raises(RankError, match="rows of an expert"):
            load(tmp_path, device="cpu", mesh=mesh, expert_layout=layout)
        part = load(tmp_path, device="cpu", mesh=mesh, expert_layout=layout, dequantize=True)
        ranks = Ranks.of(mesh)
    for (name, parameter), wanted in zip(part.named_parameters(), full.parameters(), strict=True):
        expected = part_of(wanted, split_of(name, layout), ranks, ragged="engram.embed" in name)
        assert torch.equal(parameter, expected), name
