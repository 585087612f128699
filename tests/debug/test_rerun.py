"""Saved op calls are data: a hostile file is refused with E201, and imports, opens, starts and allocates nothing."""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import DSV4Error
from dsv4_compile.debug import rerun as command
from dsv4_compile.debug.rerun import rerun
from dsv4_compile.debug.saved_call import PURE, SCHEMA, can_save, save_call
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing.samples import op_samples
from tests.audit import watched

"".encode("cp437")  # the names of an old archive's records: a codec that Python imports when it is needed
ONE = torch.ones(1)
MIX = (torch.zeros(2, 4, 8), torch.zeros(24, 32), torch.zeros(24), torch.ones(3), torch.ones(8), 1e-6, 1e-6)


def call(op: Any, *args: Any, overload: Any = "default", **others: Any) -> dict[str, Any]:
    content = {"schema": SCHEMA, "op": op, "overload": overload, "args": list(args), "kwargs": {}}
    return {**content, "first": ONE, "second": ONE, **others}


def deep() -> list[Any]:
    tree: list[Any] = []
    for _ in range(300):
        tree = [tree]
    return tree


def wide() -> list[Any]:
    """A list of 2^40 leaves in a file of a kilobyte."""
    tree: list[Any] = [0]
    for _ in range(40):
        tree = [tree, tree]
    return tree


def truncated(divisor: Any, dtype: torch.dtype, op: str = "div") -> dict[str, Any]:
    """A division that ends the process of a CPU: the smallest integer by -1."""
    smallest = torch.full((1,), torch.iinfo(dtype).min, dtype=dtype)
    name = "Tensor_mode" if isinstance(divisor, Tensor) else "Scalar_mode"
    divisor = divisor.to(dtype) if isinstance(divisor, Tensor) else divisor
    return call(f"aten::{op}.{name}", smallest, divisor, overload=name, kwargs={"rounding_mode": "trunc"})


