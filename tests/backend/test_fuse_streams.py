"""Fusion of hyper-connections: post and pre into a boundary, post and head into a head. Results keep every bit."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.ops.common.define import EAGER
from dsv4_compile.passes import fusion
from dsv4_compile.selection import decisions, proven
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused
from tests.kernels.hyper_connections.calls import arguments

T, N, D = 6, 4, 32
ops: Any = torch.ops.dsv4
STREAMS = arguments("mhc_boundary", T, D)[:4]
MIXES = [arguments("mhc_pre", T, D, seed=seed)[1:] for seed in range(4)]
MIX, HEAD = MIXES[0], arguments("mhc_head", T, D)[1:7]
UNFUSED, BOUNDARY = {"mhc_post": 1, "mhc_pre": 1}, {"mhc_boundary": 1}
FORCED = {"dsv4.impl": "eager", "dsv4.fuse": "on"}
GETITEM = str(operator.getitem)
Flat = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def attention() -> Iterator[None]:
    """Register an op of a foreign library that writes a cache, in place of attention."""

    def attend(y: Tensor, cache: Tensor) -> Tensor:
        cache.add_(y.float().sum(0))
        return torch.tanh(y.float() + cache).to(y.dtype)

    library = torch.library.Library("dsv4_streams", "DEF")
    library.define("attend_(Tensor y, Tensor(a!) cache) -> Tensor")
    library.impl("attend_", attend, "CompositeExplicitAutograd")
    torch.library.register_fake("dsv4_streams::attend_", lambda y, cache: y.new_empty(y.shape), lib=library)
    yield
    library._destroy()


class Model:
    """Two layers of two sub-layers and the head, with streams `[B, S, N, D]` in between, as in transformers."""

    def __init__(self, flat: Flat = lambda x: x.flatten(0, 1), record: slice | None = None) -> None:
        self.flat = flat
        self.record = record
        """Which outputs of layers are returned."""

    def __call__(self, embeds: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        streams = embeds.unsqueeze(2).expand(-1, -1, N, -1).contiguous()
        outputs = []
        for layer in range(2):
            for mix in (2 * layer, 2 * layer + 1):
                y, post, comb = ops.mhc_pre(self.flat(streams), *MIXES[mix])
                attends = mix % 2 == 0
                out = torch.ops.dsv4_streams.attend_(y, cache[layer]) if attends else y.relu()
                streams = ops.mhc_post(self.flat(streams), out, post, comb).view(*embeds.shape[:2], N, D)
            outputs.append(streams)
        y = ops.mhc_head(self.flat(streams), *HEAD).view(embeds.shape)
        return y, *(outputs[self.record] if self.record is not None else ())


def step(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return embeddings of a step, dynamic in sizes above 1, and a cache."""
    embeds = torch.randn(rows, columns, D).bfloat16()
    for dim, size in enumerate((rows, columns)):
        if size > 1:
            torch._dynamo.mark_dynamic(embeds, dim)
    return embeds, torch.randn(2, D)


def check_model(model: Model, call: Callable[..., Any], rows: int, columns: int) -> None:
    """Compare the results and the cache of `call` with those of the model."""
    embeds, cache = step(rows, columns)
    expected_cache = cache.clone()
    for got, want in zip(call(embeds, cache), model(embeds, expected_cache), strict=True):
        assert_bitwise(got, want, strides=True)
    assert_bitwise(cache, expected_cache)


def compare(body: Callable[..., tuple[Tensor, ...]], options: dict[str, Any] | None = None) -> Fused:
    """Compare the results on arguments of mhc_post with those of the unfused graph."""
    with torch.no_grad():
        result = fused(body, options)
        for got, want in zip(result.call(*STREAMS), body(*STREAMS), strict=True):
            assert_bitwise(got, want, strides=True)
    return result


def post_pre(*args: Tensor) -> tuple[Tensor, ...]:
    return tuple(ops.mhc_pre(ops.mhc_post(*args), *MIX))


def post_head(*args: Tensor) -> tuple[Tensor, ...]:
    return (ops.mhc_head(ops.mhc_post(*args), *HEAD),)


FLATS = [
    lambda x: x.flatten(0, 1),
    lambda x: x.view(-1, N, D),
    lambda x: x.reshape(x.shape[0] * x.shape[1], N * D).unflatten(1, (N, D)),
    lambda x: x.contiguous().view(x.shape[0], -1, N * D).reshape(-1, N, D),
]


