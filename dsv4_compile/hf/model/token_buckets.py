"""Calls of a compiled model in a few sizes, which captures serve: `dsv4.buckets`.

A prompt `[B, S]` becomes a row of B * S tokens, padded to a bucket; a longer one several of them, in whole chunks of
the largest. One graph then has all batches and lengths, and one capture for each bucket. A decode `[B, 1]` gets rows
of padding. Padding has no slot, so it changes no cache and no result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..._compat import module_hooks
from ...errors import check, fail
from ...options import INVARIANT
from ...runtime.bucket_sizes import chunk_columns, chunk_tokens, request_buckets, token_buckets
from ...runtime.compiled import in_bucket
from ...runtime.early_builds import also_for
from .cache import CACHE_NAME, PagedCache
from .call_results import RECORDED
from .redundant_guards import GLOBAL_HOOKS, HOOKS, OWN
from .token_inputs import kept, mark_dynamic_tokens, tokens_after

BY_ROW = "dsv4_arguments_by_row"
"""Attribute of a step of prompts with drafts: its arguments that have a value for each row."""
COMPILED_AS = "dsv4_compiled_as"
"""Attribute of a module that was compiled in place: a `CompiledAs`."""
_TAKEN = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"})
"""Arguments of calls that run in buckets; others may depend on the shape of the call."""
_RECORDS = "transformers.utils.output_capturing"
"""Module of hooks that do nothing in calls that record nothing."""
_MOST_LOGITS = 64
"""Most rows of logits of a captured prompt; with more of them it is captured if it is short."""
SHORT = 512
"""Tokens of a prompt that is captured with all its logits, which every capture keeps memory for."""
_SPARE = 16
"""Rows of logits after those of all tokens, so that Dynamo sees two sizes and not one."""


class CompiledAs(NamedTuple):
    """How `model.compile` was called.

    Attributes:
        buckets: whether calls run in buckets.
        graphs: what captures them, as `dsv4.cudagraph.graphs` says; "" without captures.
        batch_invariant: `dsv4.batch_invariant` as it was passed.
    """

    buckets: bool
    graphs: str
    batch_invariant: Any = "off"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> CompiledAs:
        """Return what keywords of `model.compile` ask for. The backend checks them when it compiles."""
        backend, options = arguments.get("backend"), arguments.get("options") or {}
        if backend != OWN and getattr(backend, "writes_layers_out", None) is None:
            return cls(False, "")
        captured = options.get("dsv4.cudagraph") == "full"
        wanted = options.get("dsv4.buckets", "auto")
        graphs = options.get("dsv4.cudagraph.graphs", "auto") if captured else ""
        return cls(wanted == "on" or (wanted == "auto" and captured), graphs, options.get(INVARIANT, "off"))


def check_invariant_compile(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of `model.compile`, with `dsv4.batch_invariant` for one whole graph. Raises E303 for several."""
    how = CompiledAs.of(arguments)
    if how.batch_invariant in ("off", False):
        return dict(arguments)
    check(
        arguments.get("fullgraph", True) is True,
        "E303",
        got=f"fullgraph={arguments.get('fullgraph')!r}",
        why="what torch.compile leaves out of a graph runs eager, without dsv4.batch_invariant",
        fix="pass fullgraph=True, or leave it out",
    )
    return {**arguments, "fullgraph": True}


def check_still_compiled(module: nn.Module) -> None:
    """Raise E303 for a module that was compiled with `dsv4.batch_invariant`, and then copied without its graphs."""
    how: CompiledAs | None = module.__dict__.get(COMPILED_AS)
    if how is not None and module._compiled_call_impl is None and how.batch_invariant not in ("off", False):
        fail(
            "E303",
            got="a copy of a model that was compiled with dsv4.batch_invariant",
            why="copies and pickles of a module are not compiled, so this call would run eager",
            fix="call compile() of the copy with the same options",
        )


def runs_in_buckets(module: nn.Module) -> bool:
    """Return whether a module is compiled in place, with buckets."""
    how: CompiledAs | None = module.__dict__.get(COMPILED_AS)
    return how is not None and how.buckets and module._compiled_call_impl is not None


