"""Tests of saving quantised models: transformers and `load` read what `save_pretrained` writes, bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from tests.hf import official
from tests.hf.small import assert_equal_bits, random_ids, stored

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4 experts": {"experts": official.mxfp4},
    "e4m3 experts": {"experts": official.e4m3},
    "floating experts": {"experts": None},
    "e4m3 experts, floating wo_a": {"experts": official.e4m3, "wo_a": None},
}


def float32_scales(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.float() for name, tensor in tensors.items() if name.endswith(".scale")})


def load(folder: Path, **options: Any) -> Any:
    return hf.load(folder, device="cpu", **SIZES, **options)


def read(folder: Path, **options: Any) -> Any:
    """Read a folder with transformers, which must take every tensor of it."""
    model, report = DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


def dequantised(folder: Path) -> Any:
    return read(folder, quantization_config=FineGrainedFP8Config(dequantize=True))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let transformers keep weights as they are stored, which it does on GPUs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
        yield


@torch.no_grad()
def check_saved(out: Path, model: Any, source: Path) -> None:
    """Check that `out`, saved of `model` that was loaded from `source`, is read as both are."""
    ids, state = random_ids(2, 20), model.state_dict()
    again = load(out)
    assert_equal_bits(again.state_dict(), state)
    assert torch.equal(again(ids).logits, model(ids).logits)
    with as_on_a_gpu():
        assert_equal_bits(read(out).state_dict(), state)
    got, want = dequantised(out), dequantised(source)
    assert_equal_bits(got.state_dict(), want.state_dict())
    assert torch.equal(got(ids, use_cache=False).logits, want(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_and_load_read_what_is_saved_of_a_loaded_model(tmp_path: Path, name: str) -> None:
    folder, _ = official.make(tmp_path / "official", **FORMATS[name])
    model = load(folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size="500KB")
    check_saved(tmp_path / "saved", model, folder)
    hf.revert(copy.deepcopy(model)).save_pretrained(tmp_path / "reverted")
    assert_equal_bits(stored(tmp_path / "reverted"), stored(tmp_path / "saved"))


def test_scales_in_float32_are_saved(tmp_path: Path) -> None:
    folder, _ = official.make(tmp_path / "official", experts=official.e4m3)
    changed = official.changed(folder, tmp_path / "float32", float32_scales)
    model = load(changed)
    model.save_pretrained(tmp_path / "saved")
    check_saved(tmp_path / "saved", model, changed)


def test_the_configuration_that_is_saved_says_what_is_stored(tmp_path: Path) -> None:
    folder, _ = official.make(tmp_path / "official", experts=official.e4m3)
    silent = official.changed(folder, tmp_path / "silent", lambda tensors: None, quantization_config=None)
    model = load(silent)
    model.save_pretrained(tmp_path / "saved")
    check_saved(tmp_path / "saved", model, folder)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["quantization_config"]["expert_dtype"] == saved["expert_dtype"] == "fp8"
    assert "modules_to_not_convert" not in saved["quantization_config"]


@pytest.mark.parametrize("options", [{}, {"dequantize": True}], ids=str)
def test_a_floating_model_is_saved_without_a_quantisation(tmp_path: Path, options: dict[str, Any]) -> None:
    if options:
        folder, _ = official.make(tmp_path / "official")
    else:
        folder = tmp_path / "floating"
        official.tiny_model(**official.SIZES).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(official.CONFIG))
    loaded = load(folder, **options)
    loaded.save_pretrained(tmp_path / "saved")
    assert_equal_bits(read(tmp_path / "saved").state_dict(), loaded.state_dict())
    assert not {"quantization_config", "expert_dtype"} & json.loads((tmp_path / "saved/config.json").read_text()).keys()


@pytest.mark.parametrize("experts", [official.mxfp4, official.e4m3])
def test_what_is_saved_is_what_transformers_saves(tmp_path: Path, experts: Any) -> None:
    folder, _ = official.make(tmp_path / "official", experts=experts)
    expert_dtype = "fp4" if experts is official.mxfp4 else "fp8"
    same = official.changed(folder, tmp_path / "same", lambda tensors: None, expert_dtype=expert_dtype)
    with as_on_a_gpu():
        model = read(same)
    model.save_pretrained(tmp_path / "plain")
    load(same).save_pretrained(tmp_path / "loaded")
    hf.convert(model, **SIZES).save_pretrained(tmp_path / "converted")
    for name in ("loaded", "converted"):
        assert_equal_bits(stored(tmp_path / name), stored(tmp_path / "plain"))


@pytest.mark.parametrize("experts", [official.mxfp4, official.e4m3])
def test_scales_of_all_experts_are_not_saved(tmp_path: Path, experts: Any) -> None:
    folder, _ = official.make(tmp_path / "official", experts=experts)
    with pytest.raises(DSV4Error) as raised:
        load(folder).save_pretrained(tmp_path / "saved", save_original_format=False)
    assert raised.value.code == "E208" and not (tmp_path / "saved").exists()


def test_a_transformers_that_loses_scales_saves_no_quantised_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "update_weight_conversions", lambda self, weight_conversions: [])
    folder, _ = official.make(tmp_path / "official")
    with pytest.raises(DSV4Error, match="loses scales"):
        load(folder).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    load(folder, dequantize=True).save_pretrained(tmp_path / "saved")
