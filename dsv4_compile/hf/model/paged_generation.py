"""Generation of text over paged caches: the loop of transformers, its calls of the model, and options it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from ...errors import check, fail
from .cache import CACHE_NAME, PagedCache, given_cache
from .call_checks import NO_WEIGHTS, held_by
from .call_results import RECORDED
from .draft_columns import OPTION
from .generate_call import check_prompt, generating, is_undisturbed, take_own
from .token_inputs import mark_dynamic_tokens
from .unchanged_block import has_block


class GeneratesFromPages:
    """Part of a language model whose `generate` uses a paged cache and marks dynamic dims, so that nothing recompiles.

    The method `entered_model` returns the owner of the cache `dsv4_cache`, and a function that allocates one like it.
    """

    entered_model: Callable[[], tuple[Any, Callable[[], PagedCache]]]
    generation_config: Any

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `transformers.GenerationMixin.generate`, with the model's cache unless the call has one."""
        drafts, model = kwargs.pop(OPTION, None), self.entered_model()[0]
        cache = given_cache(kwargs)
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        held = None if cache is None else held_by(model, cache)
        check_prompt(args, kwargs, held, self.generation_config)
        inherited: Any = super()
        with generating(not has_block(model) and is_undisturbed(self, args, kwargs), drafts):
            return inherited.generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise E208: `hf.RunningBatch` is the continuous batching of a converted model."""
        fail(
            "E208",
            got="transformers' continuous batching",
            why="it pages keys and values of all layers, and a converted model has its own caches",
            fix="use dsv4_compile.hf.RunningBatch(model, slots=...), or pass a padded batch to generate",
        )

    continuous_batching_context_manager = generate_batch = init_continuous_batching

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        check(
            generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            "E208",
            got=f"generation mode {generation_mode.value}",
            fix="use greedy search or sampling (num_beams=1, no assistant model)",
        )
        check(
            generation_config.cache_implementation is None,
            "E208",
            got=f"cache_implementation={generation_config.cache_implementation!r}",
            why="a converted model has its own static cache",
            fix="leave cache_implementation unset",
        )
        check(generation_config.use_cache is not False, "E208", got="use_cache=False", fix="leave use_cache unset")
        check(not generation_config.output_attentions, "E208", got="output_attentions=True", why=NO_WEIGHTS)
        mask = model_kwargs.get("attention_mask")
        check(
            mask is None or mask.dim() != 2 or bool((mask[:, -1] != 0).all()),
            "E208",
            got="prompts that end in padding",
            why="the first new token would follow from a padding token",
            fix='pad prompts on the left: tokenizer.padding_side = "left"',
        )
        rows = batch_size * generation_config.num_return_sequences
        cache, (model, allocate) = model_kwargs.get(CACHE_NAME), self.entered_model()
        if cache is None:
            model.dsv4_cache.check_fits(rows, max_cache_length)
            model_kwargs[CACHE_NAME] = take_own(model, allocate, hold=True)
        else:
            held_by(model, cache).check_fits(rows, max_cache_length)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: PagedCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the new columns and their mask, and nothing that depends on the step, so that one graph serves all."""
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        # Contiguous copies, because a slice of one column has other strides, and graphs guard on strides.
        input_ids = input_ids.clone(memory_format=torch.contiguous_format)
        # Always a mask: transformers makes one only if there is padding, and None would need a second graph.
        recent = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        recent = recent.clone(memory_format=torch.contiguous_format)
        inputs: dict[str, Any] = {
            "input_ids": mark_dynamic_tokens(input_ids),
            "attention_mask": mark_dynamic_tokens(recent),
            CACHE_NAME: given_cache({"cache": cache, **kwargs}),
        }
        forwarded = ("use_cache", "logits_to_keep", *RECORDED)
        inputs.update({name: kwargs[name] for name in forwarded if kwargs.get(name) is not None})
        return inputs
