"""Split a Hugging Face DeepSeek-V4 over processes, one for each GPU, which generate the same tokens together.

Each rank starts from the same model, keeps its heads, experts and part of the vocabulary, and frees the rest. After
that it is called as on one GPU, by all ranks. Runs on a CPU in half a minute, there without compiling unless --compile
is given: torchrun --nproc-per-node 2 examples/06_tensor_parallel.py
`python examples/06_tensor_parallel.py` starts that command itself.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time

import torch
from torch.distributed.device_mesh import init_device_mesh

import dsv4_compile
from dsv4_compile.hf.tiny import quiet_libraries, tiny_model

NEW_TOKENS = 12
SIZES = {"max_batch_size": 3, "max_seq_len": 128, "attention_only": False}


def main() -> None:
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run([*command, *sys.argv[1:]], check=True)
        return
    quiet_libraries()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    rank, ranks = mesh.get_rank(), mesh.size()

    # The same random weights on every rank. A real model comes from DeepseekV4ForCausalLM.from_pretrained(path).
    model = tiny_model(num_attention_heads=8, o_groups=8).to(kind)
    unsharded = dsv4_compile.hf.convert(copy.deepcopy(model), **SIZES)
    dsv4_compile.hf.convert(model, **SIZES, mesh=mesh)
    rank_bytes, all_bytes = (sum(p.nbytes for p in converted.parameters()) for converted in (model, unsharded))
    print(f"rank {rank} of {ranks} has {rank_bytes / 2**20:.1f} of {all_bytes / 2**20:.1f} MiB", flush=True)

    if kind == "cuda" or "--compile" in sys.argv:
        graphs = {"dsv4.cudagraph": "full"} if kind == "cuda" else {}
        model.compile(fullgraph=True, backend="dsv4", options=graphs)  # the collectives are in the graphs
    lengths = torch.tensor([[3], [40], [17]])
    mask = (torch.arange(40) >= 40 - lengths).long().to(kind)
    ids = torch.randint(1, 512, (3, 40), generator=torch.Generator().manual_seed(0)).to(kind)
    for what in ("first", "again"):
        started = time.perf_counter()
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        if rank == 0:
            print(f"{what}: {time.perf_counter() - started:.1f} s")
    expected = unsharded.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(tokens, expected), "the parts do not add up to the whole model"
    # The generator of rank 0 counts, so sampling needs no seed.
    sampled = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True)
    print(
        f"rank {rank}: {tokens[0, -6:].tolist()}, as the whole model; sampled: {sampled[0, -6:].tolist()}", flush=True
    )
    # Requests that join and leave one batch: rank 0 takes them, the other ranks follow it until it closes the batch.
    with dsv4_compile.hf.RunningBatch(model, slots=2, prefill_chunk=32) as batch:
        if rank == 0:
            prompts = [row[-int(length) :] for row, length in zip(ids, lengths, strict=True)]
            requests = [batch.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
            batch.run()
            assert [request.tokens for request in requests] == tokens[:, -NEW_TOKENS:].tolist()
            print("a RunningBatch gives the same tokens", flush=True)
        else:
            batch.serve()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
