"""Draft layers: worked numbers, an evaluation of their formulas, mistakes that change them, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.models.v41 import V41Format, V41Model, draft_steps, drafts
from dsv4_compile.models.v41.draft_config import V41DraftConfig
from dsv4_compile.models.v41.draft_steps import block, block_logits, propose
from dsv4_compile.models.v41.drafts import Stage, V41Drafts
from dsv4_compile.models.v41.layers import Layer
from dsv4_compile.models.v41.step import Step
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_config
from dsv4_compile.reference.common.rope import apply_rope
from tests.models.v41.test_worked import FORMATS
from tests.models.v41.worked import TOKENS, token_ids

GREEDY = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.int64)
WANT = {"A": [36, 47, 58, 5, 46], "B": [3, 5, 46, 5, 46]}


@torch.no_grad()
def drafted(model: V41Model, name: str = "A", tokens: int = TOKENS) -> tuple[list[int], Tensor]:
    """Drafts after the likeliest token that follows `tokens` tokens, and their logits `[5, V]`."""
    caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS[name])
    logits = model(token_ids(tokens), torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64), caches)
    assert caches.drafts is not None
    anchor, length = logits[-1].argmax()[None], torch.tensor([tokens])
    ids, chosen_from = propose(model, anchor, length, ZERO, GREEDY, ZERO, caches.drafts)
    return ids[0].tolist(), chosen_from[0]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_drafts_after_the_argmax(worked_drafts: V41Model, name: str) -> None:
    assert drafted(worked_drafts, name)[0] == WANT[name[0]]


@contextmanager
def inputs_of(model: V41Model, layers: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Streams before these layers."""
    streams: list[Tensor] = []
    hooks = [model.layers[i].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0])) for i in layers]
    yield streams
    for hook in hooks:
        hook.remove()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight


