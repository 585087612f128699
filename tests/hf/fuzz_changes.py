"""Not a test: random changes of modules and settings, adapters, saved models, and chats and batches of one sequence.

What a change gives is eager transformers' result of the same change, or an error of this package with a code.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from tests.hf.fuzz import CACHE, CAPACITY, MAX_SEQ_LEN, World, refused
from tests.hf.fuzz_eager import Eager
from tests.hf.small import close

Change = Callable[[Any], None]
FACTORS = (0.5, 2, -1, 0, 1.01)
LORA = ("q_a_proj", "kv_proj", "o_b_proj", "gate_proj", "up_proj", "weights_proj", "lm_head", "embed_tokens")
HOSTILE: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-45},
    {"temperature": 1e-39, "top_p": 1e-30},
    {"temperature": 1e30, "seed": 2**100},
    {"temperature": 1.0, "top_p": 1 - 2**-53, "top_k": 2**63},
    {"temperature": torch.tensor(0.5), "top_k": 1},
    {"stop_tokens": range(512)},
    {"on_token": lambda token: [][token]},
)
"""Options of requests that are taken."""
REFUSED: tuple[dict[str, Any], ...] = (
    {"temperature": float("nan")},
    {"temperature": -1.0},
    {"temperature": 1.0, "top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": 2.5},
    {"seed": -1},
    {"stop_tokens": "eos"},
    {"stop_tokens": [512]},
    {"max_new_tokens": 2.5},
    {"max_new_tokens": 10**9},
    {"on_token": "print"},
)
"""Options of requests that are refused."""


def scaled(result: Any, factor: float) -> Any:
    """Return what a module returned with its floating tensors times `factor`."""
    if isinstance(result, Tensor):
        return result * factor if result.is_floating_point() else result
    if isinstance(result, tuple):
        return tuple(scaled(each, factor) for each in result)
    return result


class Doubled(nn.Module):
    """A module around one of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.inner(*args, **kwargs), 2.0)


