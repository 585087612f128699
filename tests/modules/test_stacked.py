"""Tests of stacked linears: one GEMM for each input, unchanged names, and one copy of every weight at all times."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsv4_compile._compat import symbolic_convert
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.modules import DeepseekV4Attention, stacked
from dsv4_compile.modules.linear import Fp8Linear, Linear
from dsv4_compile.modules.stacked import Projection, Stack, stacks
from dsv4_compile.runtime.captures import tensor_bytes
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.backend.functional import fused
from tests.modules.engine import KINDS, Engine
from tests.modules.test_compiled_layer import CASES, SMALL, random_layer

HIDDEN = SMALL.hidden_size


def bytes_of(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of the parameters, and of the memory that parameters and matrices span."""
    tensors = [*module.parameters(), *(b for name, b in module.named_buffers() if not name.endswith("cos_sin"))]
    return sum(p.nbytes for p in module.parameters()), tensor_bytes(tensors)


def expected(stack: Stack, x: Tensor) -> list[Tensor]:
    """Return each projection from a separate GEMM."""
    results = []
    for projection in stack.projections:
        parts = [x.float() @ linear.weight.float().T for linear in projection.parts]
        result = torch.cat(parts, dim=-1)
        results.append(result if projection.float32 else result.to(x.dtype))
    return results


def check_layer(layer: DeepseekV4Attention) -> None:
    """Check that each stack is one matrix without a second copy, and computes with the current parameters."""
    rank = SMALL.q_lora_rank
    for stack, width in [*((s, HIDDEN) for s in layer.hidden_stacks), *((s, rank) for s in layer.latent_stacks)]:
        assert isinstance(stack, Stack)
        x = torch.randn(5, width).to(stack.parts[0].weight.dtype)
        for got, want in zip(stack(x), expected(stack, x), strict=True):
            torch.testing.assert_close(got, want, atol=2e-2 if x.dtype is torch.bfloat16 else 1e-5, rtol=1e-2)
        assert stack.reason == ("" if len(stack.parts) > 1 else "nothing to stack")
    parameters, storages = bytes_of(layer)
    assert parameters == storages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_of_one_input_are_one_matrix(kind: str, dtype: torch.dtype) -> None:
    layer = random_layer(SMALL, kind, dtype=dtype)
    check_layer(layer)
    assert [len(stack.parts) for stack in layer.hidden_stacks] == [{"swa": 2, "hca": 4, "csa": 7}[kind]]
    assert [len(stack.parts) for stack in layer.latent_stacks] == [2 if kind == "csa" else 1]
    names = set(dict(layer.named_parameters()))
    assert set(layer.state_dict()) == names
    assert not any("stacks" in name for name in names)


def reassigned(layer: DeepseekV4Attention) -> DeepseekV4Attention:
    for parameter in layer.parameters():
        parameter.data = parameter.data * 2
    return layer


def loaded(layer: DeepseekV4Attention, assign: bool) -> DeepseekV4Attention:
    layer.load_state_dict({name: t.clone() * 2 for name, t in layer.state_dict().items()}, assign=assign)
    return layer


def emptied(layer: DeepseekV4Attention) -> DeepseekV4Attention:
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    return layer


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: nn.Sequential(layer).double().float()[0],
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: loaded(layer, assign=False),
        lambda layer: loaded(layer, assign=True),
        emptied,
        reassigned,
    ],
    ids=["to", "in-a-model", "deepcopy", "pickle", "load", "assign", "meta", "data"],
)
@torch.no_grad()
def test_weights_that_change_or_move_are_stacked_again_without_a_copy(
    change: Callable[[DeepseekV4Attention], DeepseekV4Attention],
) -> None:
    check_layer(change(random_layer(SMALL, "csa", dtype=torch.float32)))


def test_a_checkpoint_of_a_stacked_layer_holds_every_weight_once(tmp_path: Path) -> None:
    state = random_layer(SMALL, "csa", dtype=torch.bfloat16).state_dict()
    save_file(state, tmp_path / "layer.safetensors")
    saved = load_file(tmp_path / "layer.safetensors")
    assert set(saved) == set(state)
    for name, tensor in state.items():
        assert_bitwise(saved[name], tensor, label=name)
    assert (tmp_path / "layer.safetensors").stat().st_size < 1.1 * sum(tensor.nbytes for tensor in state.values())


def test_stacking_twice_moves_nothing() -> None:
    layer = random_layer(SMALL, "csa", dtype=torch.float32)
    before = [p.data_ptr() for p in layer.parameters()]
    layer.stack()
    layer.arrange()
    assert [p.data_ptr() for p in layer.parameters()] == before


def test_a_gemm_waits_for_rows_that_moved_and_for_no_others() -> None:
    layer = random_layer(SMALL, "swa", dtype=torch.float32)
    stack, x, events = layer.hidden_stacks[0], torch.randn(3, HIDDEN), []

    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        events.append("gemm")
        return x @ weight.T

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "_wait_for", lambda matrix: events.append("wait"))
        patch.setattr(stacked, "linear", gemm)
        stack(x)
        layer.wq_a.weight.data = layer.wq_a.weight.data.clone()
        stack(x)
    assert events == ["gemm", "wait", "gemm"]


