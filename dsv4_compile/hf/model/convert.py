"""Conversion of a transformers DeepseekV4ForCausalLM in place (`convert`), and back (`revert`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ..._compat import check_transformers, device_architecture
from ...cache import CacheFormat
from ...config import DeepseekV4Config
from ...errors import check
from ...parallel import Ranks, attention_config, watchdog
from ...selection import proven
from ...sizes import check_optional_size, check_size
from .._compat import register_recorded_outputs, save_as_quantised
from . import adapters, split
from .arguments import check_flags
from .cache import RESIZE, PagedCache, cache_like
from .causal_lm import CompilableForCausalLM, hf
from .convert_drafts import check_drafts, convert_drafts, draft_facts, revert_drafts
from .convert_stack import check_stack, convert_stack, revert_stack
from .draft_model import DraftModel
from .token_buckets import COMPILED_AS
from .undo_convert import undone_on_failure
from .v41_causal_lm import V41ForCausalLM
from .weight_types import embedding_weight

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("dsv4_compile.hf")
OPS = ("moe_experts", "moe_route", "mhc_pre", "mhc_boundary", "mhc_head")
"""Ops that replace the modules around attention."""


@undone_on_failure
@split.on_all_ranks
def convert(
    model: Any,
    *,
    max_batch_size: int,
    max_seq_len: int,
    kv_cache_dtype: str | CacheFormat = "auto",
    indexer_cache_dtype: str = "auto",
    hadamard: bool = False,
    max_step_tokens: int | None = None,
    merge_adapters: bool = False,
    attention_only: bool = False,
    mesh: DeviceMesh | None = None,
    expert_layout: str = "experts",
    collectives: str = "functional",
    rank_timeout: float = watchdog.TIMEOUT,
    drafts: DraftModel | None = None,
) -> Any:
    """Make `model` compilable in one graph for prefill and one for decode, and return the same object.

    Args:
        model: a `DeepseekV4ForCausalLM` in eval mode, on its final device. Parameters are shared, not copied. Some move
            to be rows of one matrix (see `modules.stacked`), which temporarily needs memory for a few matrices of one
            layer. CUDA cannot send such a parameter to a different process: send a clone.
        max_batch_size: most sequences in a batch.
        max_seq_len: most tokens of a sequence, prompt and answer together.
        kv_cache_dtype, indexer_cache_dtype, hadamard: see `dsv4_compile.cache.CacheFormat.resolve`. With `auto` the
            caches have the model's dtype and nothing is quantised.
        max_step_tokens: most tokens that one forward adds to a sequence (None = max_seq_len). Smaller values shrink
            the window and compressor-state caches; longer prompts then go through
            `generate(prefill_chunk_size=max_step_tokens)`.
        merge_adapters: fold all adapters (PEFT's) into the weights, as active as they are now, and remove them. Their
            weights are copied to the memory of the host meanwhile. Without it, only `embed_tokens`, `lm_head` and, with
            `attention_only`, modules outside of attention may have adapters. E208 for one that no weights stand for.
        attention_only: leave experts, routers, hyper-connections and norms as transformers computes them. Otherwise
            they become ops too (`moe_route`, `moe_experts`, `mhc_*`), with weights in bfloat16, float32, e4m3 or MXFP4
            as they are stored, and all in float32 between. Where `auto` has no proven kernel for one of them on the
            model's device, the log says so.
        mesh: ranks, along one dim, that the model is split over. Each passes the same whole model, keeps its part, and
            frees the rest; from then on all make the same calls. E701 with `attention_only`.
        expert_layout: "experts" gives each rank some of the routed experts, "rows" a part of every one.
        collectives: "functional" for those of the mesh's backend, "symmetric" for all-reduces through symmetric memory
            of GPUs that reach each other. E302 if they do not.
        rank_timeout: seconds after which a process whose step waits for a rank that is gone ends with E706, with
            "symmetric" collectives. A rank on the same host is gone when its process has ended, a rank on a different
            host when its thread has not written to the store of the process group. With gloo, seconds for which a rank
            may be stopped before a call that waits for it raises E703.
        drafts: draft layers of this model, which become `model.dsv4_drafts`. They are converted too, whatever
            `attention_only` says, and `mesh` splits them as the model. Their weights are watched as the model's are.

    Later changes of weights take effect at the next call: in place, `load_state_dict` (with `assign` too),
    `module.weight = ...` and `weight.data = ...`. Hooks, adapters and parametrisations of modules that are read and
    not called, as attention's linears, raise E208.

    A convert that raises leaves the model as it was, except that with `mesh` it may have kept its part already, and
    then goes on from there when it is called again.

    Raises E205 for an unsupported configuration, E208 for an unsupported model, E701 for ranks that do not divide it,
    and E702 for ranks that differ.
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "mesh", "drafts")}
    check(
        type(model) is hf.DeepseekV4ForCausalLM,
        "E208",
        got=f"a {type(model).__name__}",
        why="already converted" if isinstance(model, CompilableForCausalLM) else "",
        fix=RESIZE
        if isinstance(model, CompilableForCausalLM)
        else "pass a transformers DeepseekV4ForCausalLM; of a PEFT model, what merge_and_unload() returns",
    )
    check_flags(hadamard=hadamard, merge_adapters=merge_adapters, attention_only=attention_only)
    max_batch_size, max_seq_len = check_size("max_batch_size", max_batch_size), check_size("max_seq_len", max_seq_len)
    max_step_tokens = check_optional_size("max_step_tokens", max_step_tokens)
    check_transformers()
    check(not model.training, "E208", got="a model in training mode", fix="call model.eval() first")
    check(
        not torch.is_inference_mode_enabled(),
        "E208",
        got="convert under torch.inference_mode()",
        why="weights that move there could not be loaded or moved again",
        fix="convert outside, and run the model inside",
    )
    embedding = embedding_weight(model.model)
    device, dtype = embedding.device, embedding.dtype
    check(
        torch.get_default_device().type != "meta" or device.type == "meta",
        "E208",
        got='convert under torch.device("meta")',
        why=f"the weights are on {device}, and RoPE tables and caches would have no values",
        fix="convert outside",
    )
    if not attention_only and (why := why_unproven_around_attention(device)):
        _log.warning("experts, routers and hyper-connections on %s: %s; attention_only=True leaves them", device, why)
    config = DeepseekV4Config.from_hf(model.config)
    if merge_adapters:
        adapters.merge(model)
    adapters.check_called(model, attention_only=attention_only, split=mesh is not None)
    check_stack(model.model, config, attention_only=attention_only)
    check_drafts(drafts, model, max_step_tokens)
    ranks = None if mesh is None else Ranks.of(mesh)
    in_step = None
    if ranks is not None:
        split.check_splittable(attention_only)
        ranks = split.with_collectives(ranks, collectives, device)
        in_step = split.split(model, ranks, expert_layout, {**options, **draft_facts(drafts, expert_layout)})
        config = attention_config(config, ranks, fp8=False)  # `split` has checked that blocks are whole
    cache_format = CacheFormat.resolve(kv_cache_dtype, indexer_cache_dtype, model_dtype=dtype, hadamard=hadamard)
    cache = PagedCache(
        config,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        cache_format=cache_format,
        max_step_tokens=max_step_tokens,
        device=device,
    )
    convert_stack(
        model,
        config,
        cache_format,
        cache.paged.max_seq_len,
        attention_only=attention_only,
        ranks=ranks,
        expert_layout=expert_layout,
    )
    model.model.__dict__.update(dsv4_cache=cache, dsv4_in_step=in_step)
    model.__dict__["dsv4_drafts"] = None
    if drafts is not None:
        convert_drafts(
            drafts,
            model,
            cache_format,
            max_batch_size=max_batch_size,
            max_seq_len=cache.paged.max_seq_len,
            ranks=ranks,
            expert_layout=expert_layout,
        )
    register_recorded_outputs(model.model)
    save_as_quantised(model)
    return model


