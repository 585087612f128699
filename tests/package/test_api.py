"""Tests of the public names, which are listed here so that a change of them is deliberate."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4_compile

PUBLIC = [
    "DSV4Error",
    "DecodeRunner",
    "DeepseekV4Attention",
    "DeepseekV4Config",
    "__version__",
    "explain",
    "explain_replay",
]


def test_public_names_are_these() -> None:
    assert dsv4_compile.__all__ == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_name_is_importable_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(dsv4_compile, name))


def test_modules_named_in_texts_are_available_after_import_dsv4_compile(root: Path) -> None:
    """For example `dsv4_compile.runtime.counting()` works after `import dsv4_compile` alone."""
    program = "import dsv4_compile\nfor name in dsv4_compile._MODULES: getattr(dsv4_compile, name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    texts = [root / "README.md", *root.glob("dsv4_compile/**/*.md"), *root.glob("dsv4_compile/**/*.py")]
    texts += root.glob("examples/*.py")
    called = re.compile(r"(?<![\w.])dsv4_compile\.([a-z_]+)\.\w+\(")
    named = {name for text in texts for name in called.findall(text.read_text())}
    assert named - {"testing", "ops", "layout"} <= set(dsv4_compile._MODULES)


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'dsv4_compile' has no attribute 'conver'"):
        _ = dsv4_compile.conver


def test_dir_lists_names_that_are_not_loaded_yet(root: Path) -> None:
    program = "import sys, dsv4_compile\nprint(*dir(dsv4_compile), 'dsv4_compile.hf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, encoding="utf-8", check=True)
    *names, loaded = done.stdout.split()
    assert {*PUBLIC, *dsv4_compile._MODULES, "hf", "ops", "cache", "decisions"} <= set(names) and loaded == "False"


ENGINE_MODULES = ("attention", "caches", "layers", "model", "tensor_parallel", "whole_model")
NEED_AN_ENGINE = {f"dsv4_compile/integrations/vllm/{name}.py" for name in ENGINE_MODULES}
"""Modules that cannot be imported without an engine; `make test-vllm` reads what they document."""


def test_everything_public_is_documented_for_help(sources: dict[str, str]) -> None:
    undocumented = []
    for path in (path for path in sources if not re.search(r"/_[^_]", path) and path not in NEED_AN_ENGINE):
        name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name if name.startswith("dsv4_compile") else f"dsv4_compile.{name}")
        assert module.__doc__, path
        for public, value in vars(module).items():
            if public.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            members = vars(value).items() if inspect.isclass(value) else ()
            named = [(public, value), *((f"{public}.{m}", getattr(value, m)) for m, _ in members if m[0] != "_")]
            undocumented += [f"{path} {n}" for n, v in named if callable(v) and not inspect.getdoc(v)]
    assert undocumented == []
