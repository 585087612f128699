"""A compiled folder starts a process with empty caches that compiles nothing, and is refused where anything differs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime import compile_caches, compiled_folder, compiled_in_use, machine_facts, source_keys
from tests.warm import ROOT, WarmPython

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "device": "cpu"}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "hidden_size": 64,
    "num_attention_heads": 2,
    "hc_sinkhorn_iters": 2,
}
BUILD = """
import sys
from dsv4_compile.cli import main
arguments = ["--max-batch-size", "2", "--max-seq-len", "64", "--device", "cpu", "--batches", "1", "--prompts", "1"]
sys.exit(main(["build", sys.argv[3], "--out", sys.argv[4], *arguments]))
"""
USE = """
import json
import sys
import torch
from torch._dynamo.utils import counters
from dsv4_compile import hf

commands, sources_read = [], []
def note(event, arguments):
    if event == "subprocess.Popen":
        commands.append(str(arguments[1]))
    if event == "open" and str(arguments[0]).endswith(("script.ld", "libtriton.so")) and arguments[1] == "rb":
        sources_read.append(str(arguments[0]))
sys.addaudithook(note)
model = hf.load(
    sys.argv[3], max_batch_size=2, max_seq_len=64, device="cpu",
    compiled=sys.argv[4] or None, compiled_digest=sys.argv[5] or None, compiled_required=bool(sys.argv[4]),
)
eager = hf.load(sys.argv[3], max_batch_size=2, max_seq_len=64, device="cpu")
model.compile(fullgraph=True, backend="dsv4")
ids = torch.tensor([[7]])
def tokens(model):
    return model.generate(ids, attention_mask=ids > 0, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
assert tokens(model) == tokens(eager)
facts = {
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "compiled": counters["inductor"]["fxgraph_cache_miss"],
}
facts["hashed"] = sources_read
facts["compilers"] = [command for command in commands if "-shared" in command or ".cpp" in command]
try:
    model(torch.tensor([[7], [8]]))
    facts["missing"] = "compiled"
except Exception as error:
    facts["missing"] = str(error)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # a fresh cache folder would try four kinds of vector instructions first
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    process = WarmPython(("torch._inductor.compile_fx", "tests.inductor_patterns"), env, 300)
    yield process
    process.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(**SMALL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def built(checkpoint: Path, warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and digest of a build."""
    folder = tmp_path_factory.mktemp("built")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    done = warm.run("tests.backend.program", str(ROOT), BUILD, str(checkpoint), str(folder / "compiled"), **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(folder / "cache")
    return folder / "compiled", done.stdout.split()[-1]


@pytest.fixture
def copied(built: tuple[Path, str], tmp_path: Path) -> Path:
    shutil.copytree(built[0], tmp_path / "compiled")
    return tmp_path / "compiled"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return hf.load(checkpoint, **SIZES)


@pytest.fixture(autouse=True)
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let this process's caches be, and note what would be written to them."""
    placed: list[Any] = []
    monkeypatch.setattr(compile_caches, "place", lambda files, device: placed.append(files))
    # As in the process that built, torch takes no vector instructions here.
    monkeypatch.setattr(machine_facts, "expect_vector_instructions", lambda recorded: recorded == [])
    yield placed
    compiled_in_use.stop()


def test_a_process_with_empty_caches_compiles_nothing(
    built: tuple[Path, str], checkpoint: Path, warm: WarmPython, tmp_path: Path
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = (str(checkpoint), str(built[0]), built[1])
    done = warm.run("tests.backend.program", str(ROOT), USE, *arguments, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["hits"] >= 1 and facts["misses"] == 0, facts
    assert facts["compiled"] == 0 and facts["compilers"] == []
    assert facts["hashed"] == [], "torch's and Triton's sources were hashed again"
    assert "E502" in facts["missing"] and "is not in it" in facts["missing"]
    libraries = {path.name for path in (tmp_path / "cache").rglob("*.so")}
    brought = {Path(name).name for name in compiled_folder.read(built[0]).files if name.startswith("inductor/")}
    assert brought <= libraries and not {name for name in libraries - brought if name.endswith(".main.so")}


def test_the_manifest_says_what_it_was_made_for(built: tuple[Path, str]) -> None:
    compiled = compiled_folder.read(*built)
    assert compiled.made_for["torch"] == torch.__version__
    assert compiled.configuration["max_seq_len"] == 256  # whole pages
    assert compiled.made_for["vectors"] == []
    assert compiled.made_for["sources"] == source_keys.recorded()
    assert compiled.configuration["options"] == ['{"mode": null, "options": {}}']
    assert {compile_caches.TORCH, compile_caches.NATIVE} <= compiled.files.keys()


def test_an_equal_model_uses_the_folder(
    built: tuple[Path, str], model: Any, caplog: pytest.LogCaptureFixture, nothing_is_written: list[Any]
) -> None:
    with caplog.at_level(logging.INFO, "dsv4_compile.hf"):
        assert hf.use_compiled(model, built[0], digest=built[1], required=True), caplog.text
    assert len(nothing_is_written) == 1 and "files are in the caches" in caplog.text


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_every_field_of_the_manifest_is_compared_and_named(
    copied: Path, model: Any, nothing_is_written: list[Any]
) -> None:
    text = (copied / compiled_folder.MANIFEST).read_text(encoding="utf-8")
    parts = {kind: json.loads(text)[kind] for kind in ("made_for", "configuration")}
    fields = [field for field in leaves(parts) if field[-1] not in ("options", "vectors") and "sources" not in field]
    assert len(fields) > 40
    for field in fields:
        manifest = json.loads(text)
        place = manifest
        for name in field[:-1]:
            place = place[name]
        place[field[-1]] = "other"
        (copied / compiled_folder.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(DSV4Error) as caught:
            hf.use_compiled(model, copied, required=True)
        assert caught.value.code == "E502"
        assert f"{'.'.join(field)} was 'other' and is" in caught.value.why
    assert nothing_is_written == []


def test_vector_instructions_are_compared(copied: Path, model: Any) -> None:
    manifest = json.loads((copied / compiled_folder.MANIFEST).read_text(encoding="utf-8"))
    manifest["made_for"]["vectors"] = ["avx1024: -mavx1024"]
    (copied / compiled_folder.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DSV4Error, match="vectors was"):
        hf.use_compiled(model, copied, required=True)


OTHERS: dict[str, dict[str, Any]] = {
    "max_seq_len": {"max_seq_len": 512},
    "max_batch_size": {"max_batch_size": 3},
    "max_step_tokens": {"max_step_tokens": 32},
    "caches": {"kv_cache_dtype": "bfloat16"},
    "attention_only": {"attention_only": True},
    "caches.indexer_dtype": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_model_that_was_loaded_otherwise_is_refused(
    built: tuple[Path, str], checkpoint: Path, field: str, nothing_is_written: list[Any]
) -> None:
    with pytest.raises(DSV4Error, match=rf"E502[\s\S]*configuration\.{field}"):
        hf.load(checkpoint, compiled=built[0], compiled_required=True, **SIZES | OTHERS[field])
    assert nothing_is_written == []


def test_a_different_torch_compiles_and_says_why(
    built: tuple[Path, str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with caplog.at_level(logging.WARNING, "dsv4_compile.hf"):
        loaded = hf.load(checkpoint, compiled=built[0], **SIZES)
    assert "made_for.torch was" in caplog.text and "is '2.99.0'" in caplog.text
    assert loaded(torch.tensor([[7]])).logits.isfinite().all()
    with pytest.raises(DSV4Error, match=r"E502[\s\S]*made_for\.torch"):
        hf.load(checkpoint, compiled=built[0], compiled_required=True, **SIZES)


def test_a_damaged_folder_compiles_unless_it_is_required_or_has_a_digest(
    copied: Path, built: tuple[Path, str], model: Any, nothing_is_written: list[Any]
) -> None:
    content = bytearray((copied / "torch.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "torch.bin").write_bytes(content)
    assert not hf.use_compiled(model, copied)
    for options in ({"required": True}, {"digest": built[1]}, {"digest": "0" * 64}):
        with pytest.raises(DSV4Error, match="E501"):
            hf.use_compiled(model, copied, **options)
    assert nothing_is_written == []


def test_a_compiled_folder_inside_a_checkpoint_is_not_looked_for(
    built: tuple[Path, str], checkpoint: Path, tmp_path: Path, nothing_is_written: list[Any]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    for name in ("compiled", "."):
        shutil.copytree(built[0], folder / name, dirs_exist_ok=True)
    hf.load(folder, **SIZES)
    assert nothing_is_written == []


def test_a_process_that_compiled_nothing_saves_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_in_use, "_options", {})
    with pytest.raises(DSV4Error, match="E502"):
        hf.save_compiled(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(DSV4Error, match="E208"):
        hf.save_compiled(torch.nn.Linear(2, 2), tmp_path / "new")
