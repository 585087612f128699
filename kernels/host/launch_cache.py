"""Launchers that do again what they did for a call like this one.

A launcher chooses tiles, looks at strides, makes views, and has Triton look at every argument again: on the host that
takes longer than most kernels run. All of that follows from shapes, dtypes, strides, alignment and plain numbers, so
that calls which agree in them launch the same: the layers of a step do, and steps of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .tape import Plan, Tape, Unknown

ALIGN = 64
"""Bytes up to which a launcher may ask how its arguments are aligned. Where it asks for their offset in a storage, that
is because a graph that is being compiled knows no address."""
MOST_PLANS = 256
"""Of a launcher, before it forgets them all."""

Key = tuple[Any, ...]


def key_of(args: tuple[Any, ...]) -> Key:
    """All that a launcher may look at of its arguments, whose types an op's schema fixes."""
    return tuple(
        [
            (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGN, x.get_device()) if isinstance(x, Tensor) else x
            for x in args
        ]
    )


class Planned:
    """A launcher, called with the arguments of its op.

    A call is noted when one like it comes the second time: of most sizes of a prompt there is one. What cannot be done
    again is launched as ever, and `refused` says why.
    """

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self._launcher = launcher
        self.plans: dict[Key, Plan | None] = {}
        """None for what has come once."""
        self.refused: dict[Key, str] = {}

    def find(self, args: tuple[Any, ...]) -> Plan | None:
        """What to do for `args`, if that is known."""
        return self.plans.get(key_of(args))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the launcher."""
        if kwargs:
            return self._launcher(*args, **kwargs)
        key = key_of(args)
        plan = self.plans.get(key)
        if plan is not None:
            return plan(args)
        if key not in self.plans:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
                self.refused.clear()
            self.plans[key] = None
        elif key not in self.refused:
            return self._note(key, args)
        return self._launcher(*args)

    def _note(self, key: Key, args: tuple[Any, ...]) -> Any:
        with Tape(args) as tape:
            result = self._launcher(*args)
        try:
            self.plans[key] = tape.plan(result)
        except Unknown as why:
            self.refused[key] = str(why)
        return result
