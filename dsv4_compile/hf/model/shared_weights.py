"""Weights that a converted attention shares with its transformers modules, watched from outside the graph.

A graph reads the parameters of our layer and the matrices that they are stacked into. A parameter that a caller
replaces in a transformers module (`load_state_dict(assign=True)`, `module.weight = ...`, `weight.data = ...`) would
never reach it, and hooks or adapters of those modules would never run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..._compat import version_of
from ...config import DeepseekV4Config
from ...errors import check, fail
from ...loading import hf_name
from ...modules import DeepseekV4Attention
from .expected_modules import check_untied, held_values, hf
from .weight_types import is_plain


class _Shared(NamedTuple):
    """One parameter: where transformers holds it, where this package does, and its value at the last comparison."""

    name: str
    theirs: dict[str, nn.Parameter | None]
    leaf: str
    owner: nn.Module
    own_leaf: str
    parameter: nn.Parameter
    address: int


class _Module(NamedTuple):
    """One submodule of transformers, and its class: None for one that is called, whose class may change."""

    name: str
    siblings: dict[str, nn.Module | None]
    key: str
    module: nn.Module
    kind: type | None


class ReadModules:
    """Submodules of `source` whose parameters a converted module reads and which it never calls: all, or `paths`.

    Those at the paths in `called` are called, but hold others, so they must stay where they are too.
    """

    def __init__(
        self, layer: str, source: Any, paths: Collection[str] | None = None, called: Collection[str] = ()
    ) -> None:
        self.layer = layer
        self.modules = [
            _Module(
                name,
                source.get_submodule(name.rpartition(".")[0])._modules,
                name.rpartition(".")[2],
                module,
                None if name in called else type(module),
            )
            for name, module in source.named_modules(remove_duplicate=False)
            if name and (paths is None or name in paths or name in called)
        ]

    def check(self) -> None:
        """Raise E208 for a module that was replaced, or that returns more than its weights say."""
        for name, siblings, key, module, kind in self.modules:
            if siblings.get(key) is not module:
                self.refuse(name, f"was replaced by a {type(siblings.get(key)).__name__}")
            if kind is None:
                continue
            if type(module) is not kind:
                self.refuse(name, f"became a {type(module).__name__}")
            if addition := _addition(module):
                self.refuse(name, f"has {addition}")

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise E208: `name` `what`."""
        fail(
            "E208",
            got=f"{name} of {self.layer} {what}",
            why="a converted model reads the weights of this module and never calls it",
            fix="remove it, or merge adapters into the weights; or call dsv4_compile.hf.revert(model) first",
        )


class _Frequencies(NamedTuple):
    """A buffer of RoPE frequencies as it was converted, and the one that was last compared with it."""

    what: str
    buffers: dict[str, Tensor | None]
    name: str
    converted: Tensor
    seen: Tensor
    version: int


class ReadSettings:
    """Numbers outside of parameters that a converted model has read once and transformers reads at every call."""

    def __init__(self, model: Any, config: DeepseekV4Config, *, attention_only: bool) -> None:
        """Read `model`, a decoder stack that runs with `config`."""
        self.model, self.attention_only = model, attention_only
        self.layers = list(model.layers)
        self.attentions = [layer.self_attn for layer in self.layers]
        self.held = list(held_values(model, config, attention_only=attention_only))
        self.rotary = ReadModules("the model", model, ("rotary_emb",))
        rotaries = [("rotary_emb", model.rotary_emb)]
        for i, attention in enumerate(self.attentions):
            modules = attention.named_modules(prefix="self_attn")
            rotaries += [(f"{path} of layer {i}", module) for path, module in modules if path.endswith("rotary_emb")]
        self.frequencies = [
            _Frequencies(what, owner._buffers, name, buffer.clone(), buffer, version_of(buffer))
            for what, owner in rotaries
            for name, buffer in owner._buffers.items()
            if name.endswith("inv_freq") and buffer is not None
        ]

    def check_layers(self) -> None:
        """Raise E208 unless the decoder stack has layers that were converted, once each, with their attention."""
        converted = {id(layer): i for i, layer in enumerate(self.layers)}
        fix = "replace modules before convert, or call dsv4_compile.hf.revert(model) first"
        check(bool(len(self.model.layers)), "E208", got="a model without layers", fix=fix)
        seen: dict[int, int] = {}
        for i, layer in enumerate(self.model.layers):
            at = converted.get(id(layer))
            attention = getattr(layer, "self_attn", None)
            if at is None or attention is not self.attentions[at]:
                got = f"layer {i} with an attention that was not converted"
                fail("E208", got=got if at is not None else f"{got}, in a {type(layer).__name__}", fix=fix)
            if not isinstance(attention, hf.DeepseekV4Attention):
                fail("E208", got=f"layer {i} with an attention that became a {type(attention).__name__}", fix=fix)
            check(seen.setdefault(at, i) == i, "E208", got=f"layers {seen[at]} and {i}, which are one", fix=fix)
        check_untied(self.model.layers, attention_only=self.attention_only)

    def check(self) -> None:
        """Raise E208 for a number that has changed. Synchronises if RoPE frequencies were written or moved."""
        self.rotary.check()
        for i, frequency in enumerate(self.frequencies):
            buffer = frequency.buffers.get(frequency.name)
            if buffer is frequency.seen and version_of(buffer) == frequency.version:
                continue
            if buffer is None or not _rounded_from(buffer, frequency.converted):
                _changed(frequency.name, frequency.what)
            self.frequencies[i] = frequency._replace(seen=buffer, version=version_of(buffer))
        for what, owner, name, value in self.held:
            now = getattr(owner, name, None)
            if now is not value and (isinstance(now, Tensor) or now != value):
                _changed(f"{name}={now}", f"{what}, converted with {value}")


