"""Options of `torch.compile(backend="dsv4", options={...})`.

    dsv4.impl            "auto" | "ir" | "triton" | "eager"   preference for all ops; others run their reference
    dsv4.impl.<op>       the same values                      demand for one op; E302 if it is unavailable
    dsv4.fuse            "auto" | "on" | "off"                fusion of neighbouring ops, see `FUSE_VALUES`
    dsv4.fuse.<pass>     the same values                      one of the `FUSE_PASSES`
    dsv4.regions         "auto" | "on" | "off"                compile repeated layers once, see `REGIONS_VALUES`
    dsv4.early_builds    "on" | "off"                         see `EARLY_BUILDS_VALUES`
    dsv4.strict          "off" | "after_warmup"               E430 for what compiles after warm-up, see `STRICT_VALUES`
    dsv4.cudagraph       "off" | "full" | "trees"             captures of the graph, see `CUDAGRAPH_VALUES`
    dsv4.cudagraph.<...> see `GRAPH_OPTIONS`                  limits and checks of these captures

Every other key is a name in torch._inductor.config, for example "max_autotune" or "triton.cudagraphs".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import check, fail
from .selection.decisions import IMPLEMENTATIONS

IMPL_VALUES = ("auto", *IMPLEMENTATIONS)
FUSE_VALUES = ("auto", "on", "off")
"""Values of dsv4.fuse. "auto" fuses if the fused op has a kernel or a lowering that would be used. "on" fuses always,
with equal results, but without a gain if the fused op runs its reference. An op whose implementation is demanded is
never fused into another."""
FUSE_PASSES = ("fuse_preprocess", "fuse_indexer", "fuse_attention", "fuse_latent", "fuse_output", "fuse_streams")
REGIONS_VALUES = ("auto", "on", "off")
"""Values of dsv4.regions. "auto" compiles each kind of layer of a graph once where that saves some compilations. "on"
does so where it saves one. A graph without repeated layers is compiled whole. Results are equal. With "off" the layers
of a converted model are also traced one by one, where else one of each kind is."""
EARLY_BUILDS_VALUES = ("on", "off")
"""Values of dsv4.early_builds. "on" builds the Triton kernels that a graph's first call will launch in threads while
the graph compiles, as many as Inductor's `compile_threads`. "off" leaves them to the first call, one by one."""
STRICT_VALUES = ("off", "after_warmup")
"""Values of dsv4.strict. "after_warmup" raises E430, with the cause, for a compilation, a capture or a build of a
Triton kernel after warm-up, see `runtime.warming_up`."""
CUDAGRAPH_VALUES = ("off", "full", "trees")
"""Values of dsv4.cudagraph. "full" captures each decode-sized shape of a compiled graph as one CUDA graph (see
`runtime.compiled`). "trees" leaves captures to Inductor and marks the caches for it."""
GRAPH_OPTIONS: Mapping[str, type] = {"graphs": str, "max_captures": int, "max_tokens": int, "debug": bool}
"""Options dsv4.cudagraph.<name> of "full", with their types.

    graphs         "auto" or "cuda" (E420 on a CPU), or "standin" to test on a CPU; default "auto"
    max_captures   most shapes of one graph to capture; others run compiled (W601); default 32
    max_tokens     most tokens of a captured call; larger ones run compiled; default 512
    debug          compare all addresses at every replay; default False
"""
GRAPHS_VALUES = ("auto", "cuda", "standin")
_FORMS = {int: ("an int above 0", "32"), bool: ("a bool", "True")}
_PREFIX = "dsv4."
_PER_OP = "dsv4.impl."
_PER_PASS = "dsv4.fuse."
_PER_GRAPH = "dsv4.cudagraph."


