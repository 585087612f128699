"""Subclasses of Hugging Face's DeepSeek-V4 classes with a compilable forward, which `convert` swaps in.

They add and rename no parameters: `state_dict`, `save_pretrained` and weight updates see the original model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...cache import LayerCache
from ...errors import check
from ...metadata import AttentionMetadata
from ...runtime.repeated_layers import begin_layer, end_layer, repeat_layer
from .._compat import why_not_saved
from .begin_step import begin_step
from .cache import CACHE_NAME, PagedCache, cache_like
from .call_checks import WHY_NOT_WHOLE, EnteredOnHost, refuse_uncalled
from .draft_generate import GeneratesWithDrafts
from .draft_names import save_with_drafts
from .layer_kinds import LayerTensors, repeated_in, repeats_of, tensors_of_cache, without_rows
from .layers import CompilableHead
from .model_snapshot import Snapshot
from .paged_generation import GeneratesFromPages
from .redundant_guards import REPEATS, STATE, TENSORS, named
from .taps import Taps
from .token_buckets import is_hooked
from .token_inputs import check_autocast, kept, places_of, restored

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""

_log = logging.getLogger("dsv4_compile.hf")
_ADOPTING = threading.Lock()
"""Held by the thread that lets a model run with changed parameters."""
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def _model_forward(forward: _Forward) -> _Forward:
    """Decorate `forward` as transformers decorates a whole model: defaults from the config, and recorded outputs."""
    wrapped: Any = merge_with_config_defaults(capture_outputs(torch.no_grad()(forward)))
    return wrapped


def _is_custom_code(cls: type) -> bool:
    """Return that transformers knows the model: `save_pretrained` then writes the names that checkpoints have."""
    return False


class CompilableAttention(hf.DeepseekV4Attention):
    """Attention module that runs a `dsv4_compile.DeepseekV4Attention`, which shares its parameters."""

    def forward(
        self, hidden_states: Tensor, *, metadata: AttentionMetadata, caches: Sequence[LayerCache], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the attention of `hidden_states` `[B, S, hidden]` in that shape, and no attention weights."""
        check_autocast(hidden_states)
        flat = hidden_states.flatten(0, 1)
        out = self.dsv4(flat, metadata, caches[self.layer_idx])
        return out.view_as(hidden_states), None

    def release(self) -> None:
        """Move the parameters out of the matrices that they are rows of."""
        ours = vars(self).get("dsv4")
        if ours is not None:
            ours.release()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompilableAttention:
        """Convert the parameters and stack them again."""
        super()._apply(fn, recurse)
        self.dsv4.arrange()
        self.dsv4_weights.settle()
        return self


class CompilableNorm(hf.DeepseekV4RMSNorm):
    """RMSNorm that returns the dtype of its input.

    transformers 5.17 returns the dtype of the weight, float32, which bfloat16 linears do not accept.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., hidden]` and return the same shape and dtype."""
        normed: Tensor = super().forward(hidden_states)
        return normed.to(hidden_states.dtype)


