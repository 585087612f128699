"""Serve prompts through vLLM in this process, and write what came out: `python tests/vllm/serve.py JOB.json`.

A program of its own, because vLLM's configuration, the compiler and the plug-in's registration belong to a process.
`jobs.py` describes jobs, writes them and reads results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from dsv4_compile.selection import decisions


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    result: dict[str, Any] = {}
    allow_chunks()
    from torch._dynamo import utils as dynamo
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if job["record"]:
        sys.path.insert(0, str(Path(__file__).parent))
        ModelRegistry.register_model("DeepseekV4ForCausalLM", "recording:RecordingForCausalLM")
    llm = LLM(
        **{
            "model": job["model"],
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            "seed": 0,
            "dtype": "bfloat16",
            **job["llm"],
        }
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 512, (length,), generator=random).tolist() for length in job["lengths"]]
    prompts += [[*prompts[source][:length], 3, 4] for source, length in job["shared"]]
    with decisions.collect() as decided:
        result |= serve(llm, prompts, greedy, job, "")
    result["implementations"] = sorted({decision.impl for decision in decided})
    result["graphs"] = [dynamo.counters["stats"]["unique_graphs"]]
    if job["rebind"]:
        bind_others(llm)
        result["rebound"] = serve(llm, prompts, greedy, job, "")
        result["graphs"].append(dynamo.counters["stats"]["unique_graphs"])
    for broken in job["breaks"]:
        prompts = [torch.randint(2, 512, (length,), generator=random).tolist() for length in job["break_lengths"]]
        result.setdefault("broken", {})[broken] = serve(llm, prompts, greedy, job, broken)
    result["breaks"] = sum(dynamo.counters["graph_break"].values())
    Path(job["out"]).write_text(json.dumps(result))


def allow_chunks() -> None:
    """Let vLLM chunk prefills and keep prefixes of this model on any CPU: its own attention does so with AMX alone."""
    from vllm.platforms.cpu import CpuPlatform

    check, supported = CpuPlatform.check_and_update_config.__func__, torch.cpu._is_amx_tile_supported

    def check_and_update_config(cls: Any, config: Any) -> None:
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            check(cls, config)
        finally:
            torch.cpu._is_amx_tile_supported = supported

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def serve(llm: Any, prompts: list[list[int]], greedy: Any, job: dict[str, Any], broken: str) -> dict[str, Any]:
    """Serve the prompts, those that share a beginning after the others, and compare every row if it is recorded."""
    recording = None
    if job["record"]:
        import recording as r

        runner = runner_of(llm)
        r.RecordingForCausalLM.runner = runner
        recording = r.RecordingForCausalLM.recording = r.Recording()
        break_table(runner.model.model, broken)
        llm.reset_prefix_cache()
    outputs = []
    for batch in (prompts[: len(job["lengths"])], prompts[len(job["lengths"]) :]):
        if batch:
            outputs += llm.generate([{"prompt_token_ids": p} for p in batch], greedy, use_tqdm=False)
    served: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if recording is not None:
        tokens = {o.request_id: list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outputs}
        # The runner's names of requests begin with those of the outputs.
        named = {name: next(t for key, t in tokens.items() if name.split("-")[0] == key) for name in recording.rows}
        errors = r.compare(runner.model.model, recording, named)
        served |= {"worst": errors.worst, "rows": errors.rows, "reused": errors.reused, "steps": recording.steps}
        served["sets"] = len(runner.model.model.sets)
    return served


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def bind_others(llm: Any) -> None:
    """Bind caches with other strides and addresses, as vLLM does after it has measured memory."""
    for attention in runner_of(llm).model.model.attention.values():
        for owner in attention.owners:
            owner.bind_kv_cache(torch.zeros_like(owner.kv_cache, memory_format=torch.contiguous_format).unsqueeze(1))


def break_table(model: Any, kind: str) -> None:
    """Let every block of the tables of a kind of cache be the first of its request."""
    buffers = model.step_buffers
    numbers = {n for attention in model.attention.values() for group, n in attention.tables().items() if group == kind}
    plain = type(buffers).load_table

    def load_table(number: int, table: Any) -> None:
        plain(buffers, number, table)
        if number in numbers:
            own = buffers.table(number)
            own[:, 1:] = own[:, :1].clone()

    buffers.load_table = load_table if kind else plain.__get__(buffers)


if __name__ == "__main__":
    main(sys.argv[1])
