"""Serve prompts through vLLM in this process, and write the results: `python tests/vllm/serve.py JOB.json`.

A separate program, because vLLM's configuration, the compiler and the plug-in's registration belong to a process.
`jobs.py` describes jobs, writes them and reads results.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsv4_compile.selection import decisions

RECORDING = "recording:RecordingForCausalLM"
PARTS = "parts:PartsForCausalLM"
RECORDING_WHOLE = "recording:RecordingWholeForCausalLM"


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    result: dict[str, Any] = {}
    llm = start(job, PARTS if job["parts"] else recording_of(job))
    from torch._dynamo import utils as dynamo

    random = torch.Generator().manual_seed(0)
    prompts = prompts_of(llm, job, random)
    if job["parts"]:
        runner_of(llm).get_model().model.compare()
    with decisions.collect() as decided:
        result |= serve(llm, prompts, job, "")
    if job["parts"]:
        result["parts"] = runner_of(llm).get_model().model.summary()
    result["implementations"] = sorted({decision.impl for decision in decided})
    result["graphs"] = [dynamo.counters["stats"]["unique_graphs"]]
    if job["rebind"]:
        bind_others(llm)
        result["rebound"] = serve(llm, prompts, job, "")
        result["graphs"].append(dynamo.counters["stats"]["unique_graphs"])
    for broken in job["breaks"]:
        prompts = prompts_of(llm, {"lengths": job["break_lengths"], "shared": []}, random)
        result.setdefault("broken", {})[broken] = serve(llm, prompts, job, broken)
    result["breaks"] = sum(dynamo.counters["graph_break"].values())
    Path(job["out"]).write_text(json.dumps(result))


def recording_of(job: dict[str, Any]) -> str:
    """Return the class of a model that records, "" for a job that does not; workers of several ranks have their own."""
    if not job["record"] or job["ranks"] > 1:
        return ""
    return RECORDING_WHOLE if job["plugin"] == "all" else RECORDING


def start(job: dict[str, Any], model: str) -> Any:
    """Start the engine of a job, with the class `model` ("module:name") instead of the plug-in's if it is not empty."""
    from vllm import LLM, ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    if current_platform.is_cpu():
        allow_chunks()
    load_general_plugins()
    if model:
        sys.path.insert(0, str(Path(__file__).parent))
        ModelRegistry.register_model("DeepseekV4ForCausalLM", model)
    settings = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "seed": 0}
    if job["ranks"] > 1:
        settings |= {"tensor_parallel_size": job["ranks"], "worker_extension_cls": "ranks.RecordingRank"}
    settings |= {"model": job["model"], "skip_tokenizer_init": True, "dtype": "bfloat16"}
    return LLM(**settings | job["llm"])


def prompts_of(llm: Any, job: dict[str, Any], random: torch.Generator) -> list[list[int]]:
    """Return random prompts of a job's `lengths`, then those that begin as one of them."""
    vocab = llm.llm_engine.vllm_config.model_config.hf_config.vocab_size
    prompts = [torch.randint(2, vocab, (length,), generator=random).tolist() for length in job["lengths"]]
    return prompts + [[*prompts[source][:length], 3, 4] for source, length in job["shared"]]


def generate(llm: Any, prompts: list[list[int]], new_tokens: int, logprobs: int | None = None) -> list[Any]:
    """Generate `new_tokens` greedily for each prompt, in one batch."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    return list(llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False))


def margin_of(logprobs: Any) -> float:
    """Return by how much the most probable token is more probable than the next one, in logarithms."""
    first, second = sorted((token.logprob for token in logprobs.values()), reverse=True)[:2]
    return float(first - second)


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


def serve(llm: Any, prompts: list[list[int]], job: dict[str, Any], broken: str) -> dict[str, Any]:
    """Serve the prompts, those that share a beginning after the others, and compare every row if it is recorded."""
    recording, ranks = None, job["ranks"] > 1
    if ranks:
        llm.collective_rpc("start_recording", args=(job["padding"],))
    elif job["record"]:
        import recording as r

        runner, recording = runner_of(llm), r.Recording(padding=job["padding"])
        model = runner.get_model().model
        break_table(model, broken)
        llm.reset_prefix_cache()
    outputs = []
    with nullcontext() if recording is None else recording.of(runner, model):
        first = len(prompts) if job["together"] else len(job["lengths"])
        for batch in (prompts[:first], prompts[first:]):
            # vLLM compiles a separate function for log-probabilities.
            outputs += generate(llm, batch, job["new_tokens"], 2 if job["margins"] else None) if batch else []
    served: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    served["sequences"] = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    if job["margins"]:
        served["margins"] = [[margin_of(token) for token in output.outputs[0].logprobs] for output in outputs]
    if llm.llm_engine.log_stats:
        served["preemptions"] = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    tokens = {o.request_id: list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outputs}
    if ranks:
        served["ranks"] = llm.collective_rpc("finish_recording", args=(tokens, str(Path(job["out"]).parent)))
    elif recording is not None:
        named = r.named(recording.rows, tokens)
        with torch.device(runner.device):
            errors = r.compare(model, recording, named)
        served |= asdict(errors) | {"steps": recording.steps, "sets": len(model.sets)}
        if not broken:
            torch.save(r.outputs(recording.rows, named), Path(job["out"]).with_name("final.pt"))
    return served


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def bind_others(llm: Any) -> None:
    """Bind caches with other strides and addresses, as vLLM does after it has measured memory."""
    for attention in runner_of(llm).get_model().model.attention.values():
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
            block_table = buffers.table(number)
            block_table[:, 1:] = block_table[:, :1].clone()

    buffers.load_table = load_table if kind else plain.__get__(buffers)


if __name__ == "__main__":
    main(sys.argv[1])
