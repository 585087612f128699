"""DeepseekV4ForCausalLM of transformers through torch.compile: convert in place, generate, revert."""

from __future__ import annotations

from ..errors import needs

with needs("hf", "dsv4_compile.hf"):
    # First: a failed import leaves subpackages in sys.modules, and a second one would not name what is missing.
    import transformers.models.deepseek_v4.modeling_deepseek_v4  # noqa: F401

    from .loading.load import load
    from .model.cache import PagedCache
    from .model.compiled_model import save_compiled, use_compiled
    from .model.convert import convert, new_cache, revert
    from .model.draft_kinds import DSparkDrafts, MtpDrafts
    from .model.draft_model import DraftModel
    from .model.experts_interface import register_experts
    from .model.token_inputs import mark_dynamic_tokens
    from .model.unchanged_block import unchanged
    from .model.warm_up import WarmUp, warm_up
    from .serving.requests import Request
    from .serving.running_batch import RunningBatch

__all__ = [
    "DSparkDrafts",
    "DraftModel",
    "MtpDrafts",
    "PagedCache",
    "Request",
    "RunningBatch",
    "WarmUp",
    "convert",
    "load",
    "mark_dynamic_tokens",
    "new_cache",
    "register_experts",
    "revert",
    "save_compiled",
    "unchanged",
    "use_compiled",
    "warm_up",
]

register_experts()
