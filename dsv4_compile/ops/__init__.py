"""Schemas, fakes and checks of `torch.ops.dsv4`. Importing this package registers every op; it needs torch alone."""

from __future__ import annotations

from . import advance as advance
from . import batch_metadata as batch_metadata
from . import c128a_topk_metadata as c128a_topk_metadata
from . import combine_topk_swa as combine_topk_swa
from . import compress_norm_rope_insert as compress_norm_rope_insert
from . import compressed_slot_mapping as compressed_slot_mapping
from . import convert_req_index as convert_req_index
from . import copy_ragged_to_graph_buffers as copy_ragged_to_graph_buffers
from . import cp_gather_indexer_k as cp_gather_indexer_k
from . import dequantize_and_gather_k_cache as dequantize_and_gather_k_cache
from . import flashinfer_mixed_indices as flashinfer_mixed_indices
from . import fp8_grouped_einsum as fp8_grouped_einsum
from . import fp8_grouped_einsum_quant as fp8_grouped_einsum_quant
from . import fp8_linear as fp8_linear
from . import fused_q_kv_rmsnorm as fused_q_kv_rmsnorm
from . import global_topk as global_topk
from . import grouped_linear as grouped_linear
from . import indexer_logits_topk as indexer_logits_topk
from . import indexer_q_rope_quant as indexer_q_rope_quant
from . import indexer_topk_slots as indexer_topk_slots
from . import inv_rope_fp8_quant as inv_rope_fp8_quant
from . import preprocess_insert as preprocess_insert
from . import preprocess_insert_quant as preprocess_insert_quant
from . import q_norm_rope_kv_insert as q_norm_rope_kv_insert
from . import quantize_and_insert_k_cache as quantize_and_insert_k_cache
from . import save_partial_states as save_partial_states
from . import sparse_mla_decode as sparse_mla_decode
from . import sparse_mla_decode_latent as sparse_mla_decode_latent
from . import sparse_mla_decode_ragged as sparse_mla_decode_ragged
from . import sparse_mla_prefill as sparse_mla_prefill
from . import swa_metadata as swa_metadata
