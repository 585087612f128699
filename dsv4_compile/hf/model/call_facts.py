"""Facts about calls of a split model that must be equal on all ranks, as values that can be compared and shown."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ...parallel.agreement import digest_in_order
from .cache import CacheHandle, PagedCache

_DEPTH = 4
"""Levels of attributes of an object that are compared; deeper ones count by their type."""
_LENGTH = 400
"""Characters of a fact; a longer one is compared by its beginning and its hash."""
FREE = ("streamer",)
"""Arguments of `generate` that change no token, and may be on one rank alone."""


def generation_facts(model: Any, config: GenerationConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of a `generate` call: its options, each by its name, and its arguments."""
    facts = {name: value for name, value in arguments.items() if name not in FREE and not hasattr(config, name)}
    options = {name: value for name, value in config.to_dict().items() if value is not None}
    facts = {**options, **facts, **settings(model), "draft layers": _drafts(model.dsv4_drafts)}
    return {name: fact(value) for name, value in facts.items() if value is not None}


def _drafts(source: Any) -> str | None:
    return None if source is None else f"{type(source).__name__}, {source.num_drafts} in a step, {source.taps}"


def settings(model: Any) -> dict[str, Any]:
    """Return facts of the process and of a language model or decoder stack that change the bits of a result."""
    return {
        "compiled": model.__dict__.get("dsv4_compiled", ""),
        "training mode": model.training,
        "gradients": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
    }


def cache_facts(cache: PagedCache) -> str:
    """Return capacities and contents of a cache, without reading the device unless it is the CPU."""
    paged = cache.paged
    sizes = f"{paged.max_batch_size} x {paged.max_seq_len}, {paged.max_step_tokens} a step"
    lengths = cache.seq_lens.tolist() if cache.seq_lens.device.type == "cpu" else "on the device"
    return f"{sizes}; holds {cache.appended} columns of {cache.rows} rows, lengths {lengths}"


def fact(value: Any) -> Any:
    """Return what is compared of an argument: values, settings of objects, and code of functions."""
    described = _described(value, _DEPTH)
    text = described if isinstance(described, str) else repr(described)
    if len(text) <= _LENGTH:
        return described
    return f"{text[:_LENGTH]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _described(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {digest_in_order(value)}"
    if isinstance(value, (list, tuple)):
        return [_described(item, depth - 1) for item in value] if depth else f"{len(value)} of a {_name(type(value))}"
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_described(item, depth - 1)) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _described(item, depth - 1) for key, item in value.items()} if depth else f"{len(value)}"
    if isinstance(value, (CacheHandle, PagedCache)):
        return cache_facts(value.cache if isinstance(value, CacheHandle) else value)
    if isinstance(value, (GenerationConfig, PreTrainedConfig)):
        return _described(value.to_dict(), depth)
    if isinstance(value, torch.Generator):
        return f"generator of seed {value.initial_seed()}, state {digest_in_order(value.get_state())}"
    if isinstance(value, PreTrainedTokenizerBase):
        return f"{_name(type(value))} of {len(value)} tokens"
    if isinstance(value, nn.Module):
        return _name(type(value))
    if isinstance(value, type) or inspect.isbuiltin(value) or isinstance(value, (torch.dtype, torch.device)):
        return _name(value) if isinstance(value, type) else str(value)
    if inspect.ismethod(value):
        return [_described(value.__func__, depth), _described(value.__self__, depth - 1) if depth else ""]
    if inspect.isfunction(value):
        return _function(value, depth)
    return _object(value, depth)


def _object(value: Any, depth: int) -> Any:
    """Return class, attributes and code of an object such as a `LogitsProcessor()`."""
    name = _name(type(value))
    if not depth:
        return name
    if isinstance(value, partial):
        attributes = {"func": value.func, "args": value.args, "keywords": value.keywords}
    else:
        attributes = dict(getattr(value, "__dict__", {}))
    call = inspect.getattr_static(type(value), "__call__", None)
    described = {key: _described(attribute, depth - 1) for key, attribute in attributes.items()}
    code = _code(call.__code__) if inspect.isfunction(call) else ""
    return f"{name}({', '.join(f'{key}={attribute!r}' for key, attribute in described.items())}){code}"


def _function(value: Any, depth: int) -> Any:
    """Return name, code, defaults and enclosed values of a function."""
    enclosed = []
    for cell in value.__closure__ or ():
        try:
            enclosed.append(_described(cell.cell_contents, depth - 1) if depth else "")
        except ValueError:
            enclosed.append("empty")
    defaults = _described([value.__defaults__, value.__kwdefaults__], depth - 1) if depth else ""
    return f"{_name(value)} {_code(value.__code__)} {defaults} {enclosed}"


def _code(code: CodeType) -> str:
    constants = [_code(value) if isinstance(value, CodeType) else _described(value, 1) for value in code.co_consts]
    text = repr((code.co_code, code.co_names, constants))
    return f" code {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
