"""torch's structured log: its logger, and the guards that a record of a recompilation names."""

from __future__ import annotations

import json

TRACE = "torch.__trace"
"""Logger of the log."""


def failed_guards(payload: str) -> list[str]:
    """Return the text of each failed guard in the payload of a record "recompile_reasons"."""
    return [str(reason) for reason in json.loads(payload)] if payload.startswith("[") else [payload]
