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


REGIONS = """
import copy
import sys
import torch
from torch import nn
from torch._dynamo.utils import counters
from dsv4_compile.backend import dsv4

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(6, 4))

    def forward(self, x):
        self.cache[:x.shape[0]] = x
        return torch.tanh(self.up(x)) + self.cache.mean(0)

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, None

torch.manual_seed(0)
model = Model(int(sys.argv[3]))
eager = copy.deepcopy(model)
# Inductor calls PyTorch instead of compiling C++: what is cached is the same.
settings = {"dsv4.regions": "on", "fallback_by_default": True}
step = torch.compile(model, backend=dsv4, fullgraph=True, options=settings)
x = torch.ones(3, 4)
with torch.no_grad():
    for each in (x, 2 * x):
        torch.testing.assert_close(step(each)[0], eager(each)[0])
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_loads_a_graph_in_regions_and_another_model_its_kinds(
    tmp_path: Path, torch_alone: WarmPython
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [torch_alone.run("tests.backend.program", str(ROOT), REGIONS, n, **cache) for n in ("5", "5", "4")]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[-1].stderr
    loaded, kinds = zip(*(map(int, run.stdout.split()) for run in runs), strict=True)
    assert loaded == (0, 1, 0)
    assert kinds[0] == kinds[1] == 0 < kinds[2]


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
