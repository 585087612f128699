"""The order of the fusion passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import Graph

from ..options import Options
from . import fuse_attention, fuse_indexer, fuse_latent, fuse_output, fuse_preprocess, fuse_streams
from .fusion import Fuser

PASSES: Mapping[str, Callable[[Graph, Fuser], None]] = {
    "fuse_preprocess": fuse_preprocess.run,
    "fuse_indexer": fuse_indexer.run,
    "fuse_attention": fuse_attention.run,
    "fuse_latent": fuse_latent.run,
    "fuse_output": fuse_output.run,
    "fuse_streams": fuse_streams.run,
}
"""All passes by the name in `dsv4.fuse.<pass>`. `fuse_latent` needs the ops that `fuse_preprocess` creates."""


def run(graph: Graph, options: Options) -> None:
    """Run every pass that `options` do not switch off."""
    for name, run_pass in PASSES.items():
        if options.fuse_of(name) != "off":
            run_pass(graph, Fuser(name, options))
