"""Options of `torch.compile(backend="dsv4", options={...})`: their values, defaults and effects, in one table.

`OPTIONS` has the keys that begin with `dsv4.`; `dsv4 explain options` prints them. Every other key is a name in
torch._inductor.config, for example "max_autotune" or "triton.cudagraphs".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import check, fail
from .selection.decisions import IMPLEMENTATIONS


class Option(NamedTuple):
    """A key of the options: its purpose, its default, and the effect of each of its values.

    `values` is a type for the options of a capture that take any value of one.
    """

    purpose: str
    default: Any
    values: Mapping[str, str] | type


FUSE_PASSES = ("fuse_preprocess", "fuse_indexer", "fuse_attention", "fuse_latent", "fuse_output", "fuse_streams")
INVARIANT = "dsv4.batch_invariant"
_PREFIX = "dsv4."
_PER_OP = "dsv4.impl."
_PER_PASS = "dsv4.fuse."
_PER_GRAPH = "dsv4.cudagraph."
MAX_CAPTURE_BYTES = 8 << 30
"""Default of dsv4.cudagraph.max_bytes: a tenth of an H100; the captures of V4-Flash's layers hold a quarter of it."""
OPTIONS: Mapping[str, Option] = {
    "dsv4.impl": Option(
        "preferred implementation of all ops; an op that does not have it runs its reference",
        "auto",
        {
            "auto": "the fastest that is proven on this GPU",
            "ir": "Inductor IR, which fuses with its neighbours",
            "triton": "the hand-written kernel, proven or not",
            "eager": "the PyTorch reference",
        },
    ),
    "dsv4.impl.<op>": Option(
        "demanded implementation of one op; E302 where it is not available",
        "auto",
        {"auto": "what dsv4.impl says", **dict.fromkeys(IMPLEMENTATIONS, "see dsv4.impl")},
    ),
    "dsv4.fuse": Option(
        "fusion of neighbouring ops; an op whose implementation is demanded is never fused",
        "auto",
        {
            "auto": "where the fused op has a kernel or a lowering that would be used",
            "on": "always, with equal results, but without a gain where the fused op runs its reference",
            "off": "never",
        },
    ),
    "dsv4.fuse.<pass>": Option(
        f"one pass: {', '.join(FUSE_PASSES)}",
        "what dsv4.fuse says",
        dict.fromkeys(("auto", "on", "off"), "see dsv4.fuse"),
    ),
    "dsv4.regions": Option(
        "layers of one kind are traced and compiled once; results are equal",
        "auto",
        {
            "auto": "where that saves some compilations",
            "on": "where it saves one",
            "off": "each layer is traced and compiled",
        },
    ),
    "dsv4.batch_invariant": Option(
        "the same bits of a token's results whatever else is in the call, see batch-invariance.md; E303 for an op that "
        "cannot promise it. True is tokens, False is off",
        "off",
        {
            "off": "implementations are chosen by speed",
            "step": "a token of a step depends on no other request, slot, batch size, padding or capture",
            "tokens": "nor on whether it came in a prompt, a chunk or a step",
        },
    ),
    "dsv4.early_builds": Option(
        "Triton kernels that calls of a graph will launch",
        "all",
        {
            "all": "built in threads, Inductor's `compile_threads`, while the graph compiles, for all sizes that calls "
            "are padded to",
            "first": "for the sizes of the first call; others are built one by one by the first call that needs them",
            "off": "built one by one by the first call that needs them",
            "on": "the same as all",
        },
    ),
    "dsv4.strict": Option(
        "compilations, captures and kernel builds after warm-up, see `runtime.warming_up`",
        "off",
        {"off": "run", "after_warmup": "raise E430, with the cause"},
    ),
    "dsv4.cudagraph": Option(
        "CUDA graphs of a compiled function",
        "off",
        {
            "off": "none",
            "full": "each decode-sized shape of the graph is captured as one CUDA graph, see `runtime.compiled`",
            "trees": "captures are left to Inductor, with the caches marked for it",
        },
    ),
    "dsv4.buckets": Option(
        "padding of a converted model's calls to a few sizes, see `runtime.token_buckets`; for `model.compile`, "
        "since calls of wrappers, as `torch.compile(model)`, are traced with the sizes that they are made with",
        "auto",
        {
            "auto": 'with dsv4.cudagraph="full", whose captures serve all lengths then',
            "on": "always; on a CPU, padding costs time and saves none",
            "off": "calls have the sizes that they are made with",
        },
    ),
    "dsv4.cudagraph.graphs": Option(
        'what "full" captures with',
        "auto",
        {"auto": "CUDA graphs, E420 on a CPU", "cuda": "the same", "standin": "a stand-in for tests on a CPU"},
    ),
    "dsv4.cudagraph.max_captures": Option("most shapes of a graph to capture; others run compiled (W601)", 64, int),
    "dsv4.cudagraph.max_bytes": Option(
        "most bytes that the captures of a device hold together: the least recently used are evicted, and captured "
        "again when they are called more often",
        MAX_CAPTURE_BYTES,
        int,
    ),
    "dsv4.cudagraph.max_tokens": Option(
        "most tokens of a call that is captured without dsv4.buckets; larger calls run compiled", 512, int
    ),
    "dsv4.cudagraph.debug": Option("compare all addresses at every replay", False, bool),
}
ENVIRONMENT: Mapping[str, str] = {
    "DSV4_VLLM": "the vLLM plug-in: 1 attention, all decoder layers, 0 or unset off",
    "DSV4_VLLM_BATCH_INVARIANT": "the vLLM plug-in: dsv4.batch_invariant of its graphs, with DSV4_VLLM=all",
    "DSV4_VLLM_EXPLAIN": "file, .txt, .html or .json, for the report of what vLLM compiles",
    "DSV4_COMMIT": "commit that `dsv4 bench` records for a copy of the code without its git folder",
    "CXX": "C++ compiler of Inductor and of this package's CPU kernels",
    "TORCHINDUCTOR_CACHE_DIR": "folder of compiled graphs, C++ kernels, self-checks and measurements",
    "TRITON_CACHE_DIR": "folder of compiled Triton kernels",
    "TRITON_HOME": "its parent, where TRITON_CACHE_DIR is not set",
    "TRITON_INTERPRET": "1 runs Triton kernels in its interpreter, for tests",
}
"""Variables that the package reads, and their purpose. Libraries read others."""
LOGGERS: Mapping[str, str] = {
    "dsv4_compile.hf": "loading and conversion: what runs without a proven kernel",
    "dsv4_compile.models": "loading of DeepSeek-V4.1: what of a folder is left out",
    "dsv4_compile.runtime": "captures, early builds, repeated layers",
    "dsv4_compile.parallel": "ranks: the watchdog of symmetric memory",
    "dsv4_compile.cpu": "the C++ kernels: why they are not built",
    "dsv4_compile.selection.decisions": "the implementation chosen for each op, and why",
    "dsv4_compile.lowering.registry": "implementations that raised, and what ran in their place",
    "dsv4_compile.testing.self_check": "checks of kernels on this GPU",
}
"""Loggers of Python's `logging`, and their messages."""


