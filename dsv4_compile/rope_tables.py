"""Float32 cos/sin tables of RoPE, one for each layer kind, shared by all layers of the kind."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .config import Rope
from .sizes import check_memory


def inv_freq(rope: Rope) -> Tensor:
    """Return float32 `[dim / 2]`: theta^(-2i/dim), interpolated by YaRN if `rope` has it.

    YaRN divides the low frequencies by `factor` and keeps the high ones, with a linear ramp over the pair index
    between the pairs that turn `beta_fast` and `beta_slow` times over the original context.
    """
    powers = rope.theta ** (_arange(0, rope.dim, 2) / rope.dim)
    plain = 1.0 / powers
    if rope.yarn is None:
        return plain
    low = max(math.floor(_pair_with_turns(rope, rope.yarn.beta_fast)), 0)
    high = min(math.ceil(_pair_with_turns(rope, rope.yarn.beta_slow)), rope.dim - 1)
    width = (high - low) or 0.001
    keep = 1.0 - ((_arange(rope.dim // 2) - low) / width).clamp(0, 1)
    return 1.0 / (rope.yarn.factor * powers) * (1.0 - keep) + plain * keep


def _arange(*bounds: int) -> Tensor:
    # Explicitly on the CPU: modules may be built under `with torch.device("meta")`.
    return torch.arange(*bounds, dtype=torch.float32, device="cpu")


def _pair_with_turns(rope: Rope, turns: float) -> float:
    """Return the index of the pair with an angle that makes `turns` full turns over the original context."""
    assert rope.yarn is not None
    context = rope.yarn.original_max_position
    return rope.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


@functools.lru_cache(maxsize=16)
def cos_sin_cache(rope: Rope, max_position: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 `[max_position + 1, dim]`: cosines in the first half of a row, sines in the second.

    The last row is NaN. Ops read the nearest row for a position outside the table, because an error on the device takes
    a synchronisation: a position that is too large gives NaN, not the rotation of a different one.

    Tables are cached, so layers of one kind share one tensor. Do not write to it or cast it.
    """
    if torch.device(device).type == "meta":
        return torch.empty(max_position + 1, rope.dim, device=device)
    check_memory("RoPE tables", 4 * rope.dim * max_position, device)
    angles = _arange(max_position)[:, None] * inv_freq(rope)
    outside = torch.full((1, rope.dim), torch.nan, device="cpu")
    return torch.cat((torch.cat((angles.cos(), angles.sin()), dim=-1), outside)).to(device)
