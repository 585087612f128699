"""Sampling between two steps of a run: choose tokens, record them, advance the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import check, fail
from ..metadata import MetadataBuffers
from ..sizes import check_memory, shown

Sampler = Callable[[Any], Any]


class Sampling:
    """Chosen tokens at fixed addresses, which `finish_step` passes to the next step.

    Args:
        buffers: the runner's metadata.
        sampler: "greedy", which is captured with the step, or a function that is called between steps with the step's
            outputs. It returns int `[n]`, a token for each request; with speculated tokens
            `(num_new [n], tokens [n, S], drafts [n, tokens_each - 1])`, as `MetadataBuffers.advance` takes them.
        tokens_each: tokens of each request in a step.
        max_steps: most steps of one `run`.
    """

    def __init__(self, buffers: MetadataBuffers, sampler: str | Sampler, tokens_each: int, max_steps: int) -> None:
        self.captured = sampler == "greedy"
        check(
            self.captured or callable(sampler),
            "E201",
            got=f"{sampler=}",
            rule='a sampler is "greedy" or a function of the outputs',
            fix='pass sampler="greedy", or a function that returns a token for each request',
        )
        check(
            not self.captured or tokens_each == 1,
            "E201",
            got=f'sampler="greedy" with tokens_each={tokens_each}',
            rule="a function of yours decides which speculated tokens are kept",
            fix="pass a function that returns (num_new, tokens, drafts), or tokens_each=1",
        )
        self._buffers, self._sampler, self._tokens_each = buffers, sampler, tokens_each
        rows, device = buffers.max_num_seqs, buffers.tensors["seq_lens"].device
        check_memory("tokens of a run", 8 * max_steps * rows * tokens_each, device)
        self.tokens = torch.zeros(rows, tokens_each, dtype=torch.int64, device=device)
        self.num_new = torch.ones(rows, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(rows, tokens_each - 1, dtype=torch.int64, device=device) if tokens_each > 1 else None
        self.chosen = torch.zeros(max_steps, rows, tokens_each, dtype=torch.int64, device=device)
        self.kept = torch.zeros(max_steps, rows, dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Restart the record of chosen tokens."""
        self._step.zero_()

    def finish_step(self, outputs: Any, num_reqs: int) -> None:
        """Choose tokens from `outputs`, record them, and advance the batch. On the device; capturable when greedy."""
        if self.captured:
            self._set(outputs[:num_reqs].argmax(-1), num_reqs)
        else:
            assert callable(self._sampler)
            self._set(self._sampler(outputs), num_reqs)
        self.chosen.index_copy_(0, self._step, self.tokens[None])
        self.kept.index_copy_(0, self._step, self.num_new[None])
        self._step.add_(1)
        self._buffers.advance(self.num_new, self.tokens, self.drafts, query_len=self._tokens_each)

    def _set(self, chosen: Any, num_reqs: int) -> None:
        if self.drafts is None:
            if not _is_int(chosen, (num_reqs,)):
                _fail_sampler(chosen, f"int [{num_reqs}], a token for each request")
            self.tokens[:num_reqs, 0].copy_(chosen)
            return
        shapes: tuple[tuple[int | None, ...], ...] = (
            (num_reqs,),
            (num_reqs, None),
            (num_reqs, self._tokens_each - 1),
        )
        listed = isinstance(chosen, (tuple, list)) and len(chosen) == len(shapes)
        if not listed or not all(map(_is_int, chosen, shapes)) or not 0 < chosen[1].shape[1] <= self._tokens_each:
            _fail_sampler(
                chosen, f"(num_new, tokens, drafts), int [{num_reqs}], [{num_reqs}, S], {list(shapes[2])}, S > 0"
            )
        num_new, tokens, drafts = chosen
        self.num_new[:num_reqs].copy_(num_new)
        self.tokens[:num_reqs, : tokens.shape[1]].copy_(tokens)
        self.drafts[:num_reqs].copy_(drafts)

    def result(self, steps: int, num_reqs: int) -> tuple[Tensor, Tensor]:
        """Return tokens int64 `[steps, num_reqs, tokens_each]` and the numbers kept, int32 `[steps, num_reqs]`."""
        return self.chosen[:steps, :num_reqs], self.kept[:steps, :num_reqs]


def _is_int(value: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether a value is an integer tensor of a shape, None for any size."""
    if (
        not isinstance(value, Tensor)
        or value.dtype.is_floating_point
        or value.dtype.is_complex
        or value.dtype == torch.bool
    ):
        return False
    return value.dim() == len(shape) and all(n in (None, size) for n, size in zip(shape, value.shape, strict=True))


def _fail_sampler(chosen: Any, rule: str) -> NoReturn:
    got = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, Tensor) else shown(chosen)
    fail("E201", got=f"a sampler that returns {got}", rule=f"a sampler returns {rule}", fix="return such tensors")
