"""Attention of a served model against the same layer on private caches: every row, whatever vLLM batched it with.

While vLLM serves, each layer records its input and output rows, inside the compiled graph too. Afterwards the layer
runs each request again from its first token to its last in one step, on `PagedCaches` with block tables that never
change. Both are the same layer with the same weights, so differences come from the plug-in's additions: vLLM's caches,
block tables and slots, chunks, prefixes that were not computed again, and the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.cache import PagedCaches
from dsv4_compile.integrations.vllm import layers, whole_model
from dsv4_compile.integrations.vllm import model as plugin
from dsv4_compile.integrations.vllm.attention import Attention
from dsv4_compile.metadata import build_batch_metadata


class RecordingAttention(Attention):
    """An attention layer that keeps the rows of its last call."""

    def __init__(self, vllm_config: Any, prefix: str, **kwargs: Any) -> None:
        super().__init__(vllm_config, prefix, **kwargs)
        rows = vllm_config.scheduler_config.max_num_batched_tokens, self.layer.config.hidden_size
        for name in ("rows_in", "rows_out"):
            self.register_buffer(name, torch.zeros(rows, dtype=vllm_config.model_config.dtype), persistent=False)

    def forward(self, step: Any, hidden: Tensor, _: Any = None) -> Tensor:
        out = super().forward(step, hidden)
        self.rows_in[: hidden.shape[0]].copy_(hidden)
        self.rows_out[: hidden.shape[0]].copy_(out)
        return out


@dataclass
class Row:
    """One token of a request in one step: each layer's input and output, and the model's output, `[hidden_size]`."""

    position: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    final: Tensor


@dataclass
class Recording:
    """Rows by request, in the order of their computation; `steps` holds the tokens of each step.

    padding: rows that are no tokens are added to each step, up to a multiple of so many, as CUDA graphs do.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    padding: int = 1

    def add(self, runner: Any, model: plugin.DeepseekV4Model, positions: Tensor, final: Tensor) -> None:
        """Record the step that has just run and returned `final`."""
        buffers, layers = model.step_buffers, list(model.attention.values())
        starts = buffers.query_start_loc.tolist()
        self.steps.append(starts[-1])
        for request, name in enumerate(runner.input_batch.req_ids):
            for row in range(starts[request], starts[request + 1]):
                inputs = [layer.rows_in[row].clone() for layer in layers]
                outputs = [layer.rows_out[row].clone() for layer in layers]
                self.rows.setdefault(name, []).append(Row(int(positions[row]), inputs, outputs, final[row].clone()))

    @contextmanager
    def of(self, runner: Any, model: plugin.DeepseekV4Model) -> Iterator[None]:
        """Record every step of a runner, replays of CUDA graphs among them."""
        plain = runner._model_forward

        def forward(**kwargs: Any) -> Any:
            positions = kwargs["positions"]
            more = -positions.shape[0] % self.padding
            for name in ("input_ids", "positions"):  # those of a token, where graphs leave older values
                kwargs[name] = torch.cat([kwargs[name], kwargs[name][-1:].expand(more)])
            out = plain(**kwargs)[: positions.shape[0]]
            self.add(runner, model, positions, out)
            return out

        runner._model_forward = forward
        try:
            yield
        finally:
            runner._model_forward = plain


class ModelWith(plugin.DeepseekV4Model):
    """The plug-in's model with attention of a different class, which `module` takes from its global `Attention`."""

    attention_class: type[Attention] = Attention
    module: Any = plugin

    def __init__(self, **kwargs: Any) -> None:
        before, self.module.Attention = self.module.Attention, type(self).attention_class
        try:
            super().__init__(**kwargs)
        finally:
            self.module.Attention = before


class RecordingModel(ModelWith):
    """The plug-in's model with layers that record."""

    attention_class = RecordingAttention


class RecordingForCausalLM(plugin.DeepseekV4ForCausalLM):
    """The class that the tests register in the place of the plug-in's."""

    model_cls = RecordingModel


class RecordingWholeModel(ModelWith, whole_model.WholeModel):
    """The plug-in's model with its decoder layers and attention that records."""

    attention_class = RecordingAttention
    module = layers


class RecordingWholeForCausalLM(whole_model.DeepseekV4ForCausalLM):
    """The class that the tests register with `DSV4_VLLM=all`."""

    model_cls = RecordingWholeModel


