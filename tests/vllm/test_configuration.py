"""The plug-in in vLLM's configuration: on, off, in unknown versions, and with unsupported settings."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import checkpoint
import pytest
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from dsv4_compile import DSV4Error
from dsv4_compile.integrations import vllm as plugin
from dsv4_compile.integrations.vllm import _compat, registration

NAME = _compat.ARCHITECTURE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("vllm") / "model", num_hidden_layers=1, compress_ratios=[0])


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the plug-in changes in this process."""
    monkeypatch.setitem(ModelRegistry.models, NAME, ModelRegistry.models[NAME])
    monkeypatch.setitem(MODELS_CONFIG_MAP, NAME, MODELS_CONFIG_MAP[NAME])
    monkeypatch.setattr(registration.Registered, "settings", registration.Settings())
    for name in (registration.SWITCH, registration.EXPLAIN, *_compat.NEEDED):
        monkeypatch.setenv(name, "")  # so that what a test sets is unset after it
        monkeypatch.delenv(name)


def configure(model: Path, monkeypatch: pytest.MonkeyPatch, on: str = "1", **arguments: Any) -> Any:
    """Register the plug-in and return the configuration that vLLM makes."""
    monkeypatch.setenv(registration.SWITCH, on)
    plugin.register()
    arguments = {"model": str(model), "skip_tokenizer_init": True, "dtype": "bfloat16", **arguments}
    return EngineArgs(max_model_len=1024, **arguments).create_engine_config()


def test_switched_off_it_leaves_vllm_as_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ModelRegistry.models[NAME], MODELS_CONFIG_MAP[NAME]
    config = configure(model, monkeypatch, on="0")
    assert (ModelRegistry.models[NAME], MODELS_CONFIG_MAP[NAME]) == before
    assert before[0].module_name == "vllm.models.deepseek_v4" and not hasattr(before[1], "dsv4")
    assert config.compilation_config.backend == "inductor" and os.environ.get(_compat.AOT) is None


def test_switched_on_it_registers_and_compiles_with_its_backend(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, monkeypatch)
    assert ModelRegistry.models[NAME].module_name == "dsv4_compile.integrations.vllm.model"
    assert config.compilation_config.backend == "dsv4" and config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
    assert os.environ[_compat.AOT] == os.environ[_compat.BREAKABLE] == "0"
    plugin.register()  # vLLM registers in every process, perhaps more than once
    assert len([c for c in MODELS_CONFIG_MAP[NAME].__mro__ if "dsv4" in vars(c)]) == 1


def test_layers_are_those_of_this_package_by_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(model, monkeypatch, on="all")
    assert ModelRegistry.models[NAME].module_name == "dsv4_compile.integrations.vllm.whole_model"
    monkeypatch.setattr(registration.Registered, "settings", registration.Settings())
    configure(model, monkeypatch)
    assert ModelRegistry.models[NAME].module_name == "dsv4_compile.integrations.vllm.model"


def test_unsupported_layers_are_an_error_with_the_reasons_of_both(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"enable_prompt_embeds": True, "kv_cache_dtype": "bfloat16"}
    with pytest.raises(Exception, match=r"E802(.*\n)*.*FlashInfer alone.*enable_prompt_embeds"):
        configure(model, monkeypatch, on="all", **arguments)


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({"enforce_eager": True}, "inductor"),
        ({"compilation_config": {"mode": 2, "backend": "eager"}}, "eager"),
        ({"compilation_config": {"mode": 3}}, "inductor"),
    ],
    ids=["eager", "backend", "mode"],
)
def test_choice_of_the_user_stays(arguments: dict, backend: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configure(model, monkeypatch, **arguments).compilation_config.backend == backend


def test_report_has_a_backend_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registration.EXPLAIN, "report.html")
    assert configure(model, monkeypatch).compilation_config.backend == registration.EXPLAINED
    with pytest.raises(Exception, match=r"E802.*\n.*\n.*DSV4_VLLM_EXPLAIN with backend 'none'"):
        configure(model, monkeypatch, enforce_eager=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "FlashInfer alone"),
        ({"compilation_config": {"mode": 1}}, "mode 1"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: the model has 2 output groups; use 1 or 2 ranks"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, "ngram"),
    ],
    ids=["cache", "mode", "ranks", "drafts"],
)
def test_unsupported_configuration_is_an_error_with_its_reason(
    arguments: dict, reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match=f"E802(.*\n)*.*{reason}"):
        configure(model, monkeypatch, **arguments)


def test_variable_that_contradicts_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_compat.AOT, "1")
    with pytest.raises(Exception, match=f"E802(.*\n)*.*{_compat.AOT}=1, with which vLLM takes no backend"):
        configure(model, monkeypatch)


def test_version_without_a_needed_field_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registration.SWITCH, "1")
    monkeypatch.setattr(_compat, "COMMON_FIELDS", _compat.COMMON_FIELDS | {"pages_of_another_kind"})
    with pytest.raises(DSV4Error, match=r"E801(.*\n)*.*without pages_of_another_kind(.*\n)*.*vLLM 0\.32 or 0\.33"):
        plugin.register()


def test_every_name_of_vllm_exists() -> None:
    assert [name for name in _compat.NAMES if getattr(_compat, name, None) is None] == []


@pytest.mark.parametrize("name", ["attention", "caches", "layers", "model", "tensor_parallel", "whole_model"])
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(f"dsv4_compile.integrations.vllm.{name}")
    public = [
        (n, v) for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"
    ]
    members = [(f"{n}.{m}", getattr(v, m)) for n, v in public if inspect.isclass(v) for m in vars(v) if m[0] != "_"]
    assert module.__doc__ and [n for n, v in (*public, *members) if callable(v) and not inspect.getdoc(v)] == []
