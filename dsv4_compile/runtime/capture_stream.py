"""Work that a capture would miss: ops on a stream that it does not cover.

CUDA records what reaches the capturing stream and those that wait for it. A kernel on another stream runs at once, and
never again: every replay reads what it left. CUDA says nothing of it, so each op is looked at while a capture is made.
"""

from __future__ import annotations

from typing import Any

import torch

from .._compat import OpOverload, TorchDispatchMode, pytree
from ..errors import fail


class OnCaptureStream(TorchDispatchMode):  # type: ignore[misc]
    """Raises E422 for an op on tensors of `device_type` while the current stream is not captured."""

    def __init__(self, what: str, device_type: str) -> None:
        super().__init__()
        self._what, self._device_type = what, device_type

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a function that is compiled runs compiled inside."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, which older torch asks to the same end."""
        return True

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        kwargs = kwargs or {}
        if not torch.cuda.is_current_stream_capturing() and self._launches(func, args, kwargs):
            fail(
                "E422",
                got=f"{self._what}: {func} on a stream that is not captured",
                why="it would run once, now, and no replay would do it again",
                fix="launch on torch.cuda.current_stream(); fork a stream with wait_stream and join it before the step "
                "returns",
            )
        return func(*args, **kwargs)

    def _launches(self, func: OpOverload, args: Any, kwargs: Any) -> bool:
        """Whether `func` has work for the device: views have none."""
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = [tensor.device for tensor in tensors]
        if kwargs.get("device") is not None:
            devices.append(torch.device(kwargs["device"]))
        return any(device.type == self._device_type for device in devices)
