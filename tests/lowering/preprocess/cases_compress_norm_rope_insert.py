"""Cases of `compress_norm_rope_insert`; see generated.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, INDEXER_HEAD_DIM, ROPE_DIM, allocate_cache, state_block_size, state_width
from dsv4_compile.testing import poison_
from tests.lowering.generated import Case, storage

SHARED, COLUMNS, BLOCK, PAGES = 3, 70, 2, 9
CAPACITY = BLOCK * PAGES


class Inputs(NamedTuple):
    """Arguments of a case; `cache` is compared byte by byte, its page padding included."""

    state: Tensor
    state_slots: Tensor
    table: Tensor
    token_to_req: Tensor
    positions: Tensor
    slots: Tensor
    weight: Tensor
    angles: Tensor
    cache: Tensor
    scale: Tensor
    projection: Tensor

    @classmethod
    def make(
        cls, tokens: int, fmt: str, ratio: int = 4, dim: int = HEAD_DIM, dtype: torch.dtype = torch.bfloat16
    ) -> Inputs:
        """Tokens at the ends of groups, a request each; the first group of a request among them, requests that lack
        blocks, and tokens that have no slot, no state, no request or close no group. Between the pages is NaN."""
        torch.manual_seed(tokens)
        block, rope = state_block_size(ratio), min(ROPE_DIM, dim // 2)
        blocks = SHARED * COLUMNS
        state = poison_(torch.empty(blocks, block + 1, state_width(ratio, dim)))[:, :-1].normal_()
        table = torch.randperm(blocks).int().view(SHARED, COLUMNS)
        table[1, 1:3] = -1
        table = table[torch.arange(tokens) % SHARED]
        groups = COLUMNS * block // ratio
        positions = torch.randint(0, groups, (tokens + 2,)) * ratio + ratio - 1
        positions[:1], positions[3::4], positions[7:8] = ratio - 1, 5, -1
        slots = torch.randperm(CAPACITY)[: tokens + 1]
        slots[4::7] = -1
        state_slots = torch.randint(0, blocks * block, (tokens,))
        state_slots[6::7] = -1
        token_to_req = torch.arange(tokens + 1).flip(0)
        cache = allocate_cache(fmt, PAGES, BLOCK, dim, dtype=dtype)
        storage(cache).random_(0, 255)
        weight, angles = 1 + 0.1 * torch.randn(dim).bfloat16(), torch.randn(groups * ratio, rope)
        owners, scale = token_to_req.int(), torch.tensor([0.01])
        projection = torch.randn(tokens, state.shape[-1])
        return cls(state, state_slots, table, owners, positions, slots, weight, angles, cache, scale, projection)


def compress(fmt: str, ratio: int = 4, hadamard: bool = False) -> Callable[[Inputs], tuple[()]]:
    """The op alone."""

    def run(x: Inputs) -> tuple[()]:
        sizes = 1e-6, ratio, state_block_size(ratio), BLOCK, fmt, hadamard
        torch.ops.dsv4.compress_norm_rope_insert(*x[:9], *sizes, x.scale if fmt == "fp8" else None)
        return ()

    return run


def saved(x: Inputs) -> tuple[()]:
    """Insert after a separate producer has saved the states of the tokens."""
    ape = x.angles.flatten()[: 2 * x.projection.shape[1]].view(4, -1)
    scores = x.projection * 1.3
    torch.ops.dsv4.save_partial_states(scores, ape, x.state, x.state_slots, x.positions, state_block_size(4))
    return compress("fp8_ds_mla")(x)


def read(x: Inputs) -> Tensor:
    """The cache is a result too: of float32 rows the last bits are not the reference's."""
    compress("plain")(x)
    return x.cache + 0


def cleared(x: Inputs) -> Inputs:
    x.cache.zero_()
    return x


def without_scores(x: Inputs) -> Inputs:
    """Scores of -inf in every window of some channels."""
    x.state[..., x.state.shape[-1] // 2 + 3 :: 32] = -torch.inf
    return cleared(x)


def all_padding(x: Inputs) -> Inputs:
    x.slots.fill_(-1)
    return x


def case(fmt: str, sizes: tuple[int, ...], ratio: int = 4, hadamard: bool = False, **options: Any) -> Case:
    dim = HEAD_DIM if fmt == "fp8_ds_mla" else INDEXER_HEAD_DIM if fmt.startswith("indexer") else 32
    make = {key: options.pop(key) for key in ("dim", "dtype") if key in options}

    def inputs(tokens: int) -> Inputs:
        return Inputs.make(tokens, fmt, ratio, **({"dim": dim} | make))

    return Case(compress(fmt, ratio, hadamard), inputs, sizes, TOKENS, **options)


TOKENS = ("state_slots", "table", "token_to_req", "positions", "slots", "projection")
CASES = {
    "ratio_4": case("fp8_ds_mla", (9, 2)),
    "ratio_128": case("fp8_ds_mla", (3,), 128, for_targets=True),
    "indexer_fp8": case("indexer_fp8", (9, 6), for_targets=True),
    "indexer_fp8_hadamard": case("indexer_fp8", (7,), hadamard=True),
    "indexer_mxfp4": case("indexer_mxfp4", (9,)),
    "indexer_mxfp4_hadamard": case("indexer_mxfp4", (7,), hadamard=True),
    "rows_of_another_ratio_hadamard": case("plain", (7,), 8, hadamard=True, dim=16),
    "float32_rows": Case(read, lambda t: cleared(Inputs.make(t, "plain", dim=32, dtype=torch.float32)), (9,)),
    "without_scores": Case(read, lambda t: without_scores(Inputs.make(t, "plain", dim=32, dtype=torch.float32)), (9,)),
    "fp8_rows": case("fp8", (9,)),
    "saved": Case(saved, lambda t: Inputs.make(t, "fp8_ds_mla"), (3,)),
    "all_padding": Case(compress("indexer_fp8"), lambda t: all_padding(Inputs.make(t, "indexer_fp8", dim=128)), (5,)),
    "one_token": case("fp8_ds_mla", (1,)),
    "no_token": case("fp8_ds_mla", (0,)),
}
