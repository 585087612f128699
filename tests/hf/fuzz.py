"""Not a test: random sequences of calls of a converted model, each equal to eager transformers or refused with a code.

Calls are compared at the end of a sequence, and before weights change.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.model.token_inputs import mark_dynamic_tokens
from tests.hf.fuzz_eager import Eager
from tests.hf.small import close

CACHE = next(each.name for each in fields(MoeModelOutputWithPast) if each.name in ("cache", "past_key_values"))
ROWS, MAX_SEQ_LEN = 3, 256
CAPACITY = {"max_batch_size": ROWS, "max_seq_len": MAX_SEQ_LEN}
WIDTHS = (1, 1, 1, 2, 3, 6, 13, 40, 130)
"""Columns of a forward: decode, a few tokens, and prompts that fill entries of both compressed kinds."""
PADDINGS = ("none", "left", "right", "holes", "empty row")
CHANGED_BETWEEN_STEPS = (
    "lm_head",
    "model.layers.0.self_attn.q_b_proj",
    "model.layers.0.self_attn.kv_proj",
    "model.layers.1.self_attn.q_a_proj",
    "model.layers.1.self_attn.o_b_proj",
    "model.layers.1.mlp.shared_experts.up_proj",
)
"""Weights that are applied to each token once, in its own step."""
MAX_GRAPHS = 64
STEPS = 6
"""Most steps of a sequence."""


never: Callable[[], bool] = lambda: False  # noqa: E731


@dataclass
class Conversation:
    """A cache, and the tokens that each of its rows holds. `stale` is `never` if the model does not own the cache."""

    cache: Any
    rows: list[list[int]]
    masks: list[Tensor] = field(default_factory=list)
    stale: Callable[[], bool] = never

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))


class World:
    """The original, the converted model, its open conversations, and the choices of one sequence.

    Args:
        in_graph: the converted model is compiled, so that calls differ in nothing that needs a new graph.
    """

    def __init__(self, original: Any, converted: Any, data: Any, *, in_graph: bool, attention_only: bool) -> None:
        self.original, self.converted, self.data = original, converted, data
        self.eager = Eager(original)
        self.in_graph, self.attention_only = in_graph, attention_only
        self.open: list[Conversation] = []
        self.calls = 0
        self.changed = False

    def choose(self, *values: Any) -> Any:
        return self.data.draw(st.sampled_from(values))

    def ids(self, *shape: int) -> Tensor:
        seed = self.data.draw(st.integers(0, 1 << 16))
        ids = torch.randint(0, 512, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return ids.to(torch.get_default_device())

    # Calls

    def conversation(self) -> Conversation:
        """Return an open conversation, or a new one."""
        usable = [c for c in self.open if not c.stale()]
        if usable and self.choose(True, True, False):
            return self.choose(*usable)
        new = Conversation(hf.new_cache(self.converted), [[] for _ in range(self.choose(1, 2, ROWS))])
        self.open.append(new)
        return new

    def mask(self, kind: str, rows: int, columns: int) -> Tensor:
        mask = torch.ones(rows, columns, dtype=torch.long)
        for row in range(rows):
            pad = self.data.draw(st.integers(0, columns - 1))
            if kind == "left":
                mask[row, :pad] = 0
            elif kind == "right":
                mask[row, columns - pad :] = 0
            elif kind == "holes":
                holes = self.data.draw(st.lists(st.integers(0, columns - 1), max_size=columns // 2))
                mask[row, holes] = 0
        if kind == "empty row":
            mask[self.data.draw(st.integers(0, rows - 1))] = 0
        return mask

    def forward(self, talk: Conversation | None = None, *, check: bool = True) -> Callable[[], None]:
        """Draw a forward of a conversation and return what runs and compares it."""
        talk = talk or self.conversation()
        rows, columns = len(talk.rows), self.choose(*WIDTHS)
        kind = self.choose(*PADDINGS)
        ids, mask = self.ids(rows, columns), self.mask(kind, rows, columns)
        options: dict[str, Any] = {CACHE: talk.cache}
        if kind != "none" or self.in_graph or self.choose(True, False):
            options["attention_mask"] = mask
            if not self.in_graph and self.choose(True, False):
                options["attention_mask"] = torch.cat((*talk.masks, mask), 1).to(self.choose(torch.long, torch.bool))
        if not self.in_graph:
            extra = self.choose("", "", "hidden", "tuple", "positions", "keep")
            if extra == "hidden":
                options["output_hidden_states"] = options["output_router_logits"] = True
            elif extra == "tuple":
                options["return_dict"] = False
            elif extra == "keep":
                options["logits_to_keep"] = 1
            elif extra == "positions":
                past = torch.tensor([len(row) for row in talk.rows])[:, None]
                options["position_ids"] = (past + mask.cumsum(1) - 1).clamp(min=0)
        fits = all(len(row) + int(m.sum()) <= MAX_SEQ_LEN for row, m in zip(talk.rows, mask, strict=True))
        inputs = {name: mark_dynamic_tokens(x) if name != CACHE else x for name, x in options.items()} if (
            self.in_graph
        ) else options  # fmt: skip
        if self.in_graph:
            ids = mark_dynamic_tokens(ids)

        def run() -> None:
            self.calls += 1
            if not fits:
                refused("E204", lambda: self.converted(ids, **inputs))
                return
            out = self.converted(ids, **inputs)
            if options.get("output_router_logits"):
                assert out.aux_loss.isfinite() or not mask.any()
            logits = out[0] if options.get("return_dict") is False else out.logits
            for row, (tokens, keep) in enumerate(zip(talk.rows, mask.bool(), strict=True)):
                tokens += ids[row, keep].tolist()
                kept = keep[-logits.shape[1] :]
                self.eager.expect(self.calls, tokens, int(kept.sum()), partial(close, logits[row, kept]))
            talk.masks.append(mask)

        return run

    def without_cache(self) -> Callable[[], None]:
        """Draw a forward without a cache; its result can be continued until the next call takes the model's cache."""
        rows, columns = self.choose(1, 2, ROWS), self.choose(*WIDTHS)
        ids = self.ids(rows, columns)
        options = {"attention_mask": torch.ones_like(ids)} if self.in_graph else {}
        if self.in_graph:
            ids, options = mark_dynamic_tokens(ids), {"attention_mask": mark_dynamic_tokens(options["attention_mask"])}

        def run() -> None:
            self.calls += 1
            out = self.converted(ids, **options)
            talk = Conversation(out[CACHE], ids.tolist(), [torch.ones_like(ids)], lambda: out[CACHE].stale)
            for row, tokens in enumerate(talk.rows):
                self.eager.expect(self.calls, tokens, columns, partial(close, out.logits[row]))
            self.open.append(talk)

        return run

    def generate(self) -> Callable[[], None]:
        """Draw a generation, greedy or sampled with a seed, of rows of one length or of one padded row each."""
        rows, columns = self.choose(1, 2, ROWS), self.choose(*WIDTHS)
        ids, seed = self.ids(rows, columns), self.data.draw(st.integers(0, 999))
        options: dict[str, Any] = {"max_new_tokens": self.choose(1, 2, 9), "do_sample": self.choose(True, False)}
        if options["do_sample"]:
            options |= {"temperature": 0.7, "top_k": self.choose(5, 50)}
        if columns > 4 and self.choose(True, False):
            options["prefill_chunk_size"] = self.choose(max(3, columns // 9), columns // 2)
        repeats = self.choose(1, ROWS // rows) if options["do_sample"] else 1
        pads = [self.data.draw(st.integers(0, columns - 1)) if self.choose(True, False) else 0 for _ in range(rows)]
        padded = any(pads) and not options["do_sample"]
        mask = torch.ones_like(ids)
        for row, pad in enumerate(pads if padded else ()):
            mask[row, :pad] = 0

        def run() -> None:
            self.calls += 1
            torch.manual_seed(seed)
            got = self.converted.generate(ids, attention_mask=mask, num_return_sequences=repeats, **options)
            if options["do_sample"]:
                plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
                torch.manual_seed(seed)
                assert torch.equal(
                    got, self.original.generate(ids, attention_mask=mask, num_return_sequences=repeats, **plain)
                )
                return
            assert got.shape[1] == columns + options["max_new_tokens"] and torch.equal(got[:, :columns], ids)
            for tokens, pad in zip(got.tolist(), pads if padded else [0] * rows, strict=True):
                self.eager.expect_greedy(self.calls, tokens[pad:], options["max_new_tokens"])

        return run

    def second_turn(self) -> Callable[[], None]:
        """Draw a generation that continues a conversation without padding."""
        talk = self.conversation()
        whole = all(bool(mask.all()) for mask in talk.masks) and len(set(map(len, talk.rows))) == 1
        if not whole or talk.longest + 20 > MAX_SEQ_LEN:
            return self.forward(talk)
        new = self.ids(len(talk.rows), self.choose(1, 5, 9))

        def run() -> None:
            self.calls += 1
            ids = torch.cat((torch.tensor(talk.rows).view(len(talk.rows), -1).long(), new), 1)
            options = {"max_new_tokens": 4, "do_sample": False}
            got = self.converted.generate(ids, attention_mask=torch.ones_like(ids), **options, **{CACHE: talk.cache})
            assert got.shape[1] == ids.shape[1] + 4 and torch.equal(got[:, : ids.shape[1]], ids)
            for tokens in got.tolist():
                self.eager.expect_greedy(self.calls, tokens, 4)
            talk.rows = got[:, :-1].tolist()  # the last token was not fed back
            talk.masks.append(torch.ones_like(got[:, :-1])[:, sum(mask.shape[1] for mask in talk.masks) :])

        return run

    def refusals(self) -> Callable[[], None]:
        """Draw a call that has to be refused."""
        talk = self.conversation()
        stale = [c for c in self.open if c.stale()]
        rows = len(talk.rows)
        one = torch.zeros(rows, 1, dtype=torch.long)
        kind = self.choose("stale", "rows", "mask", "positions", "training", "past", "float mask")

        def run() -> None:
            self.calls += 1
            if kind == "stale" and stale:
                refused("E208", lambda: self.converted(one[:1], **{CACHE: stale[0].cache}))
            elif kind == "rows" and talk.longest:
                refused("E208", lambda: self.converted(torch.zeros(rows % ROWS + 1, 1).long(), **{CACHE: talk.cache}))
            elif kind == "mask":
                wide = torch.ones(rows, 2 + sum(mask.shape[1] for mask in talk.masks), dtype=torch.long)
                refused("E208", lambda: self.converted(one, attention_mask=wide, **{CACHE: talk.cache}))
            elif kind == "float mask":
                refused("E208", lambda: self.converted(one, attention_mask=one.float(), **{CACHE: talk.cache}))
            elif kind == "positions":
                wrong = torch.tensor([[len(row) + 1] for row in talk.rows])
                refused("E208", lambda: self.converted(one, position_ids=wrong, **{CACHE: talk.cache}))
            elif kind == "past" and talk.masks:
                past = torch.cat((*talk.masks, one + 1), 1)
                past[0, 0] = 1 - past[0, 0]
                refused("E208", lambda: self.converted(one, attention_mask=past, **{CACHE: talk.cache}))
            elif kind == "training":
                self.converted.train()
                refused("E208", lambda: self.converted(one))
                self.converted.eval()

        return run

    def change(self, names: Iterable[str]) -> Callable[[Any], None]:
        """Draw a change of one weight, in place or by a new tensor, and return what makes it in a model."""
        name, how = self.choose(*names), self.choose("in place", "parameter", "data", "load", "assign")
        factor = self.choose(0.5, 1.25, -1.0)

        @torch.no_grad()
        def make(model: Any) -> None:
            self.changed = True
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = getattr(module, leaf)
            value = parameter.detach() * factor
            if how == "in place":
                parameter.copy_(value)
            elif how == "parameter":
                setattr(module, leaf, nn.Parameter(value, requires_grad=parameter.requires_grad))
            elif how == "data":
                parameter.data = value
            else:
                module.load_state_dict({**module.state_dict(), leaf: value}, assign=how == "assign")

        return make

    def weights(self) -> Callable[[], None]:
        """Draw a change of a weight of both models, which empties all conversations."""
        change = self.change(name for name, each in self.original.named_parameters() if each.dim() > 1)

        def run() -> None:
            self.eager.settle()
            change(self.original)
            change(self.converted)
            self.forget()

        return run

    def disturbed(self) -> Callable[[], None]:
        """Draw a generation with code of the caller that changes a weight, or runs the model, between two steps."""
        ids, step = self.ids(self.choose(1, 2), self.choose(2, 13, 40)), self.choose(1, 2, 3)
        change = self.change(f"{name}.weight" for name in CHANGED_BETWEEN_STEPS)
        other = self.without_cache() if self.choose(True, False) else None

        def generate(model: Any, between: Callable[[], None]) -> Tensor:
            steps = itertools.count(1)

            def process(_: Tensor, scores: Tensor) -> Tensor:
                if next(steps) == step:
                    between()
                return scores

            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
            options |= {"output_logits": True, "return_dict_in_generate": True}
            return torch.stack(model.generate(ids, logits_processor=[process], **options).logits)

        def run() -> None:
            self.calls += 1
            self.eager.settle()
            if other is not None:
                got, want = generate(self.converted, other), generate(self.original, lambda: None)
            else:
                got, want = (generate(model, partial(change, model)) for model in (self.converted, self.original))
            close(got, want)
            if other is None:
                self.forget()

        return run

    def again(self) -> Callable[[], None]:
        """Revert and convert."""

        def run() -> None:
            if not self.in_graph:
                hf.revert(self.converted)
                ids = torch.arange(7)[None]
                with torch.no_grad():
                    logits = self.converted(ids, use_cache=False).logits[0]
                self.eager.expect(self.calls, ids[0].tolist(), 7, partial(close, logits))
                hf.convert(self.converted, **CAPACITY, attention_only=self.attention_only)
            self.open.clear()

        return run

    def forget(self) -> None:
        """Empty the caches: their rows came from other weights."""
        for talk in self.open:
            talk.cache.reset()
            talk.rows, talk.masks = [[] for _ in talk.rows], []
        self.open = [talk for talk in self.open if not talk.stale()]

    def threads(self) -> Callable[[], None]:
        """Draw two or three forwards and generations, of different caches, that threads run at once."""
        talks = [Conversation(hf.new_cache(self.converted), [[] for _ in range(self.choose(1, 2))]) for _ in range(2)]
        self.open += talks
        calls = [self.forward(talk) for talk in talks] + [self.without_cache()] * self.choose(0, 1, 2)

        def run() -> None:
            faults: list[BaseException] = []

            def guarded(call: Callable[[], None]) -> None:
                # The limit is per thread. A thread may miss a graph during its look-up elsewhere, and compile it again.
                torch._dynamo.config.recompile_limit = MAX_GRAPHS
                try:
                    call()
                except BaseException as fault:
                    faults.append(fault)

            threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # Who takes the model's own cache last is a matter of time, and a sequence must be the same each time.
            self.open = [talk for talk in self.open if talk.stale is never]
            if faults:
                raise faults[0]

        return run

    def kinds(self) -> list[Callable[[], Callable[[], None]]]:
        """Return what a step of a sequence may be, once for its share of them."""
        kinds = [self.forward] * 6 + [self.without_cache, self.generate, self.second_turn, self.refusals, self.threads]
        return [*kinds, self.weights, self.again, self.disturbed]

    def play(self) -> None:
        """Run one sequence."""
        for _ in range(self.data.draw(st.integers(2, STEPS))):
            self.choose(*self.kinds())()()
        self.eager.settle()


def refused(code: str, call: Callable[[], Any]) -> None:
    """Assert that a call raises an error of this package with `code`."""
    try:
        call()
    except DSV4Error as error:
        assert error.code == code, error
    else:
        raise AssertionError(f"not refused with {code}")
