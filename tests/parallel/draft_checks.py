"""Not a test: properties of a split model that generates with drafts, which each rank checks in a separate process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.hf.model import split
from dsv4_compile.hf.model.generate_call import is_undisturbed
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.parallel import Ranks, gather_objects
from tests.parallel.callers import Fails
from tests.parallel.checks import MODEL, SIZES, assert_same_bits, divided, fails, generated, of_whole, tokens
from tests.support.draft_sources import Forced

KINDS = "dspark", "mtp"


@functools.cache
def drafting(mesh: Any, kind: str) -> Any:
    """Return this rank's part of a model with draft layers."""
    model = tiny_model(**MODEL)
    return hf.convert(model, **SIZES, mesh=mesh, drafts=tiny_drafts(model, kind))


def drafted(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return what `generated` does; fail if that ran without drafts."""
    result = generated(model, ids, mask, **options)
    assert model.draft_statistics is not None
    return result


def drafts_give_the_text_of_one_process_without_them(mesh: Any) -> None:
    ids, mask = tokens(3, 38), (torch.arange(38) >= torch.tensor([0, 37, 9])[:, None]).long()
    chunks = {"prefill_chunk_size": 9}
    for given, calls in ((None, (("dspark", {}),)), (mask, (("mtp", {}), ("dspark", chunks), ("mtp", chunks)))):
        want = of_whole(mesh, generated, ids, given)
        assert all(is_undisturbed(drafting(mesh, kind)) for kind in KINDS)  # no comparison between two steps
        assert torch.equal(generated(drafting(mesh, "dspark"), ids, given, drafts=False), want)
        for kind, options in calls:
            assert torch.equal(drafted(drafting(mesh, kind), ids, given, **options), want)


def accepted_drafts_are_counted_alike_on_all_ranks(mesh: Any) -> None:
    ids, model = tokens(2, 21), divided(mesh)
    want = of_whole(mesh, generated, ids, max_new_tokens=20)
    try:
        model.__dict__["dsv4_drafts"] = Forced(want, lambda lengths: lengths * 5 % 6)
        assert torch.equal(drafted(model, ids, max_new_tokens=20), want)
        counts = gather_objects(model.draft_statistics.accepted, Ranks.of(mesh))
        assert all(sum(count[1:]) > 2 and count == counts[0] for count in counts), counts
        call = {"return_dict_in_generate": True, "max_new_tokens": 7}
        first = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **call)
        cache = {hf.model.causal_lm.CACHE_NAME: first[hf.model.causal_lm.CACHE_NAME]}
        assert torch.equal(drafted(model, first.sequences, max_new_tokens=13, **cache), want)  # a second turn
    finally:
        model.__dict__["dsv4_drafts"] = None


def samples_with_drafts_are_those_of_the_seed_of_rank_0(mesh: Any) -> None:
    ids, options = tokens(2, 9), {"do_sample": True, "temperature": 2.0, "top_k": 50}
    shared, split.share_random_state = split.share_random_state, lambda *_: None  # as the CPU's of a model on GPUs
    try:
        for kind in KINDS:
            model = drafting(mesh, kind)
            torch.manual_seed(7 + mesh.get_rank())
            first, second = drafted(model, ids, **options), drafted(model, ids, **options)
            assert_same_bits(torch.stack((first, second)), mesh)
            assert not torch.equal(first, second)
            torch.manual_seed(7 + mesh.get_rank())
            assert torch.equal(drafted(model, ids, **options), first)
    finally:
        split.share_random_state = shared


@torch.no_grad()
def equal_logits_of_two_ranks_choose_the_lowest_id(mesh: Any) -> None:
    model = drafting(mesh, "dspark")
    drafts, per_rank = model.dsv4_drafts, 512 // mesh.size()
    before, markov = model.lm_head.weight.clone(), drafts.markov_w2.clone()
    try:
        drafts.markov_w2.zero_()
        for row, scale in ((5, 1e3), (6, -1e3)):  # their logits are one product, whatever is added up first
            model.lm_head.weight[row] = scale * torch.eye(before.shape[1])[0]
        numbers, seeds = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
        proposed, logits = drafts.propose(torch.tensor([9, 8, 7]), torch.tensor([20, 30, 40]), numbers, seeds)
        assert torch.equal(logits[..., :per_rank].amax(-1), logits[..., per_rank:].amax(-1))  # each rank has a largest
        assert set(proposed.flatten().tolist()) <= {5, 6}
        for options in ({}, {"drafts": False}):
            got = generated(model, tokens(3, 20), **options)[:, 20:]
            assert set(got.flatten().tolist()) <= {5, 6}, got
    finally:
        model.lm_head.weight.copy_(before)
        drafts.markov_w2.copy_(markov)


def ranks_whose_drafts_differ_are_told_so(mesh: Any) -> None:
    odd = mesh.get_rank() == 1

    def convert(change: Any) -> None:
        model = tiny_model(**MODEL)
        drafts = tiny_drafts(model)
        hf.convert(model, **SIZES, mesh=mesh, drafts=change(model, drafts) if odd else drafts)

    with fails("E702", "drafts = ", "num_drafts=5", "num_drafts=3"):
        convert(lambda model, drafts: tiny_drafts(model, num_drafts=3))
    with fails("E702", "drafts = ", "None on rank 1"):
        convert(lambda model, drafts: None)
    with fails("E702", "drafts = ", "mtp"):
        convert(lambda model, drafts: tiny_drafts(model, "mtp"))
    with fails("E702", "bits of draft weights"):
        convert(lambda model, drafts: tiny_drafts(model, seed=1))

    model = drafting(mesh, "dspark")
    want = drafted(model, tokens(2, 9))
    with fails("E702", "drafts = "):
        generated(model, tokens(2, 9), drafts=not odd)
    streamer = Fails(lambda: 1 / 0)
    streamer.left = 6  # when the first row has ended, and its padding is missing in a cache that outlives the call
    options = {"return_dict_in_generate": True, "eos_token_id": int(want[0, 9]), "pad_token_id": 0}
    with fails("E702", "rejected", "ZeroDivisionError"):
        generated(model, tokens(2, 9), **options, **({"streamer": streamer} if odd else {}))
    weight = model.dsv4_drafts.markov_w1
    before = weight.clone()
    weight.data.add_(odd)
    with fails("E702", "values of drafts"):
        generated(model, tokens(2, 9))
    weight.data.copy_(before)
    hook = model.model.register_forward_hook(lambda *_: None) if odd else None
    with fails("E702", "without drafts", "on rank 0", "forward hooks"):
        generated(model, tokens(2, 9))
    if hook is not None:
        hook.remove()
    assert torch.equal(drafted(model, tokens(2, 9)), want)  # calls that failed leave the ranks in step