class CompilableModel(EnteredOnHost, hf.DeepseekV4Model):
    """Decoder stack that builds metadata once per step from lengths on the device, without masks or Python counters."""

    is_custom_code: Any = classmethod(_is_custom_code)

    def entered_model(self) -> tuple[Any, Callable[[], PagedCache]]:
        """Return this model and a function that allocates a cache for it."""
        return self, partial(cache_like, self)

    def adopt(self) -> None:
        """Let the model run with the parameters that its modules have now.

        Raises E207 or E208 for parameters, modules or settings that it cannot run with.
        """
        before = self.dsv4_snapshot
        if self.is_unchanged():
            return
        with _ADOPTING:  # two threads would stack the same weights twice
            if self.dsv4_snapshot is not before and self.is_unchanged():
                return
            try:
                self.compare()
                snapshot = Snapshot(self)
            except BaseException:
                # In __dict__, because nn.Module's __setattr__ would examine the value.
                self.__dict__["dsv4_snapshot"] = None
                raise
            read = without_rows(snapshot.named)
            repeats = repeats_of(self, read)
            # Graphs of one state take tensors of the same layers from their callers.
            state = {STATE: named((snapshot.state, *repeats)), TENSORS: read, REPEATS: repeats}
            repeated = repeated_in(repeats, read)
            hooked = is_hooked(snapshot.modules)
            self.__dict__.update({"dsv4_snapshot": snapshot, "dsv4_repeated": repeated, "dsv4_hooked": hooked, **state})

    def is_unchanged(self) -> bool:
        """Return whether nothing that `adopt` reads has changed since it last did."""
        snapshot = self.dsv4_snapshot
        return snapshot is not None and snapshot.holds()

    def compare(self) -> None:
        """Check modules and settings, and read replaced weights from where they are now."""
        self.dsv4_settings.check_layers()
        self.dsv4_settings.check()
        for layer in self.layers:
            layer.self_attn.dsv4_weights.adopt()
        if self.dsv4_read is not None:
            self.dsv4_read.adopt()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: PagedCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        past_key_values: PagedCache | None = None,
        token_rows: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Append `input_ids` `[B, S]` to the sequences of `cache`, or `past_key_values`, and run them through layers.

        A call of the model passes `call_checks.enter`, which gives a call without a cache one and checks the others.
        `attention_mask` `[B, >= S]` marks tokens in its last S columns. Positions follow from the cache.
        With `token_rows` int `[T]`, which `token_buckets` makes, ids and mask are `[1, T]`, tokens of those sequences.
        """
        assert input_ids is not None
        rows, columns = input_ids.shape
        keep = None if attention_mask is None else kept(attention_mask, columns)
        options = {"cache": past_key_values if cache is None else cache, "use_cache": use_cache, **kwargs}
        if token_rows is not None:
            assert keep is not None
            options["token_rows"] = token_rows, keep[0]
        elif keep is None or columns == 1:
            return self.forward_neighbours(input_ids, keep, **options)
        # Kernels that pool find a sequence's earlier tokens in the rows before: its tokens go to the last columns.
        padding = (~keep).sum(dim=1, keepdim=True)
        places = places_of(keep, padding, first=token_rows is not None)
        ids = torch.empty_like(input_ids).scatter(1, places, input_ids)
        result = self.forward_neighbours(ids, torch.arange(columns, device=ids.device) >= padding, **options)
        row = torch.arange(rows, device=ids.device)[:, None]
        if isinstance(result, tuple):  # return_dict=False
            return restored(result, row, places)
        return type(result)(**{name: restored(value, row, places) for name, value in result.items()})

    @_model_forward
    def forward_neighbours(
        self,
        input_ids: Tensor,
        keep: Tensor | None,
        *,
        cache: PagedCache | None = None,
        token_rows: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Run `forward` for columns that, where `keep` (bool `[B, S]`) is set, are neighbours in each row.

        With `token_rows`, the arguments of `PagedCache.begin_prompts`, in place of `keep`.
        """
        if cache is None or not cache.entered:
            refuse_uncalled()
        metadata, repeats, shared = begin_step(self, input_ids, keep, cache, token_rows)
        hidden_states = self.run_layers(input_ids, metadata, cache.paged.layers, repeats, shared, **kwargs)
        results: dict[str, Any] = {"last_hidden_state": hidden_states, CACHE_NAME: cache}
        return MoeModelOutputWithPast(**results)

    def run_layers(
        self,
        input_ids: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[LayerCache],
        repeats: Sequence[LayerTensors | None] = (),
        shared: Sequence[Tensor] = (),
        taps: Taps | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the normed hidden states `[B, S, hidden]` of `input_ids` `[B, S]`, the tokens of `metadata`.

        With `repeats`, see `layer_kinds.repeats_of`, a trace has one layer of each kind and marks for the others.
        `shared` are the inputs of the trace that all layers read. With `taps`, return these too, see `Taps.read`.
        """
        if not torch.compiler.is_dynamo_compiling():
            repeats = ()  # between graphs, where Dynamo found a graph break in a layer
        embeds = self.embed_tokens(input_ids)
        hidden_states = embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        tapped: dict[int, Tensor] = {}
        wanted = () if taps is None else taps.layers
        for i, layer in enumerate(self.layers):
            names = repeats[i] if repeats else None
            if names is not None and names.first < i:
                hidden_states = repeat_layer(hidden_states, i, names.first)
                if i in wanted:
                    tapped[i] = hidden_states
                continue
            if names is not None:
                alone = [self.dsv4_parameters[name] for name in names.alone]
                others = [self.dsv4_parameters[name] for name in names.shared]
                read = [input_ids, *shared, *others]
                hidden_states = begin_layer(hidden_states, alone, tensors_of_cache(caches[i]), read, i)
            hidden_states = layer(hidden_states, input_ids=input_ids, metadata=metadata, caches=caches, **kwargs)
            if names is not None:
                hidden_states = end_layer(hidden_states, i)
            if i in wanted:
                tapped[i] = hidden_states
        head = self.hc_head
        takes_norm = isinstance(head, CompilableHead)
        normed: Tensor = head(hidden_states, self.norm) if takes_norm else self.norm(head(hidden_states))
        return normed if taps is None else (normed, taps.read(tapped))


class CompilableForCausalLM(GeneratesWithDrafts, GeneratesFromPages, EnteredOnHost, hf.DeepseekV4ForCausalLM):
    """Language model with a compilable forward, whose calls are checked on the host."""

    # Dynamo must not trace the checks of a wrapper from torch.compile(model), but compile what they call.
    __call__ = torch.compiler.disable(EnteredOnHost.__call__, recursive=False, reason=WHY_NOT_WHOLE)

    is_custom_code: Any = classmethod(_is_custom_code)
    dsv4_drafts: Any = None
    """Attached `DraftModel`, which is no submodule, or None."""

    def entered_model(self) -> tuple[Any, Callable[[], PagedCache]]:
        """Return the decoder stack and a function that allocates a cache for it."""
        return self.model.entered_model()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompilableForCausalLM:
        super()._apply(fn, recurse)
        if self.dsv4_drafts is not None:
            self.dsv4_drafts._apply(fn, recurse)
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `transformers.GenerationMixin.generate`, with one warning if the model is not compiled in place."""
        if (
            self._compiled_call_impl is None
            and "forward" not in self.__dict__
            and not self.__dict__.get("_dsv4_warned")
        ):
            self.__dict__["_dsv4_warned"] = True
            _log.warning(
                "generate() is running this converted model without torch.compile. "
                'Compile it in place: model.compile(fullgraph=True, backend="dsv4"). '
                "A wrapper from torch.compile(model) is not used by generate()."
            )
        return super().generate(*args, **kwargs)

    def save_pretrained(
        self, save_directory: Any, *args: Any, save_original_format: bool = True, **kwargs: Any
    ) -> None:
        """Write the model as transformers does, under the names that checkpoints have, and its draft layers.

        Raises E208 for quantised experts with `save_original_format=False`, and with a transformers that loses scales,
        and for draft layers with `push_to_hub`.
        """
        why = why_not_saved(self, save_original_format)
        fix = "leave save_original_format unset, with the newest transformers; or load(..., dequantize=True)"
        check(not why, "E208", got="save_pretrained of a model with quantised experts", why=why, fix=fix)
        kwargs["save_original_format"] = save_original_format
        save_with_drafts(super().save_pretrained, self.dsv4_drafts, save_directory, *args, **kwargs)


# save_pretrained writes the name of the class as the architecture, and pipelines look it up.
CompilableForCausalLM.__name__ = hf.DeepseekV4ForCausalLM.__name__