def _rounded_from(buffer: Tensor, converted: Tensor) -> bool:
    """Return whether a buffer holds the converted values, or what a change of the model's dtype has left of them.

    Transformers computes with rounded frequencies then; the tables of converted layers stay exact.
    """
    dtypes = (buffer.dtype, torch.float16, torch.bfloat16)
    return not buffer.is_meta and any(torch.equal(buffer, converted.to(dtype).to(buffer)) for dtype in dtypes)


def _changed(name: str, what: str) -> NoReturn:
    """Raise E208 for a setting."""
    fail(
        "E208",
        got=f"{name} of {what}, which has changed",
        why="a converted model reads it once",
        fix="set it back, or call dsv4_compile.hf.revert(model), change it, and convert again",
    )


class SharedWeights:
    """The parameters of `source`, a transformers attention, that `ours` runs with.

    Args:
        source: transformers attention module. Its parameters become those of `ours`.
        ours: attention that shares them, with modules in place for the dtypes of `source`.

    Raises E207 for a parameter of `source` that is missing, has a wrong shape or dtype, or that no op uses.
    """

    def __init__(self, source: Any, ours: DeepseekV4Attention) -> None:
        self.layer = f"layer {ours.layer_idx}"
        self.ours = ours
        self.source = source
        left = {name for name, _ in source.named_parameters(remove_duplicate=False)}
        self.shared: list[_Shared] = []
        for name, parameter in list(ours.named_parameters()):
            theirs = hf_name(name)
            path, _, leaf = theirs.rpartition(".")
            held = source.get_submodule(path)._parameters
            replacement = held.get(leaf)
            if replacement is None:
                fail("E207", got=f"no parameter {theirs} in {self.layer}", why=f"{name} needs it")
            _check_stored_alike(replacement, parameter, f"{theirs} of {self.layer}")
            left.remove(theirs)
            own_path, _, own_leaf = name.rpartition(".")
            owner = ours.get_submodule(own_path)
            setattr(owner, own_leaf, replacement)
            self.shared.append(_Shared(theirs, held, leaf, owner, own_leaf, replacement, 0))
        unused = ", ".join(sorted(left))
        check(not left, "E207", got=f"parameters of {self.layer} that no op uses: {unused}")

    def watch(self) -> None:
        """Record the modules of `source`, in the classes that conversion has given them."""
        self.modules = ReadModules(self.layer, self.source)

    def settle(self) -> None:
        """Record where the parameters are now, after they were stacked or converted in place."""
        self.shared = [shared._replace(address=shared.parameter.data_ptr()) for shared in self.shared]

    def adopt(self) -> None:
        """Let `ours` run with the parameters that `source` has now. Raises E207 or E208 if it cannot."""
        self.modules.check()
        changed = False
        for i, shared in enumerate(self.shared):
            parameter = shared.theirs.get(shared.leaf)
            if parameter is shared.parameter and parameter.data_ptr() == shared.address:
                continue
            if not is_plain(parameter):
                self.modules.refuse(shared.name, f"is a {type(parameter).__name__}, not a plain parameter")
            assert isinstance(parameter, nn.Parameter)
            _check_stored_alike(parameter, shared.parameter, f"{shared.name} of {self.layer}")
            check(
                parameter.device == self.ours.cos_sin.device,
                "E207",
                got=f"{shared.name} of {self.layer} on {parameter.device}",
                why=f"the layer was converted on {self.ours.cos_sin.device}",
                fix="call dsv4_compile.hf.revert(model), move the model, and convert it again",
            )
            setattr(shared.owner, shared.own_leaf, parameter)
            self.shared[i] = shared._replace(parameter=parameter)
            changed = True
        if changed:
            self.ours.arrange()
            self.settle()


def why_unreadable(source: nn.Module, paths: Collection[str] | None = None) -> str:
    """Return the first submodule, of all or of `paths`, that returns more than its weights say, or ""."""
    for name, module in source.named_modules():
        if name and (paths is None or name in paths) and (addition := _addition(module)):
            return f"{name}, a {type(module).__name__} with {addition}"
    return ""


def _addition(module: nn.Module) -> str:
    """Return what lets `module` return more than its weights say, or "".

    Adapters wrap a linear, parametrisations compute its weight, and hooks change what it returns.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    kind: Any = type(module)
    if shadowed := _methods(kind).intersection(vars(module)):
        return f"a {min(shadowed)} of its own"
    if "base_layer" in module._modules:
        return "an adapter"
    return "parametrised parameters" if "parametrizations" in module._modules else ""


@functools.cache
def _methods(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the methods that a class of modules has and `nn.Module` need not have."""
    return frozenset(name for name in dir(kind) if name == "forward" or _is_added(kind, name))


def _is_added(kind: type[nn.Module], name: str) -> bool:
    return inspect.isroutine(getattr(kind, name, None)) and not hasattr(nn.Module, name)


def _check_stored_alike(theirs: Tensor, ours: Tensor, name: str) -> None:
    """Raise E207 unless a parameter of transformers has the shape of `ours`, and is e4m3 exactly if `ours` is."""
    check(
        theirs.shape == ours.shape,
        "E207",
        got=f"{name} of shape {tuple(theirs.shape)}",
        why=f"needs {tuple(ours.shape)}",
    )
    check(
        (theirs.dtype is torch.float8_e4m3fn) == (ours.dtype is torch.float8_e4m3fn),
        "E207",
        got=f"{name} of dtype {theirs.dtype}",
        why="DeepSeek-V4 keeps this weight in floating point",
    )
