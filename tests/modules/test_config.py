"""Tests of configurations: published models, both spellings of a config.json, RoPE tables, unsupported values."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config as HFConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4_compile.config import DeepseekV4Config, Rope, Yarn
from dsv4_compile.rope_tables import cos_sin_cache, inv_freq

YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4, 0]
PRO_RATIOS = [128, 128, *[4, 128] * 29, 4, 0]

# Attention fields of the models' own config.json, in DeepSeek's spelling.
FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": FLASH_RATIOS,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", **YARN},
    "max_position_embeddings": 1048576,
}
PRO = {
    **FLASH,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": PRO_RATIOS,
    "index_topk": 1024,
}
MODELS = {"flash": (FLASH, DeepseekV4Config.flash()), "pro": (PRO, DeepseekV4Config.pro())}


def in_transformers_spelling(config: dict[str, Any]) -> HFConfig:
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    return HFConfig(**{**config, "compress_ratios": ratios, "rope_scaling": {"rope_type": "yarn", **YARN}})


@pytest.mark.parametrize(
    "model, kinds", [("flash", {"swa": 2, "csa": 21, "hca": 20}), ("pro", {"csa": 30, "hca": 31})], ids=MODELS
)
def test_published_layers(model: str, kinds: dict[str, int]) -> None:
    config = MODELS[model][1]
    assert Counter(config.kind(i) for i in range(config.num_layers)) == kinds
    # The entry after the last layer belongs to the MTP layer, which has a window only.
    assert len(config.compress_ratios) == config.num_layers + 1
    assert config.kind(config.num_layers) == "swa"
    assert config.compressed_ratios == (4, 128)
    assert config.softmax_scale == 512**-0.5


@pytest.mark.parametrize("model", MODELS)
def test_deepseeks_config_gives_the_published_model(model: str, tmp_path: Path) -> None:
    raw, expected = MODELS[model]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    for source in (raw, path, str(path), tmp_path):
        assert DeepseekV4Config.from_hf(source) == expected


@pytest.mark.parametrize("model", MODELS)
def test_transformers_config_gives_the_published_model(model: str, tmp_path: Path) -> None:
    """Read an object, its dict, and the file that it saves. transformers has no MTP entry."""
    raw, published = MODELS[model]
    theirs = in_transformers_spelling(raw)
    expected = replace(published, compress_ratios=published.compress_ratios[: published.num_layers])
    theirs.save_pretrained(tmp_path)
    for source in (theirs, theirs.to_dict(), tmp_path):
        assert DeepseekV4Config.from_hf(source) == expected


def test_ratio_0_is_ratio_1_and_layers_are_data() -> None:
    config = DeepseekV4Config.flash().with_layers(0, 1, 128)
    assert config.num_layers == 3
    assert config.compress_ratios == (1, 1, 128)
    assert [config.kind(i) for i in range(3)] == ["swa", "swa", "hca"]
    assert config.compressed_ratios == (128,)
    assert hash(config) == hash(replace(config))


def test_only_compressed_layers_have_yarn() -> None:
    config = DeepseekV4Config.flash()
    assert config.rope(1) == Rope(10000.0, 64)
    assert config.rope(4) == config.rope(128) == Rope(160000.0, 64, Yarn(16.0, 65536, 32.0, 1.0))
    without = DeepseekV4Config.from_hf({**FLASH, "rope_scaling": None})
    assert without.rope(4) == Rope(160000.0, 64)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32},
        {"rope_theta": 5000, "compress_rope_theta": 40000},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 4, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2}},
        {"rope_scaling": None},
    ],
    ids=["published", "small", "bases", "context", "betas", "no-yarn"],
)
def test_frequencies_equal_transformers(change: dict[str, Any]) -> None:
    """The two interpolate in a different order, so the last bit may differ."""
    theirs = in_transformers_spelling(FLASH).to_dict() | {"rope_parameters": None}
    for name in ("qk_rope_head_dim", "partial_rotary_factor"):
        theirs.pop(name, None)
    rope = {"qk_rope_head_dim": 64, "rope_scaling": {"rope_type": "yarn", **YARN}}
    config = HFConfig(**{**theirs, **rope, **change})
    rotary, ours = DeepseekV4RotaryEmbedding(config), DeepseekV4Config.from_hf(config)
    for ratio, label in ((1, "main"), (4, "compress"), (128, "compress")):
        torch.testing.assert_close(inv_freq(ours.rope(ratio)), getattr(rotary, f"{label}_inv_freq"), rtol=2e-7, atol=0)
        assert getattr(rotary, f"{label}_attention_scaling") == 1.0


NESTED: dict[str, dict[str, Any]] = {
    "as saved": {},
    "beta_fast of 0": {"beta_fast": 0},
    "betas of None": {"beta_fast": None, "beta_slow": None},
    "betas in reverse": {"beta_fast": 1.0, "beta_slow": 32.0},
    "equal betas": {"beta_fast": 4.0, "beta_slow": 4.0},
    "mscales that cancel": {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0},
    "a factor that scales nothing": {"attention_factor": None, "factor": 1.0},
    "truncate": {"truncate": False},
    "another base": {"rope_theta": 40000.0},
    "no YaRN": {"rope_type": "default"},
}


@pytest.mark.parametrize("what", NESTED)
@pytest.mark.parametrize("outside", [{}, {"partial_rotary_factor": 0.25}, {"qk_rope_head_dim": 32}])
def test_frequencies_of_nested_parameters_equal_transformers(what: str, outside: dict[str, Any]) -> None:
    """Dims that stand outside of the two dicts count for neither."""
    raw = (
        {name: value for name, value in FLASH.items() if name != "qk_rope_head_dim"} | nested(**NESTED[what]) | outside
    )
    ours = DeepseekV4Config.from_hf(raw)
    ratios = raw["compress_ratios"][: raw["num_hidden_layers"]]
    config = HFConfig(**copy.deepcopy({**raw, "compress_ratios": ratios}))
    assert replace(DeepseekV4Config.from_hf(config), compress_ratios=ours.compress_ratios) == ours
    rotary = DeepseekV4RotaryEmbedding(config)
    for ratio, label in ((1, "main"), (4, "compress")):
        torch.testing.assert_close(inv_freq(ours.rope(ratio)), getattr(rotary, f"{label}_inv_freq"), rtol=2e-7, atol=0)
        assert getattr(rotary, f"{label}_attention_scaling") == 1.0


@pytest.mark.parametrize("missing", ["rope_theta", "original_max_position_embeddings", "partial_rotary_factor"])
def test_what_nested_parameters_lack_is_completed_as_transformers_does(missing: str) -> None:
    raw = {**FLASH, **nested(), "partial_rotary_factor": 0.125}
    for parameters in raw["rope_parameters"].values():
        parameters.pop(missing, None)
    ratios = raw["compress_ratios"][: raw["num_hidden_layers"]]
    rotary = DeepseekV4RotaryEmbedding(HFConfig(**copy.deepcopy({**raw, "compress_ratios": ratios})))
    frequencies = inv_freq(DeepseekV4Config.from_hf(raw).rope(4))
    torch.testing.assert_close(frequencies, rotary.compress_inv_freq, rtol=2e-7, atol=0)


def test_worked_frequencies() -> None:
    """With dim 64 and base 160000, pairs up to 15 keep their frequency, and pairs from 25 on turn 16 times slower."""
    frequencies = inv_freq(DeepseekV4Config.flash().rope(4))
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    expected = [f * (1 - s) + f / 16 * s for i, f in enumerate(plain) for s in [min(max((i - 15) / 10, 0.0), 1.0)]]
    torch.testing.assert_close(frequencies.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_table_rows_are_cosines_then_sines_of_the_position() -> None:
    rope = DeepseekV4Config.flash().rope(4)
    table = cos_sin_cache(rope, 300)
    assert table.shape == (301, 64)
    assert table.dtype is torch.float32
    angle = 299 * inv_freq(rope)
    assert torch.equal(table[299], torch.cat((angle.cos(), angle.sin())))
    assert table[:300].isfinite().all() and table[300].isnan().all()
    assert cos_sin_cache(rope, 300) is table
    with torch.device("meta"):
        assert cos_sin_cache(rope, 301).device.type == "cpu"


def nested(**compress: Any) -> dict[str, Any]:
    """Return a change of `FLASH` to RoPE parameters in transformers' nested form."""
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    yarn = {**main, "rope_type": "yarn", **YARN, "rope_theta": 160000.0, "attention_factor": 1.0}
    return {"rope_scaling": None, "rope_parameters": {"main": main, "compress": {**yarn, **compress}}}