@dataclass(frozen=True, slots=True)
class Options:
    """Validated options.

    Attributes:
        impl: preference for all ops, one of `IMPL_VALUES`.
        demands: implementation demanded per op name, without "auto".
        fuse: for all fusion passes, one of `FUSE_VALUES`.
        fuses: one of `FUSE_VALUES` for single passes, by name.
        cudagraph: one of `CUDAGRAPH_VALUES`.
        capture: values of `GRAPH_OPTIONS` that the user gave.
        inductor: settings of torch._inductor.config for this compile.
        regions: one of `REGIONS_VALUES`.
        strict: one of `STRICT_VALUES`.
        early_builds: one of `EARLY_BUILDS_VALUES`.
    """

    impl: str = "auto"
    demands: Mapping[str, str] = field(default_factory=dict)
    fuse: str = "auto"
    fuses: Mapping[str, str] = field(default_factory=dict)
    cudagraph: str = "off"
    capture: Mapping[str, Any] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)
    regions: str = "auto"
    strict: str = "off"
    early_builds: str = "on"

    @classmethod
    def parse(cls, mode: str | None, options: Mapping[str, Any] | None, *, ops: Iterable[str]) -> Options:
        """Validate what torch.compile passes to a backend.

        Args:
            mode: a mode of torch.compile, whose settings `options` override.
            options: keys as in the module docstring.
            ops: names of ops for `dsv4.impl.<op>`.

        Raises:
            DSV4Error: E301 for an unknown mode, key or value, with the nearest known ones; E424 for two kinds of
                capture.
        """
        ops = tuple(ops)
        impl, fuse, cudagraph, regions, strict, early_builds = "auto", "auto", "off", "auto", "off", "on"
        demands: dict[str, str] = {}
        fuses: dict[str, str] = {}
        capture: dict[str, Any] = {}
        inductor = mode_settings(mode)
        for key, value in (options or {}).items():
            if key == "dsv4.impl":
                impl = _one_of(key, value, IMPL_VALUES)
            elif key == "dsv4.regions":
                regions = _one_of(key, value, REGIONS_VALUES)
            elif key == "dsv4.early_builds":
                early_builds = _one_of(key, value, EARLY_BUILDS_VALUES)
            elif key == "dsv4.strict":
                strict = _one_of(key, value, STRICT_VALUES)
            elif key == "dsv4.cudagraph":
                cudagraph = _one_of(key, value, CUDAGRAPH_VALUES)
            elif key.startswith(_PER_GRAPH):
                name = key.removeprefix(_PER_GRAPH)
                names = [_PER_GRAPH + each for each in GRAPH_OPTIONS]
                check(name in GRAPH_OPTIONS, "E301", got=key, fix=_nearest(key, names))
                typed = GRAPH_OPTIONS[name]
                capture[name] = _one_of(key, value, GRAPHS_VALUES) if typed is str else _typed(key, value, typed)
            elif key == "dsv4.fuse":
                fuse = _one_of(key, value, FUSE_VALUES)
            elif key.startswith(_PER_PASS):
                name = key.removeprefix(_PER_PASS)
                check(name in FUSE_PASSES, "E301", got=key, fix=_nearest(key, [_PER_PASS + n for n in FUSE_PASSES]))
                fuses[name] = _one_of(key, value, FUSE_VALUES)
            elif key.startswith(_PER_OP):
                op = key.removeprefix(_PER_OP)
                check(op in ops, "E301", got=key, fix=_nearest(key, [_PER_OP + name for name in ops]))
                demands[op] = _one_of(key, value, IMPL_VALUES)
            elif key.startswith(_PREFIX):
                known = ["dsv4.impl", "dsv4.fuse", "dsv4.regions", "dsv4.early_builds", "dsv4.strict", "dsv4.cudagraph"]
                known += [_PER_OP + op for op in ops]
                fail("E301", got=key, fix=_nearest(key, known))
            else:
                name = key.replace("-", "_")
                _check_inductor_setting(name, value)
                inductor[name] = value
        check(
            cudagraph == "off" or not inductor.get("triton.cudagraphs"),
            "E424",
            got=f"dsv4.cudagraph={cudagraph!r} with triton.cudagraphs, which a mode such as reduce-overhead sets",
            fix='leave one out; dsv4.cudagraph="trees" does what reduce-overhead does, and marks the caches as static',
        )
        check(
            cudagraph == "full" or not capture,
            "E301",
            got=", ".join(_PER_GRAPH + name for name in capture),
            rule='these are options of dsv4.cudagraph="full"',
            fix='add "dsv4.cudagraph": "full", or leave them out',
        )
        check(
            inductor.get("use_post_grad_passes", True),
            "E301",
            got="use_post_grad_passes=False",
            why="implementations are chosen in a post-grad pass",
            fix='leave it on, or use backend="inductor"',
        )
        demands = {op: value for op, value in demands.items() if value != "auto"}
        return cls(impl, demands, fuse, fuses, cudagraph, capture, inductor, regions, strict, early_builds)

    def cache_key(self) -> tuple[Any, ...]:
        """Return the options that change generated code. torch adds the Inductor settings to its cache key itself."""
        fusing = tuple(self.fuse_of(name) for name in FUSE_PASSES)
        return (self.impl, tuple(sorted(self.demands.items())), fusing, self.cudagraph, self.regions)

    def fuse_of(self, name: str) -> str:
        """Return the value for the fusion pass `name`, one of `FUSE_VALUES`."""
        return self.fuses.get(name, self.fuse)


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Return the Inductor settings of a torch.compile mode. Raise E301 for an unknown mode."""
    if mode is None or mode == "default":
        return {}
    from ._compat import list_mode_options

    known = list_mode_options()
    check(mode in known, "E301", got=f"mode={mode!r}", fix=_nearest(mode, known))
    return dict(known[mode])


def _check_inductor_setting(name: str, value: Any) -> None:
    """Raise E301 unless torch._inductor.config has `name` and `value` has its type."""
    from ._compat import inductor_config

    known = inductor_config.get_config_copy()
    if name not in known:
        fail("E301", got=name, fix=_nearest(name, known))
    expected = inductor_config.get_type(name)
    # torch.compile does not check unions and generics either.
    if isinstance(expected, type) and not isinstance(value, expected):
        fail("E301", got=f"{name}={value!r}", rule=f"{name} is {expected.__name__}", fix=f"pass {expected.__name__}")


def _typed(key: str, value: Any, expected: type) -> Any:
    valid = type(value) is expected and not (isinstance(value, int) and expected is int and value < 1)
    rule, example = _FORMS[expected]
    check(valid, "E301", got=f"{key}={value!r}", rule=f"{key} is {rule}", fix=f"pass {example}, or leave it out")
    return value


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        fail("E301", got=f"{key}={value!r}", rule=f"{key} is one of {', '.join(allowed)}", fix=_nearest(value, allowed))
    return str(value)


def _nearest(got: Any, known: Iterable[str]) -> str:
    """Return "did you mean" with up to three of `known`, or a short list in full if none is near."""
    names = list(known)
    near = difflib.get_close_matches(str(got), names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return (
        f"one of {', '.join(names)}"
        if len(names) <= 12
        else "see torch._inductor.list_options() and dsv4_compile.options"
    )