@dataclass
class Errors:
    """|ours - reference| / |reference| of every row: the worst of each layer, and how many rows there were.

    reused: rows that were not computed because of a prefix hit. again: rows that were computed before their request was
    preempted as well; drift: the worst difference of the model's outputs for them.
    hits: rows that were reused when a preempted request was resumed, and worst_after_hits the worst row of such
    requests, apart: the reference does not know which of several computations a block holds.
    """

    worst: list[float]
    rows: int = 0
    reused: int = 0
    again: int = 0
    drift: float = 0.0
    hits: int = 0
    worst_after_hits: float = 0.0


@torch.no_grad()
def compare(
    model: plugin.DeepseekV4Model, recording: Recording, tokens: dict[str, list[int]], layers: Sequence[Any] = ()
) -> Errors:
    """Run every request of `tokens` (all of its tokens, by request) again and compare.

    `layers` are those of the reference, the model's own by default.
    """
    layers = layers or [attention.layer for attention in model.attention.values()]
    known: dict[tuple[int, ...], Row] = {}  # the first that was computed, by all tokens up to theirs
    errors = Errors([0.0] * len(model.attention))
    passes = [(name, n, rows) for name, recorded in recording.rows.items() for n, rows in enumerate(split(recorded))]
    for name, number, rows in passes:
        first, prefixes = rows[0].position, [tuple(tokens[name][: i + 1]) for i in range(rows[-1].position + 1)]
        assert [row.position for row in rows] == list(range(first, len(prefixes)))
        for prefix, row in zip(prefixes[first:], rows, strict=True):
            before = known.setdefault(prefix, row)
            if number and before is not row:
                errors.again += 1
                errors.drift = max(errors.drift, float(relative(row.final, before.final)))
        sequence = [known[prefix] for prefix in prefixes[:first]] + rows
        for i, layer in enumerate(layers):
            want = whole(layer, torch.stack([row.inputs[i] for row in sequence]))
            got = torch.stack([row.outputs[i] for row in sequence])
            worst = float(relative(got[first:], want[first:]).nan_to_num(torch.inf).max())
            if number and first:
                errors.worst_after_hits = max(errors.worst_after_hits, worst)
            else:
                errors.worst[i] = max(errors.worst[i], worst)
        errors.rows += len(rows)
        errors.reused += first
        errors.hits += first if number else 0
    return errors


def named(rows: dict[str, list[Row]], tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the tokens of each recorded request; the runner's names of requests begin with those of `tokens`."""
    return {name: next(t for key, t in tokens.items() if name.split("-")[0] == key) for name in rows}


def outputs(rows: dict[str, list[Row]], tokens: dict[str, list[int]]) -> dict[tuple[int, ...], Tensor]:
    """Return the model's output for each row, by all tokens up to its own."""
    return {tuple(tokens[n][: row.position + 1]): row.final for n, request_rows in rows.items() for row in request_rows}


def relative(got: Tensor, want: Tensor) -> Tensor:
    """Return |got - want| / |want| over the last dim."""
    got, want = got.float(), want.float()
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)


def split(recorded: list[Row]) -> list[list[Row]]:
    """Return the rows of a request, apart for each time that it was begun: once, and again after each preemption."""
    begins = [i for i, row in enumerate(recorded) if i == 0 or row.position <= recorded[i - 1].position]
    return [recorded[a:b] for a, b in zip(begins, [*begins[1:], len(recorded)], strict=True)]


STEP = 701
"""Tokens of a step of the reference: no multiple of a block, and more than vLLM's chunks."""


def whole(layer: Any, hidden: Tensor) -> Tensor:
    """Run a layer on one request `[n, hidden_size]`, in steps of `STEP` tokens on private caches."""
    config, length = layer.config.with_layers(layer.ratio), hidden.shape[0]
    caches = PagedCaches(config, max_batch_size=1, max_seq_len=length, cache_format=layer.cache_format)
    done = []
    for rows in hidden.split(STEP):
        end = sum(rows_done.shape[0] for rows_done in done) + rows.shape[0]
        metadata = build_batch_metadata(
            query_start_loc=torch.tensor([0, rows.shape[0]], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            num_tokens=rows.shape[0],
            block_tables=caches.block_tables,
            window=config.sliding_window,
            max_model_len=caches.max_seq_len,
            ratios=config.compressed_ratios,
        )
        done.append(layer(rows, metadata, caches.layers[0]))
    return torch.cat(done)
