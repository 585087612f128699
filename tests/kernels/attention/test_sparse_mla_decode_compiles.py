"""The decode kernels compiled ahead of time, and which of them a call on Hopper takes."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile._compat import triton_release
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as hopper
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_heads as few
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as small
from dsv4_compile.kernels.attention import sparse_mla_decode_triton as portable
from dsv4_compile.kernels.attention.sparse_mla_decode_plan import PLAIN, Fusion, Source, results_for
from dsv4_compile.testing import strided
from dsv4_compile.testing.fake_triton import TARGETS, compiled_for, machine_code, resources
from tests.kernels.gpus import GPUS, shared_out


def sources_of(fmt: str, dtype: torch.dtype) -> tuple[Source, Source]:
    lens = torch.zeros(2, dtype=torch.int32)

    def source(pages: int, block: int, width: int) -> Source:
        cache = layout.allocate_cache(fmt, pages, block, dtype=dtype)
        return Source(cache, torch.zeros(2, width, dtype=torch.int32), lens, block)

    return source(3, 64, 128), source(9, 2, 512)


def fusion_of(kind: str, heads: int) -> Fusion:
    """Options of a call: nothing fused, both ends, or both ends with quantisation."""
    if kind == "plain":
        return PLAIN
    ends = Fusion(torch.zeros(2, dtype=torch.int64), torch.zeros(64, layout.ROPE_DIM), 1e-6, inverse_rope=True)
    return ends if kind == "fused" else ends._replace(n_groups=2, heads_per_group=heads // 2, packed_scales=True)


CALLS: dict[str, tuple[int, str, torch.dtype, str, int]] = {
    "8 heads": (8, "fp8_ds_mla", torch.bfloat16, "plain", 2),
    "64 heads quantised": (64, "fp8_ds_mla", torch.bfloat16, "quantised", 1),
    "float32 fused": (64, "plain", torch.float32, "fused", 2),
}


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, own in shared_out([*CALLS]).items() for name in own]
)
def test_it_compiles_ahead_of_time_within_shared_memory(target: str, name: str) -> None:
    gpu, kibibytes = GPUS[target]
    heads, fmt, dtype, kind, splits = CALLS[name]
    q, sink, fusion = torch.zeros(2, heads, 512, dtype=dtype), torch.zeros(heads), fusion_of(kind, heads)
    with compiled_for(TARGETS[target]) as compiled:
        portable.launch(
            q, *sources_of(fmt, dtype), fmt, 0.1, sink, None, gpu, splits=splits, fusion=fusion,
            into=results_for(q, fusion),
        )  # fmt: skip
    names = ["sparse_mla_decode_kernel", "split_softmax_kernel"]
    assert [kernel.metadata.name for kernel in compiled] == names[:splits]
    assert all(kernel.metadata.shared <= kibibytes * 1024 and machine_code(kernel) for kernel in compiled)


@pytest.mark.parametrize(
    ("heads", "splits", "sink", "kind"),
    [(64, 1, False, "plain"), (128, 1, True, "fused"), (100, 4, True, "quantised")],
)
def test_the_hopper_kernel_compiles_with_its_registers_and_asynchronous_products(
    heads: int, splits: int, sink: bool, kind: str
) -> None:
    q, sources = torch.zeros(2, heads, 512, dtype=torch.bfloat16), sources_of("fp8_ds_mla", torch.bfloat16)
    logits, fusion = torch.zeros(heads) if sink else None, fusion_of(kind, heads)
    assert hopper.hopper_refuses(q, *sources, "fp8_ds_mla", logits, fusion) == ""
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_hopper(
            q, *sources, 0.1, logits, GPUS["sm_90"][0], splits, fusion=fusion, into=results_for(q, fusion)
        )
    kernel = compiled[0]
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and machine_code(kernel)
    assert kernel.asm["ptx"].count("setmaxnreg") >= 4
    # Scores twice, in front of the loop and in it; a norm's squares by blocks of columns, in a loop of their own.
    assert kernel.asm["ptx"].count("m64n64k16") == 2 * 512 // 16 + (4 if fusion.q_norm_eps else 0)


@pytest.mark.parametrize(("rope", "heads"), [(96, 64), (200, 64), (32, 32), (200, 8)])
def test_any_even_number_of_columns_up_to_half_of_a_row_turns(rope: int, heads: int) -> None:
    kernel = few if heads <= few.MOST_HEADS else hopper
    q, sources = torch.zeros(2, heads, 512, dtype=torch.bfloat16), sources_of("fp8_ds_mla", torch.bfloat16)
    fusion = Fusion(torch.zeros(2, dtype=torch.int64), torch.zeros(64, rope), 1e-6, inverse_rope=True)
    assert kernel.hopper_refuses(q, *sources, "fp8_ds_mla", None, fusion) == ""
    with compiled_for(TARGETS["sm_90"]) as compiled:
        kernel.launch_hopper(q, *sources, 0.1, None, GPUS["sm_90"][0], 1, fusion, results_for(q, fusion))
    assert machine_code(compiled[0])


@pytest.mark.parametrize("invariant", [False, True])
def test_parts_are_stored_and_joined_sixteen_bytes_at_a_time(invariant: bool) -> None:
    q, sources = torch.zeros(2, 64, 512, dtype=torch.bfloat16), sources_of("fp8_ds_mla", torch.bfloat16)
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_hopper(q, *sources, 0.1, None, GPUS["sm_90"][0], 4, Fusion(batch_invariant=invariant))
    parts, joined = (kernel.asm["ptx"] for kernel in compiled)
    assert joined.count("ld.global.v4.b32") == 4
    assert compiled[1].metadata.num_warps == (4 if invariant else 2)
    # Of both halves of the dims, in a loop over 16 heads at a time.
    assert invariant or parts.count("st.global.v4.b32") == 8


@pytest.mark.parametrize(
    ("heads", "splits", "sink", "kind"),
    [(8, 1, False, "plain"), (16, 4, True, "fused"), (24, 1, True, "quantised"), (32, 1, True, "quantised")],
)
def test_the_kernel_for_few_heads_has_what_it_does_once_and_spills_nothing(
    heads: int, splits: int, sink: bool, kind: str
) -> None:
    q, sources = torch.zeros(2, heads, 512, dtype=torch.bfloat16), sources_of("fp8_ds_mla", torch.bfloat16)
    logits, fusion = torch.zeros(heads) if sink else None, fusion_of(kind, heads)
    assert few.hopper_refuses(q, *sources, "fp8_ds_mla", logits, fusion) == ""
    with compiled_for(TARGETS["sm_90"]) as compiled:
        few.launch_hopper(
            q, *sources, 0.1, logits, GPUS["sm_90"][0], splits, fusion=fusion, into=results_for(q, fusion)
        )
    kernel = compiled[0]
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and machine_code(kernel)
    assert kernel.asm["ptx"].count("setmaxnreg") >= 4
    assert kernel.metadata.launch_pdl and kernel.asm["ptx"].count("griddepcontrol.wait") == 1
    # Rows of the products are keys: as many columns as heads, rounded up. Both have 512 dims, scores and outputs.
    assert kernel.asm["ptx"].count(f"m64n{few.shape_of(heads).block_h}k16") == 512 // 16 + 512 // 64 * (few.KEYS // 16)
    # Of a key, a thread of eight warps dequantises what four words of codes hold, in each of seven tiles.
    assert kernel.asm["ptx"].count("0x9180") == 4 * layout.FP8_DS_MLA_TILES
    used = resources(kernel)
    # Triton 3.9 spills what 32 heads quantise.
    assert used["STACK"] <= (80 if triton_release() >= (3, 9) and kind == "quantised" else 0) and used["LOCAL"] == 0


@pytest.mark.parametrize(
    ("shape", "heads", "splits", "kind"),
    [
        (small.NARROW, 100, 3, "fused"),
        (small.ONCE[0], 64, 1, "quantised"),
        (small.ONCE[1], 64, 2, "plain"),
    ],
)
def test_the_kernel_for_few_tokens_is_small_and_waits_for_the_one_in_front(
    shape: small.Shape, heads: int, splits: int, kind: str
) -> None:
    q, sources, gpu = torch.zeros(2, heads, 512).bfloat16(), sources_of("fp8_ds_mla", torch.bfloat16), GPUS["sm_90"][0]
    fusion = fusion_of(kind, heads)
    with compiled_for(TARGETS["sm_90"]) as compiled:
        small.launch_hopper(q, *sources, 0.1, None, gpu, splits, fusion, results_for(q, fusion), shape)
    kernel = compiled[0]
    assert kernel.metadata.launch_pdl and kernel.asm["ptx"].count("griddepcontrol.wait") == 1
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_hopper(q, *sources, 0.1, None, gpu, splits, fusion, results_for(q, fusion))
    assert len(machine_code(kernel)) < len(machine_code(compiled[0])) * 2 / 3


def test_the_kernel_for_few_tokens_leaves_many_to_the_others() -> None:
    window, extra = sources_of("fp8_ds_mla", torch.bfloat16)
    calls: dict[tuple[int, int], small.Shape | None] = {(16, 64): None, (32, 64): None}
    # Rows in single blocks, as long as every block has a multiprocessor.
    calls |= {(3, 64): small.NARROW, (6, 64): small.ONCE[0], (13, 64): small.ONCE[1], (14, 64): None}
    assert {call: small.shape_of(*call, 640) for call in calls} == calls
    assert small.shape_of(1, 128, 1152) == small.ONCE[0]
    short = {
        (1, 64): small.NARROW,
        (2, 64): small.ONCE[0],
        (32, 64): small.ONCE[0],
        (64, 64): small.ONCE[1],
        (65, 64): None,
    }
    assert {call: small.shape_of(*call, 256) for call in short} == short
    assert small.shape_of(1, 64, 128) == small.ONCE[0]
    assert small.shape_of(16, 64, 512) == small.ONCE[1]
    assert small.shape_of(8, 128, 1152) is None
    q = torch.zeros(64, 64, 512, dtype=torch.bfloat16)
    assert small.hopper_refuses(q[:8], window, extra, "fp8_ds_mla", None) == ""
    assert "less than 64 tokens" in small.hopper_refuses(q, window, extra, "fp8_ds_mla", None)
    assert "33 heads" in small.hopper_refuses(q[:1, :32], window, extra, "fp8_ds_mla", None)
    assert "more tokens" in small.hopper_refuses(q[:1], window, extra, "fp8_ds_mla", None, Fusion(batch_invariant=True))


def test_the_hopper_kernel_leaves_what_does_not_fit_to_the_portable_one() -> None:
    window, extra = sources_of("fp8_ds_mla", torch.bfloat16)
    q, sink = torch.zeros(2, 64, 512, dtype=torch.bfloat16), torch.zeros(64)
    assert hopper.hopper_refuses(q, window, extra, "fp8_ds_mla", sink) == ""
    odd_pages = torch.zeros(9, 2 * 584 + 8, dtype=torch.uint8)
    calls = {
        "33 heads or more": (q[:, :32], window, extra, "fp8_ds_mla", sink),
        "bfloat16 queries": (q.half(), window, extra, "fp8_ds_mla", sink),
        "takes fp8_ds_mla": (q, window, extra, "fp8", sink),
        "power of two": (q, window._replace(block_size=48), extra, "fp8_ds_mla", sink),
        "bytes apart": (q, window, extra._replace(cache=odd_pages[:, :1168]), "fp8_ds_mla", sink),
        "start at": (q, window._replace(cache=window.cache[:, 8:]), extra, "fp8_ds_mla", sink),
        "neighbours": (q, window, extra._replace(indices=strided(extra.indices)), "fp8_ds_mla", sink),
    }
    for reason, call in calls.items():
        assert reason in hopper.hopper_refuses(*call)
    assert few.hopper_refuses(q[:, :32], window, extra, "fp8_ds_mla", sink) == ""
    assert "32 heads or fewer" in few.hopper_refuses(q[:, :33], window, extra, "fp8_ds_mla", sink)
    wide = Fusion(None, torch.zeros(64, 512))
    assert "half of a vector" in hopper.hopper_refuses(q, window, extra, "fp8_ds_mla", sink, wide)


@pytest.mark.parametrize("made_for_hopper", [False, True])
def test_nothing_is_compiled_again_for_a_piece_of_a_batch(made_for_hopper: bool) -> None:
    gpu, lens, positions = GPUS["sm_90"][0], torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    q, fusion = torch.zeros(2, 64, 512, dtype=torch.bfloat16), fusion_of("fused", 64)
    with compiled_for(TARGETS["sm_90"]) as compiled:
        for first in (0, 3):
            here = slice(first, first + 2)
            window, extra = (s._replace(lens=lens[here]) for s in sources_of("fp8_ds_mla", torch.bfloat16))
            piece = fusion._replace(positions=positions[here])
            if made_for_hopper:
                hopper.launch_hopper(q, window, extra, 0.1, None, gpu, 2, fusion=piece)
            else:
                portable.launch(q, window, extra, "fp8_ds_mla", 0.1, None, None, gpu, splits=2, fusion=piece)
    assert len(compiled) == 4
    assert [kernel.hash for kernel in compiled[:2]] == [kernel.hash for kernel in compiled[2:]]
