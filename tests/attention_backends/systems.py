"""Drive every backend like an engine: build metadata, then call one module with tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import (
    NAMES,
    CommonAttentionMetadata,
    Demand,
    LayerShape,
    SparseAttention,
    get_backend,
)
from dsv4_compile.attention_backends.v4 import DeepseekV4Metadata
from dsv4_compile.metadata import BlockTables, build_batch_metadata
from dsv4_compile.sources import groups_of
from dsv4_compile.testing.batch import Batch
from dsv4_compile.testing.generate import to_device
from tests.attention_backends.v32 import V32Case, V32Layer
from tests.support.attention import AttentionCase, random_case

MAX_MODEL_LEN, MAX_TOKENS, MAX_REQUESTS, DECODE_THRESHOLD = 320, 400, 10, 3
V4 = ("DSV4_PAGED", "FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4")
PHASES = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class Setup:
    """A backend with one cache format, one compress ratio, one phase of batches and one engine."""

    name: str
    kv_cache_dtype: str
    ratio: int = 4
    phase: str = "mixed"
    engine: str = "dsv4"

    @property
    def system(self) -> str:
        """Name in records: the backend, and the library that computes if there is one."""
        return self.name if self.engine == "dsv4" else f"{self.name}, {get_backend(self.name).library}"

    @property
    def fmt(self) -> str:
        return get_backend(self.name).cache_format(self.kv_cache_dtype)

    def __str__(self) -> str:
        engine = "" if self.engine == "dsv4" else f"-{self.engine}"
        return f"{self.name}-{self.kv_cache_dtype}-{self.ratio}-{self.phase}{engine}"


def caches(name: str) -> list[str]:
    """Return one word for each format a backend reads: the format's own name, and bfloat16 for plain rows."""
    formats = set(get_backend(name).cache_formats.values())
    return sorted("bfloat16" if fmt == "plain" else fmt for fmt in formats)


def setups(phases: tuple[str, ...] = PHASES, ratios: tuple[int, ...] = (1, 4, 128)) -> Iterator[Setup]:
    """Yield all backends, caches, ratios and phases. DeepSeek-V3.2 has no ratios; its setups have ratio 1."""
    for name in NAMES:
        for word in caches(name):
            for ratio in ratios if name in V4 else (1,):
                for phase in phases:
                    yield Setup(name, word, ratio, phase)


def library_setups(
    architecture: str, phases: tuple[str, ...] = PHASES, ratios: tuple[int, ...] = (1, 4, 128)
) -> Iterator[Setup]:
    """Yield the setups of kernel libraries that are installed and have kernels for this device."""
    for setup in setups(phases, ratios):
        model_type = get_backend(setup.name).model_type
        facts = {"model_type": model_type, "kv_cache_dtype": setup.kv_cache_dtype, "architecture": architecture}
        if setup.name not in V4:
            facts |= {"head_size": layout.V32_HEAD_DIM, "block_size": 64, "has_sink": False}
        if not get_backend(setup.name).why_unsupported(Demand(**facts, engine="library")):
            yield replace(setup, engine="library")


def batch_of(rng: random.Random, phase: str) -> Batch:
    """Return decodes of one to three tokens, then chunked and whole prefills, a padded request and padding tokens.

    At least two of each part, and at most four prefills, padded requests included.
    """
    sizes: list[tuple[int, int]] = []
    if phase != "prefill":
        for _ in range(rng.randint(2, 5)):
            seq_len = rng.randint(1, 300)
            sizes.append((min(rng.choice((1, 1, 2, 3)), seq_len), seq_len))
    if phase != "decode":
        for _ in range(rng.randint(2, 3)):
            seq_len = rng.choice((rng.randint(4, 20), rng.randint(128, 300)))
            longest = seq_len if seq_len <= 20 else 50
            sizes.append((rng.choice((longest, rng.randint(4, longest))), seq_len))
    sizes.append((0, 0))
    query_lens, seq_lens = zip(*sizes, strict=True)
    return Batch(query_lens, seq_lens, padding=rng.choice((0, 1, 3)))


