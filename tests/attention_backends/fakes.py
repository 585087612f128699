"""Stand-ins for flash_mla and flashinfer: they check arguments like the libraries and compute with our references."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.ops.attention.sparse_mla_prefill import sparse_mla_prefill

HEADS = (64, 128)


def expect(value: Tensor, dtype: torch.dtype, *shape: int | None, contiguous: bool = True) -> None:
    """Check dtype, rank, the sizes that are not None, and strides."""
    assert value.dtype is dtype
    assert value.dim() == len(shape)
    assert all(want is None or size == want for size, want in zip(value.shape, shape, strict=True)), value.shape
    assert not contiguous or value.is_contiguous()


def padded_from(q: Tensor, sink: Tensor | None) -> int:
    """Return the first padded head. Check that queries from it on are zero and their sinks -inf."""
    zero = (q == 0).flatten(2).all(2).all(0) if q.shape[0] else torch.ones(q.shape[1], dtype=torch.bool)
    first = int((~zero).sum())
    assert zero[first:].all()
    assert sink is None or (sink[first:] == -torch.inf).all()
    return first


class FlashMLA:
    """`flash_mla`: 64 or 128 heads, token pages of 584 bytes a multiple of 576 apart, rows as wide as its tiles."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.heads: list[int] = []

    def get_mla_metadata(self) -> tuple[Any, None]:
        return SimpleNamespace(have_initialized=False), None

    def _pages(self, cache: Tensor) -> Tensor:
        expect(cache, torch.uint8, None, None, 1, 584, contiguous=False)
        assert cache.stride(0) % 576 == 0
        assert cache.stride()[1:] == (584, 584, 1)
        return cache.squeeze(2)

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert not tile_scheduler_metadata.have_initialized
        tile_scheduler_metadata.have_initialized = True
        assert block_table is None and cache_seqlens is None and num_splits is None and not causal and is_fp8_kvcache
        tokens, heads = q.shape[0], q.shape[2]
        assert heads in HEADS and head_dim_v == 512
        expect(q, torch.bfloat16, tokens, 1, heads, 512)
        assert indices is not None and topk_length is not None and attn_sink is not None and softmax_scale is not None
        rows: list[Any] = []
        for row, lens in ((indices, topk_length), (extra_indices_in_kvcache, extra_topk_length)):
            if row is None or lens is None:
                rows += [None, None]
                continue
            expect(row, torch.int32, tokens, 1, None)
            assert row.shape[2] % heads == 0
            expect(lens, torch.int32, tokens)
            rows += [row.squeeze(1), lens]
        expect(attn_sink, torch.float32, heads)
        self.calls.append("decode")
        self.heads.append(padded_from(q.squeeze(1), attn_sink))
        extra = None if extra_k_cache is None else self._pages(extra_k_cache)
        out, lse = sparse_mla_decode(
            q.squeeze(1),
            self._pages(k_cache),
            *rows[:2],
            k_cache.shape[1],
            "fp8_ds_mla",
            softmax_scale,
            attn_sink,
            extra,
            *rows[2:],
            0 if extra_k_cache is None else extra_k_cache.shape[1],
        )
        return out[:, None], lse[..., None]

    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, heads = q.shape[:2]
        assert heads in HEADS and d_v == 512 and attn_sink is not None and topk_length is not None
        expect(q, torch.bfloat16, tokens, heads, 512)
        expect(kv, torch.bfloat16, None, 1, 512)
        expect(indices, torch.int32, tokens, 1, None)
        assert indices.shape[2] % 128 == 0
        expect(topk_length, torch.int32, tokens)
        expect(attn_sink, torch.float32, heads)
        self.calls.append("prefill")
        self.heads.append(padded_from(q, attn_sink))
        return sparse_mla_prefill(q, kv.squeeze(1), indices.squeeze(1), topk_length, sm_scale, attn_sink)


