"""The vLLM plug-in as far as it goes without vLLM: registration, versions, limits, cache geometry, steps, weights.

`make test-vllm` runs it in vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dsv4_compile import DeepseekV4Attention, DeepseekV4Config, DSV4Error
from dsv4_compile.cache import CacheFormat, allocate_layer_cache
from dsv4_compile.integrations import vllm as plugin
from dsv4_compile.integrations.vllm import _compat, limits, registration
from dsv4_compile.integrations.vllm.geometry import CacheKind, cache_kinds
from dsv4_compile.integrations.vllm.step import StepBuffers, table_sets
from dsv4_compile.integrations.vllm.weights import AttentionWeights
from dsv4_compile.metadata import AttentionMetadata, BlockTables, build_batch_metadata
from dsv4_compile.parallel import Ranks, attention_config
from dsv4_compile.parallel.split import attention_sizes

FLASH = DeepseekV4Config.flash()
SWA_LAYER, CSA_LAYER, HCA_LAYER = 0, 2, 3
KINDS = [kind for layer in (SWA_LAYER, CSA_LAYER, HCA_LAYER) for kind in cache_kinds(FLASH, layer)]
CPU = _compat.Installed("0.32.0", "cpu", _compat.MODELS["cpu"].names, _compat.COMMON_FIELDS | _compat.STATE_FIELDS)
GPU = _compat.Installed("0.26.0", "cuda", _compat.MODELS["cuda"].names, _compat.COMMON_FIELDS | _compat.RATIO_FIELDS)
BLOCK_BYTES = 1_002_240
"""Bytes of a block of V4-Flash in vLLM, from one page of a cache to the next."""


@pytest.mark.parametrize("switch", [None, "", "0"])
def test_registration_does_nothing_unless_it_is_switched_on(switch: str | None, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises
    monkeypatch.setenv(registration.EXPLAIN, "report.html")
    monkeypatch.delenv(registration.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(registration.SWITCH, switch)
    before = registration.Registered.settings
    plugin.register()
    assert registration.Registered.settings is before and not before.on


def test_registration_needs_vllm_once_it_is_switched_on(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv(registration.SWITCH, "1")
    with pytest.raises(ImportError, match="vllm"):
        plugin.register()


def test_unknown_value_of_the_switch_is_an_error() -> None:
    with pytest.raises(DSV4Error, match=r"E802.*\n.*\n.*DSV4_VLLM=every"):
        registration.Settings.from_environment({registration.SWITCH: "every"})


def test_file_of_the_report_is_checked_before_anything_is_compiled() -> None:
    on = {registration.SWITCH: "1", registration.EXPLAIN: "report.pdf"}
    with pytest.raises(DSV4Error, match=r"E802.*\n.*ends in \.html, \.json, \.txt\n.*report\.pdf"):
        registration.Settings.from_environment(on)
    assert not registration.Settings.from_environment(on | {registration.SWITCH: "0"}).explain
    assert registration.Settings.from_environment(on | {registration.EXPLAIN: "a.txt"}).explain == "a.txt"


def test_batch_invariance_is_for_decoder_layers() -> None:
    whole = {registration.SWITCH: "all"}
    settings = registration.Settings.from_environment
    assert settings(whole).batch_invariant == settings({registration.INVARIANT: "tokens"}).batch_invariant == "off"
    assert settings(whole | {registration.INVARIANT: "step"}).batch_invariant == "step"
    for wrong in (whole | {registration.INVARIANT: "on"}, {registration.SWITCH: "1", registration.INVARIANT: "step"}):
        with pytest.raises(DSV4Error, match="E802"):
            settings(wrong)


def test_known_version_is_taken_by_what_it_has() -> None:
    for version in ("0.32.0", "0.33.0", "0.32.1.dev3+local"):
        registration.check_version(replace(CPU, version=version))
    for fields in (GPU.spec_fields, CPU.spec_fields):
        registration.check_version(replace(GPU, spec_fields=fields))


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        (replace(CPU, device="xpu"), "device 'xpu': the plug-in was written for cpu and cuda"),
        (replace(CPU, version="0.26.0", names=None), "no vllm/models/deepseek_v4/cpu/model.py"),
        (replace(GPU, names=None), "no vllm/models/deepseek_v4/nvidia/model.py"),
        (replace(GPU, names=GPU.names - {"_select_dsv4_attn_cls"}), "nvidia/model.py without _select_dsv4_attn_cls"),
        (replace(CPU, spec_fields=CPU.spec_fields - {"tokens_per_state"}), "without tokens_per_state and without"),
        (replace(GPU, spec_fields=GPU.spec_fields - {"kv_quant_mode"}), "and without kv_quant_mode"),
        (replace(GPU, spec_fields=GPU.spec_fields - {"alignment"}), "specs of caches without alignment"),
    ],
    ids=["device", "old-cpu", "old-gpu", "model", "states", "ratios", "fields"],
)
def test_other_version_is_an_error_that_names_the_range(installed: _compat.Installed, why: str) -> None:
    with pytest.raises(DSV4Error) as caught:
        registration.check_version(installed)
    assert caught.value.code == "E801" and why in str(caught.value) and installed.version in str(caught.value)
    assert _compat.RANGE in str(caught.value)


def test_names_of_a_model_are_read_without_importing_it(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("from a.b import c, d as e\nimport f\nraise OSError\nclass G: h = 1\ndef i(): j = 2\n")
    assert _compat.globals_of(file) == {"c", "e", "f", "G", "i"}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (limits.Engine(drafts="deepseek_mtp"), "MTP layers"),
        (limits.Engine(drafts="dspark"), "not causal"),
        (limits.Engine(drafts="ngram"), "has not been run"),
        (limits.Engine(parallel=(("decode_context_parallel_size", 2),)), "pages of all ranks"),
        (limits.Engine(parallel=(("prefill_context_parallel_size", 2),)), "part of a request"),
        (limits.Engine(parallel=(("pipeline_parallel_size", 2),)), "its own layers only"),
        (limits.Engine(cache_dtype="bfloat16"), "FlashInfer alone"),
        (limits.Engine(attention_backend="FLASHINFER_MLA_SPARSE_DSV4"), "FlashInfer's rows"),
        (limits.Engine(indexer_fp4=True), "indexer keys are fp8"),
        (limits.Engine(microbatches=True), "one step's metadata"),
        (limits.Engine(lora=True), "LoRA"),
        (limits.Engine(quantisation=("awq", ())), "128x128"),
        (limits.Engine(dtype="float32"), "dtype float32"),
        (limits.Engine(whole_model=True), "mode 1"),
        (limits.Engine(model="the model: index_topk"), "the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configuration_has_one_reason(engine: limits.Engine, words: str) -> None:
    reasons = limits.why_unsupported(engine)
    assert len(reasons) == 1 and words in reasons[0]


@pytest.mark.parametrize("quantisation", [None, ("fp8", (128, 128)), ("deepseek_v4_fp8", (128, 128))])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_supported_configuration_has_none(quantisation: Any, cache_dtype: str) -> None:
    assert limits.why_unsupported(limits.Engine(quantisation=quantisation, cache_dtype=cache_dtype)) == []


def views(kind: CacheKind, pages: int, block_bytes: int, memory: Tensor, first: int = 0) -> Tensor:
    """Return pages `[P, 1, rows, row]` as vLLM binds them, `first` bytes after the start of each block of `memory`."""
    item = kind.dtype.itemsize
    strides = (block_bytes // item, kind.rows * kind.row, kind.row, 1)
    typed = memory[first : first + (memory.numel() - first) // item * item].view(kind.dtype)
    return typed.as_strided((pages, 1, kind.rows, kind.row), strides)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.group}-{kind.name}")
def test_pages_are_those_of_this_package_in_the_same_memory(kind: CacheKind) -> None:
    memory = torch.zeros(3 * BLOCK_BYTES, dtype=torch.uint8)
    engine_view = views(kind, 3, BLOCK_BYTES, memory, first=576)
    pages = from_dlpack(kind.pages_of(engine_view))
    formats = CacheFormat.resolve("fp8_ds_mla")
    layer = {"window": SWA_LAYER, "entries_128": HCA_LAYER, "states_128": HCA_LAYER}.get(kind.group, CSA_LAYER)
    cache = allocate_layer_cache(FLASH, layer, formats, lambda group: 3).tensors()[kind.name]
    assert (pages.shape, pages.dtype) == (cache.shape, cache.dtype)
    assert pages.data_ptr() == engine_view.data_ptr() and pages.storage_offset() == 0
    assert pages.stride(0) * pages.element_size() == BLOCK_BYTES


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_alignment_of_pages_is_that_of_their_address(kind: CacheKind) -> None:
    memory = torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)
    apart = views(kind, 2, BLOCK_BYTES, memory, first=584)
    moved = from_dlpack(apart)
    assert moved.storage_offset() == 0
    with pytest.raises(DSV4Error, match=r"E803.*\n.*multiples of 16 bytes"):
        kind.pages_of(moved)
    with pytest.raises(DSV4Error, match=r"E803.*\n.*multiples of 16 bytes"):
        kind.pages_of(views(kind, 2, BLOCK_BYTES - 8, memory))


def test_pages_of_another_shape_or_dtype_are_an_error() -> None:
    window = KINDS[0]
    for wrong in (torch.zeros(2, 1, 32, window.row, dtype=torch.uint8), torch.zeros(2, 1, window.rows, window.row)):
        with pytest.raises(DSV4Error, match="E803"):
            window.pages_of(wrong)


@pytest.fixture(scope="module")
def far_pages(tmp_path_factory: Any) -> Iterator[Tensor]:
    """Window pages of V4-Flash in blocks of vLLM, 2,200 of them: a sparse file; only two pages become memory."""
    window = KINDS[0]
    file = tmp_path_factory.mktemp("far") / "pages"
    with file.open("wb") as opened:
        opened.truncate(2200 * BLOCK_BYTES)
    memory = torch.from_file(str(file), shared=True, size=2200 * BLOCK_BYTES, dtype=torch.uint8)
    yield from_dlpack(window.pages_of(views(window, 2200, BLOCK_BYTES, memory)))
    Path(file).unlink()


def test_pages_beyond_2_31_bytes_are_written_and_read(far_pages: Tensor) -> None:
    far, heads, tokens = 2190, 2, 70
    assert far * far_pages.stride(0) > 2**31
    near = torch.zeros(4, far_pages.shape[1], dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(tokens, n, generator=random, dtype=torch.bfloat16) for n in (heads * 512, 512))
    table = torch.randn(tokens, 64, generator=random)
    sink, positions = torch.zeros(heads), torch.arange(tokens)
    results = []
    for cache, page in ((near, 1), (far_pages, far)):
        slots = page * 64 + positions
        rotated = torch.ops.dsv4.q_norm_rope_kv_insert(
            q.unflatten(1, (heads, 512)), kv, cache, slots, positions, table, 1e-6, 64, "fp8_ds_mla"
        )
        lens = (positions + 1).int()
        rows = torch.where(positions < lens[:, None], slots.int(), -1)
        results.append(torch.ops.dsv4.sparse_mla_decode(rotated, cache, rows, lens, 64, "fp8_ds_mla", 0.04, sink)[0])
    assert torch.equal(far_pages[far : far + 2], near[1:3]) and near[1:3].any()
    assert torch.equal(*results) and results[0].isfinite().all()


def test_two_groups_of_windows_make_two_sets_of_tables() -> None:
    swa, csa, hca = {"window": 0}, {"window": 0, "entries_4": 2, "states_4": 3}, {"window": 1, "entries_128": 4}
    sets, chosen = table_sets([swa, csa, hca, csa | {"window": 1}, swa])
    assert sets == [csa, hca | {"entries_4": 2, "states_4": 3}] and chosen == [0, 0, 1, 1, 0]


def test_layers_with_a_window_but_not_another_table_in_common_share_no_set() -> None:
    sets, chosen = table_sets(
        [{"window": 0, "entries_4": 1}, {"window": 0, "entries_4": 2}, {"window": 0, "entries_4": 1}]
    )
    assert len(sets) == 2 and chosen == [0, 1, 0]


def flatten(metadata: AttentionMetadata) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(metadata)
    return leaves


def test_metadata_is_that_of_the_batch_and_of_nothing_for_padding() -> None:
    buffers = StepBuffers(window=128, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024)
    groups = {
        "window": 64,
        "entries_4": 256,
        "keys_4": 256,
        "entries_128": 256,
        "states_4": 4,
        "key_states_4": 4,
        "states_128": 8,
    }
    numbers = {group: buffers.add_table((group,), tokens) for group, tokens in groups.items()}
    random = torch.Generator().manual_seed(0)
    tables = {
        group: torch.randint(1, 999, (3, 1024 // tokens), generator=random, dtype=torch.int32)
        for group, tokens in groups.items()
    }
    starts, lens = torch.tensor([0, 1, 30, 33], dtype=torch.int32), torch.tensor([700, 229, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip((700, 229, 40), (1, 29, 3), strict=True)])
    positions = torch.cat((positions, torch.full((7,), 5)))  # an engine leaves what was there
    buffers.load(torch.tensor([0, 60]), torch.arange(60))  # a larger step before
    for group, table in tables.items():
        buffers.load_table(numbers[group], torch.cat((table, table), 1) if group == "entries_4" else table)
    buffers.load(starts, torch.cat((torch.arange(33), torch.full((7,), -1))))
    step = buffers.step(positions, [numbers])
    assert step.shape == positions.shape, "layers may look at the shape of what they take for positions"
    (got,) = step.metadata
    padded = {group: torch.cat((table, table.new_zeros(1, table.shape[1]))) for group, table in tables.items()}
    want = build_batch_metadata(
        query_start_loc=starts,
        seq_lens=lens,
        num_tokens=40,
        block_tables=BlockTables.of(padded),
        window=128,
        max_model_len=1024,
    )
    assert all(map(torch.equal, flatten(got), flatten(want)))
    buffers.clear()
    (nothing,) = buffers.step(positions, [numbers]).metadata
    assert not nothing.is_valid_token.any() and (nothing.window.slot_mapping == -1).all()
    assert nothing.sources[128] is not None and (nothing.sources[128].lens == 0).all()


def test_table_of_a_group_keeps_its_address() -> None:
    buffers = StepBuffers(128, 2, 8, 256)
    number = buffers.add_table(("a", "b"), 64)
    table = buffers.table(number)
    assert buffers.add_table(("a", "b"), 64) == number and buffers.table(number) is table
    assert buffers.add_table(("c",), 64) != number


SMALL = DeepseekV4Config(
    hidden_size=128, num_layers=1, num_heads=2, q_lora_rank=128, o_groups=2, o_lora_rank=128, compress_ratios=(4,)
)


def weights(fp8: bool) -> tuple[DeepseekV4Attention, dict[str, Tensor]]:
    """Return a layer and random tensors for it, by the names that vLLM's mapper gives them."""
    layer = DeepseekV4Attention(SMALL, 0, kv_cache_dtype="fp8_ds_mla", fp8=fp8, max_seq_len=256)
    tensors = {}
    for name, parameter in layer.named_parameters():
        scale = parameter.dtype is torch.float8_e8m0fnu
        value = torch.ones(parameter.shape) if scale else torch.randn(parameter.shape)
        vllm_name = f"{name.removesuffix('.scale')}.weight_scale_inv" if name.endswith(".scale") else name
        tensors[f"layers.0.attn.{vllm_name}"] = value.to(parameter.dtype)
    return layer, tensors


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "e4m3"])
def test_weights_come_in_pieces_and_others_pass_by(fp8: bool) -> None:
    layer, tensors = weights(fp8)
    loader = AttentionWeights({0: layer})
    first, *rest = tensors.items()
    other = ("layers.0.ffn.gate.weight", torch.zeros(1))
    assert list(loader.others([first, other])) == [other]
    assert [name for name, _ in loader.others([*rest, ("norm.weight", torch.ones(1))])] == ["norm.weight"]
    assert loader.finish() == {f"layers.0.attn.layer.{name}" for name, _ in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        vllm_name = f"{name.removesuffix('.scale')}.weight_scale_inv" if name.endswith(".scale") else name
        assert torch.equal(parameter.float(), tensors[f"layers.0.attn.{vllm_name}"].float())


def test_rank_loads_its_heads_and_groups() -> None:
    _, tensors = weights(True)
    for rank in range(2):
        ranks = Ranks(rank, 2, "")
        layer = DeepseekV4Attention(attention_config(SMALL, ranks, fp8=True), 0, kv_cache_dtype="fp8_ds_mla", fp8=True)
        loader = AttentionWeights({0: layer}, ranks)
        assert list(loader.others(tensors.items())) == []
        loader.finish()
        assert layer.wq_b.weight.shape[0] == SMALL.num_heads * SMALL.head_dim // 2
        for name, half in (("wq_b.weight", 0), ("attn_sink", 0), ("wo_a.weight", 0), ("wo_b.weight", 1)):
            want = tensors[f"layers.0.attn.{name}"].chunk(2, half)[rank]
            assert torch.equal(layer.get_parameter(name).float(), want.float()), name
        scale = tensors["layers.0.attn.wo_b.weight_scale_inv"].chunk(2, 1)[rank]
        assert torch.equal(layer.wo_b.scale.float(), scale.float())


@pytest.mark.parametrize(("number", "words"), [(2, ""), (4, "2 attention heads, 2 output groups"), (3, "use 1 or 2")])
def test_ranks_that_do_not_divide_attention_are_a_reason(number: int, words: str) -> None:
    reason = limits.why_undivided(attention_sizes(SMALL, fp8=True), number)
    assert bool(reason) == bool(words) and words in reason


def test_weight_that_does_not_come_is_an_error_with_its_name() -> None:
    layer, tensors = weights(False)
    loader = AttentionWeights({0: layer})
    del tensors["layers.0.attn.wo_b.weight"]
    assert list(loader.others(tensors.items())) == []
    with pytest.raises(DSV4Error, match=r"E207.*\n.*\n.*layers\.0\.attn\.wo_b\.weight"):
        loader.finish()