def case_of(
    rng: random.Random, setup: Setup, batch: Batch | None = None, heads: int = 4, head_dim: int = 64
) -> AttentionCase:
    """Return a batch with caches in the backend's format; vectors are small if format and engine support it."""
    small = setup.fmt != "fp8_ds_mla" and setup.engine == "dsv4"
    return random_case(
        rng,
        batch_of(rng, setup.phase) if batch is None else batch,
        ratio=setup.ratio,
        fmt=setup.fmt,
        max_requests=MAX_REQUESTS,
        max_model_len=MAX_MODEL_LEN,
        heads=heads,
        head_dim=head_dim if small else layout.HEAD_DIM,
    )


class Layer:
    """The module and the builders of one backend, for one kind of layer."""

    def __init__(self, setup: Setup, case: AttentionCase, device: str = "cpu", **options: Any) -> None:
        self.setup, self.device = setup, device
        self.shape = LayerShape(
            num_heads=case.q.shape[1],
            head_size=case.q.shape[2],
            scale=case.scale,
            window=case.window,
            ratio=setup.ratio,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_TOKENS,
            kv_cache_dtype=setup.kv_cache_dtype,
        )
        backend = get_backend(setup.name)
        self.module: SparseAttention = backend.get_impl_cls()(self.shape, setup.engine, **options).to(device)
        if setup.name == "FLASHINFER_MLA_SPARSE_DSV4" and case.window_cache.kv_scale is not None:
            self.module.set_scales(1.0, float(case.window_cache.kv_scale))
        self.swa = self.extra = None
        if setup.name == "DSV4_PAGED":
            return
        builder = backend.get_swa_builder_cls()
        assert builder is not None
        self.swa = builder(MAX_TOKENS, window=case.window, decode_threshold=DECODE_THRESHOLD, device=device)
        if setup.ratio > 1:
            self.extra = backend.get_builder_cls()(
                MAX_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                ratio=setup.ratio,
                decode_threshold=DECODE_THRESHOLD,
                device=device,
            )

    def metadata(self, case: AttentionCase) -> Any:
        batch = case.batch
        window_table, extra_table = (table.to(self.device) for table in case.tables())
        if self.swa is None:
            names = [group.name for group in groups_of((self.setup.ratio,))]
            return build_batch_metadata(
                query_start_loc=batch.query_start_loc().to(self.device),
                seq_lens=batch.seq_lens_tensor().to(self.device),
                num_tokens=batch.num_tokens,
                block_tables=BlockTables.of(dict.fromkeys(names, extra_table) | {"window": window_table}),
                window=case.window,
                max_model_len=MAX_MODEL_LEN,
                ratios=(self.setup.ratio,),
            )

        def group(table: Tensor) -> CommonAttentionMetadata:
            return CommonAttentionMetadata.of(
                query_start_loc=batch.query_start_loc().tolist(),
                seq_lens=batch.seq_lens,
                block_table=table,
                slot_mapping=batch.slot_mapping().to(self.device),
                positions=case.positions().to(self.device),
            )

        extra = None if self.extra is None else self.extra.build(0, group(extra_table))
        return DeepseekV4Metadata(self.swa.build(0, group(window_table)), extra)

    def arguments(self, case: AttentionCase) -> tuple[Any, ...]:
        """Return the arguments of `module`."""
        extra = case.extra_cache
        own_scale = self.setup.name == "FLASHINFER_MLA_SPARSE_DSV4"
        tensors = (
            case.q,
            case.window_cache.cache,
            None if extra is None else extra.cache,
            self.metadata(case),
            case.topk,
            case.sink,
            None if own_scale else case.window_cache.kv_scale,
        )
        return tuple(to_device(x, self.device) if isinstance(x, Tensor) else x for x in tensors)


def any_case(rng: random.Random, setup: Setup, batch: Batch | None = None) -> Any:
    """Return a random case for any backend."""
    if setup.name in V4:
        return case_of(rng, setup, batch)
    return V32Case(rng, batch_of(rng, setup.phase) if batch is None else batch)


def any_layer(setup: Setup, case: Any, device: str = "cpu") -> Any:
    """Return the module and the builders of any backend."""
    return Layer(setup, case, device) if setup.name in V4 else V32Layer(case, setup.engine, device)
