"""Records name the commit and the fingerprints of the code that they measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from dsv4_compile import bench
from dsv4_compile.bench import record, timing

CPU = torch.device("cpu")
TABLE = {"torch": "2.13.0", "sm_90": {"inv_rope": "a1", "fp8_linear": "b1"}, "gfx942": {"inv_rope": "a2"}}


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", str(folder), *who, *command], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(record.COMMIT, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "kernel.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_the_commit_is_the_checkouts_and_says_if_files_were_changed(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")[:12]
    assert record.commit(checkout) == head
    (checkout / "notes").write_text("untracked")
    assert record.commit(checkout) == head
    (checkout / "kernel.py").write_text("2")
    assert record.commit(checkout) == f"{head}+changes"


def test_a_copy_without_git_has_the_commit_of_the_environment_or_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a repository around it."""
    (checkout / "site").mkdir()
    assert record.commit(checkout / "site") == "unknown"
    monkeypatch.setenv(record.COMMIT, "0123abc")
    assert record.commit(checkout / "site") == record.environment(CPU)["commit"] == "0123abc"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fingerprints.json"
    path.write_text(json.dumps(TABLE))
    monkeypatch.setattr(record, "FINGERPRINTS", path)
    return path


def test_fingerprints_are_those_of_the_ops_on_this_architecture(table: Path) -> None:
    assert record.fingerprints(["inv_rope"], "cuda sm_90") == {"inv_rope": "a1"}
    assert record.fingerprints(["inv_rope", "fp8_linear"], "cuda gfx942") == {"inv_rope": "a2"}
    assert record.fingerprints(["inv_rope"], "cpu") == {}
    table.unlink()
    assert record.fingerprints(["inv_rope"], "cuda sm_90") == {}


@pytest.mark.usefixtures("table")
def test_a_whole_step_has_the_fingerprints_of_all_ops() -> None:
    assert record.fingerprints(["decode_step"], "cuda sm_90") == {"inv_rope": "a1", "fp8_linear": "b1"}


@pytest.mark.usefixtures("table", "tiny")
def test_a_run_keeps_the_fingerprints_of_what_it_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(record, "device_architecture", lambda device: "cuda sm_90")
    run = bench.run("preprocess", only={"op": {"inv_rope"}, "impl": {"eager"}}, device=CPU)
    assert run["fingerprints"] == {"inv_rope": "a1"}


def test_the_committed_table_has_the_form_that_is_read() -> None:
    hashes = record.fingerprints(["sparse_mla_decode", "fp8_linear"], "cuda sm_90")
    assert sorted(hashes) == ["fp8_linear", "sparse_mla_decode"] and all(hashes.values())
    assert len(record.fingerprints(["decode_step"], "cuda gfx942")) > len(hashes)
