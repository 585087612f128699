"""Checks of a forward of a converted model on the host, before its graph: the call, its cache and the weights.

A graph sees shapes and dtypes alone. What a caller means by a mask, by positions or by a cache of an earlier call is
known before it, so the entry decides there, costs no launch, and synchronises only for arguments that the main road
does not pass (`position_ids`, a mask of past columns, a batch that may overflow its cache).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..._compat import RecompileLimit, TorchDynamoException, eval_frame
from ...errors import DSV4Error, check, error, fail
from ...runtime.addresses import compared
from ...runtime.repeated_layers import handed
from .._compat import has_function_modes, record_outputs, without_default_device
from .batch_checks import Call, check_batch
from .cache import CACHE_NAME, OWN_CACHE, STALE, CacheHandle, PagedCache, given_cache
from .call_results import RECORDED, inference_only, with_cache
from .generate_call import LOCK, current, take_own
from .redundant_guards import compile_arguments, drop_guards
from .token_buckets import (
    COMPILED_AS,
    Bucketed,
    CompiledAs,
    bucketed_call,
    check_invariant_compile,
    check_still_compiled,
    runs_in_buckets,
    why_exact,
)
from .token_inputs import WHY_NO_AUTOCAST, check_ids, in_rows, refuse_autocast
from .unchanged_block import is_unchanged

NO_WEIGHTS = "sparse attention builds no attention matrix"
_STALE = f"a stale {CACHE_NAME}"
WHY_NOT_WHOLE = (
    "E208: a call of a converted model is checked on the host, before its graph: compile the model itself, "
    'model.compile(fullgraph=True, backend="dsv4"), or the function around it without fullgraph=True'
)
"""Why torch.compile(function, fullgraph=True) does not trace a call of the model in that function."""


@cache
def _signature(kind: Any) -> tuple[inspect.Signature, tuple[str, ...], bool]:
    """Return the signature of a class's forward, its positional parameters, and whether it takes any keyword."""
    signature = inspect.signature(kind.forward)
    parameters = list(signature.parameters.values())[1:]
    names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
    return signature, names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises TypeError as the forward would."""
    signature, names, takes_any = _signature(module.__class__)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if takes_any and len(args) <= len(names) and len(arguments) == len(args) + len(kwargs):
        return arguments  # binding takes several times as long
    bound = signature.bind(module, *args, **kwargs).arguments
    return {name: bound[name] for name in bound if name not in ("self", "kwargs")} | bound.get("kwargs", {})


def as_generate_passes(module: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in the order, and with the values, that `generate` passes.

    Dynamo guards names, order and types of arguments, so calls that leave defaults out share the graphs of `generate`.
    """
    if "logits_to_keep" not in _signature(module.__class__)[1]:
        return arguments  # the decoder stack, which `generate` does not call
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    passed = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.int64) if mask is None else mask.long(),
        "use_cache": True,  # `Entry.finish` leaves the cache out of the result
        "logits_to_keep": arguments.get("logits_to_keep", 0),
        "return_dict": arguments.get("return_dict"),
    }
    if passed["return_dict"] is None:
        passed["return_dict"] = module.config.return_dict
    return passed | {name: value for name, value in arguments.items() if name not in passed and value is not None}


class Entry:
    """A forward between its checks and its result; it holds the cache for this thread until `release`.

    Attributes:
        arguments: what to call the forward with; empty where an outer entry has done all.
        in_step: what keeps the ranks of a split model in step, a `split.InStep`, or None.
        compared: the tensors that were compared with the layouts that graphs were traced for.
        handed: the further tensors that graphs of repeated layers take.
        bucketed: how the call runs in sizes that are captured, or None.
    """

    bucketed: Bucketed | None = None

    def __init__(self, arguments: dict[str, Any], held: Any = None, handle: Any = None, model: Any = None) -> None:
        self.arguments, self.held, self.handle, self.model = arguments, held, handle, model
        self.use_cache = arguments.get("use_cache")
        self.in_step = None if model is None else model.dsv4_in_step
        self.compared, self.handed = compared.get(), handed.get()
        if model is not None:
            self.compared = model.dsv4_snapshot.tensors, held.compared
            self.handed = held.handed(model.dsv4_repeated)

    def release(self) -> None:
        """Give the cache back, whether or not the forward failed."""
        if self.held is not None:
            self.held.entered = False
        if self.in_step is not None:
            self.in_step.launched()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def explain(self, fault: BaseException) -> None:
        """Raise what torch wrapped in `fault`: an error of this package, E208 for one graph too many or for autocast.

        Raises E703 for a fault of a collective, and returns for any other.
        """
        if isinstance(fault, RecompileLimit):
            fail(
                "E208",
                got="a further kind of call than torch.compile keeps graphs for, with fullgraph=True",
                why="different arguments, and one row or column in place of several, need separate graphs",
                fix="compile with model.compile(...), where torch 2.13 allows 64; or raise "
                "torch._dynamo.config.recompile_limit, in each thread, before the first call",
            )
        ours = wrapped_error(fault) if isinstance(fault, TorchDynamoException) else None
        if self.in_step is not None:
            self.in_step.explain(ours or fault)
        if ours is not None:
            raise ours from fault
        autocast = WHY_NO_AUTOCAST in str(fault) or "class `autocast`" in str(fault)
        if isinstance(fault, TorchDynamoException) and autocast:
            refuse_autocast(self.arguments["input_ids"].device.type)

    def finish(self, result: Any) -> Any:
        """Count the step, and return the model's `result` with the caller's cache; its backward raises E206."""
        held = self.held
        if held is None:
            return result
        rows, columns = self.arguments["input_ids"].shape
        held.rows, held.appended, held.interrupted = rows, held.appended + columns, False
        if self.in_step is not None:
            self.in_step.finish(result, held)
        if (generation := current()) is not None:
            generation.compare_ahead(self.model, held)
        returned = None if self.use_cache is False else self.handle
        return inference_only(with_cache(result, held, returned))