V41_RATIOS = [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "v4.1-ratios": ({"num_hidden_layers": 40, "compress_ratios": V41_RATIOS}, r"compress_ratios with \[2\]"),
    "v4.1-by-name": ({"model_type": "deepseek_v41"}, "deepseek_v41"),
    "v3": ({"model_type": "deepseek_v3"}, "deepseek_v3"),
    "kv-heads": ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
    "too-few-ratios": ({"compress_ratios": FLASH_RATIOS[:42]}, "42 compress_ratios for 43 layers"),
    "no-ratios": ({"compress_ratios": None}, "without compress_ratios or layer_types"),
    "no-dims": ({"hidden_size": None, "num_attention_heads": None}, "without hidden_size, num_attention_heads"),
    "layer-types": ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "full_attention"),
    "compress-rates": ({"compress_rates": {"heavily_compressed_attention": 64}}, "64"),
    "groups": ({"o_groups": 7}, "o_groups=7"),
    "rope-dim": ({"qk_rope_head_dim": 256}, "rope_dim=256"),
    "odd-rope-dim": ({"qk_rope_head_dim": 63}, "rope_dim=63"),
    "rope-type": ({"rope_scaling": {"type": "llama3", **YARN}}, "llama3"),
    "attention-factor": ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.277}}, "1.277"),
    "yarn-without-factor": ({"rope_scaling": {"type": "yarn"}}, "factor=None"),
    "yarn-on-windows": (
        {"rope_scaling": None, "rope_parameters": {"main": {"rope_type": "yarn", **YARN}, "compress": {}}},
        "'yarn' on window layers",
    ),
    "nested-without-attention-factor": (nested(attention_factor=None), "attention_factor=None(.|\n)*1.2773"),
    "nested-mscale": (nested(attention_factor=None, mscale=1.0, mscale_all_dim=0.5), "1.1218"),
    "nested-linear": (nested(rope_type="linear"), "'linear' on compressed layers"),
    "nested-dims": (nested(partial_rotary_factor=0.25), "64 rotated dims on window layers and 128"),
    "negative-beta": (nested(beta_slow=-1.0), "beta_slow=-1.0"),
    "no-base": (nested(rope_theta=0), "compress with rope_theta=0"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_configurations_raise(case: str) -> None:
    change, message = UNSUPPORTED[case]
    with pytest.raises(ValueError, match=rf"E205(.|\n)*{message}"):
        DeepseekV4Config.from_hf({**FLASH, **change})


def test_sources_without_a_configuration_raise(tmp_path: Path) -> None:
    for source in (tmp_path / "config.json", str(tmp_path), 7):
        with pytest.raises(ValueError, match="E205"):
            DeepseekV4Config.from_hf(source)


@pytest.mark.parametrize("layer", [-1, 44])
def test_a_layer_that_does_not_exist_raises(layer: int) -> None:
    with pytest.raises(ValueError, match=r"E205(.|\n)*layer_idx="):
        DeepseekV4Config.flash().kind(layer)
