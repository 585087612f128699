"""The page on attention backends maps every name of five systems to something that exists here."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4_compile.attention_backends import NAMES, get_backend
from dsv4_compile.metadata import BUFFERS

PAGE = Path(__file__).parents[2] / "dsv4_compile" / "docs" / "backends.md"
SYSTEMS = {
    name: re.findall(r"^\| (.+?) \| (.*?) \|$", rows, re.M)
    for name, rows in re.findall(
        r"^### (.+?)\n\n\| there \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.M
    )
}
ROWS = [pytest.param(*row, id=f"{row[0]}") for rows in SYSTEMS.values() for row in rows]
NOT_NEEDED = "not needed: "


def resolve(name: str) -> Any:
    """Return what `name` stands for: an op, or an attribute below dsv4_compile. LookupError if there is none."""
    if name.startswith("torch.ops."):
        return getattr(getattr(torch.ops, name.split(".")[2]), name.split(".")[3])
    value: Any = importlib.import_module("dsv4_compile")
    for attribute in name.split("."):
        value = _member(value, attribute)
    return value


def _member(owner: Any, name: str) -> Any:
    if hasattr(owner, name):
        return getattr(owner, name)
    if isinstance(owner, ModuleType):
        try:
            return importlib.import_module(f"{owner.__name__}.{name}")
        except ModuleNotFoundError:
            raise LookupError(f"{owner.__name__} has no {name}") from None
    # Fields of a dataclass, and attributes that a class assigns to its instances.
    for base in inspect.getmro(owner):
        if name in getattr(base, "__annotations__", {}):
            return base.__annotations__[name]
        if base.__module__.startswith("dsv4_compile") and re.search(
            rf'self\.{name}\b[^=\n]*= |register_buffer\("{name}"|for name in \([^)]*"{name}"', inspect.getsource(base)
        ):
            return None
    raise LookupError(f"{owner.__qualname__} has no {name}")


def _parameters(owner: Any) -> set[str]:
    if isinstance(owner, torch._ops.OpOverloadPacket):
        return {argument.name for argument in owner.default._schema.arguments}
    return set(inspect.signature(owner).parameters)


def test_page_has_a_table_for_each_of_the_five_systems() -> None:
    assert len(SYSTEMS) == 5
    assert all(len(rows) > 15 for rows in SYSTEMS.values())
    headings = " ".join(SYSTEMS)
    assert [name for name in NAMES if name != "DSV4_PAGED" and f"`{name}`" not in headings] == []


def test_page_lists_every_backend_with_its_caches() -> None:
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| V\S+ \| (.+?) \|", PAGE.read_text(), re.M))
    assert tuple(rows) == NAMES
    for name, listed in rows.items():
        words = {word.removesuffix("_e4m3") for word in get_backend(name).cache_formats} - {"auto"}
        formats = {"fp8_ds_mla"} if get_backend(name).cache_formats.get("fp8") == "fp8_ds_mla" else {"fp8"}
        assert set(listed.split(", ")) == words - {"fp8"} | (formats & words), name


def test_no_name_is_listed_twice_in_a_system() -> None:
    for name, rows in SYSTEMS.items():
        assert len({there for there, _ in rows}) == len(rows), name


@pytest.mark.parametrize(("there", "here"), ROWS)
def test_every_name_has_a_counterpart_that_exists_or_a_reason(there: str, here: str) -> None:
    if here.startswith(NOT_NEEDED):
        assert len(here) > len(NOT_NEEDED) + 20
        return
    checked = 0
    for names, owner in re.findall(r"arguments? ((?:`\w+`(?: and )?)+) of `([\w.]+)`", here):
        assert set(re.findall(r"`(\w+)`", names)) <= _parameters(resolve(owner))
    for names in re.findall(r"buffer ((?:`\w+`(?: or )?)+) of", here):
        assert set(re.findall(r"`(\w+)`", names)) <= {spec.name for spec in BUFFERS}
    plain = re.sub(r"(?:argument|buffer) (?:`\w+`(?: or | and )?)+ of", "", here)
    for name in re.findall(r"`([\w.]+)`", plain):
        resolve(name)
        checked += 1
    assert checked > 0
