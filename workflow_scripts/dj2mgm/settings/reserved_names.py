"""Names that experiments, studies and datasets cannot have, all in lower case.

A test compares them with the rules of the parsed workflow and with the paths in its rules.
"""

import re

from dj2mgm.script_modules import SCRIPTS

CORE_RULES = frozenset(
    """
    analyze analyze_data answer_benchmark answer_evaluation ask_trials assemble_model
    challenge compare_experiments compare_study configure_analysis
    configure_batch configure_challenge configure_crate configure_dataset configure_decision configure_evaluation
    configure_export configure_foundation configure_leaks configure_look configure_mixtures configure_model
    configure_page configure_power configure_publishing configure_search configure_stage configure_study crate
    decide deepspeed_configs doctor evaluate evaluate_clip evaluate_vqa export export_data fetch filter_data
    find_leaks finetune finetune_full finetune_in_one_stage finetune_minimal generate_answers leaderboard
    make_dataset make_tiny_vlm plan plan_power pretrain publish publish_dataset publish_model push_dataset push_model
    read_evaluation reproduce score_benchmark score_challenge score_evaluation score_mixtures score_trials serve_check
    synthesize_captions take_look train_clip train_language_model unpack_foundation write_crate
    write_jsonl write_submission
    """.split()
)
FEATURE_RULES = frozenset(
    name
    for path in (SCRIPTS.parent / "rules/features").glob("*.smk")
    for name in re.findall(r"^rule (\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
)
RULES = CORE_RULES | FEATURE_RULES

# folders in results/ without a rule of their name
FOLDERS = frozenset(
    {"captions", "datasets", "evaluations", "foundation", "models", "published", "report", "reproduced"}
)

RESERVED_NAMES = RULES | FOLDERS
