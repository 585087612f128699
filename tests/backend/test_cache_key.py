"""A graph with an edited lowering is never served from Inductor's cache; one with an unedited lowering is.

Each step is a new process with the same cache folder and a copy of the package that is edited between the steps.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile.options import Options
from dsv4_compile.passes import ChooseImplementations, choose
from tests.warm import ROOT, WarmPython

PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
from dsv4_compile import backend

def run(q, positions, table):
    return torch.ops.dsv4.q_norm_rope(q, positions, table, 1e-6)

q, positions, table = torch.ones(2, 1, 4), torch.arange(2), torch.tensor([[1.0, 0.5]]).expand(2, 2).contiguous()
with torch.no_grad():
    # With a single kernel, precompiled headers take more time than they save.
    options = {"cpp_cache_precompile_headers": False, "dsv4.impl": "ir"}
    out = torch.compile(run, backend=backend.dsv4, options=options)(q, positions, table)
print(json.dumps({"out": out[0, 0].tolist(), "hits": counters["aot_autograd"]["autograd_cache_hit"],
                  "misses": counters["aot_autograd"]["autograd_cache_miss"]}))
"""


@dataclass
class Checkout:
    """A copy of the package and a cache folder."""

    tree: Path
    cache: Path
    python: WarmPython

    def run(self) -> dict[str, object]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.cache)}
        done = self.python.run("tests.backend.program", str(self.tree), PROGRAM, **cache)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def checkout(tmp_path: Path, torch_alone: WarmPython) -> Checkout:
    tree = tmp_path / "tree"
    for folder in ("dsv4_compile", "lowering", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return Checkout(tree, tmp_path / "cache", torch_alone)


def test_edit_misses_and_revert_hits(checkout: Checkout) -> None:
    lowering = checkout.tree / "lowering" / "preprocess" / "q_norm_rope.py"
    original = lowering.read_text()
    edited = original.replace("cos_sin_cache, eps, padded_heads)", "cos_sin_cache, eps + 3, padded_heads)")
    assert edited != original
    # Normalized ones; their last pair (1, 1) is rotated by cos 1 and sin 0.5.
    first = checkout.run()
    assert first["out"] == pytest.approx([1, 1, 0.5, 1.5], abs=1e-5)
    assert (first["hits"], first["misses"]) == (0, 1)

    lowering.write_text(edited)
    changed = checkout.run()
    assert changed["out"] == pytest.approx([0.5, 0.5, 0.25, 0.75], abs=1e-5)
    assert (changed["hits"], changed["misses"]) == (0, 1)

    lowering.write_text(original)
    assert checkout.run() == {"out": first["out"], "hits": 1, "misses": 0}


@pytest.mark.parametrize("what", ["architectures", "torch", "triton", "kernels", "options"])
def test_the_key_has_all_that_generated_code_depends_on(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(options: Options = Options()) -> Any:  # noqa: B008
        passes = ChooseImplementations(options, (), [torch.device("cpu")])
        if what == "architectures":
            passes.architectures = architectures
        return passes.uuid()

    state = ["unproven"]
    monkeypatch.setattr(choose.proven, "state", lambda architecture: state[0])
    architectures = ("cuda sm_90",)
    before = key()
    assert key() == before is not None
    architectures = ("cuda sm_100",)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif what == "triton":
        monkeypatch.setattr(choose, "triton_version", lambda: "9.9")
    elif what == "kernels":
        state[0] = "proven"
    assert key(Options(impl="eager") if what == "options" else Options()) != before
