"""Serve a DeepSeek-V4 checkpoint through vLLM with this package's attention, and read what was compiled.

vLLM loads the plug-in because this package is installed, and the plug-in does nothing without DSV4_VLLM=1, which this
program sets unless the environment has DSV4_VLLM=all, for whole decoder layers of this package. A report of the
compilation is written by the process that runs the model. FOLDER has DeepSeek's checkpoint; prompts here are token
ids, so it needs no tokenizer: python examples/08_vllm.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from dsv4_compile.debug.report import Report

PROMPTS = [[5, 7, 11], list(range(2, 42)), list(range(2, 302))]


def serve(folder: Path, report: Path) -> list[list[int]]:
    """Return the tokens that vLLM generates for each prompt."""
    os.environ |= {"DSV4_VLLM": os.environ.get("DSV4_VLLM", "1"), "DSV4_VLLM_EXPLAIN": str(report)}
    from vllm import LLM, SamplingParams  # reads the environment

    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=4, dtype="bfloat16")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.json"
        for prompt, tokens in zip(PROMPTS, serve(folder, path), strict=True):
            print(f"{len(prompt)} tokens -> {tokens}")
        report = Report.from_json(path.read_text(encoding="utf-8"))
    print(report)
    assert report.ok and len(report.graphs) == 1


if __name__ == "__main__":  # vLLM starts processes, which import this file
    main()