def evaluated(model: V41Model, length: int, anchor: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits `[5, ...]` of the block after `length` tokens, by the formulas alone."""
    with inputs_of(model, (5, 6, 7)) as tapped:
        caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS["A"], drafts=False)
        model(token_ids(length), torch.arange(length), torch.zeros(length, dtype=torch.int64), caches)
    stages: Any = model.mtp
    taps = torch.cat([streams.mean(1) for streams in tapped], 1)
    context = rms(taps @ stages[0].main_proj.weight.t(), stages[0].main_norm.weight)
    first = max(0, length - 8)
    rows = torch.arange(length, length + 5)
    streams = model.embed.weight[torch.tensor([anchor, 63, 63, 63, 63])][:, None].expand(-1, 4, -1)
    pre = torch.tensor([1.0, 0, 0, 0]).expand(5, -1)
    for stage in stages:
        a = stage.attn
        attn_pre, post, comb = stage.hc_attn(streams.contiguous())
        x = rms((pre[..., None] * streams).sum(1), stage.attn_norm.weight)
        q = (rms(x @ a.wq_a.weight.t(), a.q_norm.weight) @ a.wq_b.weight.t()).unflatten(1, (4, 64))
        q = apply_rope(q, rows, table)
        old = apply_rope(rms(context @ a.wkv.weight.t(), a.kv_norm.weight), torch.arange(length), table)[first:]
        keys = torch.cat((old, apply_rope(rms(x @ a.wkv.weight.t(), a.kv_norm.weight), rows, table)))
        scores = torch.einsum("thd,kd->thk", q, keys) / 8
        sinks = a.attn_sink[None, :, None].expand(5, -1, -1)
        weights = torch.softmax(torch.cat((scores, sinks), 2), 2)[..., :-1]
        out = apply_rope(torch.einsum("thk,kd->thd", weights, keys), rows, table, inverse=True)
        grouped = torch.einsum("tgi,goi->tgo", out.reshape(5, 2, -1), a.wo_a.weight.view(2, 32, -1))
        z = grouped.flatten(1) @ a.wo_b.weight.t()
        streams = post[..., None] * z[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)
        ffn_pre, post, comb = stage.hc_ffn(streams.contiguous())
        z = stage.ffn(rms((attn_pre[..., None] * streams).sum(1), stage.ffn_norm.weight), torch.zeros(5).bool())
        streams = post[..., None] * z[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)
        pre = ffn_pre
    hidden = (pre[..., None] * streams).sum(1)
    return hidden, rms(hidden, stages[-1].norm.weight) @ model.head.weight.t()


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 8, 9, 33])
def test_logits_and_confidence_are_those_of_the_formulas(worked_drafts: V41Model, length: int) -> None:
    """Fewer tokens than the window, as many, and more."""
    model = worked_drafts
    caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS["A"])
    model(token_ids(length), torch.arange(length), torch.zeros(length, dtype=torch.int64), caches)
    assert caches.drafts is not None and model.mtp is not None
    hidden, base = evaluated(model, length, 17, caches.drafts.rope_tables[0])
    ids, logits = propose(model, torch.tensor([17]), torch.tensor([length]), ZERO, GREEDY, ZERO, caches.drafts)
    head, before = model.mtp.last.markov_head, torch.cat((torch.tensor([17]), ids[0, :-1]))
    want = base + head.embed.weight[before] @ head.head.weight.t()
    torch.testing.assert_close(logits[0], want, rtol=0, atol=1e-4)
    streams, pre = block(model, torch.tensor([17]), torch.tensor([length]), ZERO, caches.drafts)
    torch.testing.assert_close(block_logits(model, streams, pre), base, rtol=0, atol=1e-4)
    joint = torch.cat((hidden, head.embed.weight[before]), 1) @ model.mtp.last.confidence_head.proj.weight[0]
    torch.testing.assert_close(model.mtp.confidence(streams, pre, before), joint.sigmoid(), rtol=0, atol=1e-5)


def causal(patch: pytest.MonkeyPatch) -> None:
    steps = drafts.block_step

    def masked(ids: Tensor, *args: Any, window: int, **options: Any) -> Step:
        step = steps(ids, *args, window=window, **options)
        later = (
            torch.arange(step.window_slots.shape[1]) - window > (torch.arange(len(step.ids)) % ids.shape[1])[:, None]
        )
        return step._replace(window_slots=torch.where(later, -1, step.window_slots))

    patch.setattr(draft_steps, "block_step", masked)


def a_window_for_each_row(patch: pytest.MonkeyPatch) -> None:
    steps = drafts.block_step

    def sliding(ids: Tensor, *args: Any, **options: Any) -> Step:
        step = steps(ids, *args, **options)
        early = torch.arange(step.window_slots.shape[1]) < (torch.arange(len(step.ids)) % ids.shape[1])[:, None]
        return step._replace(window_slots=torch.where(early, -1, step.window_slots))

    patch.setattr(draft_steps, "block_step", sliding)


def context_one_off(patch: pytest.MonkeyPatch) -> None:
    inject = V41Drafts.inject

    def shifted(self: V41Drafts, taps: Any, step: Step, caches: Any) -> None:
        inject(self, taps, step._replace(positions=step.positions + 1), caches)

    patch.setattr(V41Drafts, "inject", shifted)


def taps_after_the_layer(patch: pytest.MonkeyPatch) -> None:
    forward = Layer.forward

    def late(self: Layer, *args: Any) -> Any:
        out = forward(self, *args)
        if len(args) > 7 and args[7] is not None and self.is_tapped:
            args[7][self.layer] = out[0].mean(1)
        return out

    patch.setattr(Layer, "forward", late)


def taps_of_one_stream(patch: pytest.MonkeyPatch) -> None:
    forward = Layer.forward

    def first(self: Layer, streams: Tensor, *args: Any) -> Any:
        out = forward(self, streams, *args)
        if len(args) > 6 and args[6] is not None and self.is_tapped:
            args[6][self.layer] = streams[:, 0]
        return out

    patch.setattr(Layer, "forward", first)


def coefficients_of_the_same_site(patch: pytest.MonkeyPatch) -> None:
    def collapse(self: Stage, streams: Tensor, pre: Tensor, norm: Any) -> Tensor:
        site = self.hc_attn if norm is self.attn_norm else self.hc_ffn
        return Layer.collapse(self, streams, site(streams)[0], norm)

    patch.setattr(Stage, "collapse", collapse)


def mean_of_streams_at_the_end(patch: pytest.MonkeyPatch) -> None:
    run = V41Drafts.run_block

    def mean(self: V41Drafts, *args: Any) -> tuple[Tensor, Tensor]:
        streams, pre = run(self, *args)
        return streams, torch.full_like(pre, 0.25)

    patch.setattr(V41Drafts, "run_block", mean)


MISTAKES = [
    causal,
    a_window_for_each_row,
    context_one_off,
    taps_after_the_layer,
    taps_of_one_stream,
    coefficients_of_the_same_site,
    mean_of_streams_at_the_end,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_changes_the_logits(
    mistake: Callable[[pytest.MonkeyPatch], None], worked_drafts: V41Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drafted(worked_drafts)[1]
    mistake(monkeypatch)
    assert (drafted(worked_drafts)[1][0] - before[0]).abs().max() > 1e-3


@torch.no_grad()
def test_a_row_that_no_block_reads_changes_nothing(worked_drafts: V41Model) -> None:
    """Context older than the window, of other requests and above the block may hold NaN."""
    results = []
    for dirty in (False, True):
        caches = worked_drafts.new_caches(max_batch_size=3, max_seq_len=64, cache_format=V41Format.plain())
        assert caches.drafts is not None
        if dirty:
            for tensor in caches.drafts.tensors():
                tensor.fill_(torch.nan)
        worked_drafts(token_ids(30), torch.arange(30), torch.ones(30, dtype=torch.int64), caches)
        if dirty:
            for window in caches.drafts.windows:
                rows = window.view(3, 64, -1)
                rows[[0, 2]] = torch.nan
                rows[1, :22] = rows[1, 30:] = torch.nan
        ones = torch.ones(1, dtype=torch.int64)
        results.append(propose(worked_drafts, 5 * ones, 30 * ones, ones, GREEDY, ZERO, caches.drafts)[1])
    assert torch.equal(*results) and results[0].isfinite().all()


def test_the_target_is_the_same_with_and_without(worked: V41Model, worked_drafts: V41Model) -> None:
    def logits(model: V41Model, **options: Any) -> Tensor:
        caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=FORMATS["B"], **options)
        with torch.no_grad():
            return model(token_ids(), torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), caches)

    want = logits(worked)
    assert torch.equal(logits(worked_drafts), want) and torch.equal(logits(worked_drafts, drafts=False), want)
    assert {name for name, _ in worked_drafts.named_parameters()} > {name for name, _ in worked.named_parameters()}


def test_sizes_that_drafts_do_not_fit_are_refused(worked_drafts: V41Model) -> None:
    with pytest.raises(InputError, match="max_step_tokens=5 with 5 drafts"):
        worked_drafts.new_caches(max_batch_size=1, max_seq_len=64, max_step_tokens=5)
    worked_drafts.new_caches(max_batch_size=1, max_seq_len=64, max_step_tokens=5, drafts=False)
    for changes, message in (
        ({"taps": (5, 8)}, "layers 0 to 7"),
        ({"taps": (3, 5)}, "layers from 4 on"),
        ({"taps": ()}, "dspark_target_layer_ids"),
        ({"noise_token": 64}, "vocab_size=64"),
        ({"block": 0}, "at least 1"),
        ({"experts_per_token": 9}, "9 of 4 experts"),
    ):
        values: Any = {name: getattr(TINY_DRAFTS, name) for name in V41DraftConfig.__slots__} | changes
        with pytest.raises(InputError, match=message) as caught:
            V41DraftConfig(**values).check(tiny_config())
        assert caught.value.code == "E205"
