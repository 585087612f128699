"""The page of `dsv4 explain metadata` lists the declared buffers."""

from __future__ import annotations

import re
from pathlib import Path

from dsv4_compile.cli import main
from dsv4_compile.metadata import BUFFERS

PAGE = Path(__file__).resolve().parents[2] / "dsv4_compile" / "docs" / "metadata.md"
LETTERS = {"max_num_seqs": "R", "max_num_seqs_plus_1": "R + 1", "max_num_batched_tokens": "T", "window": "W"}
LETTERS |= {"entries_128_width": "C"}


def test_the_page_lists_the_declared_buffers() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+) `\[(.*?)\]` \| (\S+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    declared = [
        (
            spec.name,
            str(spec.dtype).removeprefix("torch."),
            ", ".join(LETTERS.get(size, "B") for size in spec.shape),
            str(spec.pad),
            spec.filled_by,
            spec.meaning,
        )
        for spec in BUFFERS
    ]
    assert listed == declared


def test_explain_metadata_prints_the_page(capsys: object) -> None:
    assert main(["explain", "metadata"]) == 0
    assert capsys.readouterr().out.strip() == PAGE.read_text().strip()
