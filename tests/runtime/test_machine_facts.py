"""Vector instructions that an equal CPU has tried are taken from it, and others are tried as always."""

from __future__ import annotations

import functools
import platform
from typing import Any

import pytest

from dsv4_compile import _compat
from dsv4_compile.runtime import machine_facts


def test_vector_instructions_of_an_equal_cpu_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    isa: Any = _compat.cpu_vec_isa
    tried: list[str] = []

    class Named(isa.VecISA):  # type: ignore[misc]
        def __str__(self) -> str:
            return "named"

        __hash__ = object.__hash__

        def build_arch_flags(self) -> str:
            return "-mnamed"

    monkeypatch.setattr(isa.VecISA, "check_build", lambda self, code: bool(tried.append(str(self))))
    monkeypatch.setattr(isa, "valid_vec_isa_list", functools.cache(isa.valid_vec_isa_list.__wrapped__))
    monkeypatch.setattr(isa, "supported_vec_isa_list", [Named()])
    monkeypatch.setattr(isa, "x86_isa_checker", lambda: ["named"])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    # monkeypatch would delete the entry when it restores it.
    with isa.config.patch({"cpp.vec_isa_ok": None}):
        assert not machine_facts.expect_vector_instructions(["other: -mother"])
        assert tried == []
        monkeypatch.setattr(isa, "supported_vec_isa_list", [Named()])
        assert machine_facts.vector_instructions() == [] and tried == ["named"]
        isa.valid_vec_isa_list.cache_clear()
        monkeypatch.setattr(isa, "supported_vec_isa_list", [Named()])
        assert machine_facts.expect_vector_instructions(["named: -mnamed"])
        assert machine_facts.vector_instructions() == ["named: -mnamed"] and tried == ["named"]
