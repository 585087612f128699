"""Schemas, fakes and checks of `torch.ops.dsv4`. Importing this package registers every op; it needs torch alone."""

from __future__ import annotations

from .attention import inv_rope as inv_rope
from .attention import sparse_mla_decode as sparse_mla_decode
from .attention import sparse_mla_prefill as sparse_mla_prefill
from .drafts import accept_drafts as accept_drafts
from .drafts import markov_drafts as markov_drafts
from .hyper_connections import mhc_boundary as mhc_boundary
from .hyper_connections import mhc_head as mhc_head
from .hyper_connections import mhc_post as mhc_post
from .hyper_connections import mhc_pre as mhc_pre
from .indexer import cp_gather_indexer_k as cp_gather_indexer_k
from .indexer import indexer_logits as indexer_logits
from .indexer import indexer_q_rope_quant as indexer_q_rope_quant
from .indexer import indexer_topk_slots as indexer_topk_slots
from .linear import fp8_grouped_einsum as fp8_grouped_einsum
from .linear import fp8_linear as fp8_linear
from .linear import grouped_linear as grouped_linear
from .metadata import advance as advance
from .metadata import batch_metadata as batch_metadata
from .metadata import c128a_topk_metadata as c128a_topk_metadata
from .metadata import combine_topk_swa as combine_topk_swa
from .metadata import compressed_slot_mapping as compressed_slot_mapping
from .metadata import convert_req_index as convert_req_index
from .metadata import copy_ragged_to_graph_buffers as copy_ragged_to_graph_buffers
from .metadata import flashinfer_mixed_indices as flashinfer_mixed_indices
from .metadata import global_topk as global_topk
from .metadata import prefill_gather_lens as prefill_gather_lens
from .metadata import ragged_from_dense as ragged_from_dense
from .metadata import swa_metadata as swa_metadata
from .moe import moe_experts as moe_experts
from .moe import moe_route as moe_route
from .preprocess import compress_norm_rope_insert as compress_norm_rope_insert
from .preprocess import dequantize_and_gather_k_cache as dequantize_and_gather_k_cache
from .preprocess import fused_q_kv_rmsnorm as fused_q_kv_rmsnorm
from .preprocess import kv_rope_insert as kv_rope_insert
from .preprocess import preprocess_insert as preprocess_insert
from .preprocess import q_norm_rope as q_norm_rope
from .preprocess import quantize_and_insert_k_cache as quantize_and_insert_k_cache
from .preprocess import save_partial_states as save_partial_states
