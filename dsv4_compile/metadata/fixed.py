"""Objects at fixed addresses, which captured graphs know: they are neither copied nor used in a forked process."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from ..errors import fail


class AtFixedAddresses:
    """Base of objects with tensors, graphs or slots that belong to one process, at fixed addresses.

    A graph reads the addresses that it captured, so a copy would write some tensors and read others.
    `copy.copy`, `copy.deepcopy` and `pickle` raise E432.
    """

    _process: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the process."""
        new = super().__new__(cls)
        object.__setattr__(new, "_process", os.getpid())
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise E432."""
        fail("E432", got=f"a copy or a pickle of a {type(self).__name__}")

    def check_process(self) -> None:
        """Raise E432 in any process but that of the constructor."""
        if os.getpid() != self._process:
            fail(
                "E432",
                got=f"a {type(self).__name__} in a process that was forked after it",
                why="its device, its threads and the callers of its requests stay with the first process",
            )
