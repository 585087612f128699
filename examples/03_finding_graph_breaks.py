"""Find out why a function does not compile into one graph, fix it, and list the nodes of a replay.

`slow_attention` breaks its graph four times. `explain` shows where, why and a fix; `fast_attention`
applies these fixes. `explain_replay` captures it, as a CUDA graph or on a CPU by its stand-in, and lists every node.
Writes build/breaks.html and build/replay.html, to open in a browser.
Runs on a CPU in seconds: python examples/03_finding_graph_breaks.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import dsv4_compile

TOKENS, HEADS, DIM, KEYS = 4, 8, 64, 32
PAGES = Path("build")
"""Folder of the pages."""


def slow_attention(q: torch.Tensor, kv: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Attention of q [T, H, D] over the first lengths[t] of kv [K, D]."""
    longest = lengths.max().item()
    scores = torch.einsum("thd,kd->thk", q, kv[:longest]) * q.shape[-1] ** -0.5
    if scores.abs().max() > 30:
        scores = scores.clamp(-30, 30)
    hidden = torch.arange(longest) >= lengths[:, None]
    scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    print("attending to", int(lengths.sum()), "keys")
    return torch.einsum("thk,kd->thd", scores.softmax(-1), kv[:longest])


def fast_attention(q: torch.Tensor, kv: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Compute `slow_attention` in one graph: lengths stay a tensor, all keys are scored, those past a length masked."""
    scores = torch.einsum("thd,kd->thk", q, kv) * q.shape[-1] ** -0.5
    scores = scores.clamp(-30, 30)
    hidden = torch.arange(kv.shape[0], device=kv.device) >= lengths[:, None]
    scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    return torch.einsum("thk,kd->thd", scores.softmax(-1), kv)


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q [T, H, D], kv [K, D] and lengths i64 [T]."""
    return torch.randn(tokens, HEADS, DIM), torch.randn(KEYS, DIM), torch.randint(1, KEYS + 1, (tokens,))


def main() -> None:
    torch.manual_seed(0)
    first, second = inputs(TOKENS), inputs(2 * TOKENS)
    assert torch.allclose(slow_attention(*first), fast_attention(*first), atol=1e-5)

    # backend="eager" captures graphs without compiling them, which shows breaks and recompiles in a second. The default
    # backend also shows generated kernels, decisions on dsv4 ops and cache copies.
    PAGES.mkdir(exist_ok=True)
    print("\n1. The original function\n")
    before = dsv4_compile.explain(slow_attention, *first, backend="eager")
    print(before)
    assert not before.ok
    print("\nAs a page:", before.save(PAGES / "breaks.html"))

    print("\n2. Without graph breaks, called with two different numbers of tokens\n")
    calls = [(first, {}), (second, {})]
    report = dsv4_compile.explain(fast_attention, calls=calls, backend="eager")
    print(report)
    assert not report.breaks

    print("\n3. With the token dimension marked dynamic, as the report suggests\n")
    torch._dynamo.mark_dynamic(first[0], 0)
    torch._dynamo.mark_dynamic(first[2], 0)
    after = dsv4_compile.explain(fast_attention, calls=calls, backend="eager")
    print(after)
    assert after.ok

    print("\n4. One replay of it, as it is, without torch.compile\n")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [tensor.to(device) for tensor in inputs(TOKENS)]
    graphs = "cuda" if device == "cuda" else "standin"
    replay = dsv4_compile.explain_replay(fast_attention, *on_device, backend=None, graphs=graphs)
    print(replay)
    assert all(node.place.file == __file__ for node in replay.nodes)
    print("\nWith a timeline:", replay.save(PAGES / "replay.html"))


if __name__ == "__main__":
    main()
