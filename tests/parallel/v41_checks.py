"""Not a test: properties of a DeepSeek-V4.1 that is split over ranks, which each rank checks in a separate process."""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.errors import CompileError, InputError
from dsv4_compile.hf.model.v41_causal_lm import V41ForCausalLM
from dsv4_compile.models import v41
from dsv4_compile.models.v41.draft_captured import DraftSteps
from dsv4_compile.models.v41.draft_steps import verify
from dsv4_compile.models.v41.splitting import split_of
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, gather_objects
from dsv4_compile.parallel.collectives import first_object
from dsv4_compile.parallel.split import part_of
from tests.hf.small import close
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_draft_generate import DRAFTS
from tests.models.v41.test_loading import tokenizer
from tests.parallel.checks import assert_same_bits, fails

SIZES: dict[str, Any] = KINDS | {
    "hidden_size": 128,
    "o_groups": 4,
    "o_lora_rank": 64,
    "intermediate_size": 128,
    "image_token_id": 63,
}
"""Four ranks have whole groups and blocks of scales; the rows of the engrams do not divide."""
PROMPTS = [torch.arange(3, 40) % 61, torch.arange(5) + 7, torch.arange(60, 30, -1)]


@functools.cache
def whole() -> v41.V41Model:
    """Return a model that this rank has all of."""
    return tiny_model(**SIZES)


@functools.cache
def divided(mesh: Any, expert_layout: str = "experts") -> v41.V41Model:
    """Return this rank's part of the same model."""
    return v41.split(copy.deepcopy(whole()), mesh=mesh, expert_layout=expert_layout)


def generated(model: v41.V41Model, **options: Any) -> list[list[int]]:
    """Return 8 tokens for three prompts, in exact caches."""
    defaults: dict[str, Any] = {"max_new_tokens": 8, "stop": [], "cache_format": v41.V41Format.plain()}
    return v41.generate(model, PROMPTS, **defaults | options)