@dataclass(frozen=True, slots=True)
class Options:
    """Validated options.

    Attributes:
        impl: preference for all ops, a value of dsv4.impl.
        demands: implementation demanded per op name, without "auto".
        fuse: for all fusion passes, a value of dsv4.fuse.
        fuses: a value of dsv4.fuse for single passes, by name.
        cudagraph: a value of dsv4.cudagraph.
        capture: options dsv4.cudagraph.<name> that the user gave, by name.
        inductor: settings of torch._inductor.config for this compile.
        regions: a value of dsv4.regions.
        strict: a value of dsv4.strict.
        early_builds: a value of dsv4.early_builds.
        buckets: a value of dsv4.buckets.
        batch_invariant: a value of dsv4.batch_invariant.
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
    early_builds: str = "all"
    buckets: str = "auto"
    batch_invariant: str = "off"

    @classmethod
    def parse(cls, mode: str | None, options: Mapping[str, Any] | None, *, ops: Iterable[str]) -> Options:
        """Validate what torch.compile passes to a backend.

        Args:
            mode: a mode of torch.compile; `options` override its settings.
            options: keys as in the module docstring.
            ops: names of ops for `dsv4.impl.<op>`.

        Raises:
            DSV4Error: E301 for an unknown mode, key or value, with the nearest known ones; E424 for two kinds of
                capture.
        """
        ops = tuple(ops)
        known = [key for key in OPTIONS if "<" not in key]
        known += [_PER_PASS + name for name in FUSE_PASSES] + [_PER_OP + op for op in ops]
        values: dict[str, Any] = {}
        inductor = mode_settings(mode)
        for key, value in (options or {}).items():
            if key.startswith(_PREFIX):
                check(key in known, "E301", got=key, fix=_nearest(key, known))
                values[key] = _valid(key, value)
            else:
                name = key.replace("-", "_")
                _check_inductor_setting(name, value)
                inductor[name] = value
        chosen = {name: values.get(_PREFIX + name, OPTIONS[_PREFIX + name].default) for name in _FIELDS}
        demands, fuses, capture = (_below(prefix, values) for prefix in (_PER_OP, _PER_PASS, _PER_GRAPH))
        cudagraph = chosen["cudagraph"]
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
        return cls(**chosen, demands=demands, fuses=fuses, capture=capture, inductor=inductor)

    def cache_key(self) -> tuple[Any, ...]:
        """Return the options that change generated code. torch adds the Inductor settings to its cache key itself."""
        fusing = tuple(self.fuse_of(name) for name in FUSE_PASSES)
        demands = tuple(sorted(self.demands.items()))
        return (self.impl, demands, fusing, self.cudagraph, self.regions, self.batch_invariant)

    def fuse_of(self, name: str) -> str:
        """Return the value for the fusion pass `name`, a value of dsv4.fuse."""
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


_FIELDS = ("impl", "fuse", "cudagraph", "regions", "strict", "early_builds", "buckets", "batch_invariant")
_FORMS = {int: ("an int above 0", "32"), bool: ("a bool", "True")}


def _below(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in given.items() if key.startswith(prefix)}


def _valid(key: str, value: Any) -> Any:
    """Return a value of a known key, or raise E301."""
    pattern = next((f"{prefix}<{what}>" for prefix, what in _PATTERNS.items() if key.startswith(prefix)), key)
    allowed = OPTIONS[pattern].values
    if key == INVARIANT and isinstance(value, bool):
        value = "tokens" if value else "off"
    if not isinstance(allowed, type):
        rule = f"{key} is one of {', '.join(allowed)}"
        known = isinstance(value, str) and value in allowed
        check(known, "E301", got=f"{key}={value!r}", rule=rule, fix=_nearest(value, allowed))
        return value
    valid = type(value) is allowed and (not isinstance(value, int) or allowed is bool or value >= 1)
    rule, example = _FORMS[allowed]
    check(valid, "E301", got=f"{key}={value!r}", rule=f"{key} is {rule}", fix=f"pass {example}, or leave it out")
    return value


_PATTERNS = {_PER_OP: "op", _PER_PASS: "pass"}


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
