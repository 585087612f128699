"""Readings of a request's arguments: integers, numbers, token ids, of Python, numpy or torch, by type and range."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ...errors import fail
from ...sizes import shown

_NO_IDS = (str, bytes, bytearray, memoryview, Mapping)
"""Types that iterate over something else than token ids."""


def is_integer(value: object) -> bool:
    """Return whether a value is one integer: no bool, no float, no tensor or array with dims."""
    if type(value) is int:
        return True
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype in _INTEGERS and value.device.type != "meta"
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def integer(name: str, value: Any, least: int) -> int:
    """Return an argument as an int. Raises E201 unless it is an integer from `least` on."""
    if not is_integer(value) or (number := operator.index(value)) < least:
        fail(
            "E201", got=f"{name}={shown(value)}", rule=f"{name} is an integer from {least} on", fix="pass such a value"
        )
    return number


def check_flags(**flags: Any) -> None:
    """Raise E201 for a flag that is no bool: of "no" and of an array, Python would take the truth of the object."""
    for name, value in flags.items():
        if type(value) is not bool:
            fail("E201", got=f"{name}={shown(value)}", rule=f"{name} is True or False", fix="pass one of the two")


def real(name: str, value: Any, described: str, fine: Callable[[float], bool]) -> float:
    """Return an argument as a float. Raises E201 unless it is finite and `fine`; `described` says which numbers are."""
    scalar = isinstance(value, Tensor) and value.dim() == 0 and value.device.type != "meta" and not value.is_complex()
    number = math.nan
    if (isinstance(value, numbers.Real) or scalar) and type(value) is not bool and not _is_bool(value):
        try:
            number = float(value)
        except (OverflowError, ValueError):
            number = math.inf
    if not (math.isfinite(number) and fine(number)):
        rule, fix = f"{name} is a finite number {described}", "pass such a value"
        fail("E201", got=f"{name}={shown(value)}", rule=rule, fix=fix)
    return number


def _is_bool(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _values(name: str, values: Any, most: int, rule: str, fix: str) -> list[Any]:
    """Return the first `most + 1` elements of a vector of any kind. Raises E201 for anything else."""
    iterable = isinstance(values, Iterable) and not isinstance(values, _NO_IDS)
    if iterable and getattr(values, "ndim", 1) == 1:
        try:
            if hasattr(values, "tolist"):  # a tensor, from its device at once, or an array
                return list(itertools.islice(values[: most + 1].tolist(), most + 1))
            return list(itertools.islice(values, most + 1))
        except Exception as fault:
            fail("E201", got=f"{name}, a {type(values).__name__}", rule=rule, why=f"{fault!r:.200}", fix=fix)
    fail("E201", got=f"{name}={shown(values)} of type {type(values).__name__}", rule=rule, fix=fix)


def token_ids(prompt: Any, vocab: int, most: int) -> list[int]:
    """Return the ids of a prompt, of which at most `most + 1` are read.

    Args:
        prompt: integers of one sequence in order: a list, a range, an iterator, an array or a tensor `[S]`.
        vocab: number of tokens of the model.
        most: tokens of a prompt that fit.

    Raises E201 unless they are ids of one sequence of tokens.
    """
    rule = f"a prompt is at least one token id, an integer from 0 to {vocab - 1}"
    fix = "pass the ids of one sequence"
    if isinstance(prompt, Set):
        fail("E201", got=f"a prompt of type {type(prompt).__name__}", rule=rule, why="a set has no order", fix=fix)
    ids = _values("prompt", prompt, most, rule, fix)
    if not ids:
        fail("E201", got="an empty prompt", rule=rule, fix=fix)
    if not all(type(i) is int for i in ids):
        wrong = [i for i in ids if not is_integer(i)]
        if wrong:
            fail("E201", got=f"a prompt with {shown(wrong[0])}", rule=rule, fix=fix)
        ids = list(map(operator.index, ids))
    if min(ids) < 0 or max(ids) >= vocab:
        wrong_id = next(i for i in ids if not 0 <= i < vocab)
        fail("E201", got=f"a prompt with {shown(wrong_id)}", rule=rule, fix=fix)
    return ids


def stop_set(values: Any, vocab: int, generation: Any) -> frozenset[int]:
    """Return stop tokens as ids, for None those of the generation configuration.

    Raises E201 unless they are None, one id, or a vector of ids, all of the vocabulary: others would end no request.
    """
    if values is None:
        values = getattr(generation, "eos_token_id", None)
    if values is None:
        return frozenset()
    rule = f"stop tokens are None, a token id or a collection of them, integers from 0 to {vocab - 1}"
    fix = "pass the ids, such as stop_tokens=[eos]"
    ids = [values] if is_integer(values) else _values("stop_tokens", values, vocab, rule, fix)
    wrong = [i for i in ids if not is_integer(i) or not 0 <= operator.index(i) < vocab]
    if wrong or len(ids) > vocab:
        got = f"stop_tokens with {shown(wrong[0])}" if wrong else f"over {vocab} stop_tokens"
        fail("E201", got=got, rule=rule, fix=fix)
    return frozenset(map(operator.index, ids))


def callback(on_token: Any) -> Callable[[int], object] | None:
    """Return a callback. Raises E201 unless it is None or a function that a call runs to its end."""
    call = getattr(on_token, "__call__", None)  # noqa: B004
    if on_token is not None and (call is None or any(map(inspect.iscoroutinefunction, (on_token, call)))):
        fail(
            "E201",
            got=f"on_token={shown(on_token)}",
            rule="on_token is a function of one token, and no coroutine function, whose calls would never run",
            fix="pass a function, such as queue.put_nowait",
        )
    checked: Callable[[int], object] | None = on_token
    return checked
