"""DeepSeek-V4.1 as a language model of transformers: its forward, its generation loop, and compilation in place.

transformers has no class of V4.1, so this one is a thin shell over `models.v41`. A prompt runs in steps of
`max_step_tokens` a sequence, and the layers after the last source on its tail if only its last logits are asked for.
Greedy generation that nothing else looks into runs `models.v41.generate`, other generation transformers' loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import check, fail
from ...layout import PAD_INDEX
from ...models.v41.compiled import CompiledSteps
from ...models.v41.config import MODEL_TYPE
from ...models.v41.generate import generate
from ...models.v41.model import V41Model
from ...models.v41.prefill import LEAST_ROWS, chunks_of, facts_of, run_chunk, tail_length
from ...models.v41.ranks import same_on_ranks, step_of_ranks
from ...models.v41.save import official_config, save_folder
from ...runtime import graphs_for
from ...runtime.compiler_choice import compiler_of
from ...runtime.drafting import DraftStatistics
from .._compat import mask_columns, padding_of
from .batch_checks import Call, check_batch
from .cache import CACHE_NAME, CacheHandle, PagedCache, given_cache
from .call_checks import check_call, held_by, take
from .call_results import RECORDED, inference_only
from .draft_columns import AsksForDrafts, why_host
from .draft_generate import skipped_additions
from .generate_call import current, take_own
from .paged_generation import GeneratesFromPages
from .token_buckets import is_hooked
from .token_inputs import kept
from .v41_cache import NewTokens, V41Cache
from .v41_drafts import V41DraftCall, modes


class V41HfConfig(PreTrainedConfig):  # type: ignore[misc]
    """Fields of an official `text_config`, as transformers asks for them."""

    model_type = MODEL_TYPE


class _Compiled(NamedTuple):
    """Arguments of `model.compile`, as `CompiledSteps` takes them."""

    backend: Any
    options: Mapping[str, Any]
    graphs: str
    prompt_buckets: tuple[int, ...] | None


class V41ForCausalLM(AsksForDrafts, GeneratesFromPages, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Language model of transformers around a `V41Model`. `hf.load` makes it of a folder of DeepSeek-V4.1.

    Args:
        model: in inference mode; `model.model` of this one.
        sizes: of the caches that calls without a cache use, see `V41Caches`.
        generation: configuration of `generate` (None = from the model's).
    """

    config_class = V41HfConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    draft_statistics: DraftStatistics | None = None
    """Acceptance by position and tokens a step of the last `generate`, None if it ran without drafts."""

    def __init__(self, model: V41Model, sizes: Mapping[str, Any], generation: GenerationConfig | None = None) -> None:
        text = official_config(model.config)["text_config"]
        text.pop("rope_scaling", None)  # transformers would compute RoPE by it
        text |= {"model_type": MODEL_TYPE, "attn_implementation": "eager", "dtype": model.dtype}
        super().__init__(V41HfConfig(**text))
        self.model = model
        self.generation_config = generation or self.generation_config
        self.dsv4_cache = self.new_cache(**sizes)
        self.compiled: _Compiled | None = None
        self.eval()

    def new_cache(self, **sizes: Any) -> V41Cache:
        """Allocate caches of `sizes`, or of those of the model's cache, see `hf.new_cache`."""
        own = self.__dict__.get("dsv4_cache")
        if own is not None:
            names = "max_batch_size", "max_seq_len", "max_step_tokens", "cache_format"
            sizes = {name: getattr(own.paged, name) for name in names} | sizes
            steps = sizes["max_step_tokens"], sizes["max_seq_len"]
            if any(type(size) is int and size < self._step_tokens for size in steps):
                sizes = {"drafts": False, **sizes}
        with torch.inference_mode(False):
            return V41Cache(self.model.new_caches(**sizes))

    def entered_model(self) -> tuple[Any, Callable[[], PagedCache]]:
        """Return this model and a function that allocates a cache for it."""
        return self, self.new_cache

    @property
    def dsv4_drafts(self) -> Any:
        """Draft layers of the model, None for none."""
        return self.model.mtp

    @property
    def _step_tokens(self) -> int:
        """Tokens of a step with drafts, 0 without."""
        return 0 if self.model.mtp is None else self.model.mtp.config.step_tokens

    def get_input_embeddings(self) -> Any:
        """Return the embedding."""
        return self.model.embed

    def get_output_embeddings(self) -> Any:
        """Return the output head."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise E208: the engram's n-grams are hashes of the tokens of this vocabulary."""
        fail("E208", got="resize_token_embeddings", why="the engram hashes the tokens of its vocabulary")

    def compile(
        self,
        *,
        backend: Any = "inductor",
        options: Mapping[str, Any] | None = None,
        fullgraph: bool = True,
        dynamic: bool | None = None,
    ) -> None:
        """Compile in place; the first call of each cache, or `hf.warm_up`, compiles all graphs, with progress.

        Args:
            backend, options: of `torch.compile`. `dsv4.cudagraph="full"` captures steps over the model's own cache as
                `v41.compile` does, with `dsv4.buckets="off"` decode steps alone; caches of `hf.new_cache` share its
                compiled code, and are not captured.
            fullgraph, dynamic: steps are always one graph of dynamic sizes; E303 for False.

        Raises E301 for a backend or options that nobody knows, E420 for captures on a CPU.
        """
        whole = fullgraph is not False and dynamic is not False
        check(whole, "E303", got=f"{fullgraph=}, {dynamic=}", why="a step of V4.1 is one graph of dynamic sizes")
        left = dict(options or {})
        captured = left.pop("dsv4.cudagraph", "off") == "full"
        graphs = left.pop("dsv4.cudagraph.graphs", "auto") if captured else "off"
        buckets = left.pop("dsv4.buckets", "auto")
        check(buckets != "on" or captured, "E208", got='dsv4.buckets="on" without captures', why="they are of captures")
        compiler_of(backend, left)
        if graphs != "off":
            graphs_for(self.model.device, graphs, 'options={"dsv4.cudagraph.graphs": "standin"}')
        self.compiled = _Compiled(backend, left, graphs, () if buckets == "off" else None)
        self.dsv4_cache.steps = None

    def steps_of(self, cache: V41Cache) -> CompiledSteps | V41Model:
        """Return the runner of steps over `cache`, compiled and captured by the first call of a compiled model."""
        how = self.compiled
        if how is None:
            return self.model
        if cache.steps is None:
            graphs = how.graphs if cache is self.dsv4_cache else "off"
            own = self.model, cache.paged, how.backend, how.options or None
            cache.steps = CompiledSteps(*own, graphs=graphs, prompt_buckets=how.prompt_buckets)
            cache.steps.warm_up()
        return cache.steps

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PagedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        *,
        cache: PagedCache | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
    ) -> Any:
        """Append `input_ids` `[B, S]` to the sequences of the cache; return float32 logits of the last columns.

        Args:
            attention_mask: marks tokens in its last S columns. Padding, on whichever side, has logits of 0.
            position_ids: must be those that follow from cache and mask.
            past_key_values, cache: what an earlier call returned, or `hf.new_cache`; None = the model's, emptied.
            labels: `[B, S]`, adds the mean loss of the next tokens.
            logits_to_keep: number of last columns with logits, 0 = all. 1 runs late layers on the prompt's tail.
        """
        arguments = {"output_attentions": output_attentions, "inputs_embeds": inputs_embeds}
        check_call(self, {"input_ids": input_ids, "attention_mask": attention_mask, **arguments})
        recorded = zip(RECORDED, (output_hidden_states, output_router_logits), strict=True)
        wanted = [f"{name}=True" for name, value in recorded if value]
        check(not wanted, "E208", got=" and ".join(wanted), why="steps return logits alone")
        integer = type(logits_to_keep) is int and logits_to_keep >= 0
        check(integer, "E208", got=f"logits_to_keep={logits_to_keep!r}", fix="pass a number of columns, 0 for all")
        assert input_ids is not None
        given = given_cache({"cache": cache, "past_key_values": past_key_values})
        handle = take_own(self, self.new_cache, hold=False) if given is None else given
        held: Any = held_by(self, handle)
        take(held, new=given is None)
        columns = 0 if labels is not None else logits_to_keep
        with _entered(held), modes():
            logits = self._logits(input_ids, attention_mask, position_ids, held, columns)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        returned: dict[str, Any] = {CACHE_NAME: None if use_cache is False else handle}
        result = CausalLMOutputWithPast(loss=loss, logits=logits, **returned)
        return inference_only(result if return_dict is not False else result.to_tuple())

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, held: Any, keep_last: int) -> Tensor:
        """Append columns `[B, S]` to a cache; return logits `[B, N, V]` of the last `keep_last` of them, 0 = all."""
        check_batch(Call(ids, mask, positions, held), in_chunks=True)
        rows, columns = ids.shape
        keep = None if mask is None else kept(mask, columns)
        held.interrupted = True  # until the end
        if columns == 1:
            logits = self._decode(ids[:, 0], keep, held)[:, None]
        else:
            logits = self._prompt(ids, keep, held, min(keep_last or columns, columns))
        held.rows, held.appended, held.interrupted = rows, held.appended + columns, False
        return logits

    def _decode(self, ids: Tensor, keep: Tensor | None, held: Any) -> Tensor:
        """Append a token to each sequence; return logits `[B, V]`. Waits for nothing."""
        lengths, rows = held.seq_lens[: len(ids)], len(ids)
        live = torch.ones_like(lengths, dtype=torch.bool) if keep is None else keep[:, 0]
        positions = torch.where(live, lengths.long(), PAD_INDEX)
        missing = max(0, LEAST_ROWS - rows)
        requests = torch.arange(rows + missing, device=ids.device)
        # New tensors: a graph is specialised on the sizes of a view's base.
        inputs = pad(ids.long().clone(), (0, missing)), pad(positions, (0, missing), value=PAD_INDEX), requests
        with step_of_ranks(self.model):
            logits: Tensor = self.steps_of(held)(*inputs, held.paged)[:rows]
        lengths.add_(live)
        return torch.where(live[:, None], logits, 0)

    def _prompt(self, ids: Tensor, keep: Tensor | None, held: Any, keep_last: int) -> Tensor:
        """Append columns to each sequence; return logits `[B, N, V]` of the last `keep_last` of them."""
        model, (rows, columns), device = self.model, ids.shape, ids.device
        with same_on_ranks(model, "a forward") as facts:
            tokens = NewTokens.of(ids, keep, held, model.config)
            facts |= facts_of(tokens.prompts) | {"logits_to_keep": keep_last}
        run, first = self.steps_of(held), columns - keep_last
        starts, column_of = torch.tensor(tokens.starts), pad_sequence(tokens.columns, batch_first=True)
        ends = all(len(some) and int(some[-1]) == columns - 1 for some in tokens.columns)
        tail = tail_length(model.config, "tail") if keep_last == 1 and ends else None
        logits = torch.zeros(rows, keep_last, model.config.vocab_size, dtype=torch.float32, device=device)
        for step in chunks_of(tokens.prompts, held.paged.max_step_tokens, tail):
            if tail is not None:  # all rows, in order
                numbers, wanted = [number for number, _ in step.ends], [row for _, row in step.ends]
                at = torch.tensor(numbers, dtype=torch.int64), torch.zeros(len(numbers), dtype=torch.int64)
            else:
                sequence = step.requests.clamp(min=0)
                column = column_of[sequence, (step.positions - starts[sequence]).clamp(min=0)] - first
                chosen = ((step.positions >= 0) & (column >= 0)).nonzero()[:, 0]
                at, wanted = (sequence[chosen], column[chosen]), chosen.tolist()
            result = run_chunk(model, run, held.paged, step, wanted)
            logits.index_put_(tuple(index.to(device) for index in at), result[: len(wanted)])
        tokens.note(held)
        return logits

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate with drafts; else greedy tokens alone by `models.v41.generate`, and others by transformers' loop.

        The log says once why a call that wants drafts runs without.
        """
        held: Any = held_by(self, model_kwargs[CACHE_NAME])
        self.draft_statistics = None
        if self._may_draft(generation_config):
            why, seeds = self._why_plain(held, logits_processor, generation_config, synced_gpus, model_kwargs), None
            if not why:
                call = V41DraftCall(self, logits_processor, stopping_criteria, generation_config, streamer)
                seeds = call.draw_seeds(len(input_ids))
            if self.model.in_step is not None:
                seeds = self.model.in_step.agree({"runs without drafts": why}, seeds)[0]
            if seeds is not None:
                return call.generate(input_ids, seeds, model_kwargs)
            self._tell(why)
        new = stopping_criteria.max_length - input_ids.shape[1]
        generation, config, own = current(), generation_config, isinstance(model_kwargs[CACHE_NAME], CacheHandle)
        plain = (
            not (logits_processor or config.do_sample or config.return_dict_in_generate or synced_gpus)
            and {type(criterion) for criterion in stopping_criteria} <= {MaxLengthCriteria, EosTokenCriteria}
            and (own or len(input_ids) == 1)  # sequences that ended would have no padding in the cache
            and stopping_criteria.max_length <= held.paged.max_seq_len
            and not held.interrupted
            and generation is not None
            and generation.undisturbed
            and not is_hooked(self.modules())
        )
        if plain:
            return self._generate(input_ids, stopping_criteria, config, streamer, held, new, **model_kwargs)
        inherited: Any = super()
        arguments = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return inherited._sample(input_ids, logits_processor, stopping_criteria, generation_config, **arguments)

    def _why_plain(self, held: Any, processors: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any]) -> str:
        """Return why a call runs without drafts, or ""."""
        if why := why_host(processors, config, synced_gpus, kwargs):
            return why
        for module in (self, self.model):
            if addition := skipped_additions(module):
                return f"a {type(module).__name__} with {addition}"
        if is_hooked(self.modules()):
            return "modules with hooks"
        if (most := held.paged.max_step_tokens) < self._step_tokens:
            return f"the cache takes {most} tokens in a step, and drafts need {self._step_tokens}"
        return "" if held.paged.drafts is not None else "the cache has no windows for drafts"

    def _generate(
        self, ids: Tensor, criteria: Any, config: Any, streamer: Any, held: Any, new: int, **model_kwargs: Any
    ) -> Tensor:
        """Return greedy tokens `[B, S + N]` of a prompt, whose new columns are appended to the cache."""
        mask = model_kwargs.get("attention_mask")
        columns = mask_columns(config, mask, ids) - held.appended
        last, keep = ids[:, -columns:], None if mask is None else kept(mask, columns)
        check_call(self, {"input_ids": last, "attention_mask": mask})
        check_batch(Call(last, mask, None, held), in_chunks=True)
        ends = {int(token) for criterion in criteria for token in getattr(criterion, "eos_token_id", [])}
        fill = padding_of(config, criteria)

        def put(chosen: list[int | None]) -> None:
            streamer.put(torch.tensor([fill if token is None else token for token in chosen]))

        with modes():
            tokens = NewTokens.of(last, keep, held, self.model.config)
            held.interrupted = True
            run: Any = self.steps_of(held)
            answers = generate(
                self.model,
                [prompt.ids for prompt in tokens.prompts],
                starts=tokens.starts,
                max_new_tokens=new,
                stop=ends,
                caches=held.paged,
                drafts=False,
                forward=None if run is self.model else run,
                on_tokens=None if streamer is None else put,
            )
            tokens.note(held, [len(answer) - 1 for answer in answers])
            longest = max(map(len, answers))
            padded = [answer + [fill or 0] * (longest - len(answer)) for answer in answers]
            held.rows, held.appended, held.interrupted = len(ids), held.appended + columns + longest - 1, False
            if streamer is not None:
                streamer.end()
            return torch.cat([ids, torch.tensor(padded).to(ids)], dim=1)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' `generate`, greedy calls on the device alone, as `models.v41.generate` does.

        All ranks of a split model make the same call. E702 on all of them if they chose different tokens, as they do
        where sampling has not the same seed.
        """
        result = super().generate(*args, **kwargs)
        with same_on_ranks(self.model, "the end of generate") as facts:
            tokens = result if isinstance(result, Tensor) else result.sequences
            facts["tokens"] = zlib.crc32(repr(tokens.tolist()).encode()) if self.model.in_step is not None else 0
        return result

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write an official folder, without the tokenizer, see `models.v41.save_folder`.

        Raises E208 for options of transformers, and E201 for quantised weights: copy the folder that was loaded.
        """
        check(not kwargs, "E208", got=f"save_pretrained with {', '.join(kwargs)}", fix="pass the folder alone")
        save_folder(self.model, save_directory)
        self.generation_config.save_pretrained(save_directory)


@contextmanager
def _entered(held: Any) -> Iterator[None]:
    """Give a cache back that `take` has taken."""
    try:
        yield
    finally:
        held.entered = False
