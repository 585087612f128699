"""DeepSeek-V3.2 with the interface of systems.Layer; its layers have one cache."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import CommonAttentionMetadata
from dsv4_compile.attention_backends.v32.attention import (
    FlashInferMLASparseAttention,
    FlashInferMLASparseMetadata,
    FlashInferMLASparseMetadataBuilder,
    v32_shape,
)
from dsv4_compile.testing import random_cache
from dsv4_compile.testing.batch import Batch, random_table, row, slot, table_tensor

TOPK, REQUESTS, MAX_MODEL_LEN, MAX_TOKENS, SCALE = 24, 10, 320, 400, 0.05


class V32Case:
    """A batch over one paged cache, the top-k indices of each token, and the exact output."""

    def __init__(
        self,
        rng: random.Random,
        batch: Batch,
        *,
        heads: int = 3,
        block_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch, self.block_size = batch, block_size
        self.table = random_table(rng, REQUESTS, layout.cdiv(MAX_MODEL_LEN, block_size))
        self.chosen = [rng.sample(range(position + 1), min(position + 1, TOPK)) for _, position in batch.tokens()]
        pages = REQUESTS * len(self.table[0])
        options = {"live": pages * block_size, "head_dim": layout.V32_HEAD_DIM, "dtype": dtype, "generator": generator}
        self.cache = random_cache("plain", pages, block_size, **options).cache
        self.q = torch.randn(batch.num_tokens, heads, layout.V32_HEAD_DIM, generator=generator).to(dtype)

    def topk_indices(self) -> Tensor:
        return torch.tensor([row(chosen, TOPK) for chosen in self.chosen], dtype=torch.int32).view(-1, TOPK)

    def slot_mapping(self) -> Tensor:
        slots = [slot(self.table, *token, self.block_size) for token in self.batch.tokens()]
        return torch.tensor(slots, dtype=torch.int64)

    def expected(self) -> Tensor:
        """Return the exact output, float64 `[T, H, latent]`."""
        out = torch.zeros(*self.q.shape[:2], layout.V32_LATENT_DIM, dtype=torch.float64)
        rows = self.cache.flatten(0, 1)
        for token, ((request, _), chosen) in enumerate(zip(self.batch.tokens(), self.chosen, strict=True)):
            if chosen:
                keys = rows[[slot(self.table, request, index, self.block_size) for index in chosen]].double()
                weights = torch.softmax(SCALE * self.q[token].double() @ keys.T, -1)
                out[token] = weights @ keys[:, : layout.V32_LATENT_DIM]
        return out


class V32Layer:
    """The module and the builder of one layer."""

    def __init__(self, case: V32Case, engine: str = "dsv4", device: str = "cpu") -> None:
        self.device = device
        self.module = FlashInferMLASparseAttention(v32_shape(case.q.shape[1], SCALE), engine)
        self.builder = FlashInferMLASparseMetadataBuilder(
            MAX_TOKENS, block_size=case.block_size, topk_tokens=TOPK, device=device
        )

    def metadata(self, case: V32Case) -> FlashInferMLASparseMetadata:
        common = CommonAttentionMetadata.of(
            query_start_loc=case.batch.query_start_loc().tolist(),
            seq_lens=case.batch.seq_lens,
            block_table=table_tensor(case.table).to(self.device),
            slot_mapping=case.slot_mapping().to(self.device),
        )
        return self.builder.build(0, common)

    def arguments(self, case: V32Case) -> tuple[Any, ...]:
        """Return the arguments of `module`."""
        q, cache, topk = (tensor.to(self.device) for tensor in (case.q, case.cache, case.topk_indices()))
        if self.module.engine == "library":
            cache = cache.contiguous()
        return q, cache, self.metadata(case), topk