HOSTILE: dict[str, Any] = {
    "imports a module": call("import_module::__call__", "antigravity", overload="__call__"),
    "loads a library": call("load_library::__call__", "evil.so", overload="__call__"),
    "loads a library by another road": call("dsv4::load_library", "evil.so", overload="__call__"),
    "attribute of a packet": call("aten::add", "x", overload="__class__"),
    "attribute of the namespace": call("dsv4::__class__", "x", overload="default"),
    "private attribute": call("dsv4::_dir", overload="default"),
    "creates a file": call("aten::from_file", "created.bin", True, 100, kwargs={"dtype": torch.uint8}),
    "reads beyond a storage": call("aten::as_strided", ONE, [1], [1], 10**12),
    "reads beyond a storage by Inductor": call("inductor::_reinterpret_tensor", ONE, [1], [1], 10**9),
    "resizes a storage": call("aten::set_", ONE, ONE, 0, [10**9], [1], overload="source_Tensor_storage_offset"),
    "resizes a tensor": call("aten::resize_", ONE, [10**12]),
    "an out form": call("aten::add.out", ONE, ONE, overload="out", kwargs={"out": ONE}),
    "a factory": call("aten::ones", [10**12]),
    "an empty tensor": call("aten::empty.memory_format", [10**12], overload="memory_format"),
    "a random op": call("aten::bernoulli_.float", ONE, 0.5, overload="float"),
    "a print": call("aten::_print", "forged"),
    "a profiler": call("profiler::_record_function_enter_new", "x"),
    "a collective": call("_c10d_functional::wait_tensor", ONE),
    "unchecked indices": call("aten::_unsafe_index.Tensor", ONE, [torch.tensor([10**9])], overload="Tensor"),
    "an outer sum": call("aten::add.Tensor", torch.ones(9000, 1), torch.ones(1, 9000), overload="Tensor"),
    "an outer product": call("aten::mm", torch.ones(9000, 1), torch.ones(1, 9000)),
    "large padding": call("aten::constant_pad_nd", ONE, [0, 10**12]),
    "an expanded tensor": call("aten::exp", torch.ones(1).expand(10**12)),
    "ids beyond": call("aten::index_select", ONE, 0, torch.tensor([10**9])),
    "ids before": call("aten::index_copy_", ONE.clone(), 0, torch.tensor([-(10**9)]), ONE),
    "scattered beyond": call("aten::scatter.src", ONE, 0, torch.tensor([10**9]), ONE, overload="src"),
    "integers divided by 0": call("aten::floor_divide", torch.ones(1).int(), torch.zeros(1).int()),
    "many iterations": call("dsv4::mhc_pre", *MIX, 10**9),
    "many heads": call("dsv4::q_norm_rope", torch.ones(1, 1, 64), ONE.long(), torch.ones(4, 64), 1e-6, 2**30),
    "a large integer": call("dsv4::mhc_pre", *MIX, 10**30),
    "scalars divided by 0": call("aten::remainder.int", 1, 0, overload="int"),
    "scalars whose quotient is too large": call("aten::remainder.int", -(2**63), -1, overload="int"),
    "text": call("aten::add.str", "a", "b", overload="str"),
    "integers whose quotient is too large": truncated(-1, torch.int64),
    "integers whose quotient is too large, in place": truncated(torch.full((1,), -1), torch.int32, "div_"),
    "integers whose quotient is too large, by name": call(
        "aten::div.Tensor_mode",
        overload="Tensor_mode",
        kwargs={"self": torch.full((1,), -(2**63)), "other": torch.full((1,), -1), "rounding_mode": "trunc"},
    ),
    "no result of that shape": call("aten::exp", torch.ones(3)),
    "too few arguments": call("dsv4::mhc_pre", 1),
    "another kind of argument": call("aten::exp", {"a": 1}),
    "an unknown keyword": call("aten::exp", ONE, kwargs={"file": "x"}),
    "another kind of keyword": call("aten::exp", ONE, kwargs={1: 2}),
    "another device": call("aten::_to_copy", ONE, kwargs={"device": torch.device("meta")}),
    "sparse": call("aten::exp", ONE.to_sparse()),
    "complex": call("aten::exp", ONE.cfloat()),
    "deep": call("aten::exp", deep()),
    "wide": call("aten::exp", wide()),
    "a counter": call("aten::exp", Counter("abc")),
    "no op": call(None),
    "an int": call(5, overload=5, args=5),
    "no namespace": call("mm"),
    "a forged name": call("aten::mm\nverdict: \x1b[2Jall is well"),
    "results of two shapes": call("aten::exp", ONE, second=torch.ones(2)),
    "no results": call("aten::exp", ONE, first=None, second=None),
    "another key": call("aten::exp", ONE, more=1),
    "no dict": [1, 2],
    "no schema": {"op": "aten::exp"},
    "another schema": call("aten::exp", ONE, schema=["dsv4.call/1"]),
}


