"""Compile one attention layer of each kind and run it on the mixed batches of an inference engine.

Tensors describe a batch, so that a new prompt, a chunk of a long one and any number of decodes share a step, and every
step runs the same graph. Caches are paged, 584 bytes a token here, and updated in place. Runs in less than a minute,
also on a CPU: python examples/01_compile_attention.py
"""

from __future__ import annotations

import torch

from dsv4_compile import DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.metadata import AttentionMetadata, build_batch_metadata

REQUESTS, MAX_SEQ_LEN = 4, 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# New tokens of each of the four requests in a step.
STEPS = {
    "a prompt of 150 tokens, and the first 40 of a longer one": [150, 40, 0, 0],
    "a decode, the next chunk, and a new prompt": [1, 100, 5, 0],
    "two decodes, and three tokens to verify": [1, 1, 3, 0],
    "three decodes, and a fourth request": [1, 1, 1, 30],
}


def small_config() -> DeepseekV4Config:
    """Return a small configuration with one layer of each kind; the cache format fixes V4's head and RoPE dims.

    Real models: DeepseekV4Config.flash(), .pro(), or .from_hf("config.json").
    """
    return DeepseekV4Config(
        hidden_size=256, num_heads=4, q_lora_rank=128, o_groups=2, o_lora_rank=64, index_n_heads=8
    ).with_layers(1, 4, 128)


def random_layer(config: DeepseekV4Config, layer_idx: int, cache_format: CacheFormat) -> DeepseekV4Attention:
    """Return a bfloat16 layer with random weights; `dsv4_compile.loading` loads those of a checkpoint."""
    layer = DeepseekV4Attention(config, layer_idx, cache_format=cache_format, max_seq_len=MAX_SEQ_LEN, device=DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return layer


def describe_step(caches: PagedCaches, new_tokens: list[int], lengths: list[int]) -> AttentionMetadata:
    """Return the metadata of a step, which an engine builds once for all layers."""
    return build_batch_metadata(
        query_start_loc=torch.tensor([0, *new_tokens], device=DEVICE).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_tokens=sum(new_tokens),
        block_tables=caches.block_tables,
        window=caches.config.sliding_window,
        max_model_len=caches.max_seq_len,
        ratios=caches.config.compressed_ratios,
    )


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    config, cache_format = small_config(), CacheFormat.resolve("fp8_ds_mla")
    caches, eager_caches = (
        PagedCaches(config, max_batch_size=REQUESTS, max_seq_len=MAX_SEQ_LEN, cache_format=cache_format, device=DEVICE)
        for _ in range(2)
    )
    print(f"caches of {REQUESTS} requests of {caches.max_seq_len} tokens: {caches.nbytes / 2**20:.1f} MiB")
    for i in range(config.num_layers):
        layer = random_layer(config, i, cache_format)
        # Without dynamic=True torch compiles for the first number of tokens alone, and again for all numbers when it
        # sees the second.
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="dsv4")
        cache, eager_cache = caches.layers[i], eager_caches.layers[i]
        print(f"\nlayer {i}, {config.kind(i)}")
        for name, tensor in cache.tensors().items():
            print(f"  {name:14}{str(tensor.dtype).removeprefix('torch.'):9}{list(tensor.shape)}")

        lengths = [0] * REQUESTS
        for step, (what, new_tokens) in enumerate(STEPS.items()):
            lengths = [length + new for length, new in zip(lengths, new_tokens, strict=True)]
            metadata = describe_step(caches, new_tokens, lengths)
            hidden = torch.randn(sum(new_tokens), config.hidden_size).to(DEVICE, torch.bfloat16)
            # The first step compiles; a later one raises rather than recompile.
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                out = compiled(hidden, metadata, cache)
            expected = layer(hidden, metadata, eager_cache)
            difference = (out - expected).abs().max().item()
            print(f"  {what}: {list(hidden.shape)} -> {list(out.shape)}, differs from eager by {difference:.0e}")
            # A fused kernel rounds less: neighbouring bfloat16 values, or the rest of terms that cancel.
            torch.testing.assert_close(out, expected, atol=4e-3, rtol=2**-7)
        differing = sum(int((t != eager_cache.tensors()[name]).sum()) for name, t in cache.tensors().items())
        print(f"  elements of the caches that differ from the uncompiled layer's: {differing}")


if __name__ == "__main__":
    main()
