"""Schemas, fakes and checks of `torch.ops.dsv4`. Importing this package registers every op; it needs torch alone."""

from __future__ import annotations

from . import fused_q_kv_rmsnorm as fused_q_kv_rmsnorm