def refused(path: Path) -> str:
    with watched() as events, pytest.raises(DSV4Error) as fault:
        rerun(path)
    assert fault.value.code.startswith("E2"), fault.value
    assert {name for event, name in events if event == "open"} <= {str(path), path}, events
    assert not [event for event in events if event[0] != "open"], events
    assert sorted(path.parent.iterdir()) == [path]
    return str(fault.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_call_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(HOSTILE[name], tmp_path / "divergence.pt")
    text = refused(tmp_path / "divergence.pt")
    assert "\x1b" not in text and "\nverdict" not in text


class Executed:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_a_hostile_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "divergence.pt"
    torch.save(call("aten::exp", ONE), path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    many = b"cbuiltins\nbytearray\n(J\x00\x00\x00\x40tR."  # bytearray(2^30), which torch's reader calls
    for name, content in {
        "empty": b"",
        "a pickle": pickle.dumps(Executed()),
        "a truncated archive": path.read_bytes()[:200],
        "a broken archive": b"PK\x03\x04" + bytes(100),
        "an archive without records": b"PK\x05\x06" + bytes(18),
    }.items():
        path.write_bytes(content)
        assert "E201" in refused(path), name
    archives = {
        "code": ({pickled: pickle.dumps(Executed())}, zipfile.ZIP_STORED),
        "memory": ({pickled: b"\x80\x02" + many}, zipfile.ZIP_STORED),
        "no tensors": ({pickled: b"\x80\x02N."}, zipfile.ZIP_STORED),
        "endless": ({pickled: b"\x80\x02" + b"(" * 10}, zipfile.ZIP_STORED),
        "too long a pickle": ({pickled: records[pickled] + bytes(2 << 20)}, zipfile.ZIP_STORED),
        "packed": ({pickled: records[pickled], "archive/data/9": bytes(1 << 24)}, zipfile.ZIP_DEFLATED),
        "two pickles": ({"a/data.pkl": records[pickled]}, zipfile.ZIP_STORED),
    }
    for name, (changed, how) in archives.items():
        with zipfile.ZipFile(path, "w", how) as archive:
            for record, content in (records | changed).items():
                archive.writestr(record, content)
        assert "E201" in refused(path), name


def test_other_places_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(DSV4Error, match="E201"):
            rerun(path)


def test_the_command_prints_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(HOSTILE["a forged name"], tmp_path / "divergence.pt")
    monkeypatch.setattr(command.sys, "argv", ["rerun", str(tmp_path / "divergence.pt")])
    assert command.run() == command.WRONG
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("[E201]") and "Traceback" not in printed.err


@pytest.mark.parametrize("op", ["mhc_pre", "global_topk", "sparse_mla_decode", "kv_rope_insert", "moe_experts"])
def test_calls_of_every_kind_of_op_are_saved(op: str, tmp_path: Path) -> None:
    args = op_samples(op)[0]
    declared = OPS[op]._schema.arguments
    copies = [each.clone() if isinstance(each, Tensor) else each for each in args]
    returned = OPS[op](*copies)
    returned = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    written = [x for x, a in zip(copies, declared, strict=False) if a.alias_info and a.alias_info.is_write]
    result = next(x for x in (*returned, *written) if isinstance(x, Tensor) and x.numel())
    found = rerun(save_call(tmp_path / "call.pt", OPS[op], args, {}, result, result))
    assert found.first.largest == found.second.largest == 0


def test_parameters_and_integers_are_saved_as_they_were(tmp_path: Path) -> None:
    aten, eye = torch.ops.aten, torch.eye(2)
    path = save_call(tmp_path / "call.pt", aten.mm.default, (eye, torch.nn.Parameter(eye)), {}, eye, eye)
    assert not rerun(path).first.differs
    smallest = torch.full((1,), -(2**31), dtype=torch.int32)
    args = smallest.long() - 1, -1
    quotient = aten.div.Scalar_mode(*args, rounding_mode="trunc")
    path = save_call(path, aten.div.Scalar_mode, args, {"rounding_mode": "trunc"}, quotient, quotient)
    assert not rerun(path).first.differs


def test_a_call_that_no_file_may_hold_is_not_saved(tmp_path: Path) -> None:
    aten = torch.ops.aten
    assert all(hasattr(aten, name) for name in PURE - {"_fused_rms_norm"})
    assert can_save(aten.add.Tensor, (ONE, ONE), {}) and can_save(aten.cat.default, ((ONE, ONE),), {})
    assert not can_save(aten.from_file.default, ("x", True, 1), {})
    assert not can_save(aten.add.out, (ONE, ONE), {"out": ONE})
    assert not can_save(aten.exp.default, (ONE.to_sparse(),), {})
    with pytest.raises(DSV4Error, match="E201"):
        save_call(tmp_path / "call.pt", aten.from_file.default, ("x", True, 1), {}, ONE, ONE)
    assert not (tmp_path / "call.pt").exists()
