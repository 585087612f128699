"""Decode with one CUDA graph for a whole step, metadata included, and many steps without host work between them.

A batch replays the smallest capture that holds it; `plan` predicts the memory of the captures; greedy decoding needs no
host work between steps; tokens equal those of the same steps without graphs. On a CPU a stand-in replays by the rules
of CUDA graphs, which is no faster. Runs in a few seconds: python examples/04_decode_with_cuda_graphs.py

A Hugging Face model needs less: dsv4_compile.hf.convert(model, ...), then
model.compile(backend="dsv4", options={"dsv4.cudagraph": "full"}); generate then replays graphs in decode.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor, nn

from dsv4_compile import DecodeRunner, DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.cache import CacheFormat, LayerCache, PagedCaches
from dsv4_compile.metadata import AttentionMetadata, MetadataBuffers, build_batch_metadata

REQUESTS, MAX_SEQ_LEN, VOCAB, STEPS = 6, 512, 256, 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = DeepseekV4Config(
    hidden_size=64,
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=48,
    o_groups=2,
    o_lora_rank=24,
    sliding_window=32,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=8,
).with_layers(1, 4, 128)
FORMAT = CacheFormat.resolve(model_dtype=torch.float32)


class Model(nn.Module):
    """A model of an embedding, the attention of an SWA, a CSA and an HCA layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCAB, CONFIG.hidden_size),
            nn.Linear(CONFIG.hidden_size, VOCAB, bias=False),
        )
        self.layers = nn.ModuleList(
            DeepseekV4Attention(CONFIG, i, cache_format=FORMAT, dtype=torch.float32, max_seq_len=MAX_SEQ_LEN)
            for i in range(CONFIG.num_layers)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)

    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, caches: list[LayerCache]) -> Tensor:
        """Return logits `[T, vocab]`."""
        hidden = self.embed(input_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = hidden + layer(nn.functional.rms_norm(hidden, hidden.shape[-1:]), metadata, cache)
        return self.head(hidden)


def new_caches() -> PagedCaches:
    return PagedCaches(CONFIG, max_batch_size=REQUESTS, max_seq_len=MAX_SEQ_LEN, cache_format=FORMAT, device=DEVICE)


@torch.no_grad()
def decode_without_graphs(model: Model, tokens: list[int], lengths: list[int], padded: int) -> list[list[int]]:
    """Decode greedily in the usual way: metadata built anew, and the host involved in every step."""
    caches, chosen = new_caches(), []
    for step in range(STEPS):
        metadata = build_batch_metadata(
            query_start_loc=torch.arange(len(tokens) + 1, device=DEVICE),
            seq_lens=torch.tensor([n + step for n in lengths], device=DEVICE),
            num_tokens=padded,
            block_tables=caches.block_tables,
            window=CONFIG.sliding_window,
            max_model_len=MAX_SEQ_LEN,
        )
        rows = torch.tensor(tokens + [0] * (padded - len(tokens)), device=DEVICE)
        tokens = model(rows, metadata, caches.layers)[: len(tokens)].argmax(-1).tolist()
        chosen.append(tokens)
    return chosen


def main() -> None:
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # float32 without TF32, for equal tokens
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    caches = new_caches()
    buffers = MetadataBuffers(
        max_num_batched_tokens=REQUESTS,
        max_num_seqs=REQUESTS,
        max_model_len=MAX_SEQ_LEN,
        window=CONFIG.sliding_window,
        block_tables=caches.block_tables,
        device=DEVICE,
    )
    graphs = "cuda" if DEVICE.type == "cuda" else "standin"
    print("captures are", "CUDA graphs" if graphs == "cuda" else "the stand-in's: without a GPU nothing is faster")
    # On a CPU the stand-in replays calls, so that compiling gains nothing.
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="dsv4")
    runner = DecodeRunner(
        compiled if graphs == "cuda" else model,
        buffers,
        inputs={"input_ids": buffers.tensors["input_ids"]},
        caches=caches.layers,
        sampler="greedy",
        graphs=graphs,
    )
    print(f"\n{runner.plan()}")
    runner.warm_up()
    print(f"the captures hold {runner.graphs.memory():,} bytes")

    for lengths in ([7], [7, 127, 250], [1, 3, 4, 126, 128, 400]):
        for layer in caches.layers:
            for tensor in layer.tensors().values():
                tensor.zero_()
        count = len(lengths)
        tokens = list(range(count))
        padded = runner.buckets.fit(count)
        buffers.load(list(range(count + 1)), lengths, input_ids=tokens)
        started = time.perf_counter()
        chosen, _ = runner.run(STEPS, num_reqs=count)
        rows = chosen[:, :, 0].tolist()
        seconds = time.perf_counter() - started
        assert padded is not None and rows == decode_without_graphs(model, tokens, lengths, padded)
        print(f"\n{count} requests of {lengths} tokens, in the capture of {padded}, {STEPS} steps:")
        print(f"  {seconds / STEPS * 1e3:.2f} ms a step; tokens equal those without graphs, {rows[0]} to {rows[-1]}")
    print(f"\n{runner.statistics}")


if __name__ == "__main__":
    main()
