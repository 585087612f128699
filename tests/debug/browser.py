"""Open a page of a replay in headless Chromium and check it there: python -m tests.debug.browser replay.html

test_browser.py does it where a browser is installed. Checks in light and dark and in a narrow window: the panel is
filled, arrow keys move the focus, a click keeps a node, the outlined bar is the node of the panel, numbers stay on one
line, zoom widens the lanes, nothing overflows the page, nothing is loaded from outside. Screenshots go to its folder.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LISTEN = """<script>
const faults = [];
window.addEventListener('error', event => faults.push(String(event.message)));
</script>"""
CHECK = """<script>
const found = {errors: faults};
window.addEventListener('load', () => {
  const all = [...document.querySelectorAll('.node')], lane = document.querySelector('.lanes');
  found.nodes = all.length; found.panel = document.querySelectorAll('#node dd').length;
  const first = document.getElementById('n0');
  first.focus();
  first.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
  found.moved = all.length < 2 || document.activeElement.id === 'n1';
  const label = document.activeElement.getAttribute('aria-label').split(': ')[1].split(',')[0];
  found.told = document.getElementById('node').textContent.includes(label);
  const shown = () => [...document.querySelectorAll('.shown')].map(node => node.id).join();
  const over = node => node.dispatchEvent(new MouseEvent('mouseenter'));
  found.outlined = shown() === document.activeElement.id;
  document.activeElement.click(); over(first);
  found.kept = shown() === document.activeElement.id && all.length === 1 || shown() !== 'n0';
  document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true})); over(first);
  found.released = shown() === 'n0';
  found.wrapped = [...document.querySelectorAll('.number')].filter(cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
  }).length;
  found.unnamed = all.filter(node => !node.textContent).length;
  found.tabbable = all.filter(node => node.tabIndex === 0).length;
  const before = lane.getBoundingClientRect().width;
  document.getElementById('in').click();
  found.zoom = lane.getBoundingClientRect().width / before;
  document.getElementById('all').click();
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.outside = all.filter(node => {
    const own = node.getBoundingClientRect(), around = lane.getBoundingClientRect();
    return own.left < around.left - 1 || own.right > around.right + 2;
  }).length;
  found.loaded = performance.getEntriesByType('resource').length;
  found.paper = getComputedStyle(document.body).backgroundColor;
  document.documentElement.dataset.found = JSON.stringify(found);
});
</script>"""


def chromium() -> str:
    """Return the path of an installed Chromium, or ""."""
    names = "chromium", "chromium-browser", "google-chrome"
    return next((path for name in names if (path := shutil.which(name))), "")


def wrong(page: Path, *, dark: bool, width: int) -> Iterator[str]:
    """Yield what is wrong with `page` in a window of `width` pixels."""
    text = page.read_text(encoding="utf-8")
    shot = page.with_name(f"{page.stem}_{'dark' if dark else 'light'}_{width}.png")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as folder:
        checked = Path(folder) / page.name
        heard = text.replace("<head>", f"<head>{LISTEN}", 1)
        checked.write_text(heard.replace("</body>", f"{CHECK}</body>"), encoding="utf-8")
        command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200", scheme]
        done = subprocess.run([*command, "--dump-dom", checked.as_uri()], capture_output=True, text=True, check=True)
        subprocess.run([*command, f"--screenshot={shot}", page.resolve().as_uri()], capture_output=True, check=True)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    if not match:
        yield "the page's script did not run to its end"
        return
    shown = json.loads(match[1].replace("&quot;", '"'))
    wanted = {
        "errors": [],
        "moved": True,
        "told": True,
        "outlined": True,
        "kept": True,
        "released": True,
        "wrapped": 0,
        "unnamed": 0,
        "tabbable": 1,
        "zoom": 2,
        "overflow": 0,
        "outside": 0,
        "loaded": 0,
    }
    yield from (f"{name} is {shown[name]}, not {want}" for name, want in wanted.items() if shown[name] != want)
    if shown["nodes"] != text.count('class="node"') or shown["panel"] < 3:
        yield f"{shown['nodes']} nodes, {shown['panel']} rows in the panel"
    if (shown["paper"] != "rgb(255, 255, 255)") != dark:
        yield f"the paper is {shown['paper']}"
    if len(set(shot.read_bytes())) < 200 or shot.stat().st_size < 10_000:
        yield f"{shot} looks empty"


def main(path: str) -> int:
    """Check one page; return the number of faults."""
    if not chromium():
        raise SystemExit("no Chromium is installed")
    faults = [
        f"{'dark' if dark else 'light'}, {width} pixels: {fault}"
        for dark in (False, True)
        for width in (500, 1300)
        for fault in wrong(Path(path), dark=dark, width=width)
    ]
    sys.stdout.write("\n".join(faults or ["ok"]) + "\n")
    return len(faults)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
