"""Official folders: bytes that are read as they are published, and folders that are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.errors import InputError
from dsv4_compile.hf.loading.folder_report import rows
from dsv4_compile.models.v41 import V41Config, V41Format, V41Model, load, save_folder
from dsv4_compile.models.v41.config import MODEL_TYPE
from tests.models.v41.worked import TOKENS, token_ids

F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LOGITS = torch.tensor([-0.776645, -0.549317, -1.563573, -1.218396])


def tokenizer() -> str:
    """24 letters, small, capital, and with an accent: equal compressed ids, 24 apart."""
    forms = [chr(97 + i % 24) for i in range(64)]
    words = [form.upper() if 24 <= i < 48 else form + "́" * (i >= 48) for i, form in enumerate(forms)]
    return str(Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")).to_str())


@pytest.fixture(scope="module")
def original(worked: V41Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41")
    save_folder(worked, folder, tokenizer=tokenizer())
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "folder"))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def configure(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


@torch.no_grad()
def logits(model: V41Model) -> Tensor:
    caches = model.new_caches(max_batch_size=1, max_seq_len=64, cache_format=V41Format.plain())
    return model(token_ids(), torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), caches)[-1, :4]


@pytest.mark.parametrize("options", [{"dequantize": True}, {"quantize_input": False}], ids=["floating", "quantised"])
def test_a_folder_gives_the_worked_numbers(original: Path, options: dict[str, bool]) -> None:
    """Weights are exact in all formats; compressed ids come from the folder's tokenizer."""
    model = load(original, device="cpu", dtype=torch.float32, **options)
    torch.testing.assert_close(logits(model), LOGITS, rtol=0, atol=5e-6)
    assert model.token_map.tolist() == [token % 24 for token in range(64)]