def enter(module: Any, args: Any, kwargs: Any) -> Entry:
    """Check a call of `module` and take its cache.

    Args:
        module: a `CompilableModel`, or the language model around it.

    Raises E208 or E204 for a call that the model cannot run, before anything is written, and E702 on all ranks of a
    split model if some of them raise that.
    """
    try:
        return _enter(module, args, kwargs)
    except Exception as fault:
        in_step = module.entered_model()[0].dsv4_in_step
        if in_step is not None:
            in_step.reject(fault)
        raise


def _enter(module: Any, args: Any, kwargs: Any) -> Entry:
    arguments = _arguments(module, args, kwargs)
    cache = given_cache(arguments)
    if isinstance(cache, PagedCache) and cache.entered and cache.thread == threading.get_ident():
        arguments[CACHE_NAME] = cache
        return Entry(arguments)  # the language model around this one has been through the entry
    check_still_compiled(module)
    model, allocate = module.entered_model()
    check_call(model, arguments)
    in_buckets = (
        runs_in_buckets(module)
        and eval_frame.get_eval_frame_callback() is None
        and not why_exact(module, model.config, arguments)
    )
    handle = take_own(model, allocate, hold=False) if cache is None else cache
    held = held_by(model, handle)
    take(held, new=cache is None)
    try:
        positions = arguments.pop("position_ids", None)
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        call = Call(ids, mask, positions, held)
        check_batch(call, in_chunks=in_buckets)
        arguments["input_ids"] = in_rows(ids)
        if mask is not None:
            # Past columns are in the cache, and the loss of the router takes one weight a token.
            arguments["attention_mask"] = in_rows(mask, ids.shape[1])
        if any(arguments.get(name, getattr(model.config, name, False)) for name in RECORDED):
            record_outputs(model)
        generation = current()
        compared_ahead = generation is not None and generation.has_compared(model, held)
        if not (is_unchanged(model, held) or compared_ahead):
            model.adopt()
            held.adopt()
        if in_buckets and model.dsv4_hooked:
            check_batch(call)
            in_buckets = False
        if model.dsv4_in_step is not None:
            model.dsv4_in_step.begin(arguments, held, model)
    except BaseException:
        held.entered = False
        raise
    held.interrupted = True  # until `finish`
    arguments[CACHE_NAME] = held
    entry = Entry(arguments, held, handle, model)
    if in_buckets:
        entry.bucketed = bucketed_call(module, arguments, held)
    elif module._compiled_call_impl is not None:
        entry.arguments = as_generate_passes(module, arguments)
    return entry


def wrapped_error(fault: BaseException) -> DSV4Error | None:
    """Return a copy of the error of this package that torch raised `fault` for, or None."""
    cause: BaseException | None = fault
    while cause is not None and not isinstance(cause, DSV4Error):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return error(cause.code, got=cause.got, why=cause.why, fix=cause.fix, rule=cause.rule)


ON_HOST: tuple[Callable[..., Any], ...] = (enter, Entry.finish, Entry.release)
"""Steps of a call on the host: before its graph, with its result, and at its end, whether or not it failed."""
_UNTRACED = tuple(map(torch.compiler.disable, ON_HOST))
"""Steps of `ON_HOST` for a call that Dynamo would trace. To hide them takes time, which other calls save."""


def take(cache: PagedCache, new: bool) -> None:
    """Take the cache for this thread's forward; a `new` one is taken already. Raises E208 if it is in use."""
    with LOCK:
        busy = cache.entered and not (new and cache.thread == threading.get_ident())
        if not busy:
            cache.entered, cache.thread = True, threading.get_ident()
    check(not busy, "E208", got="a cache that another forward uses", why="it takes one call at a time", fix=OWN_CACHE)


_SAME_DEVICE: AbstractContextManager[None] = nullcontext()
_nn: Any = nn
"""Untyped: modules of transformers are subclasses of this module's class, and have the type Any."""


