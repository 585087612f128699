"""Loading of an official folder of DeepSeek-V4.1 as a language model of transformers, for `hf.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import check, fail
from ...models import v41
from ...sizes import shown
from ..model.v41_causal_lm import V41ForCausalLM
from .checkpoint import Checkpoint
from .folder_config import generation_config


def load_v41(
    checkpoint: Checkpoint,
    sizes: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    kv_cache_dtype: Any,
    only_v4: Mapping[str, bool],
    **options: Any,
) -> V41ForCausalLM:
    """Return the text model of a folder.

    Args:
        sizes: of the model's own caches.
        dtype, options: of `models.v41.load`, None = bfloat16.
        kv_cache_dtype: "auto", or a `V41Format`.
        only_v4: whether options that V4.1 does not have are given, by name.

    Raises E208 for those, E201 for other formats, and the errors of `models.v41.load`, E210 for the caches among them.
    """
    given = [name for name, value in only_v4.items() if value]
    fix = "leave them out; caches take kv_cache_dtype=models.v41.V41Format(...)"
    check(not given, "E208", got=f"{', '.join(given)} for a folder of DeepSeek-V4.1", fix=fix)
    if kv_cache_dtype != "auto" and not isinstance(kv_cache_dtype, v41.V41Format):
        fail("E201", got=f"kv_cache_dtype={shown(kv_cache_dtype)}", rule='"auto", or a models.v41.V41Format')
    cache_format = None if kv_cache_dtype == "auto" else kv_cache_dtype
    of_caches = {**sizes, "cache_format": cache_format}
    dtype = torch.bfloat16 if dtype is None else dtype
    model = v41.load(checkpoint.folder, dtype=dtype, caches=of_caches, **options)
    generation = generation_config(checkpoint.folder, model.config.vocab_size)
    loaded = V41ForCausalLM(model, of_caches, generation)
    loaded.config.name_or_path = loaded.name_or_path = str(checkpoint.folder)
    return loaded
