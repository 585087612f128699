"""Not a test: scenarios of one rank that differs or is gone, and the errors expected on the others."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.parallel.callers import Add, Fails, NoTokenizer, Stop

MODEL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "o_groups": 4,
}
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "attention_only": False, "rank_timeout": 2.0}
ENOUGH = 45.0
"""Seconds that survivors take to end, at most."""


class Me(NamedTuple):
    """A rank, seen from itself: its mesh, and whether it is the one that differs."""

    mesh: Any
    odd: bool

    @property
    def last(self) -> int:
        return int(self.mesh.size()) - 1


def ids(*shape: int, first: int = 1) -> torch.Tensor:
    return (torch.arange(shape[0] * shape[1]).view(shape) % 7) + first


@functools.cache
def model_of(mesh: Any) -> Any:
    """Return a split model that has made a call of every kind, so that no later one is the first of its graph."""
    model = hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh)
    generate(Me(mesh, False), model)
    with torch.no_grad():
        for rows, columns in ((1, 5), (2, 5), (1, 1), (2, 1)):
            model(ids(rows, columns))
    return model


def generate(me: Me, model: Any = None, odd: dict[str, Any] | None = None, **options: Any) -> torch.Tensor:
    """Generate with options, and on the odd rank with those in `odd` too."""
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **options}
    arguments |= (odd or {}) if me.odd else {}
    prompt = arguments.pop("prompt", ids(2, 5))
    model = model_of(me.mesh) if model is None else model
    tokens: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    return tokens


@torch.no_grad()
def forward(me: Me, mine: Any, other: Any, **options: Any) -> None:
    model_of(me.mesh)(other if me.odd else mine, **options)


def processors(value: float) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Add(value)])}


def divide() -> float:
    return 1 / 0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hidden_processor(me: Me) -> None:
    Add.hidden = 50.0 if me.odd else 0.0
    try:
        generate(me, **processors(0.0))
    finally:
        Add.hidden = 0.0


def hidden_criteria(me: Me) -> None:
    Stop.after = 8 if me.odd else 99
    generate(me, stopping_criteria=StoppingCriteriaList([Stop()]))


def enclosed_value(me: Me) -> None:
    allowed = [3, 4] if me.odd else [5, 6]
    generate(me, prefix_allowed_tokens_fn=lambda batch, tokens: allowed)


def other_lengths(me: Me) -> None:
    model, name = model_of(me.mesh), hf.model.causal_lm.CACHE_NAME
    mask = torch.ones(2, 4, dtype=torch.int64)
    mask[0, 0] = int(not me.odd)
    with torch.no_grad():
        model(ids(2, 4), attention_mask=mask, **{name: hf.new_cache(model)})


def other_kind_of_call(me: Me) -> None:
    if me.odd:
        forward(me, ids(2, 5), ids(2, 5))
    else:
        generate(me)


def barrier_instead(me: Me) -> None:
    barrier(me) if me.odd else generate(me)


def timeout_of_ranks(me: Me) -> None:
    hf.convert(tiny_model(**MODEL), **SIZES | {"rank_timeout": "soon" if me.odd else 2.0}, mesh=me.mesh)


def training(me: Me) -> None:
    model = model_of(me.mesh)
    if me.odd:
        model.train()
    try:
        generate(me)
    finally:
        model.eval()


def training_direct(me: Me) -> None:
    model = model_of(me.mesh)
    if me.odd:
        model.train()
    try:
        forward(me, ids(1, 4), ids(1, 4))
    finally:
        model.eval()


def compiled(me: Me) -> None:
    model = hf.convert(tiny_model(**MODEL), **SIZES, mesh=me.mesh)
    if me.odd:
        model.compile(backend="eager")
    generate(me, model)


def precision(me: Me) -> None:
    torch.set_float32_matmul_precision("medium" if me.odd else "highest")
    try:
        forward(me, ids(1, 4), ids(1, 4))
    finally:
        torch.set_float32_matmul_precision("highest")


def cache_or_none(me: Me) -> None:
    model = model_of(me.mesh)
    cache = {hf.model.causal_lm.CACHE_NAME: hf.new_cache(model, max_batch_size=3)} if me.odd else {}
    forward(me, ids(1, 4), ids(1, 4), **cache)


def convert_options(me: Me) -> None:
    hf.convert(tiny_model(**MODEL), **SIZES | {"max_seq_len": 128 if me.odd else 64}, mesh=me.mesh)


def convert_rejected(me: Me) -> None:
    hf.convert(tiny_model(**MODEL).train(me.odd), **SIZES, mesh=me.mesh)


def configuration(me: Me) -> None:
    hf.convert(tiny_model(**MODEL, rms_norm_eps=1e-5 if me.odd else 1e-6), **SIZES, mesh=me.mesh)


def folder(me: Me) -> None:
    path = saved(me)
    hf.load("nowhere" if me.odd else path, max_batch_size=2, max_seq_len=64, device="cpu", mesh=me.mesh)


def saved(me: Me) -> str:
    """Return a folder with a model, which rank 0 writes: transformers writes nothing on other ranks."""
    path = Path(os.environ["DSV4_APART"]) / "model"
    if me.mesh.get_rank() == 0 and not path.exists():
        tiny_model(**MODEL).save_pretrained(path)
    torch.distributed.barrier()
    return str(path)


DIFFERS: dict[str, tuple[Callable[[Me], object], tuple[str, ...]]] = {
    "repetition_penalty": (lambda me: generate(me, odd={"repetition_penalty": 1.7}), ("repetition_penalty",)),
    "eos_token_id": (lambda me: generate(me, odd={"eos_token_id": 3}), ("eos_token_id",)),
    "temperature": (
        lambda me: generate(me, do_sample=True, temperature=1.0, odd={"temperature": 0.3}),
        ("temperature = 1.0 on rank 0",),
    ),
    "sampling": (lambda me: generate(me, odd={"do_sample": True}), ("do_sample",)),
    "max_new_tokens": (lambda me: generate(me, odd={"max_new_tokens": 7}), ("length = 11 on rank 0",)),
    "min_new_tokens": (lambda me: generate(me, odd={"min_new_tokens": 2}), ("min_new_tokens",)),
    "bad_words_ids": (lambda me: generate(me, odd={"bad_words_ids": [[5]]}), ("bad_words_ids",)),
    "chunks": (lambda me: generate(me, odd={"prefill_chunk_size": 2}), ("prefill_chunk_size",)),
    "use_cache": (lambda me: generate(me, odd={"use_cache": False}), ("use_cache = True on rank 0",)),
    "max_time": (lambda me: generate(me, odd={"max_time": 5.0}), ("rejected", "max_time")),
    "unknown option": (lambda me: generate(me, odd={"nonsense": 1}), ("rejected", "nonsense")),
    "prompt": (lambda me: generate(me, odd={"prompt": ids(2, 5, first=3)}), ("inputs",)),
    "a processor": (lambda me: generate(me, odd=processors(1.0)), ("logits_processor",)),
    "setting of a processor": (
        lambda me: generate(me, **processors(1.0), odd=processors(2.0)),
        ("logits_processor", "value=1.0"),
    ),
    "what a processor does": (hidden_processor, ("values of input_ids",)),
    "what a criterion does": (hidden_criteria, ("generate = ",)),
    "enclosed value": (enclosed_value, ("prefix_allowed_tokens_fn",)),
    "a processor that fails": (
        lambda me: generate(me, **processors(0.0), odd={"streamer": Fails(divide)}),
        ("rejected", "ZeroDivisionError: division by zero"),
    ),
    "kind of call": (other_kind_of_call, ("call = 'generate' on rank 0",)),
    "barrier": (barrier_instead, ("call = 'generate' on rank 0", "barrier")),
    "timeout of ranks": (timeout_of_ranks, ("rejected", "rank_timeout='soon'")),
    "training mode": (training, ("training mode = False on rank 0",)),
    "training mode of a forward": (training_direct, ("rejected", "training mode")),
    "values of ids": (lambda me: forward(me, ids(2, 5), ids(2, 5, first=2)), ("values of input_ids",)),
    "order of ids": (lambda me: forward(me, ids(1, 5), ids(1, 5).flip(1)), ("values of input_ids",)),
    "shape of ids": (lambda me: forward(me, ids(1, 5), ids(1, 6)), ("input_ids = '(1, 5) torch.int64' on rank 0",)),
    "one column": (lambda me: forward(me, ids(1, 1), ids(1, 1, first=2)), ("values of input_ids",)),
    "one column or more": (lambda me: forward(me, ids(1, 1), ids(1, 2)), ("input_ids",)),
    "dtype of ids": (lambda me: forward(me, ids(1, 5), ids(1, 5).int()), ("torch.int32",)),
    "floating ids": (lambda me: forward(me, ids(1, 5), ids(1, 5).float()), ("rejected", "torch.float32")),
    "mask": (other_lengths, ("values of attention_mask",)),
    "cache": (cache_or_none, ("cache = ", "3 x ")),
    "compiled": (compiled, ("compiled",)),
    "precision of matmuls": (precision, ("matmul precision = 'highest' on rank 0",)),
    "options of convert": (convert_options, ("max_seq_len = 64 on rank 0",)),
    "configuration": (configuration, ("configuration", "rms_norm_eps")),
    "convert that rejects": (convert_rejected, ("rejected", "training mode")),
    "folder": (folder, ("rejected", "nowhere")),
}
"""By scenario, the action of one rank, and texts of E702 on every rank."""


def in_forward(act: Callable[[], object]) -> Callable[[Me], None]:
    """Return a scenario: the odd rank acts in the middle of a forward."""

    def way(me: Me) -> None:
        model = model_of(me.mesh)
        if me.odd:
            model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: act())
        generate(me)

    return way


def at_token(act: Callable[[], object]) -> Callable[[Me], None]:
    """Return a scenario: the odd rank acts in its caller's code between two steps."""

    def way(me: Me) -> None:
        model_of(me.mesh)
        generate(me, odd={"streamer": Fails(act)})

    return way


