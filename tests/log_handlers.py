"""Log capture of pytest without its cost for each test: a millisecond where torch has been imported."""

from __future__ import annotations

import logging
from typing import Any

import _pytest.logging


class KeptHandler(_pytest.logging.catching_logs[Any]):
    """Catches logs with a handler that stays at the root logger.

    pytest adds two handlers to each of torch's loggers that do not propagate, three times a test, and removes them.
    """

    def __enter__(self) -> Any:
        logger = logging.getLogger()
        if self.handler not in logger.handlers:
            self.handler.setLevel(logging.INFO)
            logger.addHandler(self.handler)
        return self.handler

    def __exit__(self, *fault: object) -> None:
        pass


def keep_handlers() -> None:
    """Let this process capture logs from INFO on: torch traces its compiler at DEBUG, and a failure would print it."""
    logging.getLogger().setLevel(logging.INFO)
    _pytest.logging.catching_logs = KeptHandler  # type: ignore[misc]