def test_inputs_are_rounded_as_the_published_code_does(original: Path) -> None:
    rounded = logits(load(original, device="cpu", dtype=torch.float32))
    assert (rounded - LOGITS).abs().max() > 1e-2
    model = load(original, device="cpu")
    assert model.dtype is torch.bfloat16 and model.layers[0].attn.wq_a.weight.dtype is F8
    assert model.layers[0].ffn.experts.w13.dtype is torch.uint8 and model.layers[1].engram.embed.dtype is F8
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_first_bytes_of_the_published_checkpoint(folder: Path) -> None:
    def publish(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.attn.wkv.weight"].view(torch.uint8)[0, :3] = torch.tensor([0xD8, 0x71, 0xF2])
        tensors["layers.0.attn.wkv.scale"].view(torch.uint8)[0, 0] = 0x73
        tensors["layers.0.ffn.experts.0.w1.weight"].view(torch.uint8)[0, :3] = torch.tensor([0xA0, 0xA8, 0xEC])
        tensors["layers.0.ffn.experts.0.w1.scale"].view(torch.uint8)[0, 0] = 0x78

    change(folder, publish)
    model = load(folder, device="cpu", dtype=torch.float32, dequantize=True)
    first = model.layers[0]
    assert first.attn.wkv.weight[0, :3].tolist() == [-0.00390625, 0.03515625, -0.0390625]
    assert first.ffn.experts.w13[0, 0, :6].tolist() == [0, -(2**-7), 0, -(2**-7), -(2**-6), -(2**-5)]


def test_vision_is_left_out_and_said_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for name in ("vision.blocks.0.attn.wq", "aligner.w1.weight", "image_newline"):
            tensors[name] = torch.zeros(3)

    change(folder, add)
    with caplog.at_level(logging.WARNING, "dsv4_compile.models"):
        load(folder, device="cpu", dtype=torch.float32)
    assert "vision tower not built: 3 tensors" in caplog.text
    report = {row.name: row for row in rows(folder)}
    assert report["vision tower"].note == "not built: not loaded"
    assert all(row.level == "ok" for row in report.values())


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str]] = {
    "missing scale": (lambda t: t.pop("layers.3.attn.wq_b.scale"), "E207", "layers.3.attn.wq_b.weight.* without"),
    "missing weight": (
        lambda t: t.pop("layers.2.attn.compressor.wgate.weight"),
        "E207",
        "no tensor layers.2.attn.comp",
    ),
    "missing expert": (lambda t: t.pop("layers.5.ffn.experts.7.w2.scale"), "E207", "experts.7.w2.weight.* without"),
    "blocks of V4": (
        lambda t: t.update({"layers.0.attn.wo_b.scale": torch.ones(1, 1).to(E8M0)}),
        "E207",
        "V4 has one for 128x128",
    ),
    "wrong shape": (
        lambda t: t.update({"layers.0.attn.wkv.weight": torch.zeros(32, 64).to(F8)}),
        "E207",
        r"wkv.weight.*\[32, 64\]",
    ),
    "wrong dtype": (
        lambda t: t.update({"layers.0.attn.wkv.weight": torch.zeros(64, 64)}),
        "E207",
        "V4.1 has F8_E4M3",
    ),
    "position bias of V4": (
        lambda t: t.update({"layers.2.attn.compressor.ape": torch.zeros(2, 64)}),
        "E207",
        "compressor.ape",
    ),
    "a gate at ratio 1": (
        lambda t: t.update({"layers.4.attn.compressor.wgate.weight": torch.zeros(64, 64)}),
        "E207",
        "layers.4.*wgate",
    ),
    "engram rows": (
        lambda t: t.update({"layers.1.engram.embed.scale": torch.ones(434, 2).to(E8M0)}),
        "E207",
        "32 columns of a row",
    ),
    "scales of NaN": (
        lambda t: t["layers.6.attn.wq_a.scale"].view(torch.uint8).fill_(255),
        "E207",
        "scales that are not numbers",
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_damaged_folder_is_refused_by_name(folder: Path, name: str) -> None:
    edit, code, message = BROKEN[name]
    change(folder, edit)
    with pytest.raises(InputError, match=message) as caught:
        load(folder, device="cpu", dtype=torch.float32)
    assert caught.value.code == code
    if name != "scales of NaN":  # the report reads headers alone
        assert [row.name for row in rows(folder) if row.level == "fix"] == [code]


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "V4": (lambda c: c.update(model_type="deepseek_v4"), "hf.load"),
    "text alone": (lambda c: c.update(model_type="deepseek_v41_text"), "text_config alone"),
    "no text_config": (lambda c: c.pop("text_config"), "without text_config"),
    "ratios of V4": (
        lambda c: c["text_config"].update(compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0]),
        "those of DeepSeek-V4",
    ),
    "blocks of V4": (
        lambda c: c["quantization_config"].update(weight_block_size=[128, 128]),
        "V4 has blocks of 128x128",
    ),
    "more layers": (
        lambda c: c["text_config"].update(num_hidden_layers=9, compress_ratios=[0, 0, 2, 2, *[1] * 5]),
        "num_hidden_layers=9, where the files have 8",
    ),
    "more experts": (lambda c: c["text_config"].update(n_routed_experts=9), "n_routed_experts=9"),
    "no source": (lambda c: c["text_config"].update(kv_source_layer_ids=[4]), "layer 2, with no source"),
    "primes": (lambda c: c["text_config"].update(engram_vocab_size=67), "an engram of 434 rows"),
    "vocabulary": (lambda c: c["text_config"].update(engram_compressed_vocab_size=30), "24 compressed ids"),
    "hidden size": (lambda c: c["text_config"].pop("hidden_size"), "without hidden_size"),
    "a type": (lambda c: c["text_config"].update(index_topk="6"), "index_topk"),
    "scores": (lambda c: c["text_config"].update(scoring_func="softmax"), "scoring_func"),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_of_another_model_is_refused(folder: Path, name: str) -> None:
    edit, message = CONFIGS[name]
    configure(folder, edit)
    with pytest.raises(InputError, match=message) as caught:
        load(folder, device="cpu", dtype=torch.float32)
    assert caught.value.code in ("E205", "E207")


def test_the_text_model_is_read_from_text_config(folder: Path) -> None:
    """Fields of the root that have the same names say nothing."""
    configure(folder, lambda c: c.update(hidden_size=1, num_hidden_layers=1, rms_norm_eps=1e-6))
    config = load(folder, device="cpu", dtype=torch.float32).config
    assert (config.hidden_size, config.num_layers, config.rms_norm_eps) == (64, 8, 1e-20)


def test_both_names_of_the_padding_id_are_read(folder: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        config["text_config"]["engram_pad_id"] = config["text_config"].pop("engram_pad_token_id")

    configure(folder, rename)
    assert load(folder, device="cpu", dtype=torch.float32).config.engram_pad == 2


def test_the_configuration_of_v4_names_the_door_of_v41(original: Path) -> None:
    with pytest.raises(InputError, match=r"dsv4_compile\.hf\.load") as caught:
        DeepseekV4Config.from_hf(json.loads((original / "config.json").read_text()))
    assert caught.value.code == "E205"
    assert "dsv4_compile.hf.load" in next(row.note for row in rows(original) if row.name == "model")


def test_a_folder_without_its_tokenizer_takes_a_map(folder: Path, worked: V41Model) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read"):
        load(folder, device="cpu")
    load(folder, device="cpu", token_map=worked.token_map)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer"):
        load(folder, device="cpu")
    with pytest.raises(InputError, match="int32"):
        load(folder, device="cpu", token_map=torch.zeros(5))


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated") as caught:
        load(folder, device="cpu")
    assert caught.value.code == "E209"


def test_the_published_configuration_is_the_default() -> None:
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_compressed_vocab_size": 99092,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3,
    }
    raw = {
        "model_type": MODEL_TYPE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "image_token_id": 129264,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "vision_config": {"model_type": "deepseek_v41_vision", "hidden_size": 1024},
    }
    assert V41Config.from_json(raw) == V41Config()
