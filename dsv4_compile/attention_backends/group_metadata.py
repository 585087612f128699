"""Metadata of single cache groups and their builders: extra caches, the indexer's cache, compressor states.

An engine calls one builder for each cache group, with that group's block table and slots. All builders split the batch
by the same threshold, so that their decodes agree, and fill the buffers declared in `metadata.BUFFERS`; builders that
get the same `MetadataBuffers` use its memory. A build is one launch, or two if a batch with prefills has layers that
attend every entry. `step_metadata.DeepseekV4StepBuilder` fills the buffers of all groups in one launch, if their block
tables are in persistent buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..errors import check
from ..layout import KV_BLOCK, PAD_INDEX, cdiv
from ..metadata import BatchSplit, MetadataBuffers, plan_buffers
from ..metadata.fill import arguments_of, names_of
from ..sources import WINDOW_ONLY, Group, source_groups
from .types import CommonAttentionMetadata, CudaGraphSupport

Builder = TypeVar("Builder", bound="GroupBuilder[Any]")
Metadata = TypeVar("Metadata")


class GroupBuilder(ABC, Generic[Metadata]):
    """Base of the builders: persistent buffers of one cache group, their refill, and the split.

    Args:
        max_num_batched_tokens: most tokens of a step, padding included.
        max_model_len: longest sequence. Block tables stay in the engine's memory.
        ratio: compress ratio of the layers that this group of caches belongs to.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens; the same for all groups.
        buffers: memory to use, allocated with the same capacities; None allocates the buffers of this group.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_BATCH
    role: ClassVar[str]
    """Role of the group, see `sources.Group`."""
    counts_entries: ClassVar[bool] = False
    """Whether the entries that a token may attend are counted."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        max_model_len: int,
        ratio: int,
        decode_threshold: int = 1,
        buffers: MetadataBuffers | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_model_len, self.ratio, self.reorder_batch_threshold = max_model_len, ratio, decode_threshold
        self.group = None if ratio in WINDOW_ONLY else self._group()
        if buffers is not None:
            fits = (max_num_batched_tokens, max_model_len) == (buffers.max_num_batched_tokens, buffers.max_model_len)
            check(
                fits,
                "E204",
                got=f"a builder for {max_num_batched_tokens} tokens and sequences of {max_model_len}, buffers for "
                f"{buffers.max_num_batched_tokens} and {buffers.max_model_len}",
                fix="give both the same capacities",
            )
            self.tensors = buffers.tensors
            return
        plan = plan_buffers(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1, max_model_len=max_model_len, ratios=(ratio,)
        )
        self.tensors = plan.allocate(names_of(self._groups(), self._counted()), device)

    @classmethod
    def from_engine(
        cls: type[Builder],
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        engine_config: Any,
        device: torch.device | str | None,
    ) -> Builder:
        """Build for a group of layers from the arguments that vLLM-like engines construct builders with.

        Args:
            kv_cache_spec: of the group: `compress_ratio`, and `block_size` for extra caches.
            layer_names: of the group; ignored.
            engine_config: `scheduler_config.max_num_batched_tokens`, `model_config.max_model_len`,
                `model_config.hf_config.index_topk`, and `speculative_config.num_speculative_tokens` if there is one.
        """
        drafts = getattr(engine_config, "speculative_config", None)
        return cls(
            engine_config.scheduler_config.max_num_batched_tokens,
            max_model_len=engine_config.model_config.max_model_len,
            ratio=kv_cache_spec.compress_ratio,
            decode_threshold=1 + (0 if drafts is None else drafts.num_speculative_tokens),
            device=device,
            **cls._engine_options(kv_cache_spec, engine_config),
        )

    @classmethod
    def _engine_options(cls, kv_cache_spec: Any, engine_config: Any) -> dict[str, Any]:
        """Return the arguments of a subclass that `GroupBuilder` does not have."""
        return {}

    def _group(self) -> Group:
        """Return the group of caches that this builder fills."""
        return next(group for group in source_groups(self.ratio) if group.role == self.role)

    def _groups(self) -> tuple[Group, ...]:
        return () if self.group is None else (self.group,)

    def _counted(self) -> tuple[int, ...]:
        return (self.ratio,) if self.counts_entries else ()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Build the metadata of a batch. Engines pass `common_prefix_len` and `fast_build`; both are ignored."""
        cm = common_attn_metadata
        batch, tables = (cm.query_start_loc, cm.seq_lens), dict.fromkeys(self._groups(), cm.block_table_tensor)
        torch.ops.dsv4.batch_metadata(*arguments_of(*batch, cm.slot_mapping, tables, self._counted(), self.tensors))
        return self.view(cm, cm.split(self.reorder_batch_threshold))

    @abstractmethod
    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> Metadata:
        """Return the metadata as views of buffers that have been filled for this batch."""


@dataclass(frozen=True)
class DeepseekV4FlashMLAMetadata:
    """A batch for the extra cache of one compress ratio; tensors are views of the builder's buffers.

    Attributes:
        num_reqs, max_query_len, max_seq_len, num_actual_tokens: of the batch.
        query_start_loc: int32 `[R + 1]`. block_table: int32 `[R, B]`, entries of `block_size` tokens each.
        slot_mapping: int64 `[T]`, slot of the compressed entry that a token completes, else -1; the raw slots for a
            window-only layer.
        req_id_per_token: int32 `[T]`, 0 for padding. topk_tokens: entries that the indexer selects, K.
        c128a_global_decode_topk_indices: int32 `[Td, 1, C]`, slots of all visible entries of the decodes' tokens;
            c128a_decode_topk_lens: int32 `[Td]`; c128a_prefill_topk_indices: int32 `[Tp, C]`, indices within the
            request. Ratio 128 only; None for an empty part.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split, the same for all groups.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    req_id_per_token: Tensor
    block_size: int = KV_BLOCK
    topk_tokens: int = 0
    c128a_global_decode_topk_indices: Tensor | None = None
    c128a_decode_topk_lens: Tensor | None = None
    c128a_prefill_topk_indices: Tensor | None = None
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0


class EntryRows(NamedTuple):
    """Lists of every entry: slots int32 `[T, C]` with their number int32 `[T]`, and indices within the request."""

    indices: Tensor
    lens: Tensor
    local: Tensor


class DeepseekV4FlashMLAMetadataBuilder(GroupBuilder[DeepseekV4FlashMLAMetadata]):
    """Builds `DeepseekV4FlashMLAMetadata` for windows (ratio 1) and extra caches. Arguments of `GroupBuilder`, and:

    Args:
        topk_tokens: entries that the indexer selects. block_size: tokens that a block table entry covers.
    """

    role = "entries"

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        max_model_len: int,
        ratio: int = 1,
        topk_tokens: int = 0,
        block_size: int = KV_BLOCK,
        decode_threshold: int = 1,
        buffers: MetadataBuffers | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check(
            ratio in WINDOW_ONLY or block_size == KV_BLOCK,
            "E205",
            got=f"block_size={block_size} of a compressed cache",
            fix=f"pages of compressed caches cover {KV_BLOCK} tokens",
        )
        super().__init__(
            max_num_batched_tokens,
            max_model_len=max_model_len,
            ratio=ratio,
            decode_threshold=decode_threshold,
            buffers=buffers,
            device=device,
        )
        self.topk_tokens, self.block_size = topk_tokens, block_size
        self.entry_rows: EntryRows | None = None
        if self.group is not None and self.group.listed:
            indices, lens = (self.tensors[f"{self.group.name}_{suffix}"] for suffix in ("indices", "lens"))
            self.entry_rows = EntryRows(indices, lens, torch.full_like(indices, PAD_INDEX))

    @classmethod
    def _engine_options(cls, kv_cache_spec: Any, engine_config: Any) -> dict[str, Any]:
        topk_tokens = engine_config.model_config.hf_config.index_topk
        return {"topk_tokens": topk_tokens, "block_size": kv_cache_spec.block_size}

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4FlashMLAMetadata:
        tokens = cm.num_actual_tokens
        decode, lens, prefill = None, None, None
        if self.entry_rows is not None:
            prefill = self._prefill_rows(self.entry_rows, cm, split) if split.num_prefill_tokens else None
            if split.num_decode_tokens:
                decode = self.entry_rows.indices[: split.num_decode_tokens].unsqueeze(1)
                lens = self.entry_rows.lens[: split.num_decode_tokens]
        return DeepseekV4FlashMLAMetadata(
            num_reqs=cm.num_reqs,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            num_actual_tokens=tokens,
            query_start_loc=cm.query_start_loc,
            slot_mapping=cm.slot_mapping if self.group is None else self.tensors[f"{self.group.name}_slots"][:tokens],
            block_table=cm.block_table_tensor,
            req_id_per_token=self.tensors["token_to_req"][:tokens],
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            c128a_global_decode_topk_indices=decode,
            c128a_decode_topk_lens=lens,
            c128a_prefill_topk_indices=prefill,
            **split._asdict(),
        )

    def _prefill_rows(self, buffers: EntryRows, cm: CommonAttentionMetadata, split: BatchSplit) -> Tensor:
        """Fill and return the rows of prefill tokens, as indices within the request."""
        tokens = slice(split.num_decode_tokens, cm.num_actual_tokens)
        rows = buffers.local[: split.num_prefill_tokens]
        torch.ops.dsv4.c128a_topk_metadata(
            self.tensors["positions"][tokens],
            self.tensors["token_to_req"][tokens],
            cm.block_table_tensor,
            cm.slot_mapping[tokens],
            self.block_size // self.ratio,
            self.ratio,
            0,
            buffers.indices[:0],
            buffers.lens[:0],
            rows,
        )
        return rows


@dataclass(frozen=True)
class DeepseekV4IndexerMetadata:
    """A batch for the indexer's cache.

    Attributes:
        block_table: int32 `[R, B]`; slot_mapping: int64 `[T]`, slot of the key that a token completes, else -1.
        req_id_per_token: int32 `[T]`; is_valid_token: bool `[T]`.
        context_lens: int32 `[T]`, keys that each token may score: `(position + 1) // ratio`, 0 for padding.
        max_context: bound of `context_lens` that follows from max_model_len, so that no shape depends on a batch.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split, the same for all groups.
    """

    block_table: Tensor
    slot_mapping: Tensor
    req_id_per_token: Tensor
    is_valid_token: Tensor
    context_lens: Tensor
    max_context: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class DeepseekV4IndexerMetadataBuilder(GroupBuilder[DeepseekV4IndexerMetadata]):
    """Builds `DeepseekV4IndexerMetadata` for a ratio with an indexer. Arguments of `GroupBuilder`."""

    role = "keys"
    counts_entries = True

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4IndexerMetadata:
        tokens = slice(0, cm.num_actual_tokens)
        return DeepseekV4IndexerMetadata(
            block_table=cm.block_table_tensor,
            slot_mapping=self.tensors[f"keys_{self.ratio}_slots"][tokens],
            req_id_per_token=self.tensors["token_to_req"][tokens],
            is_valid_token=self.tensors["is_valid_token"][tokens],
            context_lens=self.tensors[f"entries_{self.ratio}_context_lens"][tokens],
            max_context=cdiv(self.max_model_len, self.ratio),
            **split._asdict(),
        )


@dataclass(frozen=True)
class DeepseekV4CompressorMetadata:
    """A batch for the cache of compressor states.

    Attributes:
        block_table: int32 `[R, B]`, entries of `block_size` tokens. slot_mapping: int64 `[T]`, where the state of each
            token is stored, -1 for padding. req_id_per_token: int32 `[T]`.
    """

    block_table: Tensor
    slot_mapping: Tensor
    req_id_per_token: Tensor
    block_size: int


class DeepseekV4CompressorMetadataBuilder(GroupBuilder[DeepseekV4CompressorMetadata]):
    """Builds `DeepseekV4CompressorMetadata` for the states of one compressor. Arguments of `GroupBuilder`, and:

    Args:
        indexer: whether the states are those of the indexer's compressor, not of the extra cache's.
    """

    def __init__(self, max_num_batched_tokens: int, *, indexer: bool = False, **options: Any) -> None:
        self.role = "key_states" if indexer else "states"  # type: ignore[misc]
        super().__init__(max_num_batched_tokens, **options)

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4CompressorMetadata:
        tokens = slice(0, cm.num_actual_tokens)
        assert self.group is not None
        return DeepseekV4CompressorMetadata(
            block_table=cm.block_table_tensor,
            slot_mapping=self.tensors[f"{self.group.name}_slots"][tokens],
            req_id_per_token=self.tensors["token_to_req"][tokens],
            block_size=self.group.page_rows,
        )
