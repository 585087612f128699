"""Not a test: properties of a split model, which each rank checks in a separate process."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import DeepseekV4Attention, hf
from dsv4_compile._compat import counters
from dsv4_compile.debug import diverge_ranks
from dsv4_compile.errors import CompileError, RankError
from dsv4_compile.hf.model.split import InStep, keep_part
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.loading import load_attention
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, all_reduce, gather_objects, split_of, symmetric, watchdog
from dsv4_compile.parallel.collectives import first_object, functional_all_reduce
from dsv4_compile.parallel.split import part_of
from dsv4_compile.runtime import counting
from dsv4_compile.selection import decisions
from tests.hf import official, official_drafts
from tests.hf.drafting import tokens_of
from tests.hf.small import LAYERS, close
from tests.kernels.hyper_connections.calls import arguments
from tests.modules.engine import Engine
from tests.modules.test_compiled_layer import CASES, MAX_SEQ_LEN, random_layer
from tests.parallel.processes import TIMEOUT

MODEL: dict[str, Any] = LAYERS | {"o_groups": 4}
SIZES: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 128, "attention_only": False}


def tokens(*shape: int) -> Tensor:
    """Return token ids that are the same on every rank."""
    return torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(sum(shape)))


@functools.cache
def whole() -> Any:
    """Return a model that this rank has all of."""
    return hf.convert(tiny_model(**MODEL), **SIZES)


@functools.cache
def divided(mesh: Any, expert_layout: str = "experts") -> Any:
    """Return this rank's part of the same model."""
    return hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh, expert_layout=expert_layout)


def of_whole(mesh: Any, run: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Return `run(the whole model, ...)`, which rank 0 computes for all."""
    ranks = Ranks.of(mesh)
    result: Tensor = first_object(run(whole(), *args, **options) if ranks.rank == 0 else None, ranks)
    return result


@contextmanager
def fails(*texts: str) -> Iterator[None]:
    """Expect an error with `texts` in its message."""
    try:
        yield
    except RankError as error:
        missing = [text for text in texts if text not in str(error)]
        assert not missing, f"no {missing} in {error}"
        return
    raise AssertionError(f"no error with {texts}")


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    result: Tensor = model(ids, attention_mask=mask).logits
    return result


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return 12 tokens for each row of `ids`."""
    mask = torch.ones_like(ids) if mask is None else mask
    defaults = {"do_sample": False, "max_new_tokens": 12, "attention_mask": mask}
    return model.generate(ids, **defaults | options)


def assert_same_bits(value: Tensor, mesh: Any) -> None:
    values = gather_objects(value, Ranks.of(mesh))
    assert all(torch.equal(rank_value, value) for rank_value in values)


def prefill_and_decode_are_those_of_one_process(mesh: Any) -> None:
    model, ids = divided(mesh), tokens(2, 40)
    close(logits(model, ids), of_whole(mesh, logits, ids))
    assert torch.equal(generated(model, ids), of_whole(mesh, generated, ids))


def rows_of_experts_give_the_same(mesh: Any) -> None:
    model, ids = divided(mesh, "rows"), tokens(3, 17)
    close(logits(model, ids), of_whole(mesh, logits, ids))
    assert torch.equal(generated(model, ids), of_whole(mesh, generated, ids))


def prompts_of_unequal_length_and_chunks_give_the_same(mesh: Any) -> None:
    model, ids = divided(mesh), tokens(3, 38)
    mask = (torch.arange(38) >= torch.tensor([0, 37, 9])[:, None]).long()
    assert torch.equal(generated(model, ids, mask), of_whole(mesh, generated, ids, mask))
    assert torch.equal(generated(model, ids, prefill_chunk_size=16), of_whole(mesh, generated, ids))


def results_are_the_same_bits_on_all_ranks(mesh: Any) -> None:
    for layout in ("experts", "rows"):
        out = divided(mesh, layout).generate(
            tokens(2, 33), do_sample=False, max_new_tokens=12, return_dict_in_generate=True, output_logits=True
        )
        assert_same_bits(torch.stack(out.logits), mesh)


def sampled_tokens_are_the_same_with_other_seeds(mesh: Any) -> None:
    torch.manual_seed(mesh.get_rank())
    first = generated(divided(mesh), tokens(2, 9), do_sample=True, temperature=2.0)
    assert_same_bits(first, mesh)
    assert not torch.equal(first, generated(divided(mesh), tokens(2, 9), do_sample=True, temperature=2.0))


def an_op_that_differs_on_a_rank_is_found_beside_parts(mesh: Any) -> None:
    model = divided(mesh)
    factor = 1.0 + 0.01 * mesh.get_rank()
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * factor)
    finish, model.model.dsv4_in_step.finish = model.model.dsv4_in_step.finish, lambda *_: None
    report = diverge_ranks(model, tokens(2, 20), group=mesh)
    hook.remove()
    model.model.dsv4_in_step.finish = finish
    assert (report.op, report.rank) == ("aten.mul", 1) and report.layer == "model.layers.1", str(report)
    assert report.compared > 200, str(report)


