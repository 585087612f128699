"""Tests of loading checkpoints: names, formats, files, and errors that leave the layer unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.loading import HF_NAMES, hf_name, load_attention, load_attention_from_safetensors
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.testing import assert_bitwise

SMALL = DeepseekV4Config(
    hidden_size=96,
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=160,
    o_groups=2,
    o_lora_rank=24,
    index_n_heads=4,
    index_head_dim=32,
).with_layers(1, 4, 128)
KINDS = {"swa": 0, "csa": 1, "hca": 2}
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
PREFIX = {"official": "layers.1.attn.", "hf": "model.layers.1.self_attn."}
Tensors = dict[str, Tensor]


def new_layer(kind: str = "csa", *, fp8: bool = False, dtype: torch.dtype = torch.bfloat16) -> DeepseekV4Attention:
    """Make a layer with the byte 0x3c in all parameters, a value that no test writes."""
    layer = DeepseekV4Attention(SMALL, KINDS[kind], fp8=fp8, dtype=dtype, max_seq_len=256)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.view(torch.uint8).fill_(0x3C)
    return layer


def tensors_for(layer: DeepseekV4Attention, naming: str = "official") -> Tensors:
    """Return a checkpoint for `layer`, with random values and random scales."""
    named = {}
    for name, parameter in layer.named_parameters():
        if parameter.dtype is E8M0:
            value = torch.randint(118, 130, parameter.shape, dtype=torch.uint8).view(E8M0)
        else:
            value = torch.randn(parameter.shape).to(parameter.dtype)
        named[PREFIX[naming] + (name if naming == "official" else hf_name(name))] = value
    return named


def bytes_of(layer: DeepseekV4Attention) -> Tensors:
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantise block by block, with the scale as a Python number."""
    out = torch.empty(weight.shape)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = (slice(i, i + 128), slice(j, j + 128))
            out[block] = weight[block].float() * scale[i // 128, j // 128].float().item()
    return out


@pytest.mark.parametrize("naming", PREFIX)
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_its_tensor_bit_for_bit(kind: str, fp8: bool, naming: str) -> None:
    layer = new_layer(kind, fp8=fp8)
    tensors = tensors_for(layer, naming)
    # The checkpoint has other layers too, and the names of layer 11 begin like those of layer 1.
    others = {name.replace("layers.1.", "layers.11."): torch.zeros(3) for name in tensors}
    load_attention(layer, {**others, **tensors}, prefix=PREFIX[naming], naming=naming)
    for name, parameter in layer.named_parameters():
        source = PREFIX[naming] + (name if naming == "official" else hf_name(name))
        assert_bitwise(parameter.data, tensors[source], label=name)


def test_worked_names() -> None:
    assert hf_name("wq_a.scale") == "q_a_proj.weight_scale_inv"
    assert hf_name("attn_sink") == "sinks"
    assert hf_name("compressor.ape") == "compressor.position_bias"
    assert hf_name("indexer.weights_proj.weight") == "compressor.indexer.scorer.weights_proj.weight"
    assert len(set(HF_NAMES.values())) == len(HF_NAMES)


def test_a_state_dict_is_a_checkpoint() -> None:
    source = new_layer(fp8=True)
    load_attention(source, tensors_for(source), prefix=PREFIX["official"])
    copy = new_layer(fp8=True)
    load_attention(copy, source.state_dict())
    for name, parameter in copy.named_parameters():
        assert_bitwise(parameter.data, source.get_parameter(name).data, label=name)


@pytest.mark.parametrize("naming", PREFIX)
@pytest.mark.parametrize("store", [Tensor.float, lambda scale: scale.view(torch.uint8)], ids=["float32", "bytes"])
def test_scales_may_be_stored_as_float32_or_as_bytes(store: Callable[[Tensor], Tensor], naming: str) -> None:
    """Float32 and byte scales give the same power of two, the smallest and the largest included."""
    layer = new_layer(fp8=True)
    tensors = tensors_for(layer, naming)
    extremes = torch.tensor([[0, 254]], dtype=torch.uint8).view(E8M0).expand(2, -1)
    name = PREFIX[naming] + ("wq_b.scale" if naming == "official" else "q_b_proj.weight_scale_inv")
    tensors[name] = extremes.contiguous()
    stored = {key: store(value) if value.dtype is E8M0 else value for key, value in tensors.items()}
    load_attention(layer, stored, prefix=PREFIX[naming], naming=naming)
    for key, parameter in layer.named_parameters():
        source = PREFIX[naming] + (key if naming == "official" else hf_name(key))
        assert_bitwise(parameter.data, tensors[source], label=key)


@pytest.mark.parametrize("naming", PREFIX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_weights_are_dequantised_into_a_floating_module(dtype: torch.dtype, naming: str) -> None:
    tensors = tensors_for(new_layer(fp8=True), naming)
    layer = new_layer(dtype=dtype)
    load_attention(layer, tensors, prefix=PREFIX[naming], naming=naming)
    scale = "scale" if naming == "official" else "weight_scale_inv"
    quantised = 0
    for name, parameter in layer.named_parameters():
        source = PREFIX[naming] + (name if naming == "official" else hf_name(name))
        value = tensors[source]
        if value.dtype is E4M3:
            value = dequantized(value, tensors[f"{source.removesuffix('.weight')}.{scale}"])
            quantised += 1
        assert_bitwise(parameter.data, value.to(parameter.dtype), label=name)
    assert quantised == 6  # wq_a, wq_b, wkv, wo_a, wo_b, indexer.wq_b


def test_scales_that_are_not_powers_of_two_dequantise_but_raise_for_an_fp8_module() -> None:
    tensors = tensors_for(new_layer("swa", fp8=True))
    scale = PREFIX["official"] + "wq_a.scale"
    tensors[scale] = torch.full(tensors[scale].shape, 0.3)
    layer = new_layer("swa", dtype=torch.float32)
    load_attention(layer, tensors, prefix=PREFIX["official"])
    weight = tensors[PREFIX["official"] + "wq_a.weight"]
    assert_bitwise(layer.wq_a.weight.data, dequantized(weight, tensors[scale]))
    with pytest.raises(ValueError, match=r"E207(.|\n)*layers\.1\.attn\.wq_a\.scale.*not powers of two"):
        load_attention(new_layer("swa", fp8=True), tensors, prefix=PREFIX["official"])


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(PREFIX["official"] + name)


def put(name: str, change: Callable[[Tensor | None], Tensor]) -> Callable[[Tensors], object]:
    key = PREFIX["official"] + name
    return lambda tensors: tensors.update({key: change(tensors.get(key))})


def put_e4m3(name: str, scale: Tensor) -> Callable[[Tensors], object]:
    key = PREFIX["official"] + name
    return lambda tensors: tensors.update({f"{key}.weight": tensors[f"{key}.weight"].to(E4M3), f"{key}.scale": scale})


FAULTS: dict[str, tuple[bool, Callable[[Tensors], object], str]] = {
    "missing": (False, drop("compressor.norm.weight"), "compressor.norm.weight"),
    "missing-sink": (False, drop("attn_sink"), "attn_sink"),
    "missing-scale": (True, drop("indexer.wq_b.scale"), "indexer.wq_b.scale"),
    "extra": (False, put("wq_c.weight", lambda _: torch.zeros(2)), "wq_c.weight"),
    "scale-of-a-floating-weight": (False, put("wo_b.scale", lambda _: torch.ones(1, 1)), "wo_b.scale"),
    "transposed": (False, put("wq_b.weight", lambda t: t.t().contiguous()), "wq_b.weight"),
    "flattened": (False, put("compressor.ape", torch.Tensor.flatten), "compressor.ape"),
    "blocks-of-32": (True, put("wkv.scale", lambda _: torch.ones(2, 3).to(E8M0)), "wkv.scale"),
    "floating-for-e4m3": (True, put("wo_a.weight", lambda t: t.float()), "wo_a.weight"),
    "e4m3-for-a-scale": (True, put("wo_a.scale", lambda t: t.float().to(E4M3)), "wo_a.scale"),
    "e5m2": (False, put("wkv.weight", lambda t: t.to(torch.float8_e5m2)), "wkv.weight"),
    "packed-fp4": (False, put("wkv.weight", lambda t: t.to(torch.int8)), "wkv.weight"),
    "e4m3-without-scale": (False, put("compressor.wkv.weight", lambda t: t.to(E4M3)), "compressor.wkv.scale"),
    "e4m3-with-bfloat16-scale": (False, put_e4m3("wkv", torch.ones(1, 1).bfloat16()), "wkv.scale"),
    "e4m3-with-scales-of-32x32-blocks": (False, put_e4m3("wkv", torch.ones(2, 3)), "wkv.scale of shape (2, 3)"),
    "e4m3-norm": (False, put_e4m3("q_norm", torch.ones(2)), "q_norm.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_the_tensor_and_changes_no_parameter(fault: str) -> None:
    fp8, spoil, name = FAULTS[fault]
    layer = new_layer(fp8=fp8)
    tensors = tensors_for(layer)
    spoil(tensors)
    before = bytes_of(layer)
    with pytest.raises(ValueError, match="E207") as caught:
        load_attention(layer, tensors, prefix=PREFIX["official"])
    assert PREFIX["official"] + name in str(caught.value)
    for parameter, value in before.items():
        assert_bitwise(layer.get_parameter(parameter).data, value, label=parameter)


def test_an_unknown_naming_raises() -> None:
    with pytest.raises(ValueError, match=r"E207(.|\n)*'vllm'"):
        load_attention(new_layer(), {}, naming="vllm")


def test_a_layer_built_on_the_meta_device_needs_memory_first() -> None:
    with torch.device("meta"):
        layer = DeepseekV4Attention(SMALL, 1, fp8=True, max_seq_len=256)
    tensors = tensors_for(new_layer(fp8=True))
    with pytest.raises(ValueError, match=r"E207(.|\n)*to_empty"):
        load_attention(layer, tensors, prefix=PREFIX["official"])
    load_attention(layer.to_empty(device="cpu"), tensors, prefix=PREFIX["official"])
    built_here = new_layer(fp8=True)
    assert_bitwise(layer.cos_sin, built_here.cos_sin)
    assert_bitwise(layer.wq_a.weight.data, tensors[PREFIX["official"] + "wq_a.weight"])


def test_layers_of_a_kind_share_one_rope_table_that_is_never_cast() -> None:
    first, second = new_layer(), new_layer()
    for layer in (first, second):
        layer.to(torch.float16)
    assert first.wq_a.weight.dtype is torch.float16
    assert first.cos_sin.dtype is torch.float32
    assert first.cos_sin is second.cos_sin
    assert "cos_sin" not in first.state_dict()


class TestSafetensors:
    """Loading from safetensors files: only the needed tensors are read."""

    @staticmethod
    def assert_loads(path: Path, tensors: Tensors) -> None:
        layer = new_layer(fp8=True)
        load_attention_from_safetensors(layer, path, prefix=PREFIX["official"])
        for name, parameter in layer.named_parameters():
            assert_bitwise(parameter.data, tensors[PREFIX["official"] + name], label=name)

    @staticmethod
    def shards(tensors: Tensors) -> tuple[Tensors, Tensors]:
        names = sorted(tensors)
        return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}

    def test_a_single_file(self, tmp_path: Path) -> None:
        tensors = tensors_for(new_layer(fp8=True))
        save_file({**tensors, "layers.2.attn.wq_a.weight": torch.zeros(2)}, tmp_path / "layer.safetensors")
        self.assert_loads(tmp_path / "layer.safetensors", tensors)

    def test_a_folder_with_an_index_opens_the_needed_shards_only(self, tmp_path: Path) -> None:
        tensors = tensors_for(new_layer(fp8=True))
        first, second = self.shards(tensors)
        save_file(first, tmp_path / "model-1.safetensors")
        save_file(second, tmp_path / "model-2.safetensors")
        (tmp_path / "model-3.safetensors").write_bytes(b"not a checkpoint")
        weight_map = {
            **dict.fromkeys(first, "model-1.safetensors"),
            **dict.fromkeys(second, "model-2.safetensors"),
            "layers.11.attn.wq_a.weight": "model-3.safetensors",
            "embed.weight": "model-4-which-is-not-there.safetensors",
        }
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        self.assert_loads(tmp_path, tensors)

    def test_a_folder_without_an_index(self, tmp_path: Path) -> None:
        tensors = tensors_for(new_layer(fp8=True))
        for number, shard in enumerate(self.shards(tensors)):
            save_file(shard, tmp_path / f"part{number}.safetensors")
        self.assert_loads(tmp_path, tensors)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        weight_map = dict.fromkeys(tensors_for(new_layer()), "model-7.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=r"E207(.|\n)*model-7\.safetensors"):
            load_attention_from_safetensors(new_layer(), tmp_path, prefix=PREFIX["official"])

    def test_a_prefix_that_is_not_there_names_the_first_tensor(self, tmp_path: Path) -> None:
        save_file(tensors_for(new_layer()), tmp_path / "layer.safetensors")
        with pytest.raises(ValueError, match=r"E207(.|\n)*no tensor layers\.9\.attn\.attn_sink"):
            load_attention_from_safetensors(new_layer(), tmp_path / "layer.safetensors", prefix="layers.9.attn.")

    def test_a_tensor_in_two_files_raises(self, tmp_path: Path) -> None:
        for number in range(2):
            save_file(tensors_for(new_layer()), tmp_path / f"part{number}.safetensors")
        with pytest.raises(ValueError, match=r"E207(.|\n)*layers\.1\.attn\.\S+ in two files"):
            load_attention_from_safetensors(new_layer(), tmp_path, prefix=PREFIX["official"])

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"E207(.|\n)*no \.safetensors in"):
            load_attention_from_safetensors(new_layer(), tmp_path, prefix=PREFIX["official"])
