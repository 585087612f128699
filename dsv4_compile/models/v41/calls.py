"""Checks of arguments, on the host, before a step: prompts, steps, caches, and settings of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import check, error, fail
from ...sizes import shown
from .cache import V41Caches
from .config import V41Config

_INTS = (torch.int32, torch.int64)


class Prompt(NamedTuple):
    """New tokens of a request: int64 `[n]` on the CPU, its row of the caches, and the tokens that it has already."""

    ids: Tensor
    request: int
    start: int


def check_mode(model: nn.Module) -> None:
    """Raise E208 for a model in training mode."""
    check(not model.training, "E208", got="a V41Model in training mode", fix="call model.eval()")


def default_device() -> AbstractContextManager[Any]:
    """Return a context that puts new tensors without a device on the CPU, also after torch.set_default_device."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def check_caches(config: V41Config, caches: Any) -> None:
    """Raise E201 unless `caches` are V41Caches, E208 for those of a model with a different configuration."""
    if not isinstance(caches, V41Caches):
        fail("E201", got=f"caches={shown(caches)}", rule="caches are V41Caches", fix="call model.new_caches")
    same = caches.config is config or caches.config == config
    check(same, "E208", got="caches of a model with a different configuration", fix="call model.new_caches")


def check_step(config: V41Config, device: torch.device, ids: Any, positions: Any, requests: Any, caches: Any) -> None:
    """Check a step, as `V41Model.forward` takes it, without waiting for the device.

    Raises E201 for tensors of a wrong kind, shape or device, E208 for caches of a different model and settings of torch
    that change results, E204 for more tokens of a request than a step of the caches may have, which a CPU alone counts.
    """
    check_caches(config, caches)
    named = {"ids": ids, "positions": positions, "requests": requests}
    for name, values in named.items():
        if not isinstance(values, Tensor) or values.dtype not in _INTS or values.dim() != 1:
            got = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else shown(values)
            fail("E201", got=f"{name}: {got}", rule=f"{name} is int32 or int64 [T]")
    lengths = [len(values) for values in named.values()]
    check(len(set(lengths)) == 1, "E201", got=f"ids, positions and requests of {lengths}", rule="one of each a token")
    for name, values in (*named.items(), ("the caches", caches.window_table)):
        there = values.device == device
        check(there, "E201", got=f"{name} on {values.device}, the model on {device}", rule="all are on one device")
    check_settings(device)
    if device.type == "cpu" and len(ids):
        live = (positions >= 0) & (requests >= 0) & (requests < caches.max_batch_size)
        most = int(torch.bincount(requests[live].long(), minlength=1).max())
        rule = f"a step adds at most max_step_tokens={caches.max_step_tokens} to a request"
        check(most <= caches.max_step_tokens, "E204", got=f"{most} tokens of a request in a step", rule=rule)


def check_settings(device: torch.device) -> None:
    """Raise E208 for torch.autocast and a default dtype of float64."""
    why = "ops round where DeepSeek-V4.1 does, in the dtypes of the weights"
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    check(not autocast, "E208", got="a step under torch.autocast", why=why, fix="leave the autocast block")
    wide = torch.get_default_dtype() is torch.float64
    check(
        not wide, "E208", got="a default dtype of float64", why=why, fix="call torch.set_default_dtype(torch.float32)"
    )


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts, of a list, an iterator or a matrix `[R, S]`. Raises E201 for a single one."""
    rule, fix = "prompts are a list of prompts, or int [R, S]", "pass [prompt] for a single one"
    if isinstance(prompts, Tensor):
        check(prompts.dim() == 2, "E201", got=f"prompts {prompts.dtype} {list(prompts.shape)}", rule=rule, fix=fix)
    elif not isinstance(prompts, Iterable) or isinstance(prompts, (str, bytes, Mapping)):
        fail("E201", got=f"prompts={shown(prompts)}", rule=rule, fix=fix)
    return list(prompts)


def ids_of(prompt: Any, config: V41Config) -> Tensor:
    """Return a prompt as int64 `[n]` on the CPU.

    Raises E201 unless it is a vector of at least one id of the vocabulary, and E208 for image tokens.
    """
    rule = "a prompt is int [n], a list or a tensor with values"
    usable = not isinstance(prompt, Tensor) or not prompt.is_meta
    check(usable, "E201", got="a prompt on the device meta", rule=rule)
    try:
        ids = prompt.detach().cpu() if isinstance(prompt, Tensor) else torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as fault:
        raise error("E201", got=f"a prompt {shown(prompt)}", rule=rule, why=str(fault).splitlines()[0]) from fault
    check(ids.numel() > 0, "E201", got="an empty prompt", rule="a prompt has at least one token")
    integers = ids.dim() == 1 and not ids.dtype.is_floating_point and ids.dtype is not torch.bool
    check(integers and not ids.is_complex(), "E201", got=f"a prompt {ids.dtype} {list(ids.shape)}", rule=rule)
    low, high = int(ids.min()), int(ids.max())
    known = low >= 0 and high < config.vocab_size
    check(known, "E201", got=f"token ids from {low} to {high}", rule=f"ids are below {config.vocab_size}")
    check(
        not bool((ids == config.image_token_id).any()),
        "E208",
        got=f"image tokens (id {config.image_token_id}) in a prompt",
        rule="prompts are text",
        why="the vision tower is not built",
        fix="leave images out",
    )
    return ids.to(torch.int64)


def check_prompts(
    caches: V41Caches,
    prompts: Sequence[Tensor],
    requests: Sequence[int] | None,
    starts: Sequence[int] | None,
    more: int = 0,
) -> list[Prompt]:
    """Return the prompts of `ids_of` with their rows of the caches, `more` tokens after each fitting, or raise."""
    rows = list(range(len(prompts))) if requests is None else list(requests)
    begins = [0] * len(prompts) if starts is None else list(starts)
    integers = all(type(value) is int for value in (*rows, *begins))
    check(integers, "E201", got=f"requests={shown(rows)}, starts={shown(begins)}", rule="both are integers")
    counts = f"{len(prompts)} prompts, {len(rows)} requests, {len(begins)} starts"
    check(len(prompts) == len(rows) == len(begins), "E201", got=counts, rule="one of each for a prompt")
    inside = len(set(rows)) == len(rows) and all(0 <= row < caches.max_batch_size for row in rows)
    check(inside, "E204", got=f"requests {rows}", rule=f"distinct rows below max_batch_size={caches.max_batch_size}")
    checked = []
    for ids, request, start in zip(prompts, rows, begins, strict=True):
        check(
            start >= 0 and start + len(ids) + more <= caches.max_seq_len,
            "E204",
            got=f"{start} tokens, {len(ids)} of a prompt and {more} new ones",
            rule=f"a request has at most max_seq_len={caches.max_seq_len} tokens",
        )
        checked.append(Prompt(ids, request, start))
    return checked