def a_rank_keeps_its_part_alone(mesh: Any) -> None:
    model, size = divided(mesh), mesh.size()
    for path, shape in (
        ("lm_head.weight", (512 // size, 128)),
        ("model.embed_tokens.weight", (512 // size, 128)),
        ("model.layers.0.self_attn.q_b_proj.weight", (256 // size, 64)),
        ("model.layers.0.self_attn.o_b_proj.weight", (128, 128 // size)),
        ("model.layers.1.mlp.experts.gate_up_proj", (8 // size, 128, 128)),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", (128, 64 // size)),
    ):
        weight = model.get_parameter(path)
        assert tuple(weight.shape) == shape, path
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) < 1.1 * sum(p.nbytes for p in model.parameters())


def a_model_that_has_its_part_is_converted_as_it_is(mesh: Any) -> None:
    model = tiny_model(**MODEL)
    keep_part(model, Ranks.of(mesh), "rows")
    weight = model.lm_head.weight
    with fails("E701", "a part for"):
        hf.convert(model, **SIZES, mesh=mesh, expert_layout="experts")
    hf.convert(model, **SIZES, mesh=mesh, expert_layout="rows")
    assert model.lm_head.weight is weight
    close(logits(model, tokens(2, 11)), of_whole(mesh, logits, tokens(2, 11)))


def a_rank_reads_its_part_of_a_checkpoint(mesh: Any) -> None:
    ranks = Ranks.of(mesh)
    folder = Path(gather_objects(tempfile.mkdtemp(), ranks)[0])
    sizes: dict[str, Any] = LAYERS | {"moe_intermediate_size": 256, "o_lora_rank": 128, "q_lora_rank": 128}
    if ranks.rank == 0:
        model = tiny_model(**sizes, n_routed_experts=4)
        stored = official.official_tensors(model) | official_drafts.draft_tensors(model, "dspark")
        ratios = [4, 128, 0, 0, 0]
        official.write(folder / "official", stored, **sizes, compress_ratios=ratios, dspark_target_layer_ids=[0, 1])
        tiny_model(**MODEL).save_pretrained(folder / "floating")
    torch.distributed.barrier()
    limits: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "device": "cpu", "dtype": torch.float32}
    for name, options, layouts in (
        ("official", {}, EXPERT_LAYOUTS),
        ("official", {"dequantize": True}, EXPERT_LAYOUTS[1:]),
        ("floating", {}, EXPERT_LAYOUTS[:1]),
    ):
        all_of_it = hf.load(folder / name, **limits, **options)
        for layout in layouts:
            shard = hf.load(folder / name, **limits, **options, mesh=mesh, expert_layout=layout)
            for path, whole_one in all_of_it.named_parameters():
                want = part_of(whole_one.data, split_of(path, layout), ranks).contiguous()
                got = shard.get_parameter(path).data.contiguous()
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), path
            if name == "official":
                _check_drafts(shard.dsv4_drafts, all_of_it.dsv4_drafts, layout, ranks)
        got, want = logits(shard, tokens(1, 9)), logits(all_of_it, tokens(1, 9))
        assert (got - want).norm() < 1e-4 * want.norm()
    torch.distributed.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder)


@torch.no_grad()
def _check_drafts(shard: Any, whole: Any, layout: str, ranks: Ranks) -> None:
    """Compare draft layers of a rank with its part of whole ones, and the drafts of both."""
    for path, weight in whole.named_parameters():
        want = part_of(weight.data, split_of(path, layout), ranks).contiguous()
        assert torch.equal(shard.get_parameter(path).data.contiguous().view(torch.uint8), want.view(torch.uint8)), path
    assert (
        shard.markov_w1.shape == whole.markov_w1.shape and shard.main_proj.weight.shape == whole.main_proj.weight.shape
    )
    taps = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    results = []
    for drafts in (shard, whole):
        drafts.inject(taps, tokens_of(list(range(20)), [1] * 20))
        numbers, seeds = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
        results.append(drafts.propose(torch.tensor([-1, 3]), torch.tensor([0, 20]), numbers, seeds)[1][1, 0])
    assert (results[0] - results[1]).norm() < 1e-3 * results[1].norm()


def what_a_part_cannot_do_is_an_error(mesh: Any) -> None:
    model = divided(mesh)
    with fails("E701", "revert"):
        hf.revert(model)
    with fails("E701", "save_pretrained"):
        model.save_pretrained(Path("nowhere"))
    with fails("E701", "max_time"):
        generated(model, tokens(1, 3), max_time=1.0)
    other = tiny_model(**MODEL)
    with fails("E701", "attention_only"):
        hf.convert(other, **SIZES | {"attention_only": True}, mesh=mesh)
    with fails("E701", "expert_layout"):
        hf.convert(other, **SIZES, mesh=mesh, expert_layout="columns")
    for what in ("symmetric", "none"):
        try:
            hf.convert(other, **SIZES, mesh=mesh, collectives=what)
        except CompileError as error:
            assert "[E302]" in str(error)
        else:
            raise AssertionError("no error")
    with fails("E701", "one dim"):
        hf.convert(other, **SIZES, mesh=torch.distributed.DeviceMesh("cpu", [list(range(mesh.size()))]))
    with fails("E701", "int"):
        hf.convert(other, **SIZES, mesh=2)
    with fails("E701", "7 tokens in the vocabulary"):
        hf.convert(tiny_model(**MODEL, vocab_size=7), **SIZES, mesh=mesh)
    hf.convert(other, **SIZES)


def ranks_that_differ_are_told_so(mesh: Any) -> None:
    rank = mesh.get_rank()
    with fails("E702", "max_batch_size = 4 on rank 0, 5 on rank 1"):
        hf.convert(tiny_model(**MODEL), **SIZES | {"max_batch_size": 4 + rank}, mesh=mesh)
    other = tiny_model(**MODEL)
    other.get_parameter("model.layers.1.self_attn.q_a_norm.weight").data.add_(rank)
    with fails("E702", "weights"):
        hf.convert(other, **SIZES, mesh=mesh)
    model = hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh)
    with fails("E702", "input_ids = '(1, 3) torch.int64' on rank 0, '(1, 4) torch.int64' on rank 1"):
        logits(model, tokens(1, 3 + rank))
    with fails("E702", "values"):
        logits(model, tokens(1, 3) + rank)
    with fails("E702", "length = 14 on rank 0, 15 on rank 1"):
        generated(model, tokens(1, 3), max_new_tokens=12 + rank)
    weight = model.model.layers[1].self_attn.kv_norm.weight.data
    before = weight.clone()
    weight.add_(rank)
    with fails("E702", "results of a call: bits of caches"):
        logits(model, tokens(1, 3))
    weight.copy_(before)
    logits(model, tokens(1, 3))  # calls that failed leave the ranks in step


def an_engines_layer_is_split(mesh: Any) -> None:
    config, options = CASES["fp8-cache-and-weights"]
    for settings in ({"dtype": torch.bfloat16}, options):
        torch.manual_seed(1)
        whole_layer = random_layer(replace(config, num_heads=4, o_lora_rank=128), "csa", **settings)
        shard = DeepseekV4Attention(whole_layer.config, 0, max_seq_len=MAX_SEQ_LEN, mesh=mesh, **settings)
        load_attention(shard, dict(whole_layer.named_parameters()))
        hidden = torch.randn(50, config.hidden_size).to(torch.bfloat16)
        got, want = (Engine(layer, 1, 256).step([hidden])[0].float() for layer in (shard, whole_layer))
        assert (got - want).norm() < 0.01 * want.norm()
        assert_same_bits(got, mesh)


def compiled_graphs_neither_break_nor_recompile(mesh: Any) -> None:
    one = MODEL | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    model, alone = hf.convert(tiny_model(**one), **SIZES, mesh=mesh), hf.convert(tiny_model(**one), **SIZES)
    ops = ("moe_experts", "moe_route", "mhc_pre", "mhc_head", "mhc_boundary")
    quick = {f"dsv4.impl.{op}": "eager" for op in ops} | {"fallback_by_default": True}
    capture = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}
    model.compile(fullgraph=True, backend="dsv4", options=quick | capture)
    counters.clear()
    with counting() as counts:
        assert torch.equal(generated(model, tokens(2, 30)), generated(alone, tokens(2, 30)))
    assert counts.captures == 1
    assert counts.replays > 3
    graphs = counters["stats"]["unique_graphs"]
    mask = (torch.arange(20) >= torch.tensor([0, 11, 3])[:, None]).long()
    assert torch.equal(generated(model, tokens(3, 20), mask), generated(alone, tokens(3, 20), mask))
    assert (graphs, counters["stats"]["unique_graphs"]) == (2, 2)
    assert not counters["graph_break"]


def an_opaque_all_reduce_without_a_buffer_is_that_of_the_backend(mesh: Any) -> None:
    ranks = replace(Ranks.of(mesh), symmetric=True)
    assert (ranks.name, torch.device("cpu")) not in symmetric._buffers
    compiled = torch.compile(lambda x: all_reduce(x.t(), ranks) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.arange(4.0 * rows).view(rows, 4) + mesh.get_rank()
        want = functional_all_reduce(x.t().contiguous(), ranks.name) + 1
        assert torch.equal(compiled(x), want)
        assert float(want[0, 0]) == 2.0


def a_batch_invariant_sum_is_in_the_order_of_the_ranks(mesh: Any) -> None:
    ranks, options = Ranks.of(mesh), {"dsv4.batch_invariant": "tokens", "dsv4.impl": "eager"}
    x = [torch.randn(65, 33, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(mesh.size())]
    want = functools.reduce(torch.add, [part.float() for part in x]).bfloat16()
    compiled = torch.compile(lambda x: all_reduce(x, ranks), fullgraph=True, backend="dsv4", options=options)
    assert torch.equal(compiled(x[ranks.rank]), want)


def a_boundary_adds_up_the_parts_of_all_ranks(mesh: Any) -> None:
    ranks = replace(Ranks.of(mesh), symmetric=True)
    streams, summand, *rest = arguments("mhc_boundary", 3, 64)

    def step(streams: Tensor, summand: Tensor, *rest: Any) -> list[Tensor]:
        return list(torch.ops.dsv4.mhc_boundary(streams, all_reduce(summand, ranks), *rest))

    options: Any = {"dsv4.impl": "eager", "dsv4.fuse": "on"}
    compiled = torch.compile(step, fullgraph=True, backend="dsv4", options=options)
    summand += ranks.rank
    total = functional_all_reduce(summand, ranks.name)
    want = torch.ops.dsv4.mhc_boundary(streams, total, *rest)
    with decisions.collect() as collected:
        got = compiled(streams, summand, *rest)
    assert [fusion.into for fusion in collected.fusions if fusion.fused] == ["all_reduce_mhc_boundary"]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def calls_of_a_model_over_symmetric_memory_are_watched(mesh: Any) -> None:
    class Work:
        marks = 0

        def record(self) -> None:
            self.marks += 1

        def done(self) -> bool:
            return True

    ranks, work = replace(Ranks.of(mesh), symmetric=True), Work()
    guard = InStep(ranks, torch.device("cpu"), 5.0).watchdog
    assert guard is not None
    assert guard.timeout == 5.0
    assert hasattr(torch.distributed.destroy_process_group, "dsv4_releases")
    guard.work = work
    model = hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh)
    in_step = model.model.dsv4_in_step
    assert in_step.watchdog is None
    in_step.watchdog = guard
    inside = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: inside.append(guard.begun - guard.ended))
    logits(model, tokens(1, 9))
    assert (guard.begun, guard.ended, work.marks, inside) == (3, 3, 3, [1])  # two comparisons and the forward
    logits(model, tokens(1, 9))
    assert (guard.begun, guard.ended, inside) == (4, 4, [1, 1])
    assert copy.deepcopy(in_step).watchdog is guard
    generated(model, tokens(1, 9), max_new_tokens=1)
    assert (guard.begun, guard.ended, inside) == (8, 8, [1, 1, 1])  # its lengths, two comparisons and the forward
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        logits(model, tokens(1, 9))
    except ZeroDivisionError:
        assert (guard.begun, guard.ended) == (9, 9)
    else:
        raise AssertionError("no error")
    guard.leave()
    watchdog.leave(ranks.name)


def a_rank_that_dies_ends_the_others_with_its_name(mesh: Any) -> None:
    last = mesh.size() - 1
    model = divided(mesh)
    if mesh.get_rank() == last:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    with fails("E703", f"rank {last} (process"):
        logits(model, tokens(1, 8))
    assert time.monotonic() - started < TIMEOUT
