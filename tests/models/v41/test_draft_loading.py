"""Draft layers of official folders: loaded, left out, missing, damaged, and saved again."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.errors import InputError
from dsv4_compile.hf.loading.folder_report import rows
from dsv4_compile.models.v41 import V41Config, V41Model, load, loading, save_folder
from dsv4_compile.models.v41.draft_config import V41DraftConfig
from dsv4_compile.models.v41.save import official_config
from dsv4_compile.models.v41.tensors import draft_tensors
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_config
from tests.models.v41.test_drafts import WANT, drafted
from tests.models.v41.test_loading import E8M0, F8, change, configure

CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "token_map": torch.arange(64, dtype=torch.int32) % 24}


@pytest.fixture(scope="module")
def original(worked_drafts: V41Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41_drafts")
    save_folder(worked_drafts, folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "folder"))


@pytest.mark.parametrize("options", [{"dequantize": True}, {"quantize_input": False}], ids=["floating", "quantised"])
def test_a_folder_gives_the_worked_drafts(original: Path, options: dict[str, bool]) -> None:
    model = load(original, drafts="on", **CPU, **options)
    assert model.mtp is not None and model.mtp.config == TINY_DRAFTS
    assert drafted(model)[0] == WANT["A"]


def test_bytes_are_those_of_the_folder(original: Path) -> None:
    stored, parameters = load_file(original / "model.safetensors"), dict(load(original, **CPU).named_parameters())
    for expected in draft_tensors(tiny_config(), TINY_DRAFTS):
        if expected.expert is None and expected.rows is None and not expected.name.endswith("wo_a"):
            for name, parameter in ((expected.weight, expected.parameter), (expected.scale, expected.parameter_scale)):
                if name:
                    got, want = parameters[parameter], stored[name]
                    assert torch.equal(got.float(), want.float()), name
                    assert want.dtype.itemsize > 1 or got.dtype is want.dtype
    for matrix, leaf in (("w1", slice(0, 32)), ("w3", slice(32, 64))):
        name = f"mtp.1.ffn.experts.3.{matrix}"
        assert torch.equal(parameters["mtp.1.ffn.experts.w13"][3, leaf], stored[f"{name}.weight"].view(torch.uint8))
        scale = parameters["mtp.1.ffn.experts.w13_scale"][3, leaf]
        assert torch.equal(scale.view(torch.uint8), stored[f"{name}.scale"].view(torch.uint8))
    assert parameters["mtp.0.main_proj.weight"].dtype is F8 and parameters["mtp.0.main_proj.scale"].dtype is E8M0


def test_names_and_shapes_of_the_published_checkpoint() -> None:
    """801, 798 and 802 tensors; two of 5120 x 15360 and 129280 x 256."""
    counts, shapes = [0, 0, 0], {}
    for expected in draft_tensors(V41Config(), V41DraftConfig()):
        counts[int(expected.name[4])] += 2 if expected.scale else 1
        shapes[expected.weight] = expected.shape
    assert counts == [801, 798, 802]
    assert shapes["mtp.0.main_proj.weight"] == (5120, 15360) and shapes["mtp.2.confidence_head.proj.weight"] == (
        1,
        5376,
    )
    assert shapes["mtp.2.markov_head.embed.weight"] == shapes["mtp.2.markov_head.head.weight"] == (129280, 256)


def test_a_folder_says_what_it_has(
    original: Path, worked: V41Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = {row.name: row for row in rows(original)}
    assert report["draft layers"].value.startswith("3 layers of 4 experts, 5 drafts a step")
    assert "layers 5, 6, 7" in report["draft layers"].note
    with caplog.at_level(logging.WARNING, "dsv4_compile.models"):
        assert load(original, drafts="off", **CPU).mtp is None
    count = sum(1 + bool(expected.scale) for expected in draft_tensors(tiny_config(), TINY_DRAFTS))
    assert f"draft layers not built: {count} tensors" in caplog.text
    save_folder(worked, tmp_path)
    assert load(tmp_path, **CPU).mtp is None and "draft layers" not in {row.name for row in rows(tmp_path)}
    with pytest.raises(InputError, match=r"no draft layers \(mtp") as caught:
        load(tmp_path, drafts="on", **CPU)
    assert caught.value.code == "E209"
    with pytest.raises(InputError, match="drafts='yes'"):
        load(tmp_path, drafts="yes", **CPU)


def test_drafts_that_do_not_fit_are_left_out_unless_asked_for(
    original: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the free memory before anything is read, which caches count against, too."""
    whole = load(original, **CPU)
    size = sum(parameter.nbytes for parameter in whole.parameters())
    free = [size * 1.06]
    for module in ("models.v41.loading", "models.v41.tables", "sizes"):
        monkeypatch.setattr(
            f"dsv4_compile.{module}.free_memory", lambda device: free[0] if device.type == "cpu" else None
        )
    assert whole.mtp is not None and load(original, **CPU).mtp is not None
    with caplog.at_level(logging.WARNING, "dsv4_compile.models"):
        for limit, caches in ((size * 1.04, None), (size * 1.06, {"max_batch_size": 1, "max_seq_len": 64})):
            free[0] = limit
            assert load(original, caches=caches, **CPU).mtp is None
    assert caplog.text.count('they do not fit next to the model, and drafts="on"') == 2
    free[0] = size - 1
    monkeypatch.setattr(loading, "_fill", lambda *args: pytest.fail("weights were read"))
    many = {"max_batch_size": 9, "max_seq_len": 4096}
    for drafts, caches in (("on", None), ("on", many), ("auto", many), ("off", many)):
        with pytest.raises(InputError, match="of caches" if caches else "of weights") as caught:
            load(original, drafts=drafts, caches=caches, **CPU)
        assert caught.value.code == "E210"
    with pytest.raises(InputError, match="max_step_tokens=4 with 5 drafts"):
        hf.load(original, device="cpu", max_batch_size=1, max_seq_len=64, max_step_tokens=4)


