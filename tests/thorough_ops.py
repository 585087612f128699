"""Tests of ops, their kernels and their lowerings that `make test` leaves out; see thorough.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def every(tests: Iterable[str], cases: Iterable[str]) -> tuple[str, ...]:
    """Return the names of these tests with each of the cases."""
    cases = tuple(cases)
    return tuple(f"{test}[{case}]" for test in tests for case in cases)


OPS: Mapping[str, tuple[str, ...]] = {
    "kernels/attention/test_sparse_mla_decode_sm90_few_tokens.py": (
        "test_hostile_rows_give_the_references_result[9-128]",
        "test_a_row_of_a_step_does_not_depend_on_its_batch_or_its_width[0]",
        "test_a_row_of_a_step_does_not_depend_on_its_batch_or_its_width[1]",
    ),
    "kernels/drafts/test_accept_drafts.py": ("test_random_requests[3-dtype2]",),
    "kernels/hyper_connections/test_mhc_boundary.py": (
        "test_programs_may_run_in_any_order_and_one_by_one[mhc_boundary-17]",
    ),
    "kernels/indexer/test_index_topk.py": ("test_tiles_and_chunks_of_tokens_change_nothing[tiles2]",),
    "kernels/linear/test_gemm.py": (
        "test_torch_gets_a_single_group_of_quantized_x[form1]",
        "test_torch_gets_a_single_group_of_quantized_x[form2]",
    ),
    "kernels/moe/test_moe_experts_sm90.py": (
        "test_results_are_the_references[1-256-384-]",
        "test_results_are_the_references[9-384-256-]",
        "test_every_e8m0_scale_means_its_power_of_two[w2]",
    ),
    "kernels/test_attention_backends.py": (
        "test_kernels_give_the_exact_answer[DSV4_PAGED-fp8_ds_mla-4-mixed]",
        "test_kernels_give_the_exact_answer[FLASHINFER_MLA_SPARSE_DSV4-fp8-4-mixed]",
        "test_kernels_give_the_exact_answer[FLASHMLA_SPARSE_DSV4-bfloat16-4-mixed]",
        "test_kernels_give_the_exact_answer[ROCM_FLASHMLA_SPARSE_DSV4-bfloat16-4-mixed]",
    ),
    "lowering/attention/test_inv_rope.py": (
        "test_cpp_equals_the_reference[rotate]",
        *every(
            (
                "test_triton_gives_the_bytes_and_strides_of_the_reference",
                "test_rotation_values_and_scales_are_one_kernel_and_the_output_of_attention_is_not_copied",
            ),
            ("heads_outermost", "no_padding", "one_token", "whole_heads_rotated"),
        ),
    ),
    "lowering/indexer/test_indexer_q_rope_quant.py": (
        "test_cpp_equals_the_reference[fp8]",
        "test_cpp_equals_the_reference[fp8_rounded]",
        "test_cpp_equals_the_reference[mxfp4]",
        "test_cpp_equals_the_reference[plain]",
        *every(
            (
                "test_triton_gives_the_bytes_of_the_reference",
                "test_queries_are_one_kernel_and_hold_the_weights_where_those_need_the_scale",
            ),
            ("fp8_float32", "fp8_one_token", "fp8_rounded", "fp8_strided", "mxfp4_one_token", "plain_float32"),
        ),
    ),
    "lowering/metadata/test_compressed_slot_mapping.py": ("test_cpp_equals_the_reference[slots]",),
    "lowering/metadata/test_global_topk.py": ("test_cpp_equals_the_reference[slots]",),
    "lowering/moe/test_moe_experts.py": ("test_the_compiled_op_is_ir_without_a_copy_of_weights[float32--dtype0]",),
    "lowering/moe/test_moe_route.py": ("test_the_compiled_op_is_ir_and_equals_eager_for_any_number_of_tokens[dtype0]",),
    "lowering/preprocess/test_compress_norm_rope_insert.py": (
        *every(
            (
                "test_every_byte_behind_the_cache_is_that_of_the_reference",
                "test_pool_norm_and_store_are_a_kernel_each_and_no_cache_is_copied",
            ),
            ("all_padding", "indexer_fp8_hadamard", "indexer_mxfp4", "one_token"),
        ),
    ),
    "lowering/preprocess/test_fused_q_kv_rmsnorm.py": (
        "test_cpp_equals_the_reference[cast]",
        "test_cpp_equals_the_reference[cast_float16]",
    ),
    "lowering/preprocess/test_q_norm_rope_kv_insert.py": (
        "test_both_in_one_on_cpp_is_ir_for_q_around_the_reference_insert[fp8_ds_mla]",
        "test_cpp_rounds_queries_to_e4m3_as_the_reference_does[512-64-dtype1]",
    ),
    "lowering/test_traced.py": (
        "test_a_compiled_hyper_connection_is_few_loops_and_equals_eager[mhc_boundary-2]",
        "test_a_compiled_hyper_connection_is_few_loops_and_equals_eager[mhc_head-2]",
        "test_a_compiled_hyper_connection_is_few_loops_and_equals_eager[mhc_pre-2]",
    ),
    "ops/attention/test_inv_rope.py": (
        "test_inductor_sees_the_strides_that_the_op_returns[float32 scales]",
        "test_op_contract",
        "test_op_contract_of_the_quantisation",
    ),
    "ops/attention/test_sparse_mla_decode.py": (
        "test_op_contract",
        "test_compiles_once_for_every_token_count[inductor]",
    ),
    "ops/attention/test_sparse_mla_decode_fused.py": ("test_op_contract",),
    "ops/hyper_connections/test_mhc_head.py": ("test_op_keeps_its_promises",),
    "ops/indexer/test_indexer_logits.py": (
        "test_ops_keep_their_promises",
        "test_ragged_op_keeps_its_promises",
        "test_compiles_once_for_every_token_count[indexer_fp8-inductor]",
    ),
    "ops/indexer/test_indexer_q_rope_quant.py": (
        "test_op_keeps_its_promises",
        "test_compiles_once_for_every_token_count[indexer_fp8-inductor]",
    ),
    "ops/indexer/test_indexer_topk_slots.py": ("test_it_keeps_its_promises_for_strided_padded_and_empty_inputs",),
    "ops/moe/test_moe_experts.py": ("test_op_keeps_its_promises",),
    "ops/preprocess/test_compress_norm_rope_insert.py": ("test_op_keeps_its_promises",),
    "ops/preprocess/test_q_norm_rope_kv_insert.py": ("test_one_graph_serves_every_token_count[inductor]",),
    "kernels/test_plans.py": every(
        ("test_calls_of_equal_variants_are_compiled_alike_and_others_are_not",),
        (
            "decode of few heads, any batch-gfx942",
            "decode of few heads, any batch-sm_120",
            "decode of few heads, any batch-sm_90",
            "decode of latents-gfx942",
            "decode of latents-sm_120",
            "decode of latents-sm_90",
            "decode of many heads-gfx942",
            "decode of many heads-sm_120",
            "decode of many heads-sm_90",
            "experts in MXFP4, shared e4m3-gfx942",
            "experts in MXFP4, shared e4m3-sm_120",
            "experts in MXFP4, shared e4m3-sm_90",
            "experts in bfloat16-gfx942",
            "experts in bfloat16-sm_120",
            "interleaved experts-gfx942",
            "interleaved experts-sm_120",
            "interleaved experts-sm_90",
            "linear in float32-gfx942",
            "linear in float32-sm_120",
            "linear in float32-sm_90",
            "linear of groups-gfx942",
            "linear of groups-sm_120",
            "linear of groups-sm_90",
        ),
    ),
}