@pytest.mark.parametrize(
    ("flat", "sizes"), [*((flat, [(2, 3), (4, 2), (3, 7)]) for flat in FLATS), (FLATS[0], [(2, 1), (5, 1)])]
)
def test_one_graph_of_a_model_has_a_pre_a_boundary_between_sub_layers_and_a_head(
    flat: Flat, sizes: list[tuple[int, int]]
) -> None:
    model = Model(flat)
    result = fused(model)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for size in sizes:
            check_model(model, result.call, *size)
    assert result.ops == {"mhc_pre": 1, "mhc_boundary": 3, "mhc_head": 1}
    boundary = ("fuse_streams", ("mhc_post", "mhc_pre"), "mhc_boundary", True)
    head = ("fuse_streams", ("mhc_post", "mhc_head"), "mhc_head", True)
    assert [(fusion.by, fusion.ops, fusion.into, fusion.fused) for fusion in result.fusions] == [*[boundary] * 3, head]


@pytest.mark.parametrize(
    ("record", "ops_left"),
    [
        (slice(0, 1), {"mhc_pre": 1, "mhc_boundary": 3, "mhc_head": 1}),
        (slice(0, 2), {"mhc_pre": 1, "mhc_boundary": 3, "mhc_post": 1, "mhc_head": 1}),
    ],
    ids=["as-transformers-does", "the-last-too"],
)
def test_recorded_streams_are_results_of_boundaries_and_only_the_last_keep_the_head_separate(
    record: slice, ops_left: dict[str, int]
) -> None:
    model = Model(record=record)
    result = fused(model)
    with torch.no_grad():
        check_model(model, result.call, 2, 3)
    assert result.ops == ops_left
    reason = "the caller also uses the streams, which mhc_head does not return"
    assert result.reasons == [reason] * ops_left.get("mhc_post", 0)


def test_the_backend_fuses_a_model() -> None:
    model = Model(record=slice(0, 1))
    call = torch.compile(model.__call__, backend="dsv4", fullgraph=True, options=FORCED)
    with torch.no_grad(), decisions.collect() as made_decisions, torch._dynamo.config.patch(error_on_recompile=True):
        for size in ((2, 3), (4, 2)):
            check_model(model, call, *size)
    assert [fusion.fused for fusion in made_decisions.fusions] == [True] * 4
    assert sorted(decision.op for decision in made_decisions) == ["mhc_boundary"] * 3 + ["mhc_head", "mhc_pre"]


def test_explain_shows_what_was_fused_and_why_not() -> None:
    report = str(dsv4_compile.explain(Model(record=slice(0, 2)), *step(2, 3), options=FORCED))
    assert "3 groups fused into mhc_boundary" in report
    assert "1 group not fused into mhc_head" in report
    assert "the caller also uses the streams, which mhc_head does not return" in report


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.ops.aten._unsafe_view(torch.ops.aten._unsafe_view(x, (2, 3, N, D)), (T, N, D)),
        lambda x: torch.ops.aten.reshape(x.view(2, 3, N * D), (T, N, D)),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x.view(T, 1, N, 1, D).squeeze((1, 3)),
        lambda x: x.view(1, T, N, D).squeeze(),
        lambda x: x.view(2, 3, N, D).clone().flatten(0, 1),
        torch.ops.aten.alias.default,
    ],
    ids=["unsafe", "reshape", "one", "dims", "squeeze", "clone", "alias"],
)
def test_any_view_of_the_streams_is_fused(view: Flat) -> None:
    def boundary(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.mhc_pre(view(ops.mhc_post(*args)), *MIX))

    result = compare(boundary)
    assert result.ops == BOUNDARY
    assert set(result.targets) == {"mhc_boundary", GETITEM}
    assert compare(lambda *args: (ops.mhc_head(view(ops.mhc_post(*args)), *HEAD),)).ops == {"mhc_head": 1}