def test_the_published_configuration_is_the_default() -> None:
    raw = official_config(V41Config(), V41DraftConfig())
    assert V41DraftConfig.from_json(json.loads(json.dumps(raw)), V41Config()) == V41DraftConfig()
    fields = {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39]}
    fields |= {"dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3}
    assert raw["text_config"].items() >= (fields | {"num_nextn_predict_layers": 3}).items()


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("mtp.1.attn.wkv.weight"), "no tensor mtp.1.attn.wkv.weight"),
    "shape": (lambda t: t.update({"mtp.0.main_proj.weight": torch.zeros(64, 64).to(F8)}), r"main_proj.*\[64, 64\]"),
    "too many": (lambda t: t.update({"mtp.1.hc_head_fn": torch.zeros(4, 256)}), "hc_head_fn.*draft layers do not"),
    "stage": (lambda t: [t.pop(n) for n in [*t] if n.startswith("mtp.2")], "num_nextn_predict_layers=3.* have 2"),
    "scale": (lambda t: t.pop("mtp.2.ffn.experts.3.w2.scale"), "experts.3.w2.weight.* without"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_damaged_draft_layers_are_refused_by_name(folder: Path, name: str) -> None:
    edit, message = BROKEN[name]
    change(folder, edit)
    with pytest.raises(InputError, match=message) as caught:
        load(folder, **CPU)
    assert caught.value.code == "E207"
    assert [row.name for row in rows(folder) if row.level == "fix"] == ["E207"]
    assert load(folder, drafts="off", **CPU).mtp is None


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"dspark_target_layer_ids": [5, 6, 8]}, "layers 0 to 7"),
        ({"dspark_n_routed_experts": 5}, "dspark_n_routed_experts=5, where the files have 4"),
        ({"dspark_block_size": None}, "without dspark_block_size"),
        ({"dspark_markov_rank": "16"}, "dspark_markov_rank"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 2, 0]}, "of draft layers"),
    ],
)
def test_a_configuration_of_other_draft_layers_is_refused(
    folder: Path, change_of: dict[str, Any], message: str
) -> None:
    configure(folder, lambda config: config["text_config"].update(change_of))
    with pytest.raises(InputError, match=message) as caught:
        load(folder, **CPU)
    assert caught.value.code in ("E205", "E207") and "drafts=" in str(caught.value)
    assert load(folder, drafts="off", **CPU).mtp is None