def revert(model: Any) -> Any:
    """Restore the original classes of a converted model, drop its caches and its compiled calls; return the object.

    Weights that were rows of one matrix are copied to separate memory, which temporarily needs one matrix more.
    Draft layers are restored too, and no part of the model any more: keep `model.dsv4_drafts` to convert with it again.
    Compile it again, if you want to, as you would compile the original.
    """
    check_converted(model)
    check(
        not isinstance(model, split.SplitForCausalLM),
        "E701",
        got="revert of a model that is split",
        why="this rank has a part of its weights",
        fix="load it again",
    )
    revert_drafts(model)
    revert_stack(model)
    for module in (model, model.model):
        module._compiled_call_impl = None  # compiled for one graph, which the original forward is not
        module.__dict__.pop(COMPILED_AS, None)
    for name in ("dsv4_cache", "dsv4_in_step"):
        del model.model.__dict__[name]
    model.__dict__.pop("_dsv4_warned", None)
    return model


def new_cache(
    model: Any,
    *,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_step_tokens: int | None = None,
) -> PagedCache:
    """Allocate a further cache for a converted model, in the same format and, unless given, with the same capacity.

    Raises E204 for a `max_seq_len` above that of `convert`, to which RoPE tables go, and E210 without the memory.
    """
    if isinstance(model, V41ForCausalLM):
        sizes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "max_step_tokens": max_step_tokens}
        return model.new_cache(**{name: size for name, size in sizes.items() if size is not None})
    check_converted(model)
    return cache_like(model.model, max_batch_size, max_seq_len, max_step_tokens)


def why_unproven_around_attention(device: torch.device) -> str:
    """Return why `auto` does not use an implementation of all ops around attention on `device`, or ""."""
    architecture = device_architecture(device)
    return next(filter(None, (proven.why_unproven("triton", op, architecture) for op in OPS)), "")


def check_converted(model: Any) -> None:
    """Raise E208 for a model that `convert` has not returned."""
    check(
        isinstance(model, CompilableForCausalLM),
        "E208",
        got=f"a {type(model).__name__}",
        fix="pass a model that dsv4_compile.hf.convert returned",
    )
