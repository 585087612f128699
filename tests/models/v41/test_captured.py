"""One captured graph a decode step: its tokens are eager's, and nothing in it reads the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile._compat import OpOverload, pytree
from dsv4_compile.errors import DSV4Error, GraphError
from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, compile, generate
from dsv4_compile.models.v41.captured import CapturedSteps
from dsv4_compile.models.v41.tiny import tiny_config, tiny_model
from dsv4_compile.ops.common.define import OPS, REFERENCES
from dsv4_compile.reference.drafts.distributions import NO_TOKEN
from dsv4_compile.runtime.captures import TransparentMode
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

NEW: dict[str, Any] = {"max_new_tokens": 9, "stop": []}


@pytest.fixture
def model() -> V41Model:
    return tiny_model(**KINDS)


def caches_of(model: V41Model, **sizes: int) -> V41Caches:
    sizes = {"max_batch_size": 3, "max_seq_len": 64, **sizes}
    return model.new_caches(cache_format=V41Format.plain(grids=True), **sizes)


def captured_of(model: V41Model, **sizes: int) -> CapturedSteps:
    """Steps that replay the plain model."""
    steps = CapturedSteps(model, caches_of(model, **sizes), model.logits, graphs="standin")
    steps.warm_up()
    return steps


def begin(model: V41Model, steps: CapturedSteps, requests: int = 3) -> tuple[Tensor, ...]:
    """Load the first step of requests without a prompt."""
    inputs = token_ids()[:requests], torch.zeros(requests).long(), torch.arange(requests)
    steps.load(*inputs)
    return inputs


@pytest.fixture
def constants() -> Iterator[None]:
    """Floats of modules are constants of graphs, as they are where Inductor has compiled them."""
    with torch._dynamo.config.patch(specialize_float=True):
        yield


def test_generated_tokens_are_those_of_the_model(model: V41Model) -> None:
    caches = caches_of(model)
    before = [tensor.clone() for tensor in caches.tensors()]
    steps = compile(model, caches=caches, backend=None, graphs="standin")
    assert all(map(torch.equal, caches.tensors(), before))
    assert steps.captured is not None and steps.captured.statistics.captures == 2
    ids = token_ids()
    prompts = [ids[:19], ids[5:12], ids[:1]]
    greedy = generate(model, prompts, **NEW, caches=caches_of(model))
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "stop": [3, 7, 9]},
        {"stop": [greedy[0][3], greedy[1][0], greedy[2][8]]},
        {"max_new_tokens": 1},
    )
    for changes in settings:
        for some in (prompts, prompts[:1], prompts[1:]):
            options, count = NEW | changes, steps.captured.statistics.replays
            want = generate(model, some, **options, caches=caches_of(model))
            assert generate(model, some, **options, forward=steps) == want, changes
            most = max(map(len, want))
            assert most - 1 <= steps.captured.statistics.replays - count <= most
    assert steps.captured.statistics.captures == 2


@pytest.mark.usefixtures("constants")
def test_a_call_replays_and_returns_memory_of_the_caller(model: V41Model) -> None:
    steps = compile(model, caches=caches_of(model), backend="eager", graphs="standin")
    ids, want, caches = torch.stack((token_ids(6), token_ids(6)), 1), [], caches_of(model)
    got = []
    for position in range(3):
        step = ids[:2, 0].int(), torch.full((2,), position).int(), torch.arange(2).int()
        assert not ids[:2, 0].is_contiguous()
        want.append(model(*step, caches))
        got.append(steps(*step, steps.caches))
        assert steps(*step, steps.caches, last=torch.tensor([1, 1])).shape == want[-1].shape
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=0, atol=1e-4)
    assert steps.captured is not None and steps.captured.statistics.replays == 6


def test_a_run_chooses_on_the_device_up_to_the_border(model: V41Model) -> None:
    steps, caches = captured_of(model, max_seq_len=12), caches_of(model, max_seq_len=12)
    inputs, want = begin(model, steps), []
    for position in range(12):
        with torch.no_grad():
            chosen = model(inputs[0], torch.full((3,), position), inputs[2], caches).argmax(1)
        inputs = chosen, inputs[1], inputs[2]
        want.append(chosen)
    assert torch.equal(steps.run(12), torch.stack(want))
    assert (steps.run(2) == NO_TOKEN).all()
    steps.load(want[10], torch.full((3,), 11), torch.arange(3))
    assert torch.equal(steps.run(1)[0], want[11])


def test_rows_that_stop_write_nothing_more(model: V41Model) -> None:
    steps = captured_of(model)
    begin(model, steps)
    steps.run(3)
    steps.stop(1)
    noted = [history.clone() for history in steps.caches.histories.values()]
    steps.run(3)
    for history, before in zip(steps.caches.histories.values(), noted, strict=True):
        assert torch.equal(history[1], before[1]) and not torch.equal(history[0], before[0])


def test_tensors_that_moved_are_named(model: V41Model) -> None:
    steps = captured_of(model)
    model.to(torch.float64)
    with pytest.raises(GraphError, match=r"model\.embed\.weight.*float32 -> torch\.float64") as caught:
        begin(model, steps)
    assert caught.value.code == "E421"


def test_a_replaced_parameter_is_found_before_a_prompt(model: V41Model) -> None:
    steps = captured_of(model)
    model.layers[1].attn.wkv.weight = nn.Parameter(torch.zeros_like(model.layers[1].attn.wkv.weight), False)
    with pytest.raises(GraphError, match=r"layers\.1\.attn\.wkv\.weight"):
        steps.check()


def test_weights_that_are_filled_anew_are_read(model: V41Model) -> None:
    steps, other = captured_of(model), tiny_model(7, **KINDS)
    inputs = begin(model, steps)
    first = steps.step()[0].clone()
    model.load_state_dict(other.state_dict())
    steps.load(*inputs)
    got = steps.step()[0]
    torch.testing.assert_close(got, other(*inputs, caches_of(other)), rtol=0, atol=1e-4)
    assert not torch.allclose(first, got, atol=1e-3)


def test_misuses_are_refused(model: V41Model) -> None:
    steps = CapturedSteps(model, caches_of(model), model.logits, graphs="standin")
    for code, call in (
        ("E427", steps.step),
        ("E432", lambda: copy.deepcopy(steps)),
        ("E204", lambda: begin(model, steps, 4)),
        ("E204", lambda: steps.run(0)),
        ("E204", lambda: steps.run(5000)),
        ("E204", lambda: CapturedSteps(model, steps.caches, model.logits, graphs="standin", buckets=[1, 2])),
        ("E204", lambda: CapturedSteps(model, steps.caches, model.logits, graphs="standin", buckets=[])),
        ("E301", lambda: compile(model, caches=steps.caches, backend=None, options={"dsv4.strict": "off"})),
        ("E420", lambda: compile(model, caches=steps.caches, graphs="cuda")),
        ("E420", lambda: compile(model, caches=steps.caches, graphs="trees")),
        ("E420", lambda: compile(model, caches=steps.caches, graphs=None)),  # type: ignore[arg-type]
    ):
        with pytest.raises(DSV4Error) as caught:
            call()
        assert caught.value.code == code, caught.value
    steps.warm_up()
    with pytest.raises(GraphError, match="E425"):
        steps.warm_up()


def test_a_step_that_reads_the_device_is_refused(model: V41Model) -> None:
    def reads(ids: Tensor, *step: Any, **options: Any) -> Tensor:
        return model.logits(ids, *step, **options) * int(ids.max() >= 0)

    with pytest.raises(GraphError, match=r"_local_scalar_dense\.default during a capture"):
        CapturedSteps(model, caches_of(model), reads, graphs="standin").warm_up()


class WithoutHost(TransparentMode):
    """Runs this package's ops as their references, on a device without values; raises for a tensor of the host.

    A number of the host, a tensor without dims, is an argument of a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "dsv4":
            self.ops.add(func._opname)
            with self:
                return REFERENCES[func._opname](*args, **kwargs)
        out = func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        wrong = [tuple(leaf.shape) for leaf in leaves if leaf.dim() and not leaf.is_meta]
        assert not wrong, f"{func} on a tensor of the host, {wrong}"
        return out


@pytest.mark.parametrize("quantised", [False, True])
def test_no_op_of_a_step_needs_the_host(quantised: bool) -> None:
    """A tensor on the device "meta" has no values: reading one, or a size that depends on them, is an error."""
    options: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "rope_dim": 32} if quantised else {}
    model = V41Model(tiny_config(**options), torch.bfloat16, quantised=quantised, quantize_input=quantised).to("meta")
    caches = model.new_caches(max_batch_size=3, max_seq_len=64)
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    with WithoutHost() as mode, torch.no_grad():
        assert model(ids, ids, ids, caches, last=ids).shape == (3, 64)
        with pytest.raises(AssertionError, match="of the host"):
            ids + torch.ones(3, device="cpu").to("meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            ids.sum().item()
    new = {"index_topk", "index_topk_blocks", "engram_rows", "engram_gate", "compress_pairs", "sparse_mla_mixed"}
    assert new | ({"mx_linear"} if quantised else set()) <= mode.ops <= set(OPS)
