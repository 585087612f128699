"""A hostile folder is only read: nothing is started, imported, connected to, or opened outside of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsv4_compile import DSV4Error, hf
from dsv4_compile.cli import main
from dsv4_compile.hf.tiny import tiny_config
from tests.audit import watched

TRICK = "x\x1b[2J\nverdict: all is well\u202e"
FOLDERS: dict[str, dict[str, Any]] = {
    "a kernel of the hub": {"attn_implementation": "org/repo", "_attn_implementation": "org/repo"},
    "code of the folder": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    "another architecture": {"architectures": [TRICK], "model_type": TRICK},
    "another quantisation": {"quantization_config": {"quant_method": TRICK, "modules_to_not_convert": TRICK}},
    "a tokenizer elsewhere": {"tokenizer_class": "evil.Tokenizer", "_name_or_path": "https://example.com/x"},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_only_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config().to_dict() | FOLDERS[name]))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    (tmp_path / "outside.safetensors").write_bytes(b"outside")
    save_file({"embed.weight": torch.ones(2, 2), TRICK: torch.ones(2)}, folder / "model-00001.safetensors")
    index = {"weight_map": {"embed.weight": "../outside.safetensors", TRICK: "model-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with watched() as events:
        assert main(["doctor", str(folder)]) == 1
        with pytest.raises(DSV4Error):
            hf.load(folder, max_batch_size=1, max_seq_len=64)
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert [line for line in printed.out.splitlines() if line.startswith("verdict")] == [printed.out.splitlines()[-1]]
    begun = {event for event, _ in events} - {"open", "import", "exec", "compile"}
    assert not begun, begun
    python = (sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1]), str(Path(hf.__file__).parents[2]))
    opened = {str(what) for event, what in events if event == "open" and isinstance(what, (str, Path))}
    outside = [what for what in opened if not what.startswith((str(folder), "/proc/", "/sys/", *python))]
    assert not outside and not any("evil" in str(what) for _, what in events), outside
