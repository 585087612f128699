"""Calls of the simulated decode kernels for sm_90, and how their results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from dsv4_compile.testing import assert_close, poisoned_empty
from tests.ops.attention.sparse_mla_calls import positional

GPU = Gpu("cuda", 0, 132)
BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
PLAIN = BF16 | {"fmt": "plain"}
"""Caches of bfloat16 rows, which the kernels copy."""
FEW_KEYS = "attention_few_keys"


def run(
    kernel: Any, arguments: dict[str, Any], splits: int, groups: tuple[Any, ...] = (), level: str = "", **options: Any
) -> Any:
    """Run the kernel of the module `kernel` on arguments by name, over poisoned memory; quantised with `groups`.

    `level` is a value of `dsv4.batch_invariant`.
    """
    if not options and not groups:
        arguments = {name: x for name, x in arguments.items() if name not in ("positions", "cos_sin_cache")}
    elif groups:
        names = DecodeQuantArguments._fields[-len(groups) :]
        arguments = arguments | {"inverse_rope": False} | dict(zip(names, groups, strict=True))
    op = DecodeQuantArguments if groups else DecodeArguments
    call = decode_call(op(*positional(arguments | options, quant=bool(groups))))
    call = call._replace(batch_invariant=level) if level else call
    with poisoned_empty(), torch.no_grad():
        return kernel.launch(call, GPU, splits)


def row_alone(arguments: dict[str, Any], t: int) -> dict[str, Any]:
    """Return the call of token `t` by itself, its rows of slots no wider than they are long."""
    one = {name: arguments[name][t : t + 1] for name in ("q", "lens", "extra_lens", "positions")}
    one |= {
        name: arguments[name][t : t + 1, : int(arguments[count][t])].contiguous()
        for name, count in (("indices", "lens"), ("extra_indices", "extra_lens"))
    }
    return arguments | one


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], lse: str = "lse") -> None:
    assert_close(got[0], want[0], FEW_KEYS, label="out")
    assert_close(got[1], want[1], lse, label="lse")
