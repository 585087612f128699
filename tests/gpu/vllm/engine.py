"""Measure one engine of vLLM in this process: `python tests/gpu/vllm/engine.py JOB.json`.

`run.py` writes the job and reads the result: the engine's facts, and rows compared with the layer alone, rows compared
with vLLM's attention, replays compared with the compiled step, or times.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import serve
import torch
from torch import Tensor

from dsv4_compile.bench.nodes import Node, by_name, nodes

SHADOW = "shadow:ShadowForCausalLM"
"""Class of the model of "shadow"."""
REPEATS = 4
"""Pairs of calls for each number of requests."""
FEW = 4
"""Most tokens of a step with rows that count as decoded: one of each request."""
SLOWEST = 8
"""Kernels by name that are listed with their times."""
SELECTS_FROM = 4 * 512 + 3
"""First position with more than 512 entries of ratio 4; the indexer selects 512 of them."""


def main(path: str) -> None:
    faulthandler.enable()
    job = json.loads(Path(path).read_text())
    begin = time.perf_counter()
    llm = serve.start(job, SHADOW if job["what"] == "shadow" else serve.recording_of(job))
    result: dict[str, Any] = facts(llm) | {"start_s": round(time.perf_counter() - begin, 1)}
    prompts = serve.prompts_of(llm, job, torch.Generator().manual_seed(0))
    if job["what"] == "times":
        serve.serve(llm, prompts, job, "")
        result["times"] = [step_times(llm, prompts[:n], job["steps"]) for n in job["requests"]]
        if torch.cuda.is_available():  # after all times: the profiler slows the host
            result["times"] = [row | kernels(llm, prompts[: row["requests"]]) for row in result["times"]]
    elif job["what"] == "shadow":
        result["layers"] = shadowed(llm, prompts, job)
    elif job["what"] == "replay":
        result |= replayed(llm, prompts, job)
    else:
        result |= serve.serve(llm, prompts, job, "")
    from torch._dynamo import utils as dynamo

    result["graphs"] = dynamo.counters["stats"]["unique_graphs"]
    result["breaks"] = sum(dynamo.counters["graph_break"].values())
    Path(job["out"]).write_text(json.dumps(result))


def facts(llm: Any) -> dict[str, Any]:
    """Return how an engine runs: vLLM's mode of compilation, its backend and its mode of CUDA graphs."""
    config = llm.llm_engine.vllm_config.compilation_config
    return {"mode": int(config.mode), "backend": str(config.backend), "cudagraph": str(config.cudagraph_mode)}


def replayed(llm: Any, prompts: list[list[int]], job: dict[str, Any]) -> dict[str, Any]:
    """Serve the prompts and return what is found of all replays, see `replay.Replays`."""
    import replay

    runner = serve.runner_of(llm)
    with replay.replays(runner, runner.get_model().model) as counts:
        serve.serve(llm, prompts, job, "")
    return asdict(counts) | {"sizes": sorted(counts.sizes)}


def shadowed(llm: Any, prompts: list[list[int]], job: dict[str, Any]) -> list[dict[str, Any]]:
    """Serve the prompts with both attentions and return how far they are apart in each layer."""
    import shadow

    shadow.ShadowAttention.recording = True
    serve.serve(llm, prompts, job, "")
    layers = serve.runner_of(llm).get_model().model.attention
    return [{"layer": i, "ratio": layer.layer.ratio} | summary(layer.errors) for i, layer in layers.items()]


def summary(steps: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return the rows of a layer, their error on average, and the worst by kind, from positions and errors of steps.

    "prefilled" and "decoded" are rows that attend every entry; of "selected" the indexer has chosen some.
    """
    positions, errors = (torch.cat(values) for values in zip(*steps, strict=True))
    few = torch.cat([torch.full(row_errors.shape, row_errors.numel() <= FEW) for row_errors, _ in steps])
    deep = positions >= SELECTS_FROM
    row: dict[str, Any] = {"rows": errors.numel(), "mean": round(float(errors.mean()), 5)}
    for kind, chosen in {"prefilled": ~few & ~deep, "decoded": few & ~deep, "selected": deep}.items():
        if chosen.any():
            row[f"{kind}_rows"], row[f"{kind}_worst"] = int(chosen.sum()), round(float(errors[chosen].max()), 5)
    return row


def step_times(llm: Any, prompts: list[list[int]], steps: int) -> dict[str, Any]:
    """Return ms of a decode step and ms a token with the prompts, `REPEATS` values each, of these requests together.

    A step is the difference between generating `steps` tokens and one, over the steps between them. All calls but the
    first take what the prompts' whole blocks hold from vLLM's cache of prefixes.
    """

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        serve.generate(llm, prompts, tokens)
        return time.perf_counter() - begin

    seconds(steps)
    seconds(1)
    pairs = [(seconds(steps), seconds(1)) for _ in range(REPEATS)]
    step_ms = [round((long - short) / (steps - 1) * 1e3, 3) for long, short in pairs]
    return {
        "requests": len(prompts),
        "prompts": [len(prompt) for prompt in prompts],
        "steps": steps,
        "step_ms": step_ms,
        "with_prompts_ms": [round(long / steps * 1e3, 3) for long, _ in pairs],
    }


def kernels(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the kernels of the model in one decode step of the prompts, without logits and sampler, and their ms."""
    runner, launches = serve.runner_of(llm), list[list[Node]]()
    plain = runner._model_forward

    def forward(**kwargs: Any) -> Any:
        if kwargs["positions"].shape[0] <= FEW and not launches:
            launches.append(nodes(lambda: plain(**kwargs)))  # a step that is run again writes what it wrote
        return plain(**kwargs)

    runner._model_forward = forward
    serve.generate(llm, prompts, 4)
    runner._model_forward = plain
    ms = round(sum(node.us for node in launches[0]) / 1e3, 3)
    slowest = [[name[:80], count, us] for name, count, us in by_name(launches[0])[:SLOWEST]]
    return {"kernels": len(launches[0]), "kernels_ms": ms, "slowest": slowest}


if __name__ == "__main__":
    main(sys.argv[1])
