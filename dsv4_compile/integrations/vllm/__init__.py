"""Plug-in of vLLM: DeepSeek-V4 with this package's attention or decoder layers in its model, compiled as one graph.

vLLM loads the entry point `vllm.general_plugins` in each of its processes and calls `register`. Without `DSV4_VLLM=1`
or `DSV4_VLLM=all` in the environment it does nothing. All names of vLLM stand in `_compat`.

    registration     settings, versions, what vLLM is asked to change in its configuration
    limits           configurations that are unsupported, each with its reason
    whole_limits     those that are unsupported with DSV4_VLLM=all alone
    geometry         the caches of a layer as vLLM pages them
    caches           their owners in vLLM: specs, binding, metadata builders
    step             a step's tensors, and the metadata of each group of caches that share a block table
    attention        an attention layer in vLLM's decoder layer
    weights          tensors of layers out of the checkpoint that vLLM reads
    tensor_parallel  ranks of vLLM's tensor parallel group, and their all-reduce
    model            vLLM's model with this attention
    experts          router and experts of a layer
    layer_parts      hyper-connections and experts of a layer
    layers           a decoder layer in the place of vLLM's
    whole_model      vLLM's model with these layers
    compiling        the time and the backend of its compilation, and the report of that
"""

from __future__ import annotations


def register() -> None:
    """Register the model with vLLM if the environment has `DSV4_VLLM=1` or `all`; do nothing otherwise.

    Raises:
        DSV4Error: E801 for a vLLM that the plug-in does not know, E802 for any other value of DSV4_VLLM.
    """
    from .registration import Settings, register_with

    settings = Settings.from_environment()
    if settings.on:
        register_with(settings)
