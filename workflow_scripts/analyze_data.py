r"""Measure a dataset with Data-Juicer's statistics of every row, and count the rows that each limit would drop.

    python workflow_scripts/analyze_data.py --config results/datasets/shapes/analyze/config.yaml \
        --data results/datasets/shapes/pretrain.jsonl --output-dir results/datasets/shapes/analyze

Writes stats.jsonl, overall.csv, analysis.html and summary.json.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.analyze.analysis import PAGE, SUMMARY, analyze, summarize_analysis
from dj2mgm.features.analyze.analysis_page import write_analysis_page
from dj2mgm.features.analyze.analyze_keys import AnalysisSettings
from dj2mgm.juicer.patched_data_juicer import prepare_process
from dj2mgm.juicer.recipe_settings import prepare_filters
from dj2mgm.juicer.run_recipe import configure_log
from dj2mgm.records import describe_clip_doubt
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_json


@command_line
def main() -> None:
    arguments = parse_paths(__doc__, "--config", "--data", "--output-dir")
    settings = load_settings(AnalysisSettings, arguments.config)
    recipe = prepare_filters(arguments.config, settings)
    configure_log()
    prepare_process()
    if settings.clip is not None:
        from dj2mgm.compute import use_cpu_threads  # here because it imports torch, which only a CLIP needs

        use_cpu_threads(settings.cpu_threads)
    analysis = analyze(recipe, settings.clip, arguments.data, arguments.output_dir)
    doubt = describe_clip_doubt(settings.clip, settings.image_root)
    write_analysis_page(analysis, arguments.output_dir / PAGE, settings.chosen, doubt)
    write_json(arguments.output_dir / SUMMARY, summarize_analysis(analysis, settings.clip))


if __name__ == "__main__":
    main()