def before(act: Callable[[], object], then: Callable[[Me], object] = generate) -> Callable[[Me], None]:
    """Return a scenario: the odd rank acts while the others begin a call."""

    def way(me: Me) -> None:
        model_of(me.mesh)
        if me.odd:
            act()
        then(me)

    return way


def barrier(me: Me) -> None:
    torch.distributed.barrier()


def without_model(act: Callable[[], object]) -> Callable[[Me], None]:
    def way(me: Me) -> None:
        if me.odd:
            act()
        model_of(me.mesh)

    return way


def in_convert(me: Me) -> None:
    from dsv4_compile.parallel import agreement

    if me.odd:
        agreement.digest = lambda *_: kill()  # type: ignore[assignment, return-value]
    model_of(me.mesh)


def stopped_in_convert(me: Me) -> None:
    from dsv4_compile.parallel import agreement

    if me.odd:
        agreement.digest = lambda *_: stop()  # type: ignore[assignment, return-value]
    model_of(me.mesh)


def in_load(me: Me) -> None:
    path = saved(me)
    if me.odd:
        sys.modules["dsv4_compile.hf.loading.load"].fill = lambda *_: kill()  # type: ignore[attr-defined]
    hf.load(path, max_batch_size=2, max_seq_len=64, device="cpu", mesh=me.mesh)


