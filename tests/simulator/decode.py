"""Calls of the simulated Hopper decode kernels, and what their results are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.attention.sparse_mla_decode_plan import Fusion, Source, results_for
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.testing import assert_close, poisoned_empty
from tests.ops.attention.sparse_mla_calls import positional

GPU = Gpu("cuda", 0, 132)
BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
FEW_KEYS = "attention_few_keys"


def run(launcher: Any, arguments: dict[str, Any], splits: int, groups: tuple[Any, ...] = (), **options: Any) -> Any:
    """The kernel of the module `launcher` on arguments by name, over poisoned memory."""
    q, *_, scale, sink = args = positional(arguments)[:8]
    extra = Source(*positional(arguments)[8:12])
    names = ("positions", "cos_sin_cache")
    where = {name: arguments[name] for name in names} if options or groups else {}
    fusion = Fusion(**where, **options)
    fusion = fusion._replace(**dict(zip(("n_groups", "heads_per_group", "packed_scales"), groups, strict=False)))
    with poisoned_empty(), torch.no_grad():
        rows = q, Source(*args[1:5]), extra
        return launcher.launch_hopper(*rows, scale, sink, GPU, splits, fusion, results_for(q, fusion))


def row_alone(arguments: dict[str, Any], t: int) -> dict[str, Any]:
    """The call of token `t` by itself, its rows of slots no wider than they are long."""
    one = {name: arguments[name][t : t + 1] for name in ("q", "lens", "extra_lens", "positions")}
    one |= {
        name: arguments[name][t : t + 1, : int(arguments[count][t])].contiguous()
        for name, count in (("indices", "lens"), ("extra_indices", "extra_lens"))
    }
    return arguments | one


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], lse: str = "lse") -> None:
    assert_close(got[0], want[0], FEW_KEYS, label="out")
    assert_close(got[1], want[1], lse, label="lse")