def test_streams_used_before_and_after_the_pre_are_a_result_of_the_boundary() -> None:
    def recorded(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        before = streams.view(2, 3, N, D) * 2
        y, post, comb = ops.mhc_pre(streams, *MIX)
        return before, y, post, comb, streams, streams.view(3, 2, N, D) + 1

    assert compare(recorded).ops == BOUNDARY


def test_results_that_nobody_uses_are_dropped() -> None:
    result = compare(lambda *args: (post_pre(*args)[0] * 2,))
    assert result.ops == BOUNDARY and result.targets[GETITEM] == 1


@pytest.mark.parametrize("record", [False, True])
def test_streams_used_before_the_head_keep_it_separate(record: bool) -> None:
    def body(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        view = streams.view(2, 3, N, D)
        return ops.mhc_head(view.flatten(0, 1), *HEAD), (view if record else streams) * 2

    result = compare(body)
    assert result.ops == {"mhc_post": 1, "mhc_head": 1}
    assert result.reasons == ["aten.mul.Tensor also uses the streams, which mhc_head does not return"]


def test_of_two_calls_that_read_the_streams_one_is_fused_a_pre_before_a_head() -> None:
    def twice(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        return *ops.mhc_pre(streams, *MIX), *ops.mhc_pre(streams, *MIXES[1])

    assert compare(twice).ops == {"mhc_boundary": 1, "mhc_pre": 1}

    def drafts(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        return ops.mhc_head(streams, *HEAD), *ops.mhc_pre(streams, *MIX)

    result = compare(drafts)
    assert result.ops == {"mhc_boundary": 1, "mhc_head": 1}
    assert [fusion.fused for fusion in result.fusions] == [True]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: (x.view(2, 3, N, D) * 2 + 1).flatten(0, 1), "aten.add.Tensor"),
        (lambda x: x.flip(1), "prims.rev"),
        (lambda x: x.transpose(1, 2).reshape(T, N, D), "aten.permute"),
        (lambda x: x.view(2, 3, N, D).transpose(0, 1).flatten(0, 1), "aten.permute"),
        (lambda x: x.half().bfloat16(), "prims.convert_element_type"),
    ],
    ids=["add", "chain", "flip", "channels", "tokens", "rounding"],
)
@pytest.mark.parametrize("second", ["mhc_pre", "mhc_head"])
def test_changed_streams_are_not_fused_and_the_change_is_named(change: Flat, name: str, second: str) -> None:
    def body(*args: Tensor) -> tuple[Tensor, ...]:
        streams = change(ops.mhc_post(*args))
        return tuple(ops.mhc_pre(streams, *MIX)) if second == "mhc_pre" else (ops.mhc_head(streams, *HEAD),)

    result = compare(body)
    assert result.ops == {"mhc_post": 1, second: 1}
    assert result.reasons == [f"{name} changes the streams between mhc_post and {second}"]


def test_streams_that_an_op_writes_are_not_fused() -> None:
    def written(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        row = torch.ops.dsv4_streams.attend_(args[1], streams[0, 0])
        return *ops.mhc_pre(streams, *MIX), row

    result = compare(written)
    assert result.ops == UNFUSED
    assert result.reasons == ["dsv4_streams.attend_ changes the streams between mhc_post and mhc_pre"]


def test_streams_of_another_shape_are_not_fused() -> None:
    def regrouped(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args).view(2 * T, N, D // 2)
        return tuple(ops.mhc_pre(streams, MIX[0][:, : N * D // 2], *MIX[1:3], MIX[3][: D // 2], *MIX[4:]))

    result = compare(regrouped)
    assert result.ops == UNFUSED
    assert result.reasons == ["mhc_pre reads streams of [4, 16] elements, mhc_post returns [4, 32]"]


def test_streams_that_no_post_returns_are_no_candidate() -> None:
    def other(*args: Tensor) -> tuple[Tensor, ...]:
        y, _, _ = ops.mhc_pre(args[0] * 2, *MIX)
        streams = ops.mhc_post(args[0], y, *args[2:])
        pooled = ops.mhc_head(streams, *HEAD)
        return tuple(ops.mhc_pre(pooled.unsqueeze(1).expand(-1, N, -1), *MIXES[1]))

    result = compare(other)
    assert result.ops == {"mhc_pre": 2, "mhc_head": 1}
    assert [fusion.ops for fusion in result.fusions] == [("mhc_post", "mhc_head")]


def test_a_head_that_has_an_output_is_no_candidate() -> None:
    def body(*args: Tensor) -> tuple[Tensor, ...]:
        return (ops.mhc_head(ops.mhc_post(*args), *HEAD, *args[1:]),)

    result = compare(body)
    assert result.ops == {"mhc_post": 1, "mhc_head": 1} and not result.fusions


def test_a_weight_computed_after_the_post_is_moved() -> None:
    def body(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        return tuple(ops.mhc_pre(streams, (MIX[0] * 2).sin(), MIX[1] + 1, *MIX[2:]))

    assert compare(body).ops == BOUNDARY


def test_a_weight_that_depends_on_the_streams_or_on_a_write_is_not_moved() -> None:
    def circular(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        return tuple(ops.mhc_pre(streams, MIX[0] * streams.float().mean(), *MIX[1:]))

    result = compare(circular)
    assert result.ops == UNFUSED
    assert result.reasons == ["an input of the group depends on mhc_post"]

    def written(*args: Tensor) -> tuple[Tensor, ...]:
        streams = ops.mhc_post(*args)
        norm = MIX[3] * 1
        row = torch.ops.dsv4_streams.attend_(args[1], norm)
        return *ops.mhc_pre(streams, *MIX[:3], norm, *MIX[4:]), row

    result = compare(written)
    assert result.ops == UNFUSED
    assert result.reasons == ["an input of the group depends on dsv4_streams.attend_, which writes a buffer"]


@pytest.mark.parametrize(
    ("options", "boundary", "head"),
    [
        ({}, "", ""),
        ({"dsv4.fuse.fuse_streams": "off"}, None, None),
        ({"dsv4.fuse": "off"}, None, None),
        ({"dsv4.fuse": "off", "dsv4.fuse.fuse_streams": "on"}, "", ""),
        ({"dsv4.impl.mhc_pre": "ir"}, "dsv4.impl.mhc_pre demands an implementation of that op", ""),
        (
            {"dsv4.impl.mhc_post": "eager"},
            "dsv4.impl.mhc_post demands an implementation of that op",
            "dsv4.impl.mhc_post demands an implementation of that op",
        ),
        (
            {"dsv4.impl.mhc_boundary": "eager"},
            "mhc_boundary would run its reference: the reference was asked for",
            "",
        ),
        ({"dsv4.impl.mhc_head": "eager"}, "", "mhc_head would run its reference: the reference was asked for"),
    ],
)
def test_options_decide_what_is_fused(options: dict[str, str], boundary: str | None, head: str | None) -> None:
    """`boundary` and `head` are the reasons why not: "" if fused, None if the pass is off."""
    for body, reason, into, separate in (
        (post_pre, boundary, BOUNDARY, UNFUSED),
        (post_head, head, {"mhc_head": 1}, {"mhc_post": 1, "mhc_head": 1}),
    ):
        result = compare(body, options)
        assert result.ops == (into if reason == "" else separate)
        assert result.reasons == ([reason] if reason else [])
        assert len(result.fusions) == (reason is not None)


@pytest.mark.parametrize(("body", "into"), [(post_pre, "mhc_boundary"), (post_head, "mhc_head")])
def test_auto_does_not_fuse_into_an_op_that_is_not_proven(
    monkeypatch: pytest.MonkeyPatch, body: Callable[..., tuple[Tensor, ...]], into: str
) -> None:
    describe = fusion.describe
    monkeypatch.setattr(
        fusion, "describe", lambda *args: dataclasses.replace(describe(*args), architecture="cuda sm_90a")
    )
    result = compare(body, {})
    assert result.ops["mhc_post"] == 1
    assert [reason.partition(": ")[0] for reason in result.reasons] == [f"{into} would run its reference"]
    assert compare(body, {"dsv4.fuse": "on"}).ops == {into: 1}


@pytest.fixture
def kernels() -> Iterator[Callable[..., None]]:
    """Yield a function that registers what runs of ops on a CPU as their kernels, proven on every GPU."""
    library = torch.library.Library("dsv4", "IMPL")
    with proven.trust():
        yield lambda name: library.impl(name, EAGER[name], "CPU")
    library._destroy()


def test_a_kernel_is_not_replaced_by_ir_that_nobody_measured(
    kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels("mhc_pre")
    options = {"dsv4.impl": "triton", "dsv4.impl.mhc_boundary": "ir"}
    result = compare(post_pre, options)
    assert result.ops == UNFUSED
    assert result.reasons == ["mhc_pre has a kernel; mhc_boundary would be ir, whose time was not measured"]
    assert compare(post_pre, {**options, "dsv4.fuse": "on"}).ops == BOUNDARY
    kernels("mhc_boundary")
    assert compare(post_pre, {"dsv4.impl": "triton"}).ops == BOUNDARY
    us = {"mhc_post": 2.0, "mhc_pre": 3.0, "mhc_boundary": 4.0}
    monkeypatch.setattr(fusion.registry, "microseconds", lambda call, decision: us[call.op])
    result = compare(post_pre, options)
    assert result.ops == BOUNDARY
    assert result.fusions[0].reason.endswith("measured at the nearest size: fused 4.0 us, separate 5.0 us")
    us["mhc_boundary"] = 6.0
    assert compare(post_pre, options).reasons == ["measured at the nearest size: fused 6.0 us, separate 5.0 us"]