def is_hooked(modules: Iterable[nn.Module]) -> bool:
    """Return whether a hook or a replaced forward of a caller sees the shapes inside of a call."""
    hooks = [getattr(module_hooks, name) for name in GLOBAL_HOOKS]
    for module in modules:
        if "forward" in vars(module):
            return True
        hooks += [vars(module)[name] for name in HOOKS if vars(module)[name]]
    return any(getattr(hook, "__module__", "") != _RECORDS for held in hooks for hook in held.values())


def why_exact(module: Any, config: Any, arguments: Mapping[str, Any]) -> str:
    """Return why a call of `module` runs in the size that it was made with, or "" if it can run in buckets."""
    others = {name for name, value in arguments.items() if value is not None and value is not False} - _TAKEN
    others -= getattr(module, BY_ROW, frozenset())
    if others:
        return f"with {', '.join(sorted(others))}"
    if any(arguments.get(name, getattr(config, name, False)) for name in RECORDED):
        return "with the results of modules"
    if not arguments.get("return_dict", getattr(config, "return_dict", True)):
        return "with a tuple as result"
    keep = arguments.get("logits_to_keep")
    if keep is not None and (type(keep) is not int or keep < 0):
        return f"with logits_to_keep={keep!r}"
    outside = [part for part in (module, getattr(module, "lm_head", None)) if part is not None]
    return "with hooks" if is_hooked(outside) else ""


class _Step(NamedTuple):
    """A step of a call: the forward's arguments, the part of its result, and whether it is captured at any size."""

    arguments: dict[str, Any]
    shape: tuple[int, int]
    """Rows and columns of the part of the result, which may be empty."""
    captured: bool
    tokens: int
    sizes: tuple[int, ...]
    """Rows that the forward takes, and all numbers of rows that such calls are padded to."""

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the forward of one step."""
        token = in_bucket.set(self.captured)
        try:
            with also_for(self.tokens, self.sizes):
                return forward(**self.arguments)
        finally:
            in_bucket.reset(token)


class Bucketed:
    """A call of a model in steps of captured sizes.

    Args:
        result: name of the result that has a vector for each token, or for each kept token.
        steps: the call's columns, in order.
    """

    def __init__(self, result: str, steps: list[_Step]) -> None:
        self._result, self._steps = result, steps

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the steps and return the result of the call."""
        if torch.is_inference_mode_enabled():  # graphs guard it, and warm-up was outside of it
            with torch.inference_mode(False), torch.no_grad():
                return self.run(forward)
        parts: list[Tensor] = []
        for step in self._steps:
            result = step.run(forward)
            rows, columns = step.shape
            if columns == 1 and rows == step.tokens:
                return result  # a decode without padding
            if columns:
                values = result[self._result].flatten(0, 1)[: rows * columns]
                parts.append(values.unflatten(0, step.shape))
        result[self._result] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return result


class BucketedPrompt(Bucketed):
    """Prompts of a step with drafts: the result of their last chunk, a value of each row or None."""

    def __init__(self, rows: int, steps: list[_Step]) -> None:
        super().__init__("", steps)
        self._rows = rows

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the steps and return the results of the call's rows."""
        with torch.inference_mode(False), torch.no_grad():
            results = [step.run(forward) for step in self._steps][-1]
        return tuple(None if value is None else value[: self._rows] for value in results)


def bucketed_call(module: Any, arguments: Mapping[str, Any], cache: PagedCache) -> Bucketed:
    """Return the steps of a call of `module`, a language model or a decoder stack, with checked `arguments`."""
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    paged = cache.paged
    whole = getattr(module, "lm_head", None) is not None
    given = {CACHE_NAME: cache}
    with torch.inference_mode(False):  # graphs guard whether their inputs were made in that mode
        if by_row := getattr(module, BY_ROW, None):
            values = {name: arguments.get(name) for name in by_row}
            return BucketedPrompt(len(ids), _prompt_with_drafts(ids, mask, given, paged, values))
        if ids.shape[1] == 1:
            steps = [_decode(ids, mask, given, paged.max_batch_size)]
        else:
            steps = _prompt(ids, mask, given, paged, arguments.get("logits_to_keep") or 0, whole)
    return Bucketed("logits" if whole else "last_hidden_state", steps)


