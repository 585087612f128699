"""Tests of the limits of a folder: known keys, sizes that its headers have, links and names that stay inside."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_compile import DeepseekV4Config, DSV4Error, hf
from dsv4_compile.checkpoints.json_text import parse
from dsv4_compile.config import Yarn
from dsv4_compile.hf.loading import folder_config as model_config
from dsv4_compile.hf.loading import folder_report
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.loading import load_attention_from_safetensors
from dsv4_compile.modules import DeepseekV4Attention
from tests.hf import official

INDEX = "model.safetensors.index.json"
SIZES: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 64, "device": "cpu"}
PREFIX = "layers.1.attn."


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.make(tmp_path_factory.mktemp("official"))[0]


@pytest.fixture(scope="module")
def layer(good: Path) -> DeepseekV4Attention:
    return DeepseekV4Attention(DeepseekV4Config.from_hf(good), 1, fp8=True, max_seq_len=64)


def refused(path: Path, **options: Any) -> DSV4Error:
    with pytest.raises(DSV4Error) as caught:
        hf.load(path, **SIZES | options)
    return caught.value


def with_config(good: Path, target: Path, **values: Any) -> Path:
    folder = official.copied(good, target)
    (folder / "config.json").write_text(json.dumps(official.CONFIG | values))
    return folder


def test_keys_that_name_code_do_not_reach_transformers(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = {
        "attn_implementation": "org/repo",
        "_attn_implementation": "org/repo",
        "experts_implementation": "org/repo",
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
        "trust_remote_code": True,
        "num_labels": 10**9,
        "per_layer_config": {"0": {"head_dim": 1}},
        "quantization_config": official.CONFIG["quantization_config"] | {"modules": ["os.system"]},
    }
    with caplog.at_level(logging.INFO, "dsv4_compile.hf"):
        model = hf.load(with_config(good, tmp_path / "code", **code), **SIZES)
    assert "keys that are not read: _attn_implementation, attn_implementation, auto_map" in caplog.text
    assert model.config._attn_implementation == "eager"
    assert not {*code} - {"quantization_config"} & {*model.config.to_dict()}
    assert model.config.num_labels == 2 and "modules" not in model.config.quantization_config
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, hf.load(good, **SIZES)(ids).logits)


def test_unknown_keys_of_generation_are_named_and_left_out(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = official.copied(good, tmp_path / "generation")
    values = {"temperature": 0.5, "do_sample": True, "custom_generate": "org/repo", "cache_implementation": "static"}
    (folder / "generation_config.json").write_text(json.dumps(values))
    generation = hf.load(folder, **SIZES).generation_config
    assert "keys that are not read: cache_implementation, custom_generate" in caplog.text
    assert generation.temperature == 0.5 and not hasattr(generation, "custom_generate")
    for odd, message in {
        '{"temperature": "hot"}': "with temperature='hot'",
        '{"eos_token_id": []}': "a list of 1 to 1024 values",
        '{"forced_eos_token_id": [3, 512]}': "forced_eos_token_id=512 of 512 tokens",
        '{"forced_bos_token_id": 100000}': "forced_bos_token_id=100000 of 512 tokens",
        '{"bad_words_ids": [[1], [2, 600]]}': "bad_words_ids=600 of 512 tokens",
    }.items():
        (folder / "generation_config.json").write_text(odd)
        assert message in str(refused(folder))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_routed_experts": 4096}, "n_routed_experts=4096, where the files have 4"),
        ({"n_routed_experts": 10**9}, r"n_routed_experts=1000000000[\s\S]*from 1 to 4096"),
        ({"num_hidden_layers": 500, "compress_ratios": [4] * 500}, "files have tensors of 4 layers"),
        ({"num_hidden_layers": 10**4}, r"num_hidden_layers=10000[\s\S]*from 1 to 512"),
        ({"hc_sinkhorn_iters": 10**9}, "from 1 to 128"),
        ({"o_groups": 0}, "o_groups=0"),
        ({"head_dim": True}, "head_dim=True"),
        ({"hidden_size": 128.0}, r"hidden_size=128\.0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 of n_routed_experts=4"),
        ({"pad_token_id": 512}, "pad_token_id=512 with vocab_size=512"),
        ({"rope_theta": 0.5}, r"rope_theta=0\.5"),
        ({"rope_scaling": official.CONFIG["rope_scaling"] | {"factor": 0}}, "rope_scaling with factor=0"),
        ({"torch_dtype": "save"}, "torch_dtype='save'"),
        ({"compress_ratios": [0, 4, 128, -4]}, "compress_ratios="),
    ],
)
def test_sizes_and_ranges_are_checked_before_modules_are_built(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    from dsv4_compile.hf.loading import placement

    def build(config: Any) -> Any:
        raise AssertionError("a model was built")

    monkeypatch.setattr(placement, "_model", build)
    folder = with_config(good, tmp_path / "sizes", **values)
    fault = refused(folder)
    assert fault.code in ("E205", "E207")
    assert re.search(message, str(fault)), fault
    assert fault.code in [row.name for row in folder_report.rows(folder)]


NESTED = {"main": {"rope_type": "default"}, "compress": {"rope_type": "yarn", "rope_theta": 160000.0}}
NESTED["compress"] |= {"factor": 4, "original_max_position_embeddings": 4096, "attention_factor": 1.0}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_nested_parameters_of_yarn_are_read_under_either_name(good: Path, tmp_path: Path, key: str) -> None:
    values = {"rope_scaling": None, key: NESTED}
    model = hf.load(with_config(good, tmp_path / "nested", **values), **SIZES)
    assert DeepseekV4Config.from_hf(model.config).yarn == Yarn(4.0, 4096)


def test_keys_that_contradict_each_other_are_named(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention"] * 4
    assert "compress_ratios=(1, 4, 128, 4)" in str(refused(with_config(good, tmp_path / "kinds", layer_types=kinds)))
    read = model_config.HfConfig.from_dict
    without = {"rope_scaling": None}
    monkeypatch.setattr(model_config.HfConfig, "from_dict", lambda fields: read({**fields, **without}))
    assert "yarn=Yarn(factor=16.0" in str(refused(with_config(good, tmp_path / "yarn")))


def test_a_message_is_short_whatever_a_configuration_holds(good: Path, tmp_path: Path) -> None:
    kinds = [f"{i:0128d}" for i in range(1000)]
    fault = refused(with_config(good, tmp_path / "long", layer_types=kinds, compress_ratios=None))
    assert "layer_types with" in str(fault) and len(str(fault)) < 2000


def test_many_experts_of_one_layer_do_not_stand_for_those_of_all(good: Path, tmp_path: Path) -> None:
    """Distinct numbers of layers and experts exist, but not nearly all of their matrices."""

    def spread(tensors: dict[str, Tensor]) -> None:
        for i in range(2000):
            tensors[f"layers.0.ffn.experts.{i}.w1.weight"] = torch.zeros(1)

    fault = refused(official.changed(good, tmp_path / "spread", spread, n_routed_experts=2000))
    assert fault.code == "E207" and "4 layers of 2000 experts have 24000" in str(fault)


@pytest.mark.parametrize("values", [{"rope_theta": float("nan")}, {"o_groups": 0}, {"head_dim": 2**63}, {"yarn": 7}])
def test_a_configuration_built_by_hand_has_the_same_ranges(values: dict[str, Any]) -> None:
    with pytest.raises(DSV4Error, match=r"\[E205\]"):
        DeepseekV4Config(**values)
    with pytest.raises(DSV4Error, match=r"\[E205\][\s\S]*factor=0"):
        Yarn(0, 65536)


def nan_scale(
    name: str, store: Callable[[Tensor], Tensor] = lambda scale: scale
) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        scale = tensors[name].clone()
        scale.view(torch.uint8).view(-1)[-1] = 255
        tensors[name] = store(scale)

    return change


@pytest.mark.parametrize("options", [{}, {"dequantize": True}], ids=["stored", "dequantised"])
@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("layers.1.attn.wkv.scale", lambda scale: scale),
        ("layers.1.attn.wkv.scale", lambda scale: scale.view(torch.uint8)),
        ("layers.1.attn.wq_a.scale", torch.Tensor.float),
        ("layers.2.ffn.experts.3.w2.scale", lambda scale: scale),
        ("layers.2.ffn.shared_experts.w1.scale", lambda scale: scale),
    ],
    ids=["e8m0", "byte", "float32", "expert", "shared"],
)
def test_scales_of_nan_are_named(
    good: Path, tmp_path: Path, name: str, store: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    fault = refused(official.changed(good, tmp_path / "nan", nan_scale(name, store)), **options)
    assert fault.code == "E207" and f"{name} of model.safetensors with scales that are not numbers" in str(fault)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["fp8", "dequantised"])
def test_an_attention_layer_takes_no_scales_of_nan(good: Path, tmp_path: Path, dtype: Any) -> None:
    folder = official.changed(good, tmp_path / "nan", nan_scale(f"{PREFIX}wo_b.scale"))
    new = DeepseekV4Attention(DeepseekV4Config.from_hf(good), 1, fp8=dtype is None, max_seq_len=64)
    with pytest.raises(DSV4Error, match=r"E207[\s\S]*wo_b\.scale with scales that are not numbers"):
        load_attention_from_safetensors(new, folder, prefix=PREFIX)


@pytest.mark.parametrize("groups", [4, 2])
def test_groups_of_heads_that_fill_no_tile_in_e4m3_are_named(tmp_path: Path, groups: int) -> None:
    """One head of 64 dims a group is half a tile of 128 inputs."""
    model = tiny_model(0, **official.SIZES, o_groups=groups)
    folder = official.write(tmp_path / "groups", official.official_tensors(model), o_groups=groups)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        if groups == 4:
            assert "o_a_proj in e4m3 with 64 inputs a group" in str(refused(folder))
            assert hf.load(folder, dequantize=True, **SIZES)(ids).logits.isfinite().all()
        else:
            assert hf.load(folder, **SIZES)(ids).logits.isfinite().all()


OUTSIDE = ("../secret.safetensors", "a/../../secret.safetensors", "/secret.safetensors", "a\\b", "a\0b", "a\u202eb", "")


@pytest.mark.parametrize("name", OUTSIDE)
def test_both_loaders_read_no_file_that_an_index_names_outside(
    good: Path, layer: DeepseekV4Attention, tmp_path: Path, name: str
) -> None:
    folder = official.copied(good, tmp_path / "names")
    index = json.loads((folder / INDEX).read_text())
    save_file({"x": torch.ones(1)}, tmp_path / "secret.safetensors")
    file = str(tmp_path / "secret.safetensors") if name.startswith("/") else name
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (folder / INDEX).write_text(json.dumps(index))
    faults = [str(refused(folder))]
    with pytest.raises(DSV4Error) as caught:
        load_attention_from_safetensors(layer, folder, prefix=PREFIX)
    assert all("[E209]" in text and "index.json with" in text for text in (*faults, str(caught.value)))


@pytest.mark.parametrize("file", ["config.json", INDEX, "model-00002-of-00004.safetensors", "generation_config.json"])
def test_links_out_of_a_folder_are_not_followed(
    good: Path, layer: DeepseekV4Attention, tmp_path: Path, file: str
) -> None:
    folder = official.copied(good, tmp_path / "linked")
    if (folder / file).exists():
        (folder / file).rename(tmp_path / "outside")
    else:
        (tmp_path / "outside").write_text("{}")
    (folder / file).symlink_to(tmp_path / "outside")
    message = rf"\[E209\][\s\S]*{file}, a link to [\s\S]*/outside', outside of {folder}"
    with pytest.raises(DSV4Error, match=message):
        hf.load(folder, **SIZES)
    if file.startswith("model"):
        with pytest.raises(DSV4Error, match=message):
            load_attention_from_safetensors(layer, folder, prefix="")


def test_a_folder_that_looks_like_the_hubs_cache_links_to_its_blobs_alone(good: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    folder = official.copied(good, repository / "snapshots" / "0a1b")
    secret = tmp_path / "models--org--other" / "blobs" / "config"
    secret.parent.mkdir(parents=True)
    (folder / "config.json").rename(secret)
    (folder / "config.json").symlink_to(secret)
    assert "outside of" in str(refused(folder))
    (repository / "blobs").symlink_to(secret.parent)  # blobs that are somewhere else
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../blobs/config")
    assert "outside of" in str(refused(folder))


def test_a_shard_larger_than_the_layer_is_not_read(layer: DeepseekV4Attention, tmp_path: Path) -> None:
    header = {f"{PREFIX}wkv.weight": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with (tmp_path / "a.safetensors").open("r+b") as stream:
        stream.truncate(8 + len(text) + 2**42)
    for path in (tmp_path, tmp_path / "a.safetensors"):
        with pytest.raises(DSV4Error, match=r"E207[\s\S]*4398046511104 bytes under"):
            load_attention_from_safetensors(layer, path, prefix=PREFIX)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "1e999"),
        ('{"a": ' + "1" * 5000 + "}", "an integer of 5000 digits"),
        ('{"a": 0.' + "1" * 5000 + "}", "of too many digits"),
        ("[" * 100_000, "more than"),
        ("[1]", "a list, not an object"),
        ('{"a": [1, 2, 3, 4, 5, 6]}', "more than 3 values"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_json_is_limited(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text.encode(), most_values=3, most_nested=10)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(b"[" * 100_000, most_values=3, most_nested=100_000)
