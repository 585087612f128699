"""Schemas, fakes and checks of `torch.ops.dsv4`. Importing this package registers every op; it needs torch alone."""

from __future__ import annotations

from . import dequantize_and_gather_k_cache as dequantize_and_gather_k_cache
from . import fp8_grouped_einsum as fp8_grouped_einsum
from . import fp8_linear as fp8_linear
from . import fused_q_kv_rmsnorm as fused_q_kv_rmsnorm
from . import inv_rope_fp8_quant as inv_rope_fp8_quant
from . import q_norm_rope_kv_insert as q_norm_rope_kv_insert
from . import quantize_and_insert_k_cache as quantize_and_insert_k_cache
