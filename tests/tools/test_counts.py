"""Tests of tests/tools/counts.py, and of what it counts: an op is registered once."""

from __future__ import annotations

from pathlib import Path

from dsv4_compile.ops.common.define import OPS
from tests.tools import counts

OPS_OF_A_TREE = [f"op_{letter}" for letter in "abcdefghij"]


def tree(root: Path, **files: str) -> Path:
    """Write a checkout with an op "moe/moe_NAME" for each of `OPS_OF_A_TREE`, and further files."""
    texts = {f"dsv4_compile/ops/moe/{op}.py": f'{op} = define(\n    "{op}",\n)\n' for op in OPS_OF_A_TREE} | files
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_ops_are_those_that_are_defined() -> None:
    assert set(counts.ops(counts.ROOT)) == set(OPS)
    assert counts.ops(counts.ROOT)["sparse_mla_decode_quant"] == "attention/sparse_mla_decode"


def test_collections_and_imports_of_many_ops_are_lists(tmp_path: Path) -> None:
    entries = {
        "dict": "{" + ", ".join(f'"{op}": 1' for op in OPS_OF_A_TREE) + "}",
        "modules": "[" + ", ".join(f'"moe.{op}"' for op in OPS_OF_A_TREE) + "]",
        "few": str(OPS_OF_A_TREE[1:]),
        "other": str([f"{op}_row" for op in OPS_OF_A_TREE]),
    }
    files = {f"kernels/{name}.py": f"\nx = {text}\n" for name, text in entries.items()}
    files["lowering/imports.py"] = "".join(f"from .moe import {op}\n" for op in OPS_OF_A_TREE)
    lists = counts.op_lists(tree(tmp_path, **files))
    assert {(one.path, one.line) for one in lists} == {
        ("kernels/dict.py", 2), ("kernels/modules.py", 2), ("lowering/imports.py", 1),
    }  # fmt: skip
    assert {one.ops for one in lists} == {frozenset(OPS_OF_A_TREE)}


def test_files_of_an_op_are_counted_in_every_tree(tmp_path: Path) -> None:
    paths = [
        "lowering/moe/op_a.py",
        "kernels/moe/op_a.py",
        "tests/gpu/moe/test_lowered_op_a.py",
        "tests/ops/moe/test_op_a_more.py",
    ]
    root = tree(tmp_path, **dict.fromkeys([*paths, "kernels/linear/op_a.py", "kernels/moe/op_b.py"], ""))
    assert counts.op_files(root, "moe/op_a") == sorted(["dsv4_compile/ops/moe/op_a.py", *paths])


def test_an_op_stands_in_no_list_that_must_be_edited_for_it() -> None:
    # Priorities of proofs, and launchers' variants of ops that have several kernels.
    assert {one.path for one in counts.op_lists(counts.ROOT)} <= {"tests/gpu/prove.py", "tests/tools/docs.py"}


def test_report_names_every_count() -> None:
    kinds = {line.split()[0] for line in counts.report(counts.ROOT)}
    assert kinds >= {"package", "tests", "README", "parameters", "op"}
    assert all(10 < count <= 26 for count in counts.decode_parameters(counts.ROOT).values())
    assert len(counts.decode_parameters(counts.ROOT)) == 5