class FlashInfer:
    """`flashinfer.mla` and `flashinfer.decode`: pages `[P, 1, S, D]` in q's dtype, scales that are Python floats."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.heads: list[int] = []

    def trtllm_batch_decode_sparse_mla_dsv4(
        self,
        query: Tensor,
        swa_kv_cache: Tensor,
        workspace_buffer: Tensor,
        sparse_indices: Tensor,
        compressed_kv_cache: Tensor,
        sparse_topk_lens: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        sinks: Tensor | None = None,
        cum_seq_lens_q: Tensor | None = None,
        max_q_len: int | None = None,
        sparse_indices_are_storage_offsets: bool | None = None,
    ) -> Tensor:
        dense = swa_kv_cache.is_contiguous() and compressed_kv_cache.is_contiguous()
        assert sparse_indices_are_storage_offsets is (None if dense else False)
        tokens, heads, requests = query.shape[0], query.shape[1], seq_lens.shape[0]
        assert heads in HEADS and cum_seq_lens_q is not None and max_q_len is not None and sinks is not None
        assert query.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        expect(query, query.dtype, tokens, heads, 512)
        for cache in (swa_kv_cache, compressed_kv_cache):
            expect(cache, query.dtype, None, 1, None, 512, contiguous=False)
        expect(sparse_indices, torch.int32, tokens, None)
        assert sparse_indices.shape[1] >= 128 and sparse_indices.shape[1] % 4 == 0
        expect(sparse_topk_lens, torch.int32, tokens)
        assert ((sparse_topk_lens >= 128) & (sparse_topk_lens <= sparse_indices.shape[1])).all()
        expect(seq_lens, torch.int32, requests)
        expect(cum_seq_lens_q, torch.int32, requests + 1)
        assert int(cum_seq_lens_q[0]) == 0 and int(cum_seq_lens_q.diff().max()) == max_q_len > 0
        expect(out, torch.bfloat16, tokens, heads, 512)
        expect(sinks, torch.float32, heads)
        assert type(bmm1_scale) is float and type(bmm2_scale) is float
        assert workspace_buffer.dtype is torch.uint8 and not workspace_buffer.any()
        self._check_window(sparse_indices, seq_lens, cum_seq_lens_q)
        self.calls.append((tokens, max_q_len))
        self.heads.append(padded_from(query.float(), sinks))
        quantised = query.dtype is torch.float8_e4m3fn

        def rows(cache: Tensor) -> Tensor:
            return cache.squeeze(1).view(torch.uint8) if quantised else cache.squeeze(1)

        attended, _ = sparse_mla_decode(
            query,
            rows(swa_kv_cache),
            sparse_indices[:, :128],
            sparse_topk_lens.clamp_max(128),
            swa_kv_cache.shape[2],
            "fp8" if quantised else "plain",
            bmm1_scale,
            sinks,
            rows(compressed_kv_cache),
            sparse_indices[:, 128:],
            sparse_topk_lens - 128,
            compressed_kv_cache.shape[2],
        )
        out.copy_(attended.float() * bmm2_scale)
        # The library leaves the rows after the last request unwritten.
        out[int(cum_seq_lens_q[-1]) :] = torch.nan
        return out

    def _check_window(self, indices: Tensor, seq_lens: Tensor, starts: Tensor) -> None:
        """Check that each row holds the window length that the kernel derives from the request."""
        for request, seq_len in enumerate(seq_lens.tolist()):
            first, last = starts[request : request + 2].tolist()
            for token in range(first, last):
                visible = min(seq_len - (last - first) + (token - first) + 1, 128)
                assert int((indices[token, :128] >= 0).sum()) == visible

    def trtllm_batch_decode_with_kv_cache_mla(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        qk_nope_head_dim: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        sparse_mla_top_k: int,
    ) -> Tensor:
        tokens, width = query.shape[0], kv_lora_rank + qk_rope_head_dim
        assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
        expect(query, torch.bfloat16, tokens, 1, None, width)
        expect(kv_cache, torch.bfloat16, None, 1, None, width, contiguous=False)
        expect(block_tables, torch.int32, tokens, 1, sparse_mla_top_k)
        expect(seq_lens, torch.int32, tokens)
        assert max_seq_len == sparse_mla_top_k and bmm2_scale == 1.0 and not workspace_buffer.any()
        front = torch.arange(sparse_mla_top_k) < seq_lens[:, None]
        assert torch.equal(block_tables.squeeze(1) >= 0, front)
        self.calls.append((tokens, max_seq_len))
        rows = kv_cache.squeeze(1)
        out, _ = sparse_mla_decode(
            query.squeeze(1), rows, block_tables.squeeze(1), seq_lens, rows.shape[1], "plain", bmm1_scale
        )
        return out[:, None, :, :kv_lora_rank]


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> FlashMLA:
    fake, module = FlashMLA(), ModuleType("flash_mla")
    for name in ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(module, name, getattr(fake, name))
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    return fake


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    fake = FlashInfer()
    package, mla, decode = (ModuleType(name) for name in ("flashinfer", "flashinfer.mla", "flashinfer.decode"))
    mla.trtllm_batch_decode_sparse_mla_dsv4 = fake.trtllm_batch_decode_sparse_mla_dsv4  # type: ignore[attr-defined]
    decode.trtllm_batch_decode_with_kv_cache_mla = fake.trtllm_batch_decode_with_kv_cache_mla  # type: ignore[attr-defined]
    for module in (package, mla, decode):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake
