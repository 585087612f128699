"""Persistent metadata buffers: allocated once, refilled in place in each step, read by captured graphs.

    engine -> load -> inputs at fixed addresses -> refresh (one op) -> outputs at fixed addresses -> metadata(n) views
                            ^-------------- advance (one op) --------------'

`refresh` and `advance` copy nothing from the host, so both can be captured together with the layers that read the
views. `buffers.py` declares every buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .. import layout
from ..errors import check
from ..sources import RATIOS
from .buffers import BufferPlan, plan_buffers
from .checks import check_batch, check_capacity, check_ints, check_lengths, check_table, int_tensor
from .fill import arguments_of
from .fixed import AtFixedAddresses
from .types import AttentionMetadata, BlockTables, metadata_of

Ints = Tensor | Sequence[int]


class MetadataBuffers(AtFixedAddresses):
    """The persistent metadata buffers of a model. Addresses, shapes and strides never change.

    Args:
        max_num_batched_tokens, max_num_seqs, max_model_len, window, ratios, window_block_size, engine_slots:
            see `plan_buffers`.
        block_tables: the engine's persistent tables, used in place; None allocates them here. Each has at least
            `max_num_seqs` rows and covers `max_model_len` tokens, else E403.

    Every buffer is filled with its pad value at first.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        window: int = layout.SLIDING_WINDOW,
        ratios: Collection[int] = RATIOS,
        window_block_size: int = layout.WINDOW_BLOCK,
        engine_slots: bool = False,
        block_tables: BlockTables | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.plan: BufferPlan = plan_buffers(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            window=window,
            ratios=ratios,
            window_block_size=window_block_size,
            engine_slots=engine_slots,
        )
        sizes = self.plan.sizes
        self.max_num_batched_tokens, self.max_num_seqs = sizes["max_num_batched_tokens"], sizes["max_num_seqs"]
        self.max_model_len, self.window_block_size = sizes["max_model_len"], sizes["window_block_size"]
        self.groups = tuple(group.name for group in self.plan.groups)
        """Names of the groups of caches, each with a block table."""
        adopted = {} if block_tables is None else self._adopt(block_tables)
        allocated = self.plan.allocate([spec.name for spec in self.plan.specs if spec.name not in adopted], device)
        self.tensors: dict[str, Tensor] = allocated | adopted
        """Every buffer by its declared name."""
        self._tables = {group: self.tensors[f"{group.name}_block_table"] for group in self.plan.groups}
        self._ratios = [group.ratio for group in self.plan.groups if group.role == "entries"]
        self.block_tables = BlockTables.of({group.name: table for group, table in self._tables.items()})
        """The persistent block tables of the model's groups."""
        self._rows = 0

    def _adopt(self, block_tables: BlockTables) -> dict[str, Tensor]:
        """Return views of the engine's tables by buffer name."""
        adopted = {}
        for group in self.plan.groups:
            columns = self.plan.sizes[f"{group.name}_blocks"]
            table = check_table(group.name, block_tables.table(group), self.max_num_seqs, columns)
            adopted[f"{group.name}_block_table"] = table[: self.max_num_seqs]
        return adopted

    def __repr__(self) -> str:
        return (
            f"MetadataBuffers({self.max_num_batched_tokens} tokens of {self.max_num_seqs} requests of up to "
            f"{self.max_model_len} tokens, {', '.join(self.groups)}, {self.nbytes / 2**20:.1f} MiB)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, adopted block tables included."""
        return self.plan.nbytes

    def load(
        self,
        query_start_loc: Ints,
        seq_lens: Ints,
        *,
        block_tables: BlockTables | None = None,
        slot_mapping: Tensor | None = None,
        input_ids: Ints | None = None,
        reserved: Ints | None = None,
    ) -> None:
        """Copy a step's batch into the input buffers and fill the rest of each with padding.

        Args:
            query_start_loc: R + 1 ints, first token of each request and the end of the last; R <= `max_num_seqs`.
            seq_lens: R ints, this step's query included; 0 for padded requests.
            block_tables: int `[R, B]` of every group, B at most the width of the persistent table; None keeps the
                current tables, for example those of the engine.
            slot_mapping: int `[T]`, required by buffers with `engine_slots`, E201 for others.
            input_ids: up to T tokens. reserved: R ints, tokens each request has pages for (None = `max_model_len`).

        Values of lists and CPU tensors are checked: E401 for a batch over capacity, E402 for a sequence that is too
        long, E403 for a table that is too narrow. For device tensors only shapes are checked, since reading values
        would synchronise.
        """
        starts, lens = int_tensor("query_start_loc", query_start_loc), int_tensor("seq_lens", seq_lens)
        inputs = {"query_start_loc": starts, "seq_lens": lens}
        inputs["reserved"] = lens.new_zeros(0) if reserved is None else int_tensor("reserved", reserved)
        if input_ids is not None:
            inputs["input_ids"] = int_tensor("input_ids", input_ids)
        if slot_mapping is not None:
            inputs["slot_mapping"] = int_tensor("slot_mapping", slot_mapping)
        for name, values in inputs.items():
            check_ints(name, values)
        longest = check_batch(starts, lens, self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len)
        check_lengths("has pages for", inputs["reserved"], self.max_model_len)
        check(
            (slot_mapping is None) == ("slot_mapping" not in self.tensors),
            "E201",
            got="no slot_mapping" if slot_mapping is None else "a slot_mapping",
            rule="slot_mapping is passed exactly if the buffers have engine_slots=True",
        )
        for name, values in inputs.items():
            check_capacity(f"elements of {name}", values.shape[0], self.tensors[name].shape[0], "capacity")
        tables = {} if block_tables is None else self._checked_tables(block_tables, lens.shape[0], longest)

        for name, values in inputs.items():
            self._put(name, values)
        for name, table in tables.items():
            self._put_table(name, table, lens.shape[0])
        self.tensors["overflow"].zero_()
        self._rows = 0

    def _checked_tables(self, block_tables: BlockTables, requests: int, longest: int) -> dict[str, Tensor]:
        """Return the tables to copy, by buffer name, without those that already are the buffers."""
        tables = {}
        for group, buffer in self._tables.items():
            columns, table = layout.cdiv(longest, group.page_tokens), block_tables.table(group)
            if table.data_ptr() != buffer.data_ptr():
                tables[f"{group.name}_block_table"] = check_table(group.name, table, requests, columns, buffer.shape[1])
        return tables

    def _put(self, name: str, values: Tensor) -> None:
        buffer, count = self.tensors[name], values.shape[0]
        buffer[:count].copy_(values)
        if name == "query_start_loc":
            buffer[count:].copy_(buffer[count - 1 : count].expand(buffer.shape[0] - count))
        else:
            buffer[count:].fill_(next(self.plan.pad(spec) for spec in self.plan.specs if spec.name == name))

    def _put_table(self, name: str, table: Tensor, requests: int) -> None:
        buffer, width = self.tensors[name], table.shape[1]
        buffer[:requests, :width].copy_(table[:requests])
        buffer[:requests, width:].fill_(layout.PAD_INDEX)
        buffer[requests:].fill_(layout.PAD_INDEX)

    def refresh(self, num_tokens: int | None = None) -> None:
        """Rewrite all outputs from the inputs, in place: rows of tokens, then padding.

        Args:
            num_tokens: rows to rewrite for `metadata(num_tokens)`, at least the number of tokens of the batch; None
                for all. E401 above capacity.

        Runs one op, `torch.ops.dsv4.batch_metadata`; capturable.
        """
        rows = self.max_num_batched_tokens if num_tokens is None else num_tokens
        check_capacity("tokens", rows, self.max_num_batched_tokens, "max_num_batched_tokens")
        batch = self.tensors["query_start_loc"], self.tensors["seq_lens"]
        torch.ops.dsv4.batch_metadata(
            *arguments_of(*batch, self.tensors.get("slot_mapping"), self._tables, self._ratios, self.tensors, rows)
        )
        self._rows = rows

    def advance(self, num_new: Tensor, tokens: Tensor, drafts: Tensor | None = None, *, query_len: int = 1) -> None:
        """Update the inputs for the next decode step on the device: lengths, query starts and input tokens.

        Args:
            num_new: int `[max_num_seqs]`, tokens of its query that each request keeps.
            tokens: int `[max_num_seqs, S]`, sampled by the model; drafts: int `[max_num_seqs, query_len - 1]`.
            query_len: tokens of each request in the next step; `max_num_seqs * query_len` fit the buffers.

        Runs one op, `torch.ops.dsv4.advance`; capturable. Call `refresh` next. A request that would exceed its
        `reserved` tokens becomes padding, and its `overflow` is set to its number of tokens.
        """
        names = ("query_start_loc", "seq_lens", "input_ids", "overflow")
        torch.ops.dsv4.advance(
            num_new, tokens, drafts, self.tensors["reserved"], query_len, *(self.tensors[name] for name in names)
        )

    def metadata(self, num_tokens: int) -> AttentionMetadata:
        """Return views of the first `num_tokens` rows, with the same addresses and strides at every call.

        Raises E401 above capacity, and E404 for rows that have not been refreshed since `load`, which still describe an
        older batch.
        """
        check_capacity("tokens", num_tokens, self.max_num_batched_tokens, "max_num_batched_tokens")
        check(
            num_tokens <= self._rows,
            "E404",
            got=f"metadata({num_tokens}) after refresh({self._rows})" if self._rows else "metadata before refresh",
            fix=f"call refresh({num_tokens}) after load and before metadata",
        )
        return metadata_of({name: tensor[:num_tokens] for name, tensor in self.tensors.items()}, self.block_tables)
