"""Where torch keeps the comparison of strategies with dense results."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops.strategy_validation",
    "_assert_keys_normalized _AtenFalsePositiveMitigations _CaptureAtenOp _check_ground_truth "
    "_checkerboard_mask _compare_outputs _compare_rules _create_partial_input _discover_aten_op "
    "_extract_rules_from_op_strategy _FalsePositiveMitigations _find_opinfo_candidates "
    "_format_op_name _format_sample_repro _has_dtensor_support _is_tensor_output "
    "_negate_tensors_in_tree _prepare_aten_mitigations _prepare_false_positive_mitigations "
    "_print_comparison_summary _print_discrepancy_section _query_dtensor_rules _run_op_on_sample "
    "_shard_tensors _to_ground_truth _validate_aten_op_for_sample _validate_aten_with_mitigations "
    "_validate_with_mitigations ComboKey compare_operator ComparisonStats "
    "create_fully_negated_sample Discrepancy extract_tensors_from_args "
    "extract_tensors_from_sample get_1d_input_placements_for_tensor "
    "get_1d_output_placements_for_tensor get_aten_op_for_sample get_opinfo_by_name "
    "get_registered_op_names has_any_partial has_pmin_pmax is_fully_replicated is_trivial_shard "
    "negate_all_tensors normalize_combo_key normalize_placement normalize_placement_str "
    "parse_placement PARTIAL_REDUCE_OPS PlacementCombination query_single_dim_strategy "
    "report_registrations resolve_op_names validate_aten_combination validate_combination",
    why="Rules are proved by execution in `shardwise.verify`, not strategies.",
    fix="shardwise.rules.verify(op) executes a rule in every layout that it allows.",
)
