"""The GPU smoke script, run against the CPU: it must see wrong results, and it must say so."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing.agreement import assert_agrees

SCRIPT = Path(__file__).parent.parent / "gpu" / "smoke.py"


@pytest.fixture
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dsv4_gpu_smoke", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_passes_and_leaves_a_record(
    smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert smoke.main(["--device", "cpu", "--op", "kv_rope_insert"]) == 0
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert (record["failed"], record["ops"][0]["op"], record["ops"][0]["samples"]) == (0, "kv_rope_insert", 3)
    assert "kv_rope_insert" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["inv_rope", "ragged_from_dense", "kv_rope_insert"])
def test_a_difference_between_the_devices_is_a_failure(
    op: str, smoke: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third call, the one under comparison, changes one element of a result or written tensor."""
    honest, calls = smoke.run, iter(range(100))

    def wrong(name: str, args: tuple[object, ...]) -> list[torch.Tensor]:
        results = honest(name, args)
        if next(calls) % 3 == 2:
            last = results[-1].view(torch.uint8) if results[-1].element_size() == 1 else results[-1]
            last[(0,) * last.dim()] += 3
        return results

    monkeypatch.setattr(smoke, "run", wrong)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert smoke.main(["--device", "cpu", "--op", op]) == 1
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert record["failed"] > 0
    assert all(": AssertionError: " in error for error in record["ops"][0]["errors"])


def test_quantised_bytes_may_differ_rarely_and_only_where_they_were_written() -> None:
    name = "compress_norm_rope_insert"
    before, want = torch.zeros(4, 100, dtype=torch.uint8), torch.zeros(4, 100, dtype=torch.uint8)
    want[1] = 7
    near = want.clone()
    near[1, 0] = 8
    assert_agrees(name, [near], [want], [before], kernel=False)
    many = want.clone()
    many[1, :3] = 8
    with pytest.raises(AssertionError, match="of the written bytes differ"):
        assert_agrees(name, [many], [want], [before], kernel=False)
    elsewhere = want.clone()
    elsewhere[2, 0] = 1
    with pytest.raises(AssertionError, match=r"\(2, 0\)"):
        assert_agrees(name, [elsewhere], [want], [before], kernel=False)
    with pytest.raises(AssertionError, match=r"\(1, 0\)"):
        assert_agrees("kv_rope_insert", [near], [want], [before], kernel=False)


def test_results_of_experts_may_differ_by_a_share_of_their_size() -> None:
    want = torch.randn(40, 128).bfloat16()
    near = (want.float() * (1 + 2e-3 * torch.randn(40, 128)) + 2e-3 * torch.randn(40, 128)).bfloat16()
    assert_agrees("moe_experts", [near], [want], [], kernel=True)
    with pytest.raises(AssertionError, match="not close"):
        assert_agrees("moe_experts", [near], [want], [], kernel=False)
    near[3, 4] += 0.1
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        assert_agrees("moe_experts", [near], [want], [], kernel=True)


def test_an_op_without_samples_fails(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(smoke.BUILDERS, "inv_rope")
    assert smoke.check_op_samples("inv_rope", "cpu")["failed"] == 1


def test_without_a_device_it_says_so(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert smoke.main([]) == 2
    assert set(smoke.BUILDERS) == set(OPS)