def _decode(ids: Tensor, mask: Tensor | None, given: dict[str, Any], most: int) -> _Step:
    """Return a step of one token of each row."""
    rows, sizes = ids.shape[0], request_buckets(most)
    padded = _fit(sizes, rows)
    more = padded - rows
    ids = _usual(ids)
    mask = torch.ones_like(ids) if mask is None else _usual(mask)
    if more:
        ids, mask = pad(ids, (0, 0, 0, more)), pad(mask, (0, 0, 0, more))
    tokens = {"input_ids": mark_dynamic_tokens(ids), "attention_mask": mark_dynamic_tokens(mask)}
    return _Step({**tokens, **given}, (rows, 1), True, padded, sizes)


def _usual(tensor: Tensor) -> Tensor:
    """Return an integer tensor as int64, and not made in inference mode, as graphs guard both."""
    tensor = tensor.long()
    return tensor.clone() if tensor.is_inference() else tensor


def _prompt(
    ids: Tensor, mask: Tensor | None, given: dict[str, Any], paged: Any, logits_to_keep: int, whole: bool
) -> list[_Step]:
    """Return the steps of a prompt `[B, S]`."""
    (rows, columns), device = ids.shape, ids.device
    most = chunk_tokens(paged.max_batch_size, paged.max_step_tokens)
    few = few_logits(paged.max_batch_size, most)
    first = max(0, columns - logits_to_keep) if logits_to_keep else 0
    steps = []
    for begin, end, size, tokens in _chunks(ids, mask, paged):
        arguments = {**tokens, **given}
        shown = min(end - begin, max(0, end - first))
        captured = True
        if whole:
            logits = few if rows * shown <= few else size + _SPARE
            captured = logits == few or size <= SHORT
            places = torch.arange(rows * shown, device=device)
            places += (places // max(shown, 1) + 1) * (end - begin - shown)  # the last columns of each row
            arguments["logits_to_keep"] = mark_dynamic_tokens(pad(places, (0, logits - rows * shown)))
        else:
            shown = end - begin
        steps.append(_Step(arguments, (rows, shown), captured, size, token_buckets(most)))
    return steps


def _prompt_with_drafts(
    ids: Tensor, mask: Tensor | None, given: dict[str, Any], paged: Any, values: dict[str, Tensor | None]
) -> list[_Step]:
    """Return the steps of a prompt `[B, S]` with drafts, each for as many rows as the cache has.

    Args:
        values: a tensor `[B, ...]` by name, among them "following", the tokens after the prompt, or None.
    """
    (rows, columns), more = ids.shape, paged.max_batch_size - ids.shape[0]
    sizes = token_buckets(chunk_tokens(paged.max_batch_size, paged.max_step_tokens))
    steps = []
    for _, end, size, tokens in _chunks(ids, mask, paged):
        by_row = {**values, "following": tokens_after(ids, mask, end)} if end < columns else values
        padded = {
            name: value if value is None else pad(value, (0, 0) * (value.dim() - 1) + (0, more))
            for name, value in by_row.items()
        }
        steps.append(_Step({**tokens, **padded, **given}, (rows, 0), True, size, sizes))
    return steps


def _chunks(ids: Tensor, mask: Tensor | None, paged: Any) -> Iterator[tuple[int, int, int, dict[str, Tensor]]]:
    """Yield first and last column, bucket, and tokens as arguments of a forward, of each step of a prompt `[B, S]`."""
    (rows, columns), device = ids.shape, ids.device
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else kept(mask, columns)
    most = chunk_tokens(paged.max_batch_size, paged.max_step_tokens)
    width = chunk_columns(rows, most, paged.max_step_tokens)
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        tokens = rows * (end - begin)
        size = _fit(token_buckets(most), tokens)
        end_pad = 0, size - tokens
        arguments = {
            "input_ids": pad(ids[:, begin:end].reshape(1, tokens).long(), end_pad),
            "attention_mask": pad(keep[:, begin:end].reshape(1, tokens), end_pad),
            "token_rows": torch.arange(size, device=device) // (end - begin),
        }
        yield begin, end, size, {name: mark_dynamic_tokens(tensor) for name, tensor in arguments.items()}


def few_logits(max_batch_size: int, most: int) -> int:
    """Return the rows of logits of a captured prompt: no bucket's size, because Dynamo takes equal sizes for one."""
    few = min(max(2, max_batch_size), _MOST_LOGITS)
    return few + 1 if few in token_buckets(most) else few


def _fit(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
