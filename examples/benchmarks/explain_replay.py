"""Report one replay of a captured V4-Flash layer, node by node: python examples/benchmarks/explain_replay.py

The attention of one layer of real size, compiled by backend="dsv4" and captured with the refresh of the metadata in a
DecodeRunner. Writes replay_LAYER_TOKENS.html, .json and .txt to the folder OUT of the environment, or to build/, and
fails if the nodes' times are further from the replay's than 5 % and a launch, or a node has no source line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import dsv4_compile
from dsv4_compile import layout
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.decode_layers import DecodeStep
from dsv4_compile.debug import ReplayReport
from dsv4_compile.selection import proven

RATIOS = {"SWA": 1, "HCA": layout.HCA_RATIO, "CSA": layout.CSA_RATIO}
SHARE, LAUNCH_US = 0.05, 3.0
"""Largest accepted distance between the sum of the nodes' times and the time of a replay: of consecutive replays, by
events, so that it has the launch of a graph in it."""


def report_of(layer: str, tokens: int, context: int, fp8: bool, layers: int, device: torch.device) -> ReplayReport:
    """Return the report of a decode step of `tokens` requests of `context` tokens."""
    config = dsv4_compile.DeepseekV4Config.flash().with_layers(*[RATIOS[layer]] * layers)
    step = DecodeStep.build(config, fp8, tokens, context, device)
    runner = step.runner(step.compiled(backend=dsv4), (tokens,))
    step.load(tokens)
    runner.inputs["hidden"].normal_()
    runner.step(tokens)
    report = dsv4_compile.explain_replay(runner, tokens)
    weights = "e4m3" if fp8 else "bfloat16"
    report.target = f"{layers} {layer} layer{'s' if layers > 1 else ''} of V4-Flash, {weights}, {context} tokens"
    return report


def wrong(report: ReplayReport) -> list[str]:
    """Return what a report lacks."""
    reasons = [f"no source line: node {node.index} {node.name}" for node in report.nodes if not node.place.file]
    reasons += [f"no time: node {node.index} {node.name}" for node in report.nodes if node.us is None]
    if report.us is None or report.replay_us is None or _far(report.us, report.replay_us):
        reasons.append(f"nodes take {report.us} us together, a replay {report.replay_us} us")
    return reasons + report.notes


def _far(nodes_us: float, replay_us: float) -> bool:
    return abs(nodes_us - replay_us) > SHARE * replay_us + LAUNCH_US


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=tuple(RATIOS), default="CSA")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="bfloat16 weights instead of e4m3")
    parser.add_argument("--out", default=os.environ.get("OUT", "build"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a captured layer of real size needs a GPU; examples/03_finding_graph_breaks.py runs on a CPU")
    with proven.trust(), torch.no_grad():
        report = report_of(args.layer, args.tokens, args.context, not args.bfloat16, args.layers, torch.device("cuda"))
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (".html", ".json", ".txt"):
        print(report.save(folder / f"replay_{args.layer.lower()}_{args.tokens}{suffix}"))
    print(report)
    problems = wrong(report)
    print("\n".join(problems) or "every node has a line and a time, and the times add up")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
