"""The beginning of a step of a decoder stack, eager or in a trace: its tokens get places in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import check
from ...metadata import AttentionMetadata
from ...runtime.repeated_layers import marks_are_written_out
from .cache import PagedCache
from .layer_kinds import LayerTensors, block_tables_of, later_layers
from .token_inputs import check_autocast


def begin_step(
    model: Any,
    input_ids: Tensor,
    keep: Tensor | None,
    cache: PagedCache,
    token_rows: tuple[Tensor, Tensor] | None = None,
) -> tuple[AttentionMetadata, Sequence[LayerTensors | None], Sequence[Tensor]]:
    """Append columns to `cache`; return their metadata, and `repeats` and `shared` of `run_layers`.

    Args:
        model: a `CompilableModel`.
        input_ids: int64 `[B, S]`.
        keep: bool `[B, S]`, columns that hold a token, neighbours in each row; None = all.
        token_rows: in place of `keep`, arguments of `PagedCache.begin_prompts`.
    """
    check_autocast(input_ids)
    if torch.compiler.is_dynamo_compiling():
        # Guarded in place of modules and settings; parameters that were read here have a short way to the graph.
        check(bool(model.dsv4_state and cache.dsv4_state), "E208", got="a forward before a call")
        repeats = model.dsv4_repeats if marks_are_written_out() else ()
        elsewhere = tuple(f"layers.{i}." for i in later_layers(repeats))
        for tensors in (model.dsv4_parameters, cache.dsv4_parameters):
            _ = [tensors[name].ndim for name in tensors if not name.startswith(elsewhere)]
    else:
        repeats = ()
    rows, columns = input_ids.shape
    if token_rows is None:
        metadata = cache.begin_step(rows, columns, keep)
    else:
        metadata = cache.begin_prompts(*token_rows)
    return metadata, repeats, block_tables_of(metadata) if repeats else ()
