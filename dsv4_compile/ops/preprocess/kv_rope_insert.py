"""Schema, check and fake of `kv_rope_insert`."""

from __future__ import annotations

from torch import Tensor

from ...cpu.preprocess import kv_rope_insert as cpu
from ...reference.preprocess import kv_rope_insert as reference
from ...selection.costs import CallSizes, CostModel, angles, inserted
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_kv_cache, expect_rope_table, expect_rows


def check_kv_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
    op: str = "kv_rope_insert",
) -> None:
    """Raise if the arguments of `kv_rope_insert`, on behalf of `op`, are wrong."""
    expect(kv, f"{op}: kv [T, D]", FLOATS)
    expect(slot_mapping, f"{op}: slot_mapping [<= T]", INTS)
    expect(positions, f"{op}: positions [T]", INTS)
    expect_rows(kv.shape[0], slot_mapping.shape[0], f"{op}: kv")
    expect_rows(positions.shape[0], slot_mapping.shape[0], f"{op}: positions")
    expect_rope_table(cos_sin_cache, op, kv.shape[1])
    expect_kv_cache(k_cache, op, cache_format, block_size, kv.shape[1], kv_scale)


def _fake(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
) -> None:
    return None


def insert_sizes(call: CallSizes) -> dict[str, int]:
    """Return the sizes of a call that inserts rows of `kv`, and normalises `qr` where it has some."""
    kv = call.of_rows("kv")
    return kv | call.rope | call.row(kv["D"], "kv") | {"Q": call.dims("qr")[-1] if "qr" in call.arguments else 0}


kv_rope_insert = define(
    "kv_rope_insert",
    mutates=("k_cache",),
    reference=reference.kv_rope_insert,
    on_cpu=cpu.kv_rope_insert,
    fake=_fake,
    check=check_kv_insert,
    kernel="dsv4_compile.kernels.preprocess.kv_rope_insert",
    lowering="dsv4_compile.lowering.preprocess.kv_rope_insert",
    cost=CostModel(
        lambda T, D, rope, row, e=2: (T * (angles(rope) + e * D + inserted(row)), 0),
        sizes=insert_sizes,
    ),
    invariant=Invariance(rows=("kv", "slot_mapping", "positions"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
