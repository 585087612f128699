"""Compile one attention layer of each kind, and feed it the mixed batches of an inference engine.

What to take away: a batch is described by tensors, so a new prompt, a chunk of a long one and any number of decoded
tokens share a step, and every step runs the same graph. Caches are paged, 584 bytes a token here, and are updated in
place. Runs in less than a minute, without a GPU too: python examples/01_compile_attention.py
"""

from __future__ import annotations

import torch

from dsv4_compile import DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.metadata import AttentionMetadata, build_batch_metadata

REQUESTS, MAX_SEQ_LEN = 4, 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Tokens that each of the four requests gets in a step.
STEPS = {
    "a prompt of 150 tokens, and the first 40 of a longer one": [150, 40, 0, 0],
    "a decode, the next chunk, and a new prompt": [1, 100, 5, 0],
    "two decodes, and three tokens to verify": [1, 1, 3, 0],
    "three decodes, and a fourth request": [1, 1, 1, 30],
}


def small_config() -> DeepseekV4Config:
    """V4's head and RoPE dims, which the byte format of the cache fixes, with few heads; one layer of each kind.

    Of a real model: DeepseekV4Config.flash(), .pro(), or .from_hf("config.json").
    """
    return DeepseekV4Config(
        hidden_size=256, num_heads=4, q_lora_rank=128, o_groups=2, o_lora_rank=64, index_n_heads=8
    ).with_layers(1, 4, 128)


def random_layer(config: DeepseekV4Config, layer_idx: int, cache_format: CacheFormat) -> DeepseekV4Attention:
    """A bfloat16 layer. Weights of a checkpoint come from dsv4_compile.loading.load_attention_from_safetensors."""
    layer = DeepseekV4Attention(config, layer_idx, cache_format=cache_format, max_seq_len=MAX_SEQ_LEN, device=DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return layer


def describe_step(caches: PagedCaches, new_tokens: list[int], lengths: list[int]) -> AttentionMetadata:
    """Metadata of a step. An engine builds it once and passes it to all layers."""
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
        # dynamic=True says that numbers of tokens will vary. Without it torch compiles the first one by itself, sees
        # the second, and compiles again for all numbers.
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
            # The first step compiles. From then on torch is told to raise rather than to compile again.
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                out = compiled(hidden, metadata, cache)
            expected = layer(hidden, metadata, eager_cache)
            difference = (out - expected).abs().max().item()
            print(f"  {what}: {list(hidden.shape)} -> {list(out.shape)}, differs from eager by {difference:.0e}")
            # Two neighbouring bfloat16 values, or what is left where terms cancel: a merged kernel rounds less.
            torch.testing.assert_close(out, expected, atol=4e-3, rtol=2**-7)
        differing = sum(int((t != eager_cache.tensors()[name]).sum()) for name, t in cache.tensors().items())
        print(f"  elements of the caches that differ from the uncompiled layer's: {differing}")


if __name__ == "__main__":
    main()