def linger(*_: Any) -> None:
    """Live on, as a server does that has caught an error."""
    time.sleep(ENOUGH)


def lives_on(act: Callable[[Me], None]) -> Callable[[Me], None]:
    """Return a scenario: the odd rank catches its error, and does something else."""

    def way(me: Me) -> None:
        try:
            act(me)
        except (ZeroDivisionError, OSError):
            linger()

    return way


def destroys(me: Me) -> None:
    model_of(me.mesh)
    if me.odd:
        torch.distributed.destroy_process_group()
        linger()
    generate(me)


def fewer(me: Me) -> None:
    model_of(me.mesh)
    for _ in range(2 - me.odd):
        generate(me)


def plain_streamer(me: Me) -> None:
    model_of(me.mesh)
    generate(me, prompt=ids(1, 5), odd={"streamer": TextStreamer(NoTokenizer())})


def calls_again(me: Me) -> None:
    try:
        in_forward(divide)(me)
    except ZeroDivisionError:
        generate(me)


GONE: dict[str, tuple[Callable[[Me], object], tuple[str, ...]]] = {
    "killed in a forward": (in_forward(kill), ("ended",)),
    "killed between steps": (at_token(kill), ("ended",)),
    "killed before a call": (before(kill), ("ended",)),
    "killed before a forward": (before(kill, lambda me: forward(me, ids(2, 5), ids(2, 5))), ("ended",)),
    "killed before a barrier": (before(kill, barrier), ("ended",)),
    "killed in convert": (in_convert, ("ended",)),
    "killed before convert": (without_model(kill), ("has not come to the group",)),
    "killed in load": (in_load, ("ended",)),
    "exits": (before(lambda: os._exit(0)), ("ended",)),
    "exits between steps": (at_token(lambda: os._exit(3)), ("ended",)),
    "fewer calls, and exits": (fewer, ("ended",)),
    "stopped in a forward": (in_forward(stop), ("is stopped",)),
    "stopped between steps": (at_token(stop), ("is stopped",)),
    "stopped in convert": (stopped_in_convert, ("is stopped",)),
    "stopped before a call": (before(stop), ("is stopped",)),
    "stopped before a barrier": (before(stop, barrier), ("is stopped",)),
    "raises in a forward, and exits": (in_forward(divide), ("rank",)),
    "raises in a forward, and lives on": (lives_on(in_forward(divide)), ("raised ZeroDivisionError",)),
    "raises in a forward, and calls again": (calls_again, ("raised ZeroDivisionError",)),
    "raises in a plain streamer, and lives on": (lives_on(plain_streamer), ("raised OSError: stdout is closed",)),
    "destroys the group, and lives on": (destroys, ("has left",)),
    "does not come": (before(linger), ("has not come to call",)),
    "does not come to a barrier": (before(linger, barrier), ("has not come to call",)),
}
"""By scenario, the end of one rank, and texts of E703 on every other."""