def test_a_new_matrix_on_a_gpu_is_waited_for() -> None:
    matrix, waits = mock.Mock(is_cuda=True), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock(synchronize=lambda: waits.append(device)))
        stacked._wait_for(matrix)
    assert waits == [matrix.device]


def test_a_copy_shares_no_memory_with_its_original() -> None:
    layer = random_layer(SMALL, "swa", dtype=torch.float32)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.wq_a.weight.zero_()
    assert layer.hidden_stacks[0](torch.ones(2, HIDDEN))[0].abs().max() > 0
    assert not {p.untyped_storage().data_ptr() for p in layer.parameters()} & {
        p.untyped_storage().data_ptr() for p in twin.parameters()
    }


GEMMS = {"swa": (3, 1), "hca": (3, 1), "csa": (3, 1)}
"""Number of mm nodes (hidden, latent, output) and of grouped GEMMs over heads."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_has_one_gemm_for_each_input(kind: str) -> None:
    layer = random_layer(SMALL, kind, dtype=torch.float32)
    result = fused(layer, {"dsv4.fuse": "off"})
    Engine(layer, 1, 256, call=result.call).step([torch.randn(9, HIDDEN)])
    assert (result.targets["mm"], result.ops["grouped_linear"]) == GEMMS[kind]
    assert not result.targets["cat"]


@pytest.mark.parametrize(("single", "gemms"), [(None, 2), (False, 2), (True, 1)])
def test_bfloat16_weights_with_float32_scores_take_one_gemm_or_two(single: bool | None, gemms: int) -> None:
    """The default is two on a CPU and one on CUDA. The op that reads a float32 result rounds it."""
    layer = random_layer(SMALL, "hca", dtype=torch.bfloat16, single_gemm=single)
    expected, got = (Engine(layer, 1, 256, call=None) for _ in range(2))
    result = fused(layer)
    got.call = result.call
    x = torch.randn(9, HIDDEN).bfloat16()
    assert_bitwise(got.step([x])[0], expected.step([x])[0])
    assert result.targets["mm"] == 2 + gemms
    fused_op = [fusion.fused for fusion in result.fusions if fusion.by == "fuse_preprocess"]
    assert fused_op == [True]
    assert result.targets["convert_element_type"] == 2  # the input and the weights, widened on a CPU only


def fp8_linear(rows: int, columns: int) -> Fp8Linear:
    linear = Fp8Linear(rows, columns)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, columns))
        linear.scale.copy_(torch.exp2(torch.randint(-3, 2, linear.scale.shape).float()))
    return linear


def floating(rows: int, columns: int = 256, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(rows, columns, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, columns))
    return linear


def test_e4m3_weights_are_stacked_with_their_scales() -> None:
    parts = [fp8_linear(256, 256), fp8_linear(100, 256)]
    x = torch.randn(7, 256)
    single = [linear(x) for linear in parts]
    stack = Stack(tuple(Projection((linear,)) for linear in parts))
    assert stack.reason == ""
    for got, want in zip(stack(x), single, strict=True):
        assert_close(got, want, "attention_float32")
    assert bytes_of(nn.ModuleList([*parts, stack]))[0] == bytes_of(nn.ModuleList([*parts, stack]))[1]


@pytest.mark.parametrize("kind", ["hca", "csa"])
@pytest.mark.parametrize(("single", "gemms"), [(None, 0), (False, 0), (True, 1)])
def test_e4m3_weights_and_the_compressors_take_one_op_or_two(kind: str, single: bool | None, gemms: int) -> None:
    """The default is two on a CPU and one on CUDA. The op that reads a float32 result rounds it."""
    config = replace(SMALL, q_lora_rank=128)
    layer = random_layer(config, kind, dtype=torch.bfloat16, fp8=True, single_gemm=single)
    twin = copy.deepcopy(layer)
    twin.single_gemm = False
    twin.stack()
    expected, got = Engine(twin, 1, 256, call=None), Engine(layer, 1, 256, call=None)
    result = fused(layer)
    got.call = result.call
    x = torch.randn(9, HIDDEN).bfloat16()
    assert_bitwise(got.step([x])[0], expected.step([x])[0])
    assert result.joined == gemms
    assert [fusion.fused for fusion in result.fusions if fusion.by == "fuse_preprocess"] == [True]


def subclassed() -> Linear:
    class Quantised(nn.Parameter):
        pass

    linear = floating(8)
    linear.weight = Quantised(linear.weight.data, requires_grad=False)
    return linear


def twice() -> list[Linear]:
    first, second = floating(8), floating(8)
    second.weight = first.weight
    return [first, second]


def other_scales() -> list[Fp8Linear]:
    parts = [fp8_linear(128, 256), fp8_linear(128, 256)]
    parts[1].scale = nn.Parameter(parts[1].scale.float(), requires_grad=False)
    return parts


UNSUPPORTED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "partial block": (
        lambda: [fp8_linear(100, 256), fp8_linear(128, 256)],
        "a weight whose rows end within a block of 128",
    ),
    "subclass": (lambda: [floating(8), subclassed()], "a parameter of type Quantised"),
    "scales": (other_scales, "torch.float32 on cpu with torch.float8_e8m0fnu on cpu"),
    "tied": (twice, "a weight that is used twice"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_weights_stay_unstacked_with_a_reason(case: str) -> None:
    make, reason = UNSUPPORTED[case]
    parts = make()
    before = [linear.weight.data_ptr() for linear in parts]
    stack = Stack(tuple(Projection((linear,)) for linear in parts))
    assert (stack.reason, repr(stack)) == (reason, f"Stack({reason})")
    x = torch.randn(3, 256)
    single = [linear(x) for linear in parts]
    for got, want in zip(stack(x), single, strict=True):
        assert_bitwise(got, want)
    assert [linear.weight.data_ptr() for linear in parts] == before


def test_linears_of_other_inputs_are_not_stacked() -> None:
    assert Stack((Projection((floating(8),)), Projection((floating(8, 128),)))).reason == "inputs of different widths"


def test_weights_of_different_kinds_get_different_stacks() -> None:
    parts = [fp8_linear(128, 256), fp8_linear(64, 256), floating(8), floating(8, dtype=torch.bfloat16)]
    groups = stacks([Projection((linear,)) for linear in parts])
    assert [(len(stack.parts), stack.reason) for stack in groups] == [
        (2, ""),
        (1, "nothing to stack"),
        (1, "nothing to stack"),
    ]


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_replaced_linear_is_used(compiled: bool) -> None:
    layer = random_layer(SMALL, "hca", dtype=torch.float32)
    twin = copy.deepcopy(layer)
    replacement = floating(SMALL.q_lora_rank, HIDDEN)
    layer.wq_a = replacement
    twin.wq_a.weight.copy_(replacement.weight)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(9, HIDDEN)
    for _ in range(2):
        got, want = (Engine(m, 1, 256, call=c).step([x])[0] for m, c in ((layer, call), (twin, twin)))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        layer.stack()
    check_layer(layer)


@torch.no_grad()
def test_a_trace_enters_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo enters a generator once for each element: a frame to build, for linears that a trace compares."""
    frames: list[str] = []
    translator = symbolic_convert.InstructionTranslatorBase
    run = translator.run

    def noted(self: Any) -> None:
        frames.append(self.f_code.co_name)
        run(self)

    monkeypatch.setattr(translator, "run", noted)
    linears = [Linear(8, 4, dtype=torch.float32) for _ in range(3)]
    projections = [Projection((linears[0], linears[1])), Projection((linears[2],))]
    stacked_parts = stacks(projections)
    torch.compile(stacked.project, backend="eager", fullgraph=True)(torch.randn(2, 4), projections, stacked_parts)
    assert "parts" in frames and "<genexpr>" not in frames, frames


