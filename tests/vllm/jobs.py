"""Jobs for `serve.py`: requests to serve and records of them, each job in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

HERE = Path(__file__).parent
TIMEOUT = 1500
NEAR_TIE = 0.2
"""Logarithm of the ratio of two probabilities that roundings may exchange: logits of bfloat16 are 1/16 apart here."""


@dataclass
class Job:
    """The requests that one process serves.

    lengths: of random prompts, served together first. shared: prompts that begin as an earlier one, `(which, tokens)`,
    served after them. record: compare every row of attention. breaks: block tables to break, one after the other, while
    prompts of `break_lengths` are served. rebind: bind other caches and serve again. workers: in their own processes.
    plugin: the value of DSV4_VLLM. parts: compare the modules around attention with vLLM's own. padding: add rows that
    are no tokens to each step, up to a multiple of so many. together: serve `shared` with the others, not after them.
    ranks: of tensor parallel, in separate processes, which all record. margins: return by how much each token is
    more probable than the next one.
    """

    llm: dict[str, Any]
    lengths: list[int]
    shared: list[tuple[int, int]] = field(default_factory=list)
    new_tokens: int = 6
    record: bool = True
    breaks: list[str] = field(default_factory=list)
    break_lengths: list[int] = field(default_factory=list)
    rebind: bool = False
    workers: bool = False
    explain: str = ""
    plugin: str = "1"
    parts: bool = False
    padding: int = 1
    together: bool = False
    margins: bool = False
    ranks: int = 1
    program: ClassVar[Path] = HERE / "serve.py"

    def run(self, model: Path, folder: Path) -> dict[str, Any]:
        """Serve `model` in a new process; return what its program writes."""
        folder.mkdir(parents=True, exist_ok=True)
        job = {**asdict(self), "model": str(model), "out": str(folder / "result.json")}
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(self.program), str(folder / "job.json")]
        with (folder / "log.txt").open("w") as log:
            done = subprocess.run(
                command, env=self.environment(folder), stdout=log, stderr=log, timeout=TIMEOUT, check=False
            )
        assert done.returncode == 0, (folder / "log.txt").read_text()[-8000:]
        return dict(json.loads((folder / "result.json").read_text()))

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the process; the caches of vLLM for later ones are next to `folder`.

        With decoder layers of this package, no kernel of vLLM for this model is called, so none is defined.
        """
        paths = {"PYTHONPATH": search_path(HERE)} if self.plugin == "all" else {}
        return (
            environment_of(folder.parent)
            | paths
            | {
                "VLLM_CPU_OMP_THREADS_BIND": "auto" if self.ranks == 1 else "nobind",
                "DSV4_VLLM": self.plugin,
                "DSV4_VLLM_EXPLAIN": self.explain,
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.workers)),
            }
        )


def search_path(*folders: Path) -> str:
    """Return PYTHONPATH with `folders` before the caller's, where vLLM itself may be."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment_of(cache: Path) -> dict[str, str]:
    """Return the environment of a process that runs vLLM: one thread, no network, kernels that the CPU lacks."""
    return {
        **os.environ,
        "PYTHONPATH": search_path(HERE / "start", HERE),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def final_errors(folder: Path, ours: str, theirs: str) -> Tensor:
    """Return |difference| / |row| of the model's outputs after equal tokens, of two runs."""
    got, want = (torch.load(folder / name / "final.pt") for name in (ours, theirs))
    pairs = [(got[tokens].float(), want[tokens].float()) for tokens in got if tokens in want]
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs])


def common_rows(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Return how many rows two runs have in common: those of equal tokens up to and with their own.

    A run feeds all tokens of its sequences but the last ones. Where a near tie chose other tokens, the rows after them
    are not comparable; `final_errors` has all rows before.
    """
    fed = [{tuple(s[:n]) for s in run["sequences"] for n in range(1, len(s))} for run in (ours, theirs)]
    return len(fed[0] & fed[1])


def same_until_near_ties(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Assert that tokens differ, if at all, from a token on that is nearly as probable as a second one."""
    for ours, theirs, margins in zip(got["tokens"], want["tokens"], want["margins"], strict=True):
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        assert first is None or margins[first] <= NEAR_TIE, (first, margins[first])