class ChangingWorld(World):
    """A `World` whose sequences also change, adapt, save and serve models."""

    def kinds(self) -> list[Callable[[], Callable[[], None]]]:
        """Return what a step of a sequence may be, once for its share of them."""
        return [*super().kinds(), self.module, self.module, self.adapter, self.saved, self.regenerated, self.batch]

    # Modules and settings

    def number(self, model: Any) -> Change:
        """Draw a new value of a number that a module, or the configuration, holds."""
        owners = {"": model.config, **dict(model.named_modules())}
        numbers = [
            (path, name)
            for path, owner in owners.items()
            for name, value in vars(owner).items()
            if type(value) in (int, float, bool) and name != "training" and not name.startswith("_")
        ]
        name, factor = self.choose(*sorted({name for _, name in numbers})), self.choose(*FACTORS)
        path = self.choose(*(path for path, each in numbers if each == name))

        def change(m: Any) -> None:
            owner = m.get_submodule(path) if path else m.config
            value = getattr(owner, name)
            setattr(owner, name, not value if type(value) is bool else type(value)(value * factor))

        return change

    def code(self, model: Any) -> Change:
        """Draw a hook, a forward or a class of the caller for a module."""
        paths = [path for path, _ in model.named_modules() if path not in ("", "model", "model.layers")]
        path, factor = self.choose(*paths), self.choose(0.5, 1.01)
        how = self.choose("hook", "pre-hook", "forward", "class", "wrapped", "identity")

        def change(m: Any) -> None:
            module = m.get_submodule(path)
            inner = module.forward
            if how == "hook":
                module.register_forward_hook(lambda each, args, out: scaled(out, factor))
            elif how == "pre-hook":
                module.register_forward_pre_hook(lambda each, args: scaled(args, factor))
            elif how == "forward":
                module.forward = lambda *args, **kwargs: scaled(inner(*args, **kwargs), factor)
            elif how == "class":
                forward = type(module).forward
                halved = {"forward": lambda *args, **kwargs: scaled(forward(*args, **kwargs), factor)}
                module.__class__ = type(type(module).__name__, (type(module),), halved)
            else:
                m.set_submodule(path, nn.Identity() if how == "identity" else Doubled(module))

        return change

    def tensor(self, model: Any) -> Change:
        """Draw other values, a different place or a different type of a parameter."""
        path, _, leaf = self.choose(*(name for name, _ in model.named_parameters())).rpartition(".")
        how = self.choose("in place", "transposed", "buffer", "infinite", "tied", "none")

        def change(m: Any) -> None:
            module = m.get_submodule(path)
            parameter = getattr(module, leaf)
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "transposed":
                value = parameter.detach().mT.contiguous().mT if parameter.dim() > 1 else parameter.detach() * 2
                setattr(module, leaf, nn.Parameter(value))
            elif how == "infinite":
                parameter.view(-1)[:1].fill_(torch.inf)
            elif how == "tied":
                alike = [p for p in m.parameters() if p.shape == parameter.shape]
                setattr(module, leaf, alike[0])
            else:
                delattr(module, leaf)
                module.register_buffer(leaf, parameter.detach() * 2 if how == "buffer" else None)

        return change

    def stack(self, model: Any) -> Change:
        """Draw a different list of layers."""
        how, i = self.choose("pop", "swap", "twice", "copy", "slice", "number"), self.choose(0, 1)

        def change(m: Any) -> None:
            layers = m.model.layers
            if how == "pop":
                layers.pop(i)
            elif how == "swap":
                layers.insert(0, layers.pop(1))
            elif how in ("twice", "copy"):
                layers.append(layers[i] if how == "twice" else copy.deepcopy(layers[i]))
            elif how == "slice":
                m.model.layers = layers[:1]
            else:
                layers[i].self_attn.layer_idx = 1 - i

        return change

    def module(self) -> Callable[[], None]:
        """Draw a change of copies of both models, before or after convert: used or refused."""
        change = self.choose(self.number, self.number, self.code, self.tensor, self.stack)(self.original)
        before, ids = self.choose(True, False), self.ids(self.choose(1, 2), self.choose(1, 6, 40, 130))

        @torch.no_grad()
        def run() -> None:
            self.calls += 1
            changed = copy.deepcopy(self.original)
            try:
                change(changed)
                want = changed(ids, use_cache=False).logits
            except Exception:
                return  # of a change that transformers does not run
            clear = want.isfinite().all(-1)
            with contextlib.suppress(Exception):  # of routers that are no routers
                routed = changed(ids, use_cache=False, output_router_logits=True).router_logits
                clear &= Eager(changed).chosen_clearly(routed).view_as(ids).cumprod(1).bool()
            model = copy.deepcopy(self.original)
            try:
                if before:
                    change(model)
                hf.convert(model, **CAPACITY, attention_only=self.attention_only)
                if not before:
                    model(ids[:, :1])
                    change(model)
                logits = model(ids).logits
            except DSV4Error:
                return
            close(logits[clear], want[clear])

        return run

    # Adapters and files

    def adapter(self) -> Callable[[], None]:
        """Draw an adapter: convert merges it, or refuses it and leaves the model as it was."""
        import peft

        targets = self.data.draw(st.lists(st.sampled_from(LORA), min_size=1, max_size=3, unique=True))
        state = self.choose("plain", "plain", "disabled", "merged", "scaled")
        options = self.choose(
            {}, {"use_dora": True}, {"bias": "all"}, {"use_rslora": True}, {"layers_to_transform": [1]}
        )
        ids, merge = self.ids(1, 20), self.choose(True, False)

        @torch.no_grad()
        def run() -> None:
            self.calls += 1
            config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets, **options)
            try:
                with_adapters = peft.get_peft_model(copy.deepcopy(self.original), config).eval()
            except ValueError:
                return  # of targets that PEFT does not find in the layer
            if state == "disabled":
                with_adapters.base_model.disable_adapter_layers()
            elif state == "merged":
                with_adapters.merge_adapter()
            elif state == "scaled":
                _ = [m.scale_layer(0.5) for m in with_adapters.modules() if hasattr(m, "scale_layer")]
            model = with_adapters.base_model.model
            want = model(ids, use_cache=False).logits
            try:
                hf.convert(model, **CAPACITY, attention_only=self.attention_only, merge_adapters=merge)
                close(model(ids).logits, want)
            except DSV4Error:
                assert torch.equal(model(ids, use_cache=False).logits, want)

        return run

    def saved(self) -> Callable[[], None]:
        """Draw a road to a file and back."""
        road, ids = self.choose("save_pretrained", "load", "state_dict", "pickle", "safetensors"), self.ids(1, 20)

        @torch.no_grad()
        def run() -> None:
            from safetensors.torch import load_model, save_model

            self.calls += 1
            with tempfile.TemporaryDirectory() as folder:
                again = copy.deepcopy(self.original)
                for parameter in again.parameters():
                    parameter.zero_()
                if road in ("save_pretrained", "load"):
                    self.converted.save_pretrained(folder)
                    if road == "load":
                        again = hf.load(
                            folder, device=self.original.device, attention_only=self.attention_only, **CAPACITY
                        )
                    else:
                        again = DeepseekV4ForCausalLM.from_pretrained(folder).eval()
                elif road == "safetensors":
                    save_model(self.converted, f"{folder}/model.safetensors")
                    load_model(again, f"{folder}/model.safetensors")
                else:
                    torch.save(self.converted.state_dict(), f"{folder}/weights.pt")
                    weights = torch.load(f"{folder}/weights.pt", mmap=road == "pickle")
                    again.load_state_dict(weights, assign=road == "pickle")
                options = {} if road == "load" else {"use_cache": False}
                logits = again(ids, **options).logits
            self.eager.expect(self.calls, ids[0].tolist(), ids.shape[1], partial(close, logits[0]))

        return run

    # Chats and batches

    def regenerated(self) -> Callable[[], None]:
        """Draw a chat whose cache already holds the prompt, or more than it: refused, and the chat goes on."""
        talk, fewer = self.conversation(), self.choose(0, 1, 5)
        plain = talk.masks and all(bool(mask.all()) for mask in talk.masks) and talk.longest + 8 <= MAX_SEQ_LEN
        if not plain or len(set(map(len, talk.rows))) > 1 or talk.longest <= fewer or self.in_graph:
            return self.forward(talk)

        def run() -> None:
            self.calls += 1
            ids = torch.tensor(talk.rows)[:, : talk.longest - fewer]
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
            refused("E208", lambda: self.converted.generate(ids, **options, **{CACHE: talk.cache}))
            held = torch.tensor(talk.rows)[:, -1:]
            logits = self.converted(held, **{CACHE: talk.cache}).logits  # once more, as a next token
            for row, tokens in enumerate(talk.rows):
                tokens += held[row].tolist()
                self.eager.expect(self.calls, tokens, 1, partial(close, logits[row]))
            talk.masks.append(torch.ones_like(held))

        return run

    def batch(self) -> Callable[[], None]:
        """Draw a running batch of good and hostile requests, and cancel some."""
        slots, chunk = self.choose(1, 2, 4), self.choose(2, 16, 64)
        good = [self.ids(self.choose(1, 5, 20)).tolist() for _ in range(self.choose(1, 3))]
        hostile = self.data.draw(st.lists(st.sampled_from(range(len(HOSTILE) + len(REFUSED))), max_size=3))
        cancelled = self.choose(True, False)

        def run() -> None:
            self.calls += 1
            batch = hf.RunningBatch(self.converted, slots=slots, prefill_chunk=chunk)
            requests = []
            for i, at in enumerate([*hostile, -1]):
                requests += [batch.submit(ids, max_new_tokens=3) for ids in good[i : i + 1]]
                if at < 0:
                    continue
                options = (*HOSTILE, *REFUSED)[at]
                try:
                    request = batch.submit([7, 8, 9], **{"max_new_tokens": 3, **options})
                except DSV4Error as error:
                    assert options in REFUSED and error.code in ("E201", "E204")
                else:
                    assert at < len(HOSTILE)
                    if cancelled:
                        batch.step_for(request)
                        request.cancel()
            for _ in range(1000):
                if batch.idle:
                    break
                with contextlib.suppress(IndexError):  # of the callback
                    batch.step()
            assert batch.idle
            for request in requests:
                assert (request.state, len(request.tokens)) == ("length", 3)
                self.eager.expect_greedy(self.calls, [*request.prompt, *request.tokens], 3)

        return run
