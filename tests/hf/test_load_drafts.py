"""Tests of draft layers in checkpoints: what is loaded, refused before memory is allocated, saved and reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import DSV4Error, hf
from dsv4_compile.checkpoints.reader import Reader
from dsv4_compile.hf.loading import load as load_module
from dsv4_compile.hf.loading.checkpoint import read_checkpoint
from dsv4_compile.hf.loading.folder_report import rows
from dsv4_compile.hf.loading.placement import place
from dsv4_compile.modules.linear import Fp8Linear
from dsv4_compile.parallel import split_of
from tests.hf import official, official_drafts
from tests.hf.drafting import NOISE, Formulas, close, inject, propose, taps_of
from tests.hf.drafting import official_drafts as exported
from tests.hf.small import random_ids

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 256, "device": "cpu"}


def load(folder: Path, **options: Any) -> Any:
    return hf.load(folder, **SIZES | options)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Tensor]]:
    return official_drafts.make(tmp_path_factory.mktemp("dspark"), "dspark")


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Tensor]]:
    return official_drafts.make(tmp_path_factory.mktemp("mtp"), "mtp")


def check_logits(model: Any, values: dict[str, Tensor]) -> None:
    """Compare drafts of random taps with the formulas and these values."""
    drafts, length = model.dsv4_drafts, 40
    embed, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    want = Formulas(values, model.config, embed, head)
    taps, ids = taps_of(model, length), random_ids(length)
    inject(model, taps, 0, 1, ids)
    chosen, logits = propose(model, [-1, int(ids[-1])], [0, length])
    if drafts.kind == "mtp":
        close(logits[1], want.mtp(taps.view(length, 4, 128), ids.tolist(), drafts.num_drafts))
        return
    _, base = want.dspark(taps, int(ids[-1]), NOISE, 5)
    close(logits[1], want.markov(base, [int(ids[-1]), *chosen[1, :-1].tolist()]))


# What is loaded.


def test_dequantised_drafts_have_the_stored_values_and_their_logits(dspark: Any, mtp: Any) -> None:
    """DSpark has three stages, although `num_nextn_predict_layers` is 1; MTP one."""
    for (folder, _, values), stages in ((dspark, 3), (mtp, 1)):
        model = load(folder, dequantize=True, dtype=torch.float32)
        drafts = model.dsv4_drafts
        assert len(drafts.model.layers) == stages
        loaded = exported(drafts)
        assert loaded.keys() == values.keys()
        assert [name for name in values if not torch.equal(loaded[name], values[name])] == []
        check_logits(model, values)


def test_formats_are_read_tensor_by_tensor(dspark: Any, mtp: Any, tmp_path: Path) -> None:
    """MXFP4 experts and e8m0 scales, whatever the configuration says of the target; fp32 mixes, sinks and biases."""
    for folder, _, _ in (dspark, mtp):
        drafts = load(folder).dsv4_drafts
        layer = drafts.model.layers[0]
        assert layer.mlp.experts.gate_up_proj.dtype is torch.int8
        assert layer.mlp.experts.gate_up_proj_scale_inv.dtype is torch.float8_e8m0fnu
        assert isinstance(layer.self_attn.dsv4.wq_a, Fp8Linear)
        for tensor in (layer.attn_hc.fn, layer.ffn_hc.base, layer.self_attn.sinks, drafts.model.hc_head.hc_scale):
            assert tensor.dtype is torch.float32
        assert layer.mlp.gate.e_score_correction_bias.dtype is torch.float32
        projection = drafts.main_proj if drafts.kind == "dspark" else drafts.e_proj
        assert projection.weight.dtype is torch.float8_e4m3fn
        assert projection.weight_scale_inv.dtype is torch.float8_e8m0fnu
    floating = ("main_proj", "mtp.1.attn.wkv")
    folder, _, values = official_drafts.make(
        tmp_path / "requantised", "dspark", floating=floating, experts=official.e4m3, config={"expert_dtype": "fp8"}
    )
    drafts = load(folder).dsv4_drafts
    assert drafts.main_proj.weight.dtype is torch.bfloat16 and drafts.main_proj.weight_scale_inv is None
    kinds = [layer.self_attn.kv_proj.weight.dtype for layer in drafts.model.layers]
    assert kinds == [torch.float8_e4m3fn, torch.bfloat16, torch.float8_e4m3fn]
    assert drafts.model.layers[2].mlp.experts.down_proj.dtype is torch.float8_e4m3fn
    check_logits(load(folder, dequantize=True, dtype=torch.float32), values)


def test_quantised_drafts_draft_near_their_values(dspark: Any) -> None:
    """Inputs of e4m3 linears are quantised, so logits are near those of the formulas, and finite."""
    model = load(dspark[0], dtype=torch.float32)
    taps = taps_of(model, 40)
    inject(model, taps, 0, 0)
    _, logits = propose(model, [3], [40])
    want = Formulas(dspark[2], model.config, model.model.embed_tokens.weight, model.lm_head.weight)
    base = want.dspark(taps, 3, NOISE, 5)[1][0]
    lost = (logits[0, 0] - want.markov(base[None], [3])[0]).norm() / base.norm()
    assert 1e-4 < lost < 0.3


def test_drafts_use_plain_rope_where_no_layer_of_the_target_does(dspark: Any) -> None:
    """Check theta 10000 without YaRN for a model that begins with HCA layers, as V4-Pro does."""
    table = load(dspark[0]).dsv4_drafts.model.layers[0].self_attn.dsv4.cos_sin
    angle = 200 * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(table[200, :8], angle.cos(), atol=1e-4, rtol=0)
    assert table.shape[0] >= 256 + 5 + 1


def test_separate_embedding_and_head_of_drafts_are_used(dspark: Any, tmp_path: Path) -> None:
    """Checkpoints whose hidden states were rotated store both for their draft layers."""
    embed, head = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16() * 0.1

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {"mtp.0.embed.weight": embed, "mtp.2.head.weight": head}

    model = load(official.changed(dspark[0], tmp_path / "rotated", add), dequantize=True, dtype=torch.float32)
    want = Formulas(dspark[2], model.config, embed, head)
    taps = taps_of(model, 9)
    inject(model, taps, 0, 0)
    close(propose(model, [3], [9])[1][0, 0], want.markov(want.dspark(taps, 3, NOISE, 5)[1][:1], [3])[0])


def test_the_markov_matrices_are_whole_on_every_rank() -> None:
    for name in ("markov_w1", "markov_w2", "main_proj.weight", "main_proj.weight_scale_inv", "e_proj.weight"):
        assert split_of(name) is None
    assert split_of("model.layers.0.mlp.experts.gate_up_proj") is not None


def test_the_number_of_stages_has_three_sources(dspark: Any, tmp_path: Path) -> None:
    """`n_mtp_layers`, also of inference/config.json, else `compress_ratios`, else the tensors."""
    short = [0, 4, 128, 4]
    for i, config in enumerate(({"n_mtp_layers": 3, "compress_ratios": [*short, 0]}, {"compress_ratios": short})):
        folder = official.changed(dspark[0], tmp_path / str(i), lambda _: None, **config)
        assert len(load(folder).dsv4_drafts.model.layers) == 3
    folder = official.changed(dspark[0], tmp_path / "inference", lambda _: None, compress_ratios=[*short, 0])
    with pytest.raises(DSV4Error, match=r"draft layers \[0, 1, 2\]"):
        load(folder)
    (folder / "inference").mkdir()
    (folder / "inference" / "config.json").write_text(json.dumps({"n_mtp_layers": 3}))
    assert len(load(folder).dsv4_drafts.model.layers) == 3


# What is refused.


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [key for key in tensors if key.startswith(names)]:
            del tensors[name]

    return change


def with_value(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


W1 = "mtp.2.markov_head.markov_w1.weight"
REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], None], dict[str, Any], str]] = {
    "missing expert": (without("mtp.1.ffn.experts.2.w3"), {}, "mtp.1.ffn.experts.2.w3"),
    "missing shared expert": (without("mtp.0.ffn.shared_experts.w2"), {}, "mtp.0.ffn.shared_experts.w2"),
    "missing scale": (without("mtp.0.main_proj.scale"), {}, "mtp.0.main_proj.scale"),
    "missing norm": (without("mtp.2.norm"), {}, "mtp.2.norm.weight"),
    "missing head": (without("mtp.2.hc_head_fn"), {}, "mtp.2.hc_head_fn"),
    "missing markov": (without(W1), {}, W1),
    "missing stage": (without("mtp.2."), {}, r"draft layers \[0, 1\]"),
    "extra tensor": (with_value("mtp.1.attn.compressor.ape", torch.zeros(4)), {}, "mtp.1.attn.compressor.ape"),
    "hash table": (with_value("mtp.0.ffn.gate.tid2eid", torch.zeros(512, 2).long()), {}, "mtp.0.ffn.gate.tid2eid"),
    "other shape": (with_value(W1, torch.zeros(512, 16).bfloat16()), {}, W1),
    "other dtype": (with_value(W1, torch.zeros(512, 32).long()), {}, W1),
    "both kinds": (with_value("mtp.0.e_proj.weight", torch.zeros(128, 128).bfloat16()), {}, "main_proj.weight and"),
    "neither kind": (without("mtp.0.main_proj"), {}, "main_proj.weight or mtp.0.e_proj.weight"),
    "extra stage": (with_value("mtp.3.norm.weight", torch.zeros(128).bfloat16()), {}, r"\[0, 1, 2, 3\]"),
    "no block size": (without("none"), {"dspark_block_size": 0}, "dspark_block_size=0"),
    "tap beyond the model": (without("none"), {"dspark_target_layer_ids": [3, 4]}, "layers 0 to 3"),
    "noise beyond the vocabulary": (without("none"), {"dspark_noise_token_id": 512}, "vocab_size=512"),
    "compressed draft layers": (
        without("none"),
        {"compress_ratios": [0, 4, 128, 4, 0, 4, 0]},
        "draft layers of ratios",
    ),
    "nonsense field": (without("none"), {"dspark_target_layer_ids": "last"}, "dspark_target_layer_ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_drafts_are_refused_by_name_before_memory_is_allocated(
    dspark: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, config, words = REFUSED[name]
    folder = official.changed(dspark[0], tmp_path / "damaged", change, **config)
    monkeypatch.setattr(load_module, "allocate", None)
    monkeypatch.setattr(Reader, "read", None)
    with pytest.raises(DSV4Error, match=words):
        load(folder)
    report = [row for row in rows(folder) if row.level == "fix"]
    assert any(row.name.startswith("E2") for row in report)


def test_damaged_drafts_can_be_left_out(dspark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = official.changed(dspark[0], tmp_path / "damaged", without("mtp.1."))
    with pytest.raises(DSV4Error, match='drafts="off"'):
        load(folder)
    with caplog.at_level(logging.WARNING):
        model = load(folder, drafts="off")
    assert model.dsv4_drafts is None and "draft layers are not loaded, mtp.0, mtp.2" in caplog.text


def test_a_folder_without_drafts_says_so_where_they_are_asked_for(tmp_path: Path) -> None:
    folder, _ = official.make(tmp_path / "plain")
    assert load(folder).dsv4_drafts is None
    with pytest.raises(DSV4Error, match=r"no draft layers \(mtp"):
        load(folder, drafts="on")
    for wrong in ("yes", True, None):
        with pytest.raises(DSV4Error, match="E201"):
            load(folder, drafts=wrong)


def test_drafts_are_loaded_if_they_fit_next_to_the_model(
    dspark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[int] = []
    check_memory = load_module.check_memory
    monkeypatch.setattr(load_module, "check_memory", lambda *args: counted.append(sum(args[2:])) or check_memory(*args))
    load(dspark[0])
    load(dspark[0], drafts="off")
    both, target = counted
    for free, kept in ((both * 1.06, True), (both * 1.04, False), (target, False)):
        monkeypatch.setattr(load_module, "free_memory", lambda _, free=int(free): free)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert (load(dspark[0]).dsv4_drafts is not None) == kept
        assert ("do not fit next to the model" in caplog.text) != kept
    with pytest.raises(DSV4Error, match="E210"):
        load(dspark[0], drafts="on")


def test_how_many_tokens_are_drafted(dspark: Any, mtp: Any) -> None:
    assert load(mtp[0]).dsv4_drafts.num_drafts == 1
    assert load(mtp[0], num_drafts=3).dsv4_drafts.num_drafts == 3
    for folder, number in ((mtp[0], 4), (mtp[0], 0), (mtp[0], True), (dspark[0], 4)):
        with pytest.raises(DSV4Error, match="E201"):
            load(folder, num_drafts=number)
    with pytest.raises(DSV4Error, match="E204"):
        load(dspark[0], max_step_tokens=5)
    assert load(dspark[0], max_step_tokens=6).dsv4_drafts.num_drafts == 5


def test_memory_of_drafts_is_counted_before_they_are_loaded(dspark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(load_module, "check_memory", lambda _, __, weights, caches: counted.append((weights, caches)))
    model = load(dspark[0])
    load(dspark[0], drafts="off")
    drafts = model.dsv4_drafts
    weights = sum(parameter.nbytes for parameter in drafts.parameters()) + sum(b.nbytes for b in buffers(drafts))
    assert counted[0][0] - counted[1][0] == weights
    assert counted[0][1] - counted[1][1] == drafts.caches.nbytes


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def buffers(drafts: Any) -> list[Tensor]:
    state = drafts.state_dict(keep_vars=True)
    return [buffer for name, buffer in drafts.named_buffers() if name in state]


# What is saved and reported.


def test_saved_drafts_load_equal(dspark: Any, mtp: Any, tmp_path: Path) -> None:
    """Also over an earlier save, which has left an index and files."""
    options: dict[str, Any]
    for name, (folder, _, _), options in (("stored", dspark, {}), ("floating", mtp, {"dequantize": True})):
        model, target = load(folder, **options), tmp_path / name
        for _ in range(2):
            model.save_pretrained(target)
        again = load(target)
        assert again.dsv4_drafts.settings == model.dsv4_drafts.settings
        want, loaded = model.dsv4_drafts.state_dict(), again.dsv4_drafts.state_dict()
        assert loaded.keys() == want.keys()
        assert [key for key in want if not torch.equal(bits(loaded[key]), bits(want[key]))] == []
    with pytest.raises(DSV4Error, match="push_to_hub"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    check_logits(load(tmp_path / "stored", dequantize=True, dtype=torch.float32), dspark[2])


def test_a_reverted_model_is_saved_without_drafts(dspark: Any, tmp_path: Path) -> None:
    hf.revert(load(dspark[0])).save_pretrained(tmp_path / "reverted")
    assert load(tmp_path / "reverted").dsv4_drafts is None


def test_the_report_names_drafts_and_counts_their_memory(dspark: Any, mtp: Any) -> None:
    for (folder, _, _), words in ((dspark, "dspark, 5 drafts a step"), (mtp, "mtp, 1 to 3 drafts a step")):
        report = {row.name: row for row in rows(folder)}
        assert words in report["draft layers"].value and report["draft layers"].value.startswith("mtp.0")
        assert not [row for row in report.values() if row.level == "fix"]
    checkpoint = read_checkpoint(dspark[0])
    assert len(checkpoint.drafts) == 169 and not place(checkpoint).problems.count
