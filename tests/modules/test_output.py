"""Tests of the output projection: which path a layer takes, and the results of each path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4_compile import backend
from dsv4_compile.errors import CompileError
from dsv4_compile.modules.linear import Fp8Linear, Linear
from dsv4_compile.modules.output import PATHS, choose_path, project_output
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.modules.test_attention_backend import CONFIG, Serving, layer_of

TOKENS, HEADS, DIM, ROPE, GROUPS = 5, 4, 256, 64, 2
FLOATING, QUANTISED = Linear(8, 128, dtype=torch.bfloat16), Fp8Linear(256, 512)


@pytest.mark.parametrize(
    ("architecture", "quantised", "path"),
    [
        ("cpu", False, "bfloat16"),
        ("cuda sm_100", False, "bfloat16"),
        ("cpu", True, "fp8"),
        ("cuda sm_90", True, "fp8"),
        ("cuda sm_100", True, "fp8_packed"),
        ("cuda sm_120", True, "fp8_packed"),
        ("cuda gfx942", True, "bfloat16"),
    ],
)
def test_auto_chooses_by_weights_and_device(architecture: str, quantised: bool, path: str) -> None:
    with decisions.collect() as collected:
        decision = choose_path("auto", QUANTISED if quantised else FLOATING, architecture)
    assert decision.impl == path and collected == [decision]
    assert architecture in decision.reason or not quantised


def test_a_requested_path_is_taken_or_raises() -> None:
    for path in ("bfloat16", "fp8", "fp8_packed", "fp8_rounded"):
        assert choose_path(path, QUANTISED, "cuda sm_90").impl == path
    with pytest.raises(CompileError, match="wo_a in bfloat16"):
        choose_path("fp8_packed", FLOATING, "cuda sm_100")
    with pytest.raises(CompileError, match="E302"):
        choose_path("fp4", QUANTISED, "cpu")


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor, Fp8Linear, torch.nn.Identity]:
    wo_a = Fp8Linear(GROUPS * 128, HEADS * DIM // GROUPS)
    wo_a.weight.data.copy_((torch.randn(wo_a.weight.shape) * 8).to(torch.float8_e4m3fn))
    wo_a.scale.data.copy_(torch.tensor([[0.5, 0.25, 1.0, 2.0], [1.0, 0.125, 0.5, 1.0]]))
    out = torch.randn(TOKENS, HEADS, DIM).bfloat16()
    return out, torch.arange(TOKENS) * 7, torch.rand(64, ROPE) * 2 - 1, wo_a, torch.nn.Identity()


def test_packed_scales_give_the_same_result(case: tuple[Tensor, Tensor, Tensor, Fp8Linear, torch.nn.Identity]) -> None:
    assert_bitwise(project_output("fp8_packed", *case, GROUPS), project_output("fp8", *case, GROUPS))


@pytest.mark.parametrize("path", ["fp8", "fp8_rounded", "bfloat16"])
def test_every_path_computes_the_projection(
    path: str, case: tuple[Tensor, Tensor, Tensor, Fp8Linear, torch.nn.Identity]
) -> None:
    out, positions, cos_sin, wo_a, _ = case
    cos, sin = cos_sin[positions].double().chunk(2, -1)
    exact = out.double()
    even, odd = exact[..., -ROPE::2].clone(), exact[..., -ROPE + 1 :: 2].clone()
    exact[..., -ROPE::2] = even * cos[:, None] + odd * sin[:, None]
    exact[..., -ROPE + 1 :: 2] = odd * cos[:, None] - even * sin[:, None]
    scale = wo_a.scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = (wo_a.weight.double() * scale).view(GROUPS, 128, -1)
    want = torch.einsum("tgk,gnk->tgn", exact.reshape(TOKENS, GROUPS, -1), weight).flatten(1)
    got = project_output(path, *case, GROUPS).double()
    # An e4m3 operand is off by up to 2^-4; errors average over 512 terms.
    assert (got - want).norm() < (0.04 if path != "bfloat16" else 0.005) * want.norm()


MOST = 33
CACHE, SLOTS = torch.randn(3, 64, DIM).bfloat16(), torch.randint(3 * 64, (MOST, 8), dtype=torch.int32)


def after_quantising_attention(
    packed: bool, out: Tensor, positions: Tensor, cos_sin: Tensor, wo_a: Fp8Linear, wo_b: Fp8Linear, groups: int
) -> Tensor:
    """Project as the graph passes write it on Hopper: attention and wo_a quantise their results."""
    lens = torch.full((MOST,), 8, dtype=torch.int32)
    values, scale = torch.ops.dsv4.sparse_mla_decode_quant(
        out, CACHE, SLOTS, lens, 64, "plain", 0.1,
        positions=positions, cos_sin_cache=cos_sin, n_groups=groups, packed_scales=packed,
    )  # fmt: skip
    middle = torch.ops.dsv4.fp8_grouped_einsum_quant(values, scale, wo_a.weight, wo_a.scale)
    hidden: Tensor = torch.ops.dsv4.fp8_grouped_einsum(*middle, wo_b.weight, wo_b.scale).squeeze(1)
    return hidden


STEPS: dict[str, Callable[..., Tensor]] = {
    **{path: partial(project_output, path) for path in PATHS if path != "auto"},
    "quantised by attention": partial(after_quantising_attention, False),
    "packed by attention": partial(after_quantising_attention, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_graph_serves_every_number_of_tokens(
    name: str, case: tuple[Tensor, Tensor, Tensor, Fp8Linear, torch.nn.Identity]
) -> None:
    """Rows of scales are padded to four tokens, and a compiled step must not guard on that padding."""
    _, _, cos_sin, wo_a, _ = case
    wo_b = Fp8Linear(96, GROUPS * 128)
    wo_b.weight.data.copy_((torch.randn(wo_b.weight.shape) * 8).to(torch.float8_e4m3fn))
    wo_b.scale.data.fill_(0.25)

    def step(out: Tensor) -> Tensor:
        return STEPS[name](out, torch.arange(MOST), cos_sin, wo_a, wo_b, GROUPS)

    compiled = torch.compile(step, backend=backend.dsv4, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (9, 16, 7, 12, MOST, 8, 2, 4, 5, 32):
            out = torch.randn(tokens, HEADS, DIM).bfloat16()
            torch._dynamo.mark_dynamic(out, 0)
            assert_close(compiled(out), step(out))


@pytest.mark.parametrize("path", ["fp8_packed", "fp8_rounded", "bfloat16"])
def test_a_layer_takes_the_requested_path(path: str) -> None:
    auto, other = (
        Serving(layer_of("swa", kv_cache_dtype="fp8_ds_mla", fp8=True, output_projection=p)) for p in ("auto", path)
    )
    for serving in (auto, other):
        for scale in serving.layer.parameters():
            if scale.dtype is torch.float8_e8m0fnu:
                scale.data.fill_(0.25)
    assert (auto.layer.output_path.impl, other.layer.output_path.impl) == ("fp8", path)
    hidden = torch.randn(12, CONFIG.hidden_size).bfloat16()
    ours, theirs = (engine.step([1, 1, 2, 2, 3, 3], hidden) for engine in (other, auto))
    assert torch.nn.functional.cosine_similarity(ours.float(), theirs.float(), dim=-1).min() > 0.99
    compiled = torch.compile(other.layer, backend="aot_eager", fullgraph=True, dynamic=True)
    again = Serving(other.layer, compiled)
    assert_close(again.step([1, 1, 2, 2, 3, 3], hidden), ours)