def prompt_logits(model: v41.V41Model) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of the last tokens of the prompts in chunks, and all caches."""
    caches = model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=v41.V41Format.plain())
    return v41.prefill(model, PROMPTS, caches, chunk=11), caches.tensors()


def v41_gives_what_one_process_gives(mesh: Any) -> None:
    ranks = Ranks.of(mesh)
    want = first_object((prompt_logits(whole()), generated(whole())) if ranks.rank == 0 else None, ranks)
    for layout in EXPERT_LAYOUTS:
        model = divided(mesh, layout)
        logits, caches = prompt_logits(model)
        close(logits, want[0][0])
        assert generated(model, **({"chunk": 7} if layout == "rows" else {})) == want[1]
        assert_same_bits(torch.cat([logits.flatten(), *(tensor.flatten().float() for tensor in caches)]), mesh)
    assert len({*map(str, gather_objects(generated(model, temperature=1.0, seed=3), ranks))}) == 1


def v41_compiles_to_one_graph_on_a_rank(mesh: Any) -> None:
    """Trace alone: `compiled_graphs_neither_break_nor_recompile` lets Inductor generate code of collectives."""
    model = divided(mesh)
    step = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    assert generated(model, decode=step) == generated(model)


def v41_captures_a_step_with_its_collectives(mesh: Any) -> None:
    model = divided(mesh)
    caches = model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=v41.V41Format.plain())
    steps = v41.compile(model, caches=caches, backend=None, graphs="standin", buckets=[3])
    assert generated(model, forward=steps, cache_format=None) == generated(model)
    sampled = {"temperature": 1.0, "seed": 3}
    assert generated(model, forward=steps, cache_format=None, **sampled) == generated(model, **sampled)
    assert steps.captured is not None and steps.captured.statistics.replays == 14


def v41_requests_get_the_text_of_the_whole_model(mesh: Any) -> None:
    ranks, sizes = Ranks.of(mesh), {"slots": 2, "max_seq_len": 64, "prefill_chunk": 16}
    settings: list[dict[str, Any]] = [{"temperature": 1.0, "seed": i} if i % 2 else {} for i in range(5)]

    def texts(batch: Any) -> list[list[int]]:
        requests = [
            batch.submit(prompt, max_new_tokens=4 + i, stop_tokens=[], **options)
            for i, (prompt, options) in enumerate(zip([*PROMPTS, [5], [6, 7]], settings, strict=True))
        ]
        dropped = batch.submit([8, 9], max_new_tokens=40, stop_tokens=[])
        batch.step()
        dropped.cancel()
        batch.run()
        assert {request.state for request in requests} == {"length"} and dropped.state == "cancelled"
        return [request.tokens for request in requests]

    want = first_object(texts(hf.RunningBatch(whole(), **sizes)) if ranks.rank == 0 else None, ranks)
    for graphs in ("off", "standin"):
        with hf.RunningBatch(divided(mesh), graphs=graphs, **sizes) as batch:
            got = texts(batch) if ranks.rank == 0 else batch.serve()
            if ranks.rank == 0:
                with pytest.raises(InputError, match="follow a RunningBatch"):
                    generated(divided(mesh))
        assert first_object(got, ranks) == want
        assert len({*map(str, gather_objects(batch._ranks._checksum, ranks))}) == 1
    with fails("E702", "slots"):
        hf.RunningBatch(divided(mesh), **sizes | {"slots": 2 + ranks.rank})
    assert generated(divided(mesh)) == generated(divided(mesh), chunk=7)


def v41_a_rank_reads_its_part_of_a_folder(mesh: Any) -> None:
    ranks = Ranks.of(mesh)
    folder = Path(first_object(tempfile.mkdtemp() if ranks.rank == 0 else None, ranks))
    if ranks.rank == 0:
        v41.save_folder(whole(), folder, tokenizer=tokenizer())
    gather_objects(None, ranks)  # the files are there
    for options in ({}, {"dequantize": True, "dtype": torch.float32}):
        full = v41.load(folder, device="cpu", **options)
        for layout in EXPERT_LAYOUTS:
            part = v41.load(folder, device="cpu", mesh=mesh, expert_layout=layout, **options)
            for (name, parameter), wanted in zip(part.named_parameters(), full.parameters(), strict=True):
                expected = part_of(wanted, split_of(name, layout), ranks, ragged="engram.embed" in name)
                assert parameter.shape == expected.shape, name
                assert torch.equal(parameter.view(torch.uint8), expected.contiguous().view(torch.uint8)), name
            if options:
                assert generated(part) == generated(full), layout
            size = sum(parameter.nbytes for parameter in part.parameters())
            assert size < 0.8 * sum(parameter.nbytes for parameter in full.parameters())


def v41_drafts_of_ranks_are_those_of_one_process(mesh: Any) -> None:
    ranks, one = Ranks.of(mesh), tiny_model(drafts=replace(DRAFTS, noise_token=62), **SIZES)

    def steps(model: v41.V41Model) -> tuple[Tensor, list[Tensor]]:
        """Logits of drafts and tokens of three steps, greedy and sampled."""
        caches = model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=v41.V41Format.plain())
        first = v41.prefill(model, PROMPTS, caches).argmax(1)
        run = DraftSteps(model, caches, verify)
        numbers = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
        run.load(first, torch.tensor([len(prompt) for prompt in PROMPTS]), numbers, torch.arange(3))
        tokens = [run.step() for _ in range(3)]
        return run._loaded.rows.draft_logits, tokens

    want = first_object(steps(one) if ranks.rank == 0 else None, ranks)
    for layout in EXPERT_LAYOUTS:
        model = v41.split(copy.deepcopy(one), mesh=mesh, expert_layout=layout)
        logits, tokens = steps(model)
        close(logits, want[0])
        assert all(map(torch.equal, tokens, want[1]))
        assert_same_bits(logits.flatten(), mesh)
    got = generated(model)
    assert model.draft_statistics is not None and got == generated(model, drafts=False)
    sizes = {"max_batch_size": 1, "max_seq_len": 64, "max_step_tokens": 16}
    language = V41ForCausalLM(model, sizes | {"cache_format": v41.V41Format.plain()})
    with hf.RunningBatch(language, slots=2, prefill_chunk=16, graphs="standin") as batch:
        if ranks.rank == 0:
            new = {"max_new_tokens": len(got[0]), "stop_tokens": []}
            requests = [batch.submit(prompt, **new) for prompt in PROMPTS]
            batch.run()
            assert [request.tokens for request in requests] == got and batch.draft_statistics.steps > 0
        else:
            batch.serve()
    torch.manual_seed(ranks.rank)  # rows are sampled by the seeds of rank 0
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
    ids = PROMPTS[0][None]
    assert language.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist() == got[0][:6]
    language.generate(ids, do_sample=True, **options)  # E702 if ranks chose different tokens
    assert language.draft_statistics is not None
    with fails("E701", "experts of a draft layer"):
        v41.split(tiny_model(drafts=replace(DRAFTS, num_experts=3), **SIZES), mesh=mesh)


def v41_calls_that_ranks_make_differently_are_errors(mesh: Any) -> None:
    ranks = Ranks.of(mesh)
    model, mine = divided(mesh), ranks.rank == 0
    with fails("E702", "max_new_tokens"):
        generated(model, max_new_tokens=4 + mine)
    with fails("E702", "tokens"):
        v41.generate(model, [[1, 2, 3 + mine]], max_new_tokens=2)
    with fails("E702", "E201"):  # one rank alone
        v41.generate(model, [[1, 2, 64 if mine else 3]], max_new_tokens=2)
    with fails("E702"):
        v41.split(copy.deepcopy(whole()), mesh=mesh, expert_layout="rows" if mine else "experts")
    with fails("E702", "bits of weights"):
        other = copy.deepcopy(whole())
        other.layers[0].attn.wkv.weight.add_(int(mine))
        v41.split(other, mesh=mesh)
    assert generated(model) == generated(divided(mesh))  # ranks still agree


def v41_what_a_part_cannot_do_is_an_error(mesh: Any) -> None:
    with fails("E701", "output groups"):
        v41.split(tiny_model(**SIZES | {"o_groups": 1}), mesh=mesh)
    with fails("E701", "split already"):
        v41.split(divided(mesh), mesh=mesh)
    with fails("E701", "expert_layout"):
        v41.split(copy.deepcopy(whole()), mesh=mesh, expert_layout="columns")
    with fails("E701", "save_folder"):
        v41.save_folder(divided(mesh), Path("nowhere"))
    with pytest.raises(CompileError, match="E302"):
        v41.split(copy.deepcopy(whole()), mesh=mesh, collectives="symmetric")
