"""What CUDA says when a capture fails, in words: which rule the step broke, and what to do about it."""

from __future__ import annotations

from ..errors import GraphError, error, fail

_CAUSES = (
    (
        ("legacy stream", "unjoined", "isolation", "capturing stream", "wrong thread"),
        "work went to a stream that the capture does not cover, or that did not join it again",
        "launch on torch.cuda.current_stream(); fork a stream with wait_stream and join it before the step returns",
    ),
    (
        ("unsupported", "not permitted", "synchronize", "item", "nonzero", "host"),
        "the step waits for the device or reads from it, which a replay could not repeat",
        "keep .item(), .cpu(), print, boolean indexing and tensors made from Python lists out of the step",
    ),
    (("out of memory",), "the captures do not fit", "fewer or smaller buckets; see runner.plan()"),
)


def explain_failure(fault: BaseException, what: str) -> GraphError:
    """The E422 for what torch or CUDA said while `what` was captured."""
    text = str(fault).strip() or type(fault).__name__
    found = next((cause for cause in _CAUSES if any(word in text.lower() for word in cause[0])), None)
    why, fix = found[1:] if found else ("", "")
    first = text.splitlines()[0]
    built = error("E422", got=f"{what}: {first}", why=why, fix=fix)
    assert isinstance(built, GraphError)
    return built


def refuse_host_read(what: str, op: str) -> None:
    """Raise the E422 of an op whose result the host needs, as a CUDA capture would."""
    fail(
        "E422",
        got=f"{what}: {op} during a capture",
        why="the step reads a value, or a number of elements, from the device",
        fix="keep .item(), .cpu(), boolean indexing and nonzero out of the step",
    )
