"""One step of a runner: its padded size, its inputs, the call itself, and checks of its outputs and padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._compat import maybe_mark_dynamic, pytree
from ..errors import check, fail
from ..metadata import AttentionMetadata, MetadataBuffers
from ..sizes import check_size, shown
from .aliasing import overlap, rows_coincide

StepFunction = Callable[..., Any]
_BATCH_LENGTHS = ("query_start_loc", "seq_lens")
_WRITTEN_BY_ADVANCE = (*_BATCH_LENGTHS, "input_ids", "overflow")


def padded_buckets(max_tokens: int, tokens_each: int = 1) -> tuple[int, ...]:
    """Return numbers of tokens to capture, ascending: 1, 2, 4, 8, ... requests of `tokens_each`, and `max_tokens`.

    Args:
        max_tokens: the largest batch to capture.
        tokens_each: tokens of each request, 1 + the number of speculative ones.
    """
    max_tokens, tokens_each = check_size("max_tokens", max_tokens), check_size("tokens_each", tokens_each)
    check(tokens_each <= max_tokens, "E204", got=f"{max_tokens=}, {tokens_each=}", fix="tokens_each is 1 to max_tokens")
    sizes = []
    requests = 1
    while requests * tokens_each < max_tokens:
        sizes.append(requests * tokens_each)
        requests *= 2
    return (*sizes, max_tokens)


class Buckets:
    """Sizes to capture, ascending and distinct. Raises E204 for one above `capacity`."""

    def __init__(self, sizes: Iterable[int], capacity: int) -> None:
        listed = isinstance(sizes, Iterable) and not isinstance(sizes, str)
        check(listed, "E204", got=f"buckets={shown(sizes)}", fix="pass a list of numbers of tokens")
        self.sizes = tuple(sorted({check_size("a bucket", tokens) for tokens in sizes}))
        check(
            bool(self.sizes) and self.sizes[-1] <= capacity,
            "E204",
            got=f"buckets {list(self.sizes)} with buffers of {capacity} tokens",
            fix=f"choose buckets from 1 to {capacity}",
        )

    def fit(self, size: int) -> int | None:
        """Return the smallest bucket of at least `size`, or None."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of capture, largest first: what it leaves in the pool has room for all others."""
        return reversed(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def count_tokens(num_tokens: int | None, num_reqs: int | None, tokens_each: int, capacity: int) -> int:
    """Return `num_tokens`, or the tokens of `num_reqs` requests. E201 unless one is given, E204 over capacity."""
    # Without `check`, which would format its message at every step.
    if (num_tokens is None) == (num_reqs is None):
        fail(
            "E201",
            got=f"{num_tokens=}, {num_reqs=}",
            rule="one of num_tokens and num_reqs is given",
            fix="step(num_tokens) or step(num_reqs=...)",
        )
    tokens = num_tokens if num_tokens is not None else (num_reqs or 0) * tokens_each
    if type(tokens) is not int:
        tokens = check_size("num_tokens" if num_reqs is None else "num_reqs", tokens)
    if not 0 < tokens <= capacity:
        fail(
            "E204",
            got=f"a step of {tokens} tokens with buffers of {capacity}",
            fix=f"pass 1 to {capacity}: allocate MetadataBuffers for the largest step, or split the step",
        )
    return tokens


class StepInputs(dict[str, Tensor]):
    """Persistent tensors `[>= capacity, ...]` by name, in the order of a step's arguments. E204 for too few rows."""

    def __init__(self, tensors: Mapping[str, Tensor], capacity: int) -> None:
        if not (isinstance(tensors, Mapping) and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
            fail(
                "E201",
                got=f"inputs={shown(tensors)}",
                rule="inputs are tensors by name",
                fix='pass a dict such as {"hidden": hidden}',
            )
        super().__init__(tensors)
        for name, tensor in self.items():
            check(
                tensor.dim() > 0 and tensor.shape[0] >= capacity,
                "E204",
                got=f"input {name} of shape {list(tensor.shape)} with metadata of {capacity} tokens",
                fix=f"allocate {name} with {capacity} rows, max_num_batched_tokens of the buffers",
            )

    def named(self) -> dict[str, Tensor]:
        """Return all inputs by their names in errors."""
        return {f"input {name}": tensor for name, tensor in self.items()}

    def check_memory(self, caches: Mapping[str, Tensor], buffers: MetadataBuffers) -> None:
        """Raise E201 for an input if its padding rows, which are zeroed, hold data that the batch needs.

        An input may be metadata with a row for each token, such as `input_ids`, and inputs may be the same rows.
        """
        by_request = [s.name for s in buffers.plan.specs if s.shape[0] != "max_num_batched_tokens"]
        others = {**caches, **{f"metadata {name}": buffers.tensors[name] for name in by_request}}
        named = list(self.named().items())
        for index, (name, tensor) in enumerate(named):
            shared = [other for other, theirs in others.items() if overlap(tensor, theirs)]
            shared += [other for other, theirs in named[:index] if not rows_coincide(tensor, theirs)]
            check(
                not shared,
                "E201",
                got=f"{name} in memory of {', '.join(shared)}",
                rule="an input has separate rows, which are zeroed after the batch",
                fix="allocate it separately",
            )

    def rows(self, size: int) -> list[Tensor]:
        """Return the first `size` rows of each input."""
        return [tensor[:size] for tensor in self.values()]

    def copy_in(self, name: str, value: Tensor, tokens: int) -> None:
        """Fill the first `tokens` rows of input `name`. E201 for an unknown name, or a wrong shape or dtype."""
        rule, fix = f"inputs are {', '.join(self)}", "pass one of them, as named in DecodeRunner(inputs=...)"
        check(name in self, "E201", got=f"input {name!r}", rule=rule, fix=fix)
        buffer = self[name]
        if not isinstance(value, Tensor) or value.is_meta:
            fail("E201", got=f"{name}={shown(value)}", rule=f"{name} is a tensor with values", fix="pass such a tensor")
        check(
            value.shape == (tokens, *buffer.shape[1:]) and value.dtype == buffer.dtype,
            "E201",
            got=f"{name} {value.dtype} {list(value.shape)}",
            rule=f"{name} is {buffer.dtype} {[tokens, *buffer.shape[1:]]} in a step of {tokens} tokens",
        )
        buffer[:tokens].copy_(value)

    def pad(self, tokens: int, bucket: int) -> None:
        """Zero rows `tokens` to `bucket`."""
        if tokens < bucket:
            for tensor in self.values():
                tensor[tokens:bucket].zero_()


def step_call(
    step: StepFunction, buffers: MetadataBuffers, inputs: StepInputs, caches: Any, size: int
) -> Callable[[], Any]:
    """Return a call of `step` for `size` tokens at the persistent addresses, its metadata refreshed first."""

    def call() -> Any:
        buffers.refresh(size)
        metadata, rows = buffers.metadata(size), inputs.rows(size)
        if size > 1:
            for tensor in (*rows, *token_tensors(metadata)):
                maybe_mark_dynamic(tensor, 0)
        return step(*rows, metadata, caches)

    return torch.no_grad()(call)


@contextmanager
def no_requests(buffers: MetadataBuffers) -> Iterator[None]:
    """Describe no request inside the block, so that a step writes no live byte; restore the batch after it."""
    saved = {name: buffers.tensors[name].clone() for name in _WRITTEN_BY_ADVANCE}
    for name in _BATCH_LENGTHS:
        buffers.tensors[name].zero_()
    try:
        yield
    finally:
        for name, tensor in saved.items():
            buffers.tensors[name].copy_(tensor)


def token_tensors(metadata: AttentionMetadata) -> list[Tensor]:
    """Return the tensors of `metadata` with one row for each token; block tables have one for each request."""
    tensors = [metadata.positions, metadata.token_to_req, metadata.is_valid_token]
    for part in (metadata.window, *metadata.sources.values()):
        named = vars(part).items()
        tensors += [tensor for name, tensor in named if tensor is not None and not name.endswith("block_table")]
    return tensors


def check_outputs(outputs: Any, size: int) -> None:
    """Raise E426 unless `outputs` are tensors of `size` rows, at least one of them."""
    leaves = pytree.tree_leaves(outputs)
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    check(
        wrong is None and bool(leaves),
        "E426",
        got=f"a step that returns {type(wrong).__name__}" if leaves else "a step that returns nothing",
    )
    short = next((leaf.shape for leaf in leaves if leaf.dim() == 0 or leaf.shape[0] != size), None)
    check(short is None, "E426", got=f"an output of shape {list(short or ())} from a step of {size} tokens")


def check_padding(buffers: MetadataBuffers, tokens: int, rows: int) -> None:
    """Raise E429 unless rows `tokens` to `rows` of refreshed metadata hold their pad values. Wait for the device."""
    for spec in buffers.plan.specs:
        if spec.filled_by == "refresh":
            pad = buffers.plan.pad(spec)
            wrong = int((buffers.tensors[spec.name][tokens:rows] != pad).sum())
            check(
                wrong == 0,
                "E429",
                got=f"{wrong} elements of metadata {spec.name} after {tokens} tokens of {rows} are not {pad}",
            )
