"""Tests that `make test` leaves out and `make test-all` runs: whole models, and further settings.

They take more than a third of the time and find little that no other test does: each has a sibling with a smaller
model, with fewer settings, or without compiled code. Of a test with several lists of parameters `make test` runs the
sets of tests/covering.py. `pytest` with a path leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.thorough_ops import OPS, every

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    **OPS,
    "attention_backends/test_conformance.py": (
        "test_fifty_batches_do_not_recompile",
        "test_one_compiled_graph_serves_every_batch[FLASHINFER_MLA_SPARSE_DSV4-bfloat16-4-mixed]",
        "test_one_compiled_graph_serves_every_batch[FLASHMLA_SPARSE_DSV4-bfloat16-128-prefill]",
        "test_one_compiled_graph_serves_every_batch[ROCM_FLASHMLA_SPARSE_DSV4-bfloat16-128-prefill]",
        "test_one_compiled_graph_serves_every_batch[ROCM_FLASHMLA_SPARSE_DSV4-fp8_ds_mla-4-mixed]",
        "test_one_compiled_graph_serves_every_batch[DSV4_PAGED-fp8-4-mixed]",
        "test_one_compiled_graph_serves_every_batch[FLASHINFER_MLA_SPARSE_DSV4-fp8-4-mixed]",
    ),
    "attention_backends/test_libraries.py": (
        "test_library_calls_are_nodes_of_one_graph[FLASHINFER_MLA_SPARSE_DSV4-bfloat16]",
    ),
    "attention_backends/test_v32.py": ("test_layer_equals_attention_over_unabsorbed_keys_and_values[aot_eager]",),
    "attention_backends/test_v32_indexer.py": (
        "test_layer_with_indexer_equals_layer_with_given_indices_in_one_graph[bfloat16]",
    ),
    "backend/test_backend.py": (
        "test_nested_conditions_are_not_inlined_exponentially_in_cpp_unless_an_option_allows_it",
        "test_ops_stay_opaque_under_plain_inductor",
    ),
    "backend/test_cache_key.py": ("test_edit_misses_and_revert_hits",),
    "backend/test_fuse_layer.py": (
        "test_a_layer_has_one_op_between_its_projections_and_caches_and_one_for_attention[csa-float32]",
        "test_a_layer_has_one_op_between_its_projections_and_caches_and_one_for_attention[csa-fp8-cache-and-weights]",
        "test_every_pass_works_without_each_other",
    ),
    "backend/test_identities.py": ("test_a_copy_has_the_values_before_a_write_and_memory_that_no_other_has[by ATen]",),
    "backend/test_regions.py": (
        "test_a_cache_that_another_layer_uses_keeps_the_graph_whole[written twice]",
        "test_a_graph_with_a_backward_is_compiled_whole",
        "test_hyper_connections_of_neighbouring_layers_stay_together",
    ),
    "backend/test_warm_start.py": (
        "test_a_second_process_loads_a_graph_in_regions_and_another_model_its_kinds",
        "test_a_second_process_runs_the_cached_graph",
    ),
    "bench/test_bench.py": ("test_every_op_of_the_scenario_agrees_with_itself_and_compiles",),
    "bench/test_chain.py": (
        "test_plain_pytorch_is_one_graph[HCA]",
        "test_plain_pytorch_is_one_graph[SWA]",
    ),
    "bench/test_compile_time.py": ("test_compile_times_are_of_a_prompt_and_of_steps",),
    "bench/test_decode_step.py": (
        "test_a_replay_that_is_timed_cold_flushes_before_each_layer_and_has_the_results_of_a_warm_one_that_never_does",
        "test_replays_of_a_step_agree_with_the_ops_and_are_timed[bfloat16]",
        "test_few_requests_close_a_group_if_their_groups_end_apart",
        "test_layers_of_a_kind_share_what_is_compiled",
    ),
    "bench/test_one_rank.py": ("test_steps_of_a_whole_rank_are_timed_beside_the_floor_of_its_weights",),
    "bench/test_starts.py": ("test_a_folder_of_official_formats_is_read_and_recorded",),
    "bench/test_v41_model.py": (
        "test_a_tiny_model_is_measured_and_its_tables_are_rendered",
        "test_a_part_that_fails_leaves_the_others_running",
    ),
    "debug/test_diverge.py": (
        "test_planted_fault_is_found_at_its_op[a rounding]",
        "test_planted_fault_is_found_at_its_op[a transposed weight]",
        "test_planted_fault_is_found_at_its_op[a weight]",
        "test_planted_fault_is_found_at_its_op[an epsilon]",
        "test_planted_fault_is_found_at_its_op[swapped results]",
        "test_planted_fault_is_found_at_its_op[NaN in a hole]",
        "test_planted_fault_is_found_at_its_op[a stale cache]",
    ),
    "debug/test_script.py": ("test_mode_and_options_of_a_script_reach_inductor",),
    "docs/test_adding_an_op.py": ("test_op_of_the_page_passes_its_tests_and_those_of_all_ops",),
    "hf/test_batch_invariant.py": ("test_a_running_batch_gives_each_request_the_logits_that_it_gets_alone",),
    "hf/test_call_checks.py": ("TestWeights::test_replaced_weights_take_effect[compiled]",),
    "hf/test_compiled.py": (
        "test_a_batch_of_unequal_prompts_decodes_as_each_prompt_alone",
        "test_a_sequence_over_its_capacity_raises",
        "test_any_split_of_a_prompt_uses_the_same_graphs",
        "test_chunked_prefill_gives_the_tokens_of_a_whole_prefill",
        "test_each_prompt_alone_decodes_the_same_tokens",
        "test_nothing_recompiles_over_random_batches",
    ),
    "hf/test_compiled_model.py": (
        "test_a_compiled_folder_inside_a_checkpoint_is_not_looked_for",
        "test_a_damaged_folder_compiles_unless_it_is_required_or_has_a_digest",
        "test_a_different_torch_compiles_and_says_why",
        "test_a_model_that_was_loaded_otherwise_is_refused",
        "test_a_process_that_compiled_nothing_saves_nothing",
        "test_a_process_with_empty_caches_compiles_nothing",
        "test_an_equal_model_uses_the_folder",
        "test_every_field_of_the_manifest_is_compared_and_named",
        "test_the_manifest_says_what_it_was_made_for",
        "test_vector_instructions_are_compared",
    ),
    "hf/test_convert.py": ("test_any_split_of_the_prompt_gives_the_same_logits[token-by-token]",),
    "hf/test_demo.py": ("test_every_claim_is_true",),
    "hf/test_draft_buckets.py": (
        "test_a_cache_goes_on_after_a_generation_in_buckets[mtp]",
        "test_first_tokens_and_drafts_are_those_of_whole_prompts[mtp]",
        "test_generate_has_the_text_and_the_acceptance_of_exact_sizes[mtp]",
        "test_only_prompts_run_in_buckets[mtp]",
    ),
    "hf/test_draft_generate.py": (
        "test_fault_10_one_graph_serves_steps_with_any_acceptance",
        "test_sampled_text_follows_torch_seed_and_the_options[one-hot]",
    ),
    "hf/test_draft_graph.py": ("test_a_step_with_drafts_is_one_graph_with_taps_of_a_repeated_layer[mtp]",),
    "hf/test_draft_misuses.py": (
        "test_a_cache_of_an_earlier_conversion_takes_other_drafts[mtp]",
        "test_a_model_that_is_cast_after_a_call_drafts_on[mtp]",
        "test_caches_of_drafts_serve_calls_in_and_out_of_inference_mode[mtp]",
        "test_revert_frees_draft_layers_and_the_steps_that_call_them[mtp]",
    ),
    "hf/test_expected_modules.py": ("test_layers_before_convert",),
    "hf/test_experts_interface.py": ("test_the_backend_compiles_experts_of_other_models",),
    "hf/test_fp8_weights.py": ("test_generation_compiles_into_one_graph",),
    "hf/test_fuzz.py": ("test_every_call_is_that_of_eager_transformers_or_refused",),
    "hf/test_holes.py": ("test_holes_in_a_row[True]",),
    "hf/test_layer_kinds.py": (
        "test_a_backend_without_marks_after_one_with_them",
        "test_a_change_of_one_layer_is_used[a hook-1]",
        "test_a_change_of_one_layer_is_used[a number-0]",
        "test_a_graph_break_in_layers",
        "test_any_road_to_a_backend_that_takes_marks[around]",
        "test_any_road_to_a_backend_that_takes_marks[compile]",
        "test_any_road_to_a_backend_that_takes_marks[forward_of]",
        "test_any_road_to_a_backend_that_takes_marks[in_place]",
        "test_any_road_to_a_backend_that_takes_marks[stack_of]",
        "test_captures_of_repeated_layers",
        "test_layers_of_a_kind_in_one_model_and_of_two_in_another",
        "test_layers_without_a_weight_in_common_where_others_have_one",
        "test_nothing_keeps_tensors_of_repeated_layers",
        "test_other_caches_of_repeated_layers",
        "test_records_of_repeated_layers",
        "test_the_backend_writes_repeated_layers_out[True]",
        "test_the_graph_is_that_of_a_trace_of_every_layer[a layer unlike others]",
        "test_the_graph_is_that_of_a_trace_of_every_layer[e4m3]",
        "test_the_graph_is_that_of_a_trace_of_every_layer[float32]",
        "test_the_graph_is_that_of_a_trace_of_every_layer[scaled caches]",
    ),
    "hf/test_layer_kinds_settings.py": (
        "test_what_a_forward_of_the_caller_reads_is_compared[ByDepth]",
        "test_what_a_forward_of_the_caller_reads_is_compared[ByTable]",
    ),
    "hf/test_layers.py": ("test_a_compiled_model_has_a_boundary_between_sub_layers",),
    "hf/test_misuses.py": (
        "test_misuses_of_constructors_buffers_and_runners_are_errors[slots huge]",
        "test_stop_tokens_of_any_library_stop[greedy]",
    ),
    "hf/test_redundant_guards.py": (
        "test_a_captured_weight_that_moved_is_followed",
        "test_a_change_is_used[a dtype of a weight]",
        "test_a_change_is_used[a layout of a weight]",
        "test_a_change_is_used[a number of a module that is read]",
        "test_a_change_is_used[a shape of a weight]",
        "test_no_road_guards_layers[inside_a_function-False]",
        "test_no_road_guards_layers[with_a_filter-False]",
        "test_no_road_guards_layers[wrapper-True]",
        "test_one_kind_of_call_more_than_torch_keeps_graphs_for[True]",
        "test_a_change_is_used[a class]",
        "test_a_change_is_used[a forward]",
        "test_a_change_is_used[a hook before]",
    ),
    "hf/test_running_batch.py": (
        "test_a_chunk_of_more_tokens_than_a_sequence_may_have[dsv4]",
        "test_a_weight_of_a_repeated_layer_that_changes_between_steps",
        "test_steps_trace_one_layer_of_each_kind",
    ),
    "hf/test_running_batch_storm.py": ("test_good_requests_get_the_tokens_that_they_get_alone",),
    "hf/test_saving_quantised.py": (
        "test_scales_in_float32_are_saved",
        "test_transformers_and_load_read_what_is_saved_of_a_loaded_model[e4m3 experts, floating wo_a]",
        "test_transformers_and_load_read_what_is_saved_of_a_loaded_model[floating experts]",
    ),
    "hf/test_start.py": (
        "test_a_model_that_load_warmed_up_compiles_nothing",
        "test_seconds_of_a_start_add_up",
        "test_warm_up_covers_calls_with_drafts_and_without",
        "test_a_start_runs_in_a_process_that_imports_nothing_from_the_current_folder",
    ),
    "hf/test_threads.py": ("test_first_calls_at_once",),
    "hf/test_token_inputs.py": ("test_slices_and_transposes_are_what_their_copies_are_in_one_graph",),
    "hf/test_unchanged_block.py": (
        "test_calls_in_a_block_compare_a_cache_once_and_a_model_never[captured]",
        "test_calls_in_a_block_compare_a_cache_once_and_a_model_never[wrapper]",
    ),
    "hf/test_warm_up.py": ("test_without_captures_warm_up_compiles_what_generate_uses",),
    "hf/test_wrapped_calls.py": ("test_autocast_is_named_where_the_call_is_compiled[False]",),
    "models/v41/test_all_graphs.py": ("test_a_storm_of_sizes_compiles_nothing",),
    "models/v41/test_captured.py": (
        "test_a_call_replays_and_returns_memory_of_the_caller",
        "test_generated_tokens_are_those_of_the_model",
        "test_no_op_of_a_step_needs_the_host[False]",
    ),
    "models/v41/test_captured_prompts.py": ("test_replayed_prompts_are_those_of_the_model[replay]",),
    "models/v41/test_compiled.py": (
        "test_a_compiled_tail_of_a_prompt_is_the_eager_one",
        "test_one_graph_runs_prompts_and_decode_steps",
    ),
    "models/v41/test_compiled_kinds.py": ("test_numbers_of_modules_are_constants",),
    "models/v41/test_draft_generate.py": (
        "test_any_acceptance_leaves_the_caches_of_plain_decoding[15]",
        "test_any_acceptance_leaves_the_caches_of_plain_decoding[16]",
        "test_any_acceptance_leaves_the_caches_of_plain_decoding[32]",
        "test_any_acceptance_leaves_the_caches_of_plain_decoding[7]",
        "test_greedy_text_is_the_same[1]",
        "test_sabotaged_drafts_give_the_same_text[63]",
        "test_sabotaged_drafts_give_the_same_text[64]",
    ),
    "models/v41/test_draft_graphs.py": (
        "test_any_acceptance_and_any_batch_run_in_one_graph",
        "test_backend_dsv4_compiles_the_step",
        "test_captured_generation_is_that_of_the_model",
        "test_no_op_of_a_step_needs_the_host[False]",
        "test_no_op_of_a_step_needs_the_host[True]",
    ),
    "models/v41/test_running.py": (
        "test_many_requests_through_few_slots_get_the_tokens_that_each_gets_alone[off-eager]",
        "test_a_prompt_of_nan_fails_alone_and_leaves_nothing[off]",
    ),
    "models/v41/test_running_drafts.py": (
        "test_requests_with_and_without_drafts_get_the_tokens_that_each_gets_alone[off-False]",
    ),
    "models/v41/test_side_roads.py": ("test_positions_that_go_back[off]",),
    "models/v41/test_transformers.py": ("test_a_compiled_model_replays_its_decode_steps",),
    "modules/test_attention_backend.py": (
        "test_compiled_layer_is_one_graph_for_every_batch[FLASHINFER_MLA_SPARSE_DSV4-fp8]",
        "test_compiled_layer_is_one_graph_for_every_batch[ROCM_FLASHMLA_SPARSE_DSV4-fp8_ds_mla]",
        "test_compiled_layer_is_one_graph_for_every_batch[FLASHMLA_SPARSE_DSV4-fp8_ds_mla]",
    ),
    "modules/test_attention_layer.py": (
        "test_real_dimensions[csa-flash]",
        "test_real_dimensions[csa-pro]",
    ),
    "modules/test_compiled_layer.py": (
        "test_one_graph_serves_every_mixed_batch[float32-csa]",
        "test_one_graph_serves_every_mixed_batch[float32-hca]",
        "test_one_graph_serves_every_mixed_batch[fp8-cache-and-weights-csa]",
        "test_one_graph_serves_every_mixed_batch[fp8-cache-and-weights-swa]",
        "test_one_graph_serves_every_mixed_batch[float32-swa]",
        "test_one_graph_serves_every_mixed_batch[fp8_ds_mla-hca]",
        "test_one_graph_serves_every_mixed_batch[fp8_ds_mla-mxfp4-hadamard-csa]",
    ),
    "modules/test_launches.py": every(
        ("test_a_decode_step_has_exactly_these_launches", "test_a_decode_step_stays_within_its_budget_of_graph_nodes"),
        ("csa bf16", "hca fp8", "swa bf16"),
    ),
    "modules/test_output.py": ("test_one_graph_serves_every_number_of_tokens[bfloat16]",),
    "package/test_cli.py": ("test_a_script_run_by_the_command_has_the_ops",),
    "package/test_examples.py": (
        "test_example_runs",
        "test_the_picture_of_architecture_is_that_of_the_example",
    ),
    "package/test_kernels_name.py": (
        "test_a_source_checkout_does_not_shadow_the_name[from elsewhere]",
        "test_an_installed_wheel_does_not_shadow_the_name[from elsewhere]",
    ),
    "package/test_prove.py": (
        "test_a_hang_and_a_fault_take_no_other_file_with_them",
        "test_a_test_that_hangs_is_ended_before_its_file_is_overdue",
        "test_what_finds_no_memory_beside_others_runs_once_more_alone",
    ),
    "package/test_thorough.py": (
        "test_a_run_with_a_path_leaves_out_nothing[a file]",
        "test_processes_that_share_a_run_leave_out_nothing_either",
    ),
    "parallel/test_hosts.py": ("test_a_host_that_is_gone_is_named[the_first_host_is_gone_while_the_other_serves-0]",),
    "parallel/test_ranks.py": (
        "test_on_four_ranks",
        "test_on_two_ranks[an_op_that_differs_on_a_rank_is_found_beside_parts]",
        "test_on_two_ranks[compiled_graphs_neither_break_nor_recompile]",
        "test_on_two_ranks[drafts_give_the_text_of_one_process_without_them]",
        "test_on_two_ranks[prompts_of_unequal_length_and_chunks_give_the_same]",
        "test_on_two_ranks[ranks_whose_drafts_differ_are_told_so]",
        "test_on_two_ranks[requests_with_drafts_get_their_text_on_all_ranks]",
        "test_on_two_ranks[samples_with_drafts_are_those_of_the_seed_of_rank_0]",
        "test_on_two_ranks[v41_a_rank_reads_its_part_of_a_folder]",
        "test_on_two_ranks[v41_captures_a_step_with_its_collectives]",
        "test_on_two_ranks[v41_compiles_to_one_graph_on_a_rank]",
        "test_on_two_ranks[v41_drafts_of_ranks_are_those_of_one_process]",
        "test_on_two_ranks[v41_requests_get_the_text_of_the_whole_model]",
    ),
    "parallel/test_watchdog.py": ("test_process_ends_whose_step_waits_for_a_rank_that_is_gone[a_rank_is_killed]",),
    "tools/test_counts.py": (
        "test_an_op_stands_in_no_list_that_must_be_edited_for_it",
        "test_report_names_every_count",
    ),
    "tools/test_isa.py": ("test_bits_are_equal_as_on_another_cpu",),
    "runtime/test_replay.py": (
        "test_random_decode_steps_over_poisoned_tails[two-speculated]",
        "test_a_fault_in_the_padding_is_found_by_comparison_and_by_debug[stale-tail]",
    ),
}
"""Names of tests, with their parameters or for all parameters, by the file in tests/."""


def left_out(file: str, names: Iterable[str], table: Mapping[str, tuple[str, ...]] = LEFT_OUT) -> set[str]:
    """Return those of a file's test names, such as "test_sum[float32]", that the table names."""
    listed = table.get(file, ())
    return {name for name in names if name in listed or name.partition("[")[0] in listed}


def unknown(file: str, names: Collection[str], table: Mapping[str, tuple[str, ...]] = LEFT_OUT) -> list[str]:
    """Return what the table names in a file without a test of that name."""
    known = {*names, *(name.partition("[")[0] for name in names)}
    return [name for name in table.get(file, ()) if name not in known]