class EnteredOnHost(_nn.Module):
    """A module whose calls are checked on the host, also where torch.compile wraps the module.

    Its method `entered_model` returns the `CompilableModel` and a function that allocates a cache for it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward between `enter` and `Entry.finish`, without gradients."""
        # Not `is_compiling`, which is true in all threads while one compiles.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return super().__call__(*args, **kwargs)
        compiler = eval_frame.get_eval_frame_callback()
        if compiler:
            drop_guards(compiler)  # of torch.compile(model), or of a function around the model
        begin, finish, release = _UNTRACED if compiler else ON_HOST
        entry = begin(self, args, kwargs)
        tokens = compared.set(entry.compared), handed.set(entry.handed)
        try:
            leaves_device = has_function_modes() and self._compiled_call_impl is not None
            with torch.no_grad(), without_default_device() if leaves_device else _SAME_DEVICE:
                if entry.bucketed is None:
                    result = super().__call__(**entry.arguments)
                else:
                    result = entry.bucketed.run(super().__call__)
        except Exception as fault:
            entry.explain(fault)
            raise
        finally:
            compared.reset(tokens[0])
            handed.reset(tokens[1])
            release(entry)
        return finish(entry, result)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place as `nn.Module.compile`, without the guards that the entry makes redundant.

        With `dsv4.batch_invariant` as one whole graph. Raises E303 for fullgraph=False with it.
        """
        super().compile(*args, **compile_arguments(check_invariant_compile(kwargs)))
        self.__dict__[COMPILED_AS] = CompiledAs.of(kwargs)


def check_call(model: Any, arguments: dict[str, Any]) -> None:
    """Raise E208 for arguments or a mode that a converted model does not run in."""
    input_ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    check(not model.training, "E208", got="a model in training mode", fix="call model.eval(), or revert it to train")
    if input_ids is None or arguments.get("inputs_embeds") is not None:
        fail("E208", got="inputs_embeds", why="layers read token ids too, for routes and n-grams", fix="pass input_ids")
    check(not arguments.get("output_attentions"), "E208", got="output_attentions=True", why=NO_WEIGHTS)
    check_ids(input_ids)
    device = model.dsv4_cache.seq_lens.device
    if input_ids.device != device or device.type == "meta":
        fail(
            "E208",
            got=f"input_ids on {input_ids.device} for a model that was converted on {device}",
            fix="pass input_ids.to(model.device); after moving the model, revert and convert it",
        )
    if torch.is_autocast_enabled(device.type):
        refuse_autocast(device.type)
    if mask is not None and not (
        isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point() and mask.device == device
    ):
        fail(
            "E208",
            got=f"attention_mask of type {type(mask).__name__}"
            + (f" on {mask.device}, shape {tuple(mask.shape)}, dtype {mask.dtype}" if isinstance(mask, Tensor) else ""),
            why="every token attends to the kept tokens before it, and to nothing else",
            fix=f"pass integers or booleans [batch, columns] on {device}, nonzero for a token",
        )


def _refuse_uncalled() -> NoReturn:
    """Raise E208 for a forward without a call."""
    fail(
        "E208",
        got="a forward that no call of the model led to",
        why="its checks, its cache and replaced weights belong to the call",
        fix='compile the model in place, model.compile(backend="dsv4"), or call it',
    )


refuse_uncalled: Callable[[], NoReturn] = torch.compiler.disable(_refuse_uncalled, reason=WHY_NOT_WHOLE)
"""`_refuse_uncalled`, or in a trace with fullgraph=True torch's error with this reason."""


def held_by(model: Any, cache: Any) -> PagedCache:
    """Return the cache that the one of a call stands for. Raises E208 if it cannot be continued."""
    new = "dsv4_compile.hf.new_cache(model)"
    if not isinstance(cache, PagedCache):
        fail("E208", got=f"{CACHE_NAME} of type {type(cache).__name__}", fix=f"pass none, or {new}")
    default: PagedCache = model.dsv4_cache
    check(cache is not default, "E208", got="the model's own cache", why=STALE, fix=OWN_CACHE)
    if isinstance(cache, CacheHandle):
        check(not cache.stale, "E208", got=_STALE, why=STALE, fix=OWN_CACHE)
        other = cache.cache.holder is not None and cache.cache.holder is not cache.holder
        check(not other, "E208", got="a cache that a generate call uses", fix=OWN_CACHE)
        cache = cache.cache
    held: PagedCache = cache
    for what, theirs, ours in (
        ("configuration", held.paged.config, default.paged.config),
        ("cache format", held.paged.cache_format, default.paged.cache_format),
        ("device", held.seq_lens.device, default.seq_lens.device),
    ):
        if theirs is not ours and theirs != ours:
            why = f"it was allocated for another model: {theirs}" if what != "configuration" else ""
            fail("E208", got=f"a cache of another {what}", why=why, fix=f"pass {new}")
    return held
