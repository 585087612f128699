"""Paged caches of a converted model with transformers' cache interface."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from ..._compat import CACHE_NAMES, assert_async, cache_name, mark_static, mark_static_address
from ...cache import TENSORS_OF, CacheFormat, PagedCaches
from ...config import DeepseekV4Config
from ...errors import check, fail
from ...metadata import AttentionMetadata, build_batch_metadata, build_metadata
from ...runtime.addresses import HeldTensors
from ...runtime.repeated_layers import Handed
from ...sizes import check_optional_size
from .layer_kinds import Repeated
from .redundant_guards import named

CACHE_NAME = cache_name()
"""Keyword and result field of the cache in the installed transformers; "" if it is unknown and `convert` raises."""

_WINDOW, _SOURCES = operator.attrgetter("window"), operator.attrgetter("sources")

# On one line, because Inductor copies it into generated source.
_OVERFLOW = "[E204] a sequence grew over the max_seq_len of its cache; dsv4 explain E204"


class PagedCache(Cache):
    """Static caches for up to `max_batch_size` sequences of up to `max_seq_len` tokens.

    Sequence lengths live on the device and advance inside the model's graph, so a step changes no Python state and
    nothing recompiles. A forward appends the tokens that its attention mask keeps. Padding is never stored, so every
    sequence has its own positions, on whichever side the batch is padded.

    The host's record of the cache, which `call_checks` keeps and no graph reads except `entered`:

    Attributes:
        generation: resets so far; a `CacheHandle` of an earlier one is stale.
        rows: sequences of the batch in the cache, 0 if it is empty.
        appended: columns since the last reset, padding included.
        holder: the `generate` call that owns the cache, or None.
        entered: whether a forward uses the cache now, in `thread`.
        interrupted: whether a forward failed after it may have written.
        drafted: columns since the last reset that drafts have read, all of them or fewer than `appended`.
        draft_caches: caches of the model's drafts, None before their first use.

    Graphs read `dsv4_parameters`, the tensors by a path for each, and guard `dsv4_state`, both as of the last `adopt`.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        max_batch_size: int,
        max_seq_len: int,
        cache_format: CacheFormat,
        max_step_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        with torch.inference_mode(False):  # later calls write the cache in any mode
            paged = PagedCaches(
                config,
                max_batch_size=max_batch_size,
                max_seq_len=max_seq_len,
                max_step_tokens=max_step_tokens,
                cache_format=cache_format,
                device=device,
            )
        self._hold(paged, paged.layers, device)
        for tensor in self._tensors().values():
            # A cache keeps its shape and address: its dims do not become symbols, and captures use it in place.
            mark_static(tensor)
            mark_static_address(tensor, guard=False)

    def _hold(self, paged: Any, layers: Iterable[Any], device: torch.device | str | None) -> None:
        """Begin the record of empty caches."""
        super().__init__(layers=list(layers))
        self.paged = paged
        with torch.inference_mode(False):
            self.seq_lens = torch.zeros(paged.max_batch_size, dtype=torch.int32, device=device)
        self.generation = 0
        self.rows = 0
        self.appended = 0
        self.holder: object | None = None
        self.entered = False
        self.thread = 0
        self.interrupted = False
        self.drafted = 0
        self.draft_caches: Any = None
        self.dsv4_state = ""
        self.dsv4_parameters: dict[str, Tensor] = {}
        self._parts: list[Any] = []
        self.compared: HeldTensors | None = None
        self._repeated: tuple[Any, Any, list[Tensor]] = ((), None, [])

    def _tensors(self) -> dict[str, Tensor]:
        named = [(f"layers.{i}.{name}", t) for i, x in enumerate(self.paged.layers) for name, t in x.tensors().items()]
        tables = [(f"block_tables.{name}", table) for name, table in self.paged.block_tables.tensors().items()]
        return dict([*named, *tables, ("seq_lens", self.seq_lens)])

    def adopt(self) -> None:
        """Let graphs run with the tensors that the cache has now; `dsv4_state` names what they guard of it."""
        if self.holds():
            return
        paged = self.paged
        self._parts, self.dsv4_parameters = self._parts_now(), self._tensors()
        self.compared = HeldTensors(self.dsv4_parameters.values())
        settings = {name: value for name, value in vars(paged).items() if name not in ("layers", "block_tables")}
        self.dsv4_state = named({**settings, **self.dsv4_parameters})

    def holds(self) -> bool:
        """Return whether the cache has the tensors and settings that graphs were last told of."""
        parts = self._parts_now()
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return same and self.compared is not None and self.compared.hold()

    def handed(self, repeated: Repeated) -> Handed:
        """Return what graphs of a model take with this cache; its tensors are those of the last `adopt`."""
        layers, compared, caches = self._repeated
        if layers is not repeated.layers or compared is not self.compared:
            caches = repeated.caches(self.paged.layers)
            self._repeated = repeated.layers, self.compared, caches
        return Handed(repeated.weights, caches)

    def _parts_now(self) -> list[Any]:
        paged = self.paged
        layers, tables = paged.layers, paged.block_tables
        parts = [*vars(paged).values(), self.seq_lens, tables.window]
        for source in tables.sources.values():
            parts.extend(vars(source).values())
        sources = map(TENSORS_OF, chain.from_iterable(map(_SOURCES, layers)))
        return [*parts, *map(_WINDOW, layers), *chain.from_iterable(sources)]

    def begin_step(self, batch_size: int, num_columns: int, keep: Tensor | None) -> AttentionMetadata:
        """Append `num_columns` columns to the first `batch_size` sequences; return the metadata of those tokens.

        Args:
            keep: bool `[B, num_columns]`, which columns hold a token; those of a row are neighbours. None = all.
        Returns:
            Metadata of the `T = B * num_columns` tokens in row-major order, with masked tokens as padding.
        """
        paged, device = self.paged, self.seq_lens.device
        if keep is None:
            keep = torch.ones(batch_size, num_columns, dtype=torch.bool, device=device)
        lengths = self.seq_lens[:batch_size]
        grown = lengths + keep.sum(dim=1, dtype=torch.int32)
        # Only the device knows the lengths. The check runs there, without synchronisation.
        assert_async((grown <= paged.max_seq_len).all(), _OVERFLOW)
        positions = lengths[:, None].long() + keep.cumsum(dim=1) - 1
        requests = torch.arange(batch_size, dtype=torch.int32, device=device)[:, None].expand(-1, num_columns)
        metadata = build_metadata(
            positions=positions.clamp(min=0).reshape(-1),
            token_to_req=requests.reshape(-1),
            is_valid_token=keep.reshape(-1),
            block_tables=paged.block_tables,
            window=paged.config.sliding_window,
            max_model_len=paged.max_seq_len,
            ratios=paged.config.compressed_ratios,
        )
        lengths.copy_(grown)
        return metadata

    def begin_prompts(self, rows: Tensor, keep: Tensor) -> AttentionMetadata:
        """Append tokens of any sequences, kept ones first; return the metadata of all.

        Args:
            rows: int `[T]`, sequence of each token in the order of the call, not decreasing among those in `keep`.
            keep: bool `[T]`, which of them are tokens, not padding.
        Returns:
            Metadata of T tokens: those in `keep`, in their order, then padding.
        """
        paged = self.paged
        sequences = torch.arange(self.seq_lens.shape[0], device=rows.device)
        counts = ((rows == sequences[:, None]) & keep).sum(dim=1)
        grown = self.seq_lens + counts.to(torch.int32)
        assert_async((grown <= paged.max_seq_len).all(), _OVERFLOW)
        metadata = build_batch_metadata(
            query_start_loc=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            seq_lens=grown,
            num_tokens=rows.shape[0],
            block_tables=paged.block_tables,
            window=paged.config.sliding_window,
            max_model_len=paged.max_seq_len,
            ratios=paged.config.compressed_ratios,
        )
        self.seq_lens.copy_(grown)
        return metadata

    def reset(self) -> None:
        """Remove all sequences. Cache rows keep their bytes, because no row is read before it is written again."""
        self.seq_lens.zero_()
        self.generation += 1
        self.rows = self.appended = self.drafted = 0
        self.interrupted = False

    def check_fits(self, batch_size: int, length: int) -> None:
        """Raise E204 unless `batch_size` sequences of up to `length` tokens fit."""
        paged = self.paged
        check(
            batch_size <= paged.max_batch_size and length <= paged.max_seq_len,
            "E204",
            got=f"{batch_size} sequences of up to {length} tokens",
            why=f"the cache was allocated for {paged.max_batch_size} sequences of {paged.max_seq_len} tokens",
            fix=RESIZE,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns appended since the last reset, padding included, as transformers counts."""
        return self._record.appended

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the length of the longest sequence that fits."""
        return self.paged.max_seq_len

    @property
    def is_croppable(self) -> bool:
        """False: a step that is taken back has overwritten the states of open compression groups."""
        return False

    @property
    def is_compileable(self) -> bool:
        """False, so that transformers builds no dense masks and does not compile the model with its own options.

        Compile it with `model.compile(backend="dsv4")`.
        """
        return False

    @property
    def max_batch_size(self) -> int:
        return self.paged.max_batch_size

    @property
    def max_cache_len(self) -> int:
        """Length of the longest sequence that fits, as transformers before 5.24 calls it."""
        return self.paged.max_seq_len

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return the length of the longest sequence that fits, as transformers before 5.24 calls it."""
        return self.paged.max_seq_len

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 if it is empty."""
        return self._record.rows or -1

    @property
    def is_initialized(self) -> bool:
        """True: a paged cache is allocated when it is made."""
        return True

    def early_initialization(self, batch_size: int, *shape: Any, **options: Any) -> None:
        """Check that `batch_size` sequences fit. Raises E204; the caches are allocated."""
        self.check_fits(batch_size, 0)

    @property
    def _record(self) -> PagedCache:
        """The cache that has the host's record."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return self.paged.nbytes

    def _unsupported(self, what: str, *, why: str = "sequences keep their pages", fix: str = "") -> NoReturn:
        fail("E208", got=what, why=why, fix=fix or "use greedy search or sampling")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._unsupported("beam search (reorder_cache)")

    def crop(self, max_length: int) -> None:
        self._unsupported(
            f"crop({max_length})",
            why="a step that is taken back has overwritten the states of open compression groups",
            fix="call reset() and prefill again, or keep a cache for each branch; assisted decoding is unsupported",
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._unsupported("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._unsupported("batch_select_indices")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._unsupported("cache.update from an attention layer that is not converted")

    def __copy__(self) -> NoReturn:
        """Raise E432: two records of one memory would each go on in the other's sequences."""
        fail("E432", got=f"copy.copy of a {type(self).__name__}", fix="use copy.deepcopy, or hf.new_cache(model)")

    def __repr__(self) -> str:
        paged, stored = self.paged, getattr(self.paged.cache_format, "kv", "DeepSeek-V4.1")
        sizes = f"{paged.max_batch_size} x {paged.max_seq_len} tokens"
        return f"PagedCache({sizes}, {stored}, {self.nbytes / 2**20:.1f} MiB)"


_OF_CACHE_LAYERS = (
    *("get_mask_sizes", "offload", "prefetch", "activate_past_recording", "has_previous_state", "update_indexer"),
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
)
"""Methods of transformers' caches that a paged cache cannot have, because its layers are no layers of transformers."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PagedCache, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise E208."""
        self._unsupported(
            f"cache.{name}", why="its layers are pages, which ops of this package read", fix="leave it out"
        )

    return refuse


for _name in _OF_CACHE_LAYERS:
    setattr(PagedCache, _name, _refusal(_name))


class CacheHandle(PagedCache):
    """The cache of one call: what a forward without a cache returns.

    It shares the model's cache until a later call takes that cache, from when on it is stale and raises E208.
    """

    def __init__(self, cache: PagedCache, holder: object | None = None) -> None:
        self.cache = cache
        self.entered, self.thread = False, 0
        self.generation = cache.generation
        self.holder = holder
        self.paged, self.layers = cache.paged, cache.layers
        self.seq_lens = cache.seq_lens

    @property
    def _record(self) -> PagedCache:
        return self.cache

    @property
    def stale(self) -> bool:
        """Whether a later call has taken the cache."""
        return self.generation != self.cache.generation

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns appended to this call's sequences. Raises E208 if the handle is stale."""
        check(not self.stale, "E208", got=f"a stale {CACHE_NAME}", why=STALE, fix=OWN_CACHE)
        return super().get_seq_length(layer_idx)

    def reset(self) -> None:
        """Remove all sequences from the cache, and make this handle its current one."""
        self.cache.reset()
        self.generation = self.cache.generation


RESIZE = (
    f"for more sequences pass {CACHE_NAME}=dsv4_compile.hf.new_cache(model, max_batch_size=...); for longer ones "
    "dsv4_compile.hf.convert(dsv4_compile.hf.revert(model), max_batch_size=..., max_seq_len=...), or load the model so"
)
"""Advice for a batch that does not fit."""
STALE = f"a later call without {CACHE_NAME} has taken the model's cache"
OWN_CACHE = f"pass {CACHE_NAME}=dsv4_compile.hf.new_cache(model), one for each conversation"


def given_cache(arguments: dict[str, Any]) -> Any:
    """Remove the cache from the arguments of a call, under any name that transformers gave it; return it or None.

    Raises E208 for two.
    """
    caches = [cache for cache in (arguments.pop(name, None) for name in CACHE_NAMES) if cache is not None]
    if len(caches) > 1:
        fail("E208", got=" and ".join(CACHE_NAMES), why="both mean the cache", fix=f"pass {CACHE_NAME}")
    return caches[0] if caches else None


def cache_like(
    model: Any,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_step_tokens: int | None = None,
) -> PagedCache:
    """Allocate a cache like that of `model`, a `CompilableModel`, with other capacities if they are given."""
    own: PagedCache = model.dsv4_cache
    limit = own.paged.max_seq_len
    rows = check_optional_size("max_batch_size", max_batch_size) or own.paged.max_batch_size
    length = check_optional_size("max_seq_len", max_seq_len) or own.paged.max_seq_len
    step_tokens = check_optional_size("max_step_tokens", max_step_tokens) or own.paged.max_step_tokens
    check(length <= limit, "E204", got=f"max_seq_len={length}", why=f"the model was converted for {limit}", fix=RESIZE)
    return PagedCache(
        own.paged.config,
        max_batch_size=rows,
        max_seq_len=length,
        cache_format=own.paged.cache_format,
        max_step_tokens=step_tokens,
        device=own.seq_lens.device,
    )
