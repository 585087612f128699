"""The decode kernels compiled ahead of time, and which of them a call on Hopper takes."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.kernels import sparse_mla_decode_hopper as hopper
from dsv4_compile.kernels import sparse_mla_decode_portable as portable
from dsv4_compile.kernels.gpu import Gpu
from dsv4_compile.kernels.sparse_mla_decode_portable import Source
from dsv4_compile.testing import strided
from dsv4_compile.testing.fake_triton import TARGETS, compiled_for, machine_code

GPUS = {
    "sm_90": (Gpu("cuda", 90, 132), 227),
    "sm_100": (Gpu("cuda", 100, 148), 227),
    "sm_120": (Gpu("cuda", 120, 170), 99),
    "gfx942": (Gpu("hip", 0, 304), 64),
    "gfx950": (Gpu("hip", 0, 256), 160),
}
"""By target: the GPU, and the KiB of shared memory that a program may have."""


def sources_of(fmt: str, dtype: torch.dtype) -> tuple[Source, Source]:
    lens = torch.zeros(2, dtype=torch.int32)

    def source(pages: int, block: int, width: int) -> Source:
        cache = layout.allocate_cache(fmt, pages, block, dtype=dtype)
        return Source(cache, torch.zeros(2, width, dtype=torch.int32), lens, block)

    return source(3, 64, 128), source(9, 2, 512)


@pytest.mark.parametrize(
    ("heads", "fmt", "dtype"),
    [(8, "fp8_ds_mla", torch.bfloat16), (64, "fp8_ds_mla", torch.bfloat16), (64, "plain", torch.float32)],
    ids=["8 heads", "64 heads", "float32"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_ahead_of_time_within_shared_memory(target: str, heads: int, fmt: str, dtype: torch.dtype) -> None:
    gpu, kibibytes = GPUS[target]
    q, sink = torch.zeros(2, heads, 512, dtype=dtype), torch.zeros(heads)
    with compiled_for(TARGETS[target]) as compiled:
        portable.launch(q, *sources_of(fmt, dtype), fmt, 0.1, sink, None, gpu, splits=2)
    assert [kernel.metadata.name for kernel in compiled] == ["sparse_mla_decode_kernel", "split_softmax_kernel"]
    assert all(kernel.metadata.shared <= kibibytes * 1024 and machine_code(kernel) for kernel in compiled)


@pytest.mark.parametrize(("heads", "splits", "sink"), [(64, 1, False), (128, 4, True)])
def test_the_hopper_kernel_compiles_with_its_registers_and_asynchronous_products(
    heads: int, splits: int, sink: bool
) -> None:
    q, sources = torch.zeros(2, heads, 512, dtype=torch.bfloat16), sources_of("fp8_ds_mla", torch.bfloat16)
    assert hopper.hopper_refuses(q, *sources, "fp8_ds_mla", None) == ""
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_hopper(q, *sources, 0.1, torch.zeros(heads) if sink else None, GPUS["sm_90"][0], splits)
    kernel = compiled[0]
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and machine_code(kernel)
    assert kernel.asm["ptx"].count("setmaxnreg") >= 4
    assert kernel.asm["ptx"].count("wgmma.mma_async") > 0


def test_the_hopper_kernel_leaves_what_does_not_fit_to_the_portable_one() -> None:
    window, extra = sources_of("fp8_ds_mla", torch.bfloat16)
    q, sink = torch.zeros(2, 64, 512, dtype=torch.bfloat16), torch.zeros(64)
    assert hopper.hopper_refuses(q, window, extra, "fp8_ds_mla", sink) == ""
    odd_pages = torch.zeros(9, 2 * 584 + 8, dtype=torch.uint8)
    calls = {
        "heads": (q[:, :32], window, extra, "fp8_ds_mla", sink),
        "bfloat16": (q.half(), window, extra, "fp8_ds_mla", sink),
        "takes fp8_ds_mla": (q, window, extra, "fp8", sink),
        "power of two": (q, window._replace(block_size=48), extra, "fp8_ds_mla", sink),
        "bytes apart": (q, window, extra._replace(cache=odd_pages[:, :1168]), "fp8_ds_mla", sink),
        "start at": (q, window._replace(cache=window.cache[:, 8:]), extra, "fp8_ds_mla", sink),
        "neighbours": (q, window, extra._replace(indices=strided(extra.indices)), "fp8_ds_mla", sink),
    }
    for reason, call in calls.items():
        assert reason in hopper.hopper_refuses(*call)
