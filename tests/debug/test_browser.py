"""Pages of replays in headless Chromium, where it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dsv4_compile
from tests.debug.browser import chromium, wrong

pytestmark = pytest.mark.skipif(not chromium(), reason="no Chromium is installed")
PAGE = Path(dsv4_compile.__file__).parent / "docs" / "replay_csa_h100.html"


@pytest.mark.parametrize(("dark", "width"), [(False, 500), (True, 1300)])
def test_page_of_a_layer_is_whole_and_works(dark: bool, width: int, tmp_path: Path) -> None:
    page = Path(shutil.copy(PAGE, tmp_path))
    assert list(wrong(page, dark=dark, width=width)) == []


FAULTS = {
    "overflow": ("<body>", '<body><div style="width: 3000px; height: 1px"></div>'),
    "moved": ("ArrowRight", "ArrowAside"),
    "outlined": ("classList.toggle('shown', k === i)", "classList.toggle('shown', k === 0)"),
    "kept": ("keep(kept === i ? null : i)", "show(i)"),
    "released": ("if (event.key === 'Escape') keep(null);", ""),
    "wrapped": (
        "th, .number { white-space: nowrap; }",
        ".number { display: block; width: 1ch; overflow-wrap: anywhere; }",
    ),
    "errors": ("</body>", "<script>missing()</script></body>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_page_is_found(fault: str, tmp_path: Path) -> None:
    before, after = FAULTS[fault]
    text = PAGE.read_text(encoding="utf-8")
    assert before in text
    page = tmp_path / "page.html"
    page.write_text(text.replace(before, after), encoding="utf-8")
    assert any(message.startswith(f"{fault} is ") for message in wrong(page, dark=False, width=1300))
