"""Run our calls through flashinfer's own Python code without its GPU: names, shapes and all of its checks.

    python tests/attention_backends/library_calls.py

The installed library is patched to see compute capability 10.0 and to call our references instead of its kernels; the
results are compared with float64. flash_mla needs no such patch: it runs on an H200, and `record.py` records it where
it is installed. Exits with 1 on a failure.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile import layout
from dsv4_compile.attention_backends.flashinfer import STORAGE_OFFSETS
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.testing import assert_close
from tests.attention_backends.systems import PHASES, V4, Setup, any_case, any_layer, setups

LIBRARY, NAMES = "flashinfer", ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE")
SEED, SMS, WINDOW = 20261120, 148, layout.SLIDING_WINDOW


def attend_dsv4(out: Tensor, q: Tensor, entries: Tensor, window: Tensor, *others: Any) -> None:
    """Compute attention from the arguments of `trtllm_paged_attention_decode_sparse_mla_dsv4`."""
    # Versions have different arguments in between; in all of them lens come directly before the two scales.
    first = next(i for i, x in enumerate(others) if isinstance(x, float))
    lens, bmm1_scale, bmm2_scale = others[first - 1 : first + 2]
    indices = next(x for x in others if isinstance(x, Tensor) and x.dim() == 2)
    sinks = next(x for x in others if isinstance(x, Tensor) and x.dtype is torch.float32)
    quantised = q.dtype is torch.float8_e4m3fn

    def rows(cache: Tensor) -> Tensor:
        return cache.squeeze(1).view(torch.uint8) if quantised else cache.squeeze(1)

    attended, _ = sparse_mla_decode(
        q,
        rows(window),
        indices[:, :WINDOW],
        lens.clamp_max(WINDOW),
        window.shape[2],
        "fp8" if quantised else "plain",
        bmm1_scale,
        sinks,
        rows(entries),
        indices[:, WINDOW:],
        lens - WINDOW,
        entries.shape[2],
    )
    out.copy_(attended.float() * bmm2_scale)


def attend_v32(out: Tensor, fp4: None, q: Tensor, cache: Tensor, *others: Any) -> None:
    """Compute attention from the arguments of `trtllm_paged_attention_decode` with a sparse top-k."""
    at = next(i for i, x in enumerate(others) if isinstance(x, Tensor) and x.dim() == 3)
    indices, lens, _, _, bmm1_scale = others[at : at + 5]
    rows, slots = cache.squeeze(1), indices.flatten(0, 1)
    attended, _ = sparse_mla_decode(q, rows, slots, lens, rows.shape[1], "plain", bmm1_scale)
    out.copy_(attended.view(*out.shape[:-1], -1)[..., : out.shape[-1]])


def check(setup: Setup, gaps: bool) -> None:
    """Check three random batches through the library against the exact output; `gaps`: pages with gaps between them."""
    rng = random.Random(SEED)
    for _ in range(3):
        case = any_case(rng, setup)
        layer = any_layer(setup, case)
        arguments = list(layer.arguments(case))
        if not gaps:
            arguments[1:3] = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments[1:3]]
        if setup.fmt == "fp8":
            quantised = (arguments[0] * layer.module.q_scale_inv).to(torch.float8_e4m3fn)
            case.q.copy_(quantised.float())
            arguments[0] = quantised
        with torch.inference_mode():
            assert_close(layer.module(*arguments), case.expected())


def main() -> int:
    core = importlib.import_module(f"{LIBRARY}.mla._core")
    kernels = SimpleNamespace(
        trtllm_paged_attention_decode_sparse_mla_dsv4=attend_dsv4, trtllm_paged_attention_decode=attend_v32
    )
    patches = {
        "get_compute_capability": lambda device: (10, 0),
        "get_device_sm_count": lambda device: SMS,
        "device_support_pdl": lambda device: False,
        "get_trtllm_gen_fmha_module": lambda: kernels,
    }
    gaps = STORAGE_OFFSETS in inspect.signature(core.trtllm_batch_decode_sparse_mla_dsv4).parameters
    failures = 0
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(core, name, value))
        for setup in setups(PHASES):
            if setup.name not in NAMES:
                continue
            ratio = setup.ratio if setup.name in V4 else 1
            called = Setup(setup.name, setup.kv_cache_dtype, ratio, setup.phase, "library")
            try:
                check(called, gaps)
                print(f"passed  {called}", flush=True)
            except Exception as error:
                failures += 1
                print(f"FAILED  {called}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{LIBRARY} {importlib.import_module(LIBRARY).__version__}: {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