@torch.no_grad()
def test_a_weight_is_replaced_while_something_else_compiles() -> None:
    """torch says of all threads that they compile, while one does."""
    layer, equal = random_layer(SMALL, "hca", dtype=torch.float32), list[bool]()
    stack: Any = layer.hidden_stacks[0]
    x = torch.randn(5, HIDDEN)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        stack.parts[0].weight = nn.Parameter(stack.parts[0].weight * 2)
        for got, want in zip(stack(x), expected(stack, x), strict=True):
            equal.append(torch.allclose(got, want, atol=1e-5))
        return gm.forward

    torch.compile(lambda y: y + 1, backend=backend)(torch.ones(2))
    assert equal and all(equal)


@pytest.mark.parametrize("config", [DeepseekV4Config.flash(), DeepseekV4Config.pro()], ids=["flash", "pro"])
def test_layers_of_real_size_are_stacked(config: DeepseekV4Config) -> None:
    index = config.compress_ratios.index(4)
    layer = DeepseekV4Attention(config, index, kv_cache_dtype="fp8_ds_mla", fp8=True, device="meta", max_seq_len=64)
    reasons = [[stack.reason for stack in group] for group in (layer.hidden_stacks, layer.latent_stacks)]
    assert reasons == [["", ""], [""]]


def test_the_cases_of_the_compiled_layer_cover_both_stacked_and_unstacked_weights() -> None:
    layers = [random_layer(config, "csa", **kwargs) for config, kwargs in CASES.values()]
    reasons = {stack.reason for layer in layers for stack in layer.hidden_stacks}
    assert reasons == {"", "a weight whose rows end within a block of 128"}


def test_linears_of_which_one_quantises_its_input_are_not_stacked() -> None:
    parts = [Fp8Linear(128, 256), Fp8Linear(128, 256)]
    assert stacked.why_unsupported(parts) == ""
    parts[1].quantize_input = not parts[1].quantize_input
    assert stacked.why_unsupported(parts) == "an input that only some quantise"


def test_both_compressors_have_the_eps_of_the_config() -> None:
    layer = random_layer(replace(SMALL, rms_norm_eps=0.25), "csa", dtype=torch.float32)
    assert layer.indexer is not None and layer.compressor is not None
    assert (layer.eps, layer.compressor.eps, layer.indexer.compressor.eps) == (0.25, 0.25, 0.25)
