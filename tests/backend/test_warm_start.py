"""A graph from torch's compile cache runs in a process that has run no lowering.

Generated code must not call an op that only the lowering defines.
"""

from __future__ import annotations

from pathlib import Path

from tests.warm import ROOT, WarmPython

SCRIPT = """
import torch
from torch._dynamo.utils import counters
from dsv4_compile.backend import dsv4

def step(q, kv, cache, slots, positions, table):
    return torch.ops.dsv4.q_norm_rope_kv_insert(q, kv, cache, slots, positions, table, 1e-6, 4, "plain")

rows = torch.arange(3)
args = (torch.ones(3, 2, 24), torch.ones(3, 24), torch.zeros(2, 4, 24), rows, rows, torch.ones(8, 8))
# With a single kernel, precompiled headers take more time than they save.
torch.compile(step, backend=dsv4, fullgraph=True, options={"cpp_cache_precompile_headers": False})(*args)
print("hits", counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_runs_the_cached_graph(tmp_path: Path, torch_alone: WarmPython) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [torch_alone.run("tests.backend.program", str(ROOT), SCRIPT, **cache) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    assert runs[0].stdout.strip() == "hits 0"
    assert runs[1].stdout.strip() != "hits 0"


def test_a_process_that_compiles_nothing_has_the_op_of_gemms(torch_alone: WarmPython) -> None:
    """A graph from a warm cache may call it."""
    program = "import torch, dsv4_compile.passes.choose; print(torch.ops.dsv4_cpu.mm.default)"
    done = torch_alone.run("tests.backend.program", str(ROOT), program)
    assert done.stdout.strip() == "dsv4_cpu.mm.default", done.stderr[-2000:]
