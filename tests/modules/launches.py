"""Program that prints the launches of one compiled decode step of each kind of layer as JSON.

python -m tests.modules.launches

It runs in a separate process, because Inductor generates Triton for CPU tensors here, the kernels' launchers replace
the references, and launches are recorded instead of run.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from triton.runtime.jit import JITFunction

from dsv4_compile import backend
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.ops.common.kernels import KERNELS, launcher
from tests.modules.engine import Engine
from tests.quick_compiler import quicken_if_imported
from tests.support.inductor_triton import GeneratedKernel, generated_triton

RATIOS = {"swa": 1, "hca": 128, "csa": 4}
TOKENS, CONTEXT = 8, 512
OPTIONS = {"dsv4.impl": "triton", "dsv4.fuse": "on", "dsv4.fuse.fuse_output": "off"}
"""Fusion as on GPUs other than Hopper, where the first GEMM of the output projection quantises for the second."""
PREFIX = "launch::"


@contextmanager
def recorded_kernels() -> Iterator[None]:
    """Use launchers in place of the references, and record kernels instead of running them."""
    library = torch.library.Library("dsv4", "IMPL")
    for op in KERNELS:
        library.impl(op, launcher(op), "CPU")

    def record(name: Callable[[Any], str]) -> Callable[..., None]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with record_function(PREFIX + name(kernel)):
                pass

        return run

    with (
        mock.patch.object(JITFunction, "run", record(lambda kernel: kernel.fn.__name__)),
        mock.patch.object(GeneratedKernel, "run", record(lambda kernel: kernel.name)),
    ):
        yield
    library._destroy()


@contextmanager
def launches() -> Iterator[list[str]]:
    """List the launches of the block in order: kernels by name, GEMMs and fills by torch's name."""
    log: list[str] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield log
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        parent = event.cpu_parent
        if _launches(event.name) and not (parent is not None and _launches(parent.name)):
            log.append(event.name.partition("::")[2])


def _launches(event: str) -> bool:
    """Return whether the event is a kernel, or an op of torch that is neither a view nor an allocation."""
    space, _, name = event.partition("::")
    if space != "aten" or "empty" in name:
        return event.startswith(PREFIX)
    packet = getattr(torch.ops.aten, name)
    return not any(getattr(packet, overload).is_view for overload in packet.overloads())


def report(kind: str, fp8: bool) -> list[str]:
    """Return the launches of a decode step of TOKENS requests."""
    torch.compiler.reset()
    quicken_if_imported()
    config = DeepseekV4Config.flash().with_layers(RATIOS[kind])
    layer = DeepseekV4Attention(
        config, 0, kv_cache_dtype="fp8_ds_mla", dtype=torch.bfloat16, max_seq_len=CONTEXT, single_gemm=True, fp8=fp8
    )
    with generated_triton():
        compiled = torch.compile(layer, backend=backend.dsv4, fullgraph=True, options=OPTIONS)
        engine = Engine(layer, TOKENS, CONTEXT)
        engine.lengths = [9] * TOKENS
        metadata, cache = engine.metadata([1] * TOKENS, TOKENS), engine.paged.layers[0]
        hidden = torch.zeros(TOKENS, config.hidden_size, dtype=torch.bfloat16)
        with torch.inference_mode(), recorded_kernels():
            compiled(hidden, metadata, cache)
            with launches() as log:
                compiled(hidden, metadata, cache)
    return log


def main(*layers: str) -> dict[str, list[str]]:
    """Return the reports of these layers, such as "csa fp8"."""
    warnings.simplefilter("ignore")
    return {layer: report(kind, width == "fp8") for layer in layers for kind, width in [layer.split()]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
