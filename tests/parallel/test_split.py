"""Tests of a rank's parts of weights in each format, and of the numbers of ranks that divide a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import DeepseekV4Config
from dsv4_compile.errors import RankError
from dsv4_compile.hf.model import split
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, attention_config, split_of
from dsv4_compile.parallel.split import check_divides, part_of
from dsv4_compile.reference.moe.expert_weights import scale_shape

RANKS = [Ranks(rank, 2, "") for rank in range(2)]
EXPERTS, HIDDEN, ROWS = 4, 128, 256


def weight(kind: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    """Return a random weight and its scales."""
    if kind == "float":
        return torch.randn(shape) * shape[-1] ** -0.5, None
    if kind == "e4m3":
        values = torch.randn(shape).to(torch.float8_e4m3fn)
        return values, torch.randint(118, 122, scale_shape(values), dtype=torch.uint8)
    values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return values, torch.randint(118, 122, scale_shape(values), dtype=torch.uint8)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("kind", ["float", "e4m3", "mxfp4"])
def test_parts_of_experts_add_up(kind: str, layout: str) -> None:
    x, ids = torch.randn(5, HIDDEN), torch.randint(0, EXPERTS, (5, 2), dtype=torch.int32)
    names = [f"experts.{name}_proj" for name in ("gate_up", "down")]
    names += [f"shared_experts.{name}_proj.weight" for name in ("up", "down")]
    (w13, s13), (w2, s2) = weight(kind, EXPERTS, 2 * ROWS, HIDDEN), weight(kind, EXPERTS, HIDDEN, ROWS)
    gate, up = weight(kind, ROWS, HIDDEN), weight(kind, ROWS, HIDDEN)
    down, down_scale = weight(kind, HIDDEN, ROWS)

    def experts(ranks: Ranks) -> Tensor:
        routed, back, shared, shared_back = (split_of(f"model.layers.3.mlp.{name}", layout) for name in names)
        scales = (split_of(f"model.layers.3.mlp.{name}_scale_inv", layout) for name in names)
        assert [*scales] == [routed, back, shared, shared_back]

        def of(tensor: Tensor | None, how: Any) -> Any:
            return None if tensor is None else part_of(tensor, how, ranks).contiguous()

        both, scale = (
            None if a is None else torch.cat([of(a, shared), of(b, shared)]) for a, b in zip(gate, up, strict=True)
        )
        return torch.ops.dsv4.moe_experts(
            x,
            ids,
            torch.ones(5, 2),
            of(w13, routed),
            of(w2, back),
            of(s13, routed),
            of(s2, back),
            both,
            of(down, shared_back),
            scale,
            of(down_scale, shared_back),
            10.0,
            ranks.part(EXPERTS)[0] if layout == "experts" else 0,
        )

    want = experts(Ranks(0, 1, ""))
    torch.testing.assert_close(sum(map(experts, RANKS)), want, atol=1e-5 * float(want.abs().max()), rtol=0)


def test_parameters_of_a_model_are_split_or_whole_by_name() -> None:
    model = tiny_model(num_hidden_layers=2, layer_types=["compressed_sparse_attention"] * 2)
    splits = {name: split_of(name) for name, _ in model.named_parameters()}
    assert splits["lm_head.weight"] == splits["model.embed_tokens.weight"] == (0, 1)
    unsplit = {name.removeprefix("model.layers.1.") for name, split in splits.items() if split is None}
    assert {"model.norm.weight", "self_attn.q_a_proj.weight", "mlp.gate.weight", "attn_hc.fn"} <= unsplit
    assert {name for name in unsplit if ".indexer." in name}
    assert {name.removeprefix("model.layers.1.") for name, cut in splits.items() if cut and "layers.1." in name} == {
        *(f"self_attn.{name}_proj.weight" for name in ("q_b", "o_a", "o_b")),
        *(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
        "self_attn.sinks",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }


def test_ranks_that_do_not_divide_a_model_are_told_which_do() -> None:
    model = tiny_model(num_hidden_layers=1, layer_types=["sliding_attention"], num_attention_heads=8, o_groups=4)
    with pytest.raises(
        RankError, match=r"(?s)E701.*3 ranks.*8 attention heads, 4 output groups.*use 1 or 2 or 4 ranks"
    ):
        check_divides(split.sizes(model, "experts"), Ranks(0, 3, ""))


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (8, True), (16, False)])
def test_flash_is_split_over_at_most_its_output_groups(size: int, fits: bool) -> None:
    ranks = Ranks(0, size, "")
    if not fits:
        with pytest.raises(RankError, match="use 1 or 2 or 4 or 8 ranks"):
            attention_config(DeepseekV4Config.flash(), ranks, fp8=True)
        return
    config = attention_config(DeepseekV4Config.flash(), ranks, fp8=True)
    assert (config.num_heads, config.o_groups) == (64 // size, 8 // size)


def test_blocks_of_quantised_weights_stay_whole() -> None:
    config = DeepseekV4Config(num_heads=4, o_groups=4, head_dim=64, o_lora_rank=128)
    assert attention_config(config, RANKS[0], fp8=True).num_heads == 2
    with pytest.raises(RankError, match="256 rows of wq_b in blocks of 128"):
        attention_config(config, Ranks(0, 4, ""), fp8=True)
    assert attention_config(config, Ranks(0, 4, ""), fp8=False).num_heads == 1


def test_an_error_of_the_model_is_not_taken_for_one_of_a_collective() -> None:
    alone = split.InStep(Ranks(0, 1, ""))
    alone.processes.patience = 0
    alone.explain(RuntimeError("no kernel for mhc_pre in ops/hyper_connections\nwhile gloo was waiting"))
    with pytest.raises(RankError, match=r"(?s)E703.*Connection closed by peer"):
        alone.explain(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"))
