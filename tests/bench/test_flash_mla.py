"""FlashMLA as a peer: a stand-in with its interface gets the arguments that the definitions of our ops need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4_compile.bench import flash_mla, sparse_mla_decode, sparse_mla_prefill

CPU = torch.device("cpu")
STAND_IN = """
from dsv4_compile.ops.common.define import REFERENCES

def get_mla_metadata():
    return object(), None

def flash_mla_with_kvcache(q, k_cache, table, seqlens, dim, plan, *, softmax_scale, is_fp8_kvcache, indices, attn_sink,
                           topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length):
    assert table is None and seqlens is None and dim == q.shape[3] and is_fp8_kvcache
    out, lse = REFERENCES["sparse_mla_decode"](
        q[:, 0], k_cache[:, :, 0], indices[:, 0], topk_length, k_cache.shape[1], "fp8_ds_mla", softmax_scale, attn_sink,
        extra_k_cache[:, :, 0], extra_indices_in_kvcache[:, 0], extra_topk_length, extra_k_cache.shape[1])
    return out[:, None], lse[..., None]

def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    assert d_v == q.shape[2]
    return REFERENCES["sparse_mla_prefill"](q, kv[:, 0], indices[:, 0], topk_length, sm_scale, attn_sink)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "flash_mla.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("flash_mla", None)


@pytest.mark.usefixtures("installed")
def test_both_kernels_pass_the_gates_of_the_scenarios() -> None:
    (problem,) = sparse_mla_decode.problems(CPU, {"heads": {"64"}, "fused": {"none"}}, (2,), 512)
    args = problem.make(0)
    assert not sparse_mla_decode.differs(flash_mla.decode()(*args), problem.reference(*args))
    prompt = next(sparse_mla_prefill.problems(CPU, {"heads": {"64"}}, (3,)))
    args = prompt.make(0)
    assert not sparse_mla_prefill.differs(flash_mla.prefill()(*args), prompt.reference(*args))


@pytest.mark.usefixtures("installed")
def test_it_is_an_implementation_for_the_heads_that_it_supports() -> None:
    for heads in (8, 64, 128):
        ways = sparse_mla_decode.implementations(sparse_mla_decode.OP, "none", heads)
        assert (flash_mla.NAME in ways) == (heads in flash_mla.HEADS)
    assert flash_mla.NAME not in sparse_mla_decode.implementations(sparse_mla_decode.OP, "both", 64)


def test_it_is_no_implementation_if_it_is_not_installed() -> None:
    (problem,) = sparse_mla_decode.problems(CPU, {"heads": {"64"}, "fused": {"none"}}, (2,), 512)
    assert flash_mla.NAME not in problem.implementations
