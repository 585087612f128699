"""Registration with vLLM: settings from the environment, versions, and checks of its configuration.

vLLM calls `register` in every process, perhaps more than once. The model's class is registered by name, so that no
process imports the model before it needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import check
from ...ops.common.invariance import STEP, TOKENS
from . import _compat, limits, whole_limits

SWITCH, EXPLAIN, INVARIANT = "DSV4_VLLM", "DSV4_VLLM_EXPLAIN", "DSV4_VLLM_BATCH_INVARIANT"
ON = ("1", "all")
REPORTS = (".html", ".json", ".txt")
MODEL_CLASS = "dsv4_compile.integrations.vllm.model:DeepseekV4ForCausalLM"
WHOLE_CLASS = "dsv4_compile.integrations.vllm.whole_model:DeepseekV4ForCausalLM"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the environment.

    on: the plug-in itself. whole: it replaces decoder layers, not their attention alone. explain: a file for the report
    of the compilation, "" for none. batch_invariant: a value of dsv4.batch_invariant.
    """

    on: bool = False
    explain: str = ""
    whole: bool = False
    batch_invariant: str = "off"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings.

        E802 for a value of DSV4_VLLM other than "", 0, 1 and all, a file that is no report, and a value of
        DSV4_VLLM_BATCH_INVARIANT other than "", off, step and tokens, or one without DSV4_VLLM=all.
        """
        switch = environment.get(SWITCH, "")
        rule = f"{SWITCH} is 1 (attention), all (decoder layers) or 0 (off)"
        check(switch in ("", "0", *ON), "E802", got=f"{SWITCH}={switch}", rule=rule, fix=f"set {SWITCH}=1, or unset it")
        explain = environment.get(EXPLAIN, "") if switch in ON else ""
        rule = f"{EXPLAIN} is a file whose name ends in {', '.join(REPORTS)}"
        check(not explain or explain.endswith(REPORTS), "E802", got=f"{EXPLAIN}={explain}", rule=rule)
        level = environment.get(INVARIANT, "") or "off" if switch in ON else "off"
        rule = f"{INVARIANT} is step, tokens or off, and needs {SWITCH}=all: vLLM's own layers promise nothing"
        known = level == "off" or (level in (STEP, TOKENS) and switch == "all")
        check(known, "E802", got=f"{INVARIANT}={level} with {SWITCH}={switch}", rule=rule, fix=f"unset {INVARIANT}")
        return cls(switch in ON, explain, switch == "all", level)


class Registered:
    """Settings that this process was registered with."""

    settings = Settings()


def register_with(wanted: Settings) -> None:
    """Register the model and the check of its configuration. E801 for a vLLM that the plug-in does not know."""
    installed = _compat.Installed.here()
    check_version(installed, wanted.whole)
    Registered.settings = wanted
    hooks = _compat.MODELS_CONFIG_MAP
    if not hasattr(hooks.get(_compat.ARCHITECTURE), "dsv4"):
        hooks[_compat.ARCHITECTURE] = config_hook(hooks.get(_compat.ARCHITECTURE, object))
    _compat.ModelRegistry.register_model(_compat.ARCHITECTURE, WHOLE_CLASS if wanted.whole else MODEL_CLASS)
    what = "layers" if wanted.whole else "attention"
    names = _compat.ARCHITECTURE, installed.version, what
    _compat.log("%s of vLLM %s is registered with the %s of dsv4_compile", *names)


def check_version(installed: _compat.Installed, whole: bool = False) -> None:
    """Raise E801 unless the plug-in, `whole` or for attention alone, runs in this vLLM."""
    why = installed.why_unsupported(whole)
    check(
        not why,
        "E801",
        got=f"vLLM {installed.version}",
        why=why,
        fix=f"install {_compat.RANGE}, or unset {SWITCH}, which leaves vLLM as it is",
    )


def config_hook(base: type[Any]) -> type[Any]:
    """Return vLLM's class that completes a DeepSeek-V4 configuration, extended by `complete`."""

    class DeepseekV4Config(base):  # type: ignore[misc]
        """The configuration of DeepSeek-V4 with this plug-in."""

        dsv4 = True

        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            before = getattr(super(), "verify_and_update_config", None)
            if before is not None:
                before(vllm_config)
            complete(vllm_config)

    return DeepseekV4Config


def complete(vllm_config: Any) -> None:
    """Check a configuration of vLLM and choose how it compiles. E802 with every reason that stands against it."""
    compiled = not _compat.eager(vllm_config)
    reasons = limits.why_unsupported(limits.Engine.of(vllm_config))
    if Registered.settings.whole:
        reasons += whole_limits.why_unsupported(vllm_config)
    reasons += _compat.prepare_compilation(compiled)
    got = f"{len(reasons)} things that the plug-in does not support: {'; '.join(reasons)}"
    check(not reasons, "E802", got=got, fix=f"change them, or unset {SWITCH}, which leaves vLLM as it is")
    if compiled:
        _compat.choose_backend(vllm_config, BACKEND)
    level = Registered.settings.batch_invariant
    if level != "off":
        chosen = _compat.backend_name(vllm_config) if compiled else "none"
        got, fix = f"{INVARIANT}={level} with backend {chosen!r}", f"unset {INVARIANT}, or compile with {BACKEND!r}"
        check(chosen == BACKEND, "E802", got=got, fix=fix)
        _compat.set_backend(vllm_config, WITH_OPTIONS)
    if Registered.settings.explain:
        chosen = _compat.backend_name(vllm_config) if compiled else "none"
        chosen = BACKEND if chosen == WITH_OPTIONS else chosen
        got = f"{EXPLAIN} with backend {chosen!r}"
        check(chosen == BACKEND, "E802", got=got, fix=f"unset {EXPLAIN}, or let vLLM compile with backend {BACKEND!r}")
        _compat.set_backend(vllm_config, EXPLAINED)


BACKEND = "dsv4"
WITH_OPTIONS = "dsv4_compile.integrations.vllm.compiling.with_options"
EXPLAINED = "dsv4_compile.integrations.vllm.compiling.explained"
"""Backends by the names that vLLM resolves."""
