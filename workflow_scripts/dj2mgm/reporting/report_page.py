"""The report: one page that compares experiments, made from its sections and templates."""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from dj2mgm.evaluation.run_scores import GroupEstimates
from dj2mgm.reporting.comparison import (
    build_difference_table,
    build_metric_table,
    describe_chance,
    describe_coverage,
    describe_paired_seeds,
)
from dj2mgm.reporting.experiment_results import ExperimentResults, group_experiments
from dj2mgm.reporting.rendering import build_step_key, build_template_environment, format_integer, join_words, link_rows
from dj2mgm.reporting.row_flow import (
    FlowStep,
    RecaptionedRow,
    Shape,
    build_pretrain_steps,
    build_recaption_gallery,
    build_source_table,
    count_instructions,
    draw_flows,
    measure_synthesis_quality,
    read_recaptions,
    read_truth,
)
from dj2mgm.reporting.sections.gallery import build_duplicate_sections, build_gallery
from dj2mgm.reporting.sections.histograms import build_similarity_histogram, build_statistic_histograms
from dj2mgm.reporting.sections.judge_section import build_leak_sections, describe_judges, measure_judge_agreement
from dj2mgm.reporting.sections.run_details import (
    build_times_table,
    build_training_table,
    list_config_differences,
    list_versions,
)
from dj2mgm.reporting.sections.training_charts import draw_loss_chart, draw_memory_timeline, draw_score_charts
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.headline_panels import LOW_COVERAGE, build_headline_panels, build_metric_verdicts
from dj2mgm.reporting.verdicts.learning_faults import describe_faults
from dj2mgm.reporting.what_changed import describe_changes
from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_text

COLORS = 6  # of experiments, in the style sheet
LANES = {
    "original": "original caption",
    "recaptioned": "new caption",
    "repeated": "repeated",
    "dropped": "dropped",
}
TRAINED = {
    "pretrain": "Trained: the projector between towers and language model. Everything else is frozen.",
    "finetune": "Trained: {weights}{projector}. Everything else is frozen.",
}


def write_report_page(assessment: Assessment, path: str | Path, explorers: Collection[str] = frozenset()) -> None:
    """Write the report as one self-contained HTML file without scripts.

    Args:
        assessment: the assessment of the experiments, of which the first is the reference.
        path: the file.
        explorers: names of experiments whose explorer page the report links to.
    """
    experiments, differences = assessment.experiments, assessment.differences
    recaptions = {experiment.name: read_recaptions(experiment.runs[0]) for experiment in experiments}
    names = [experiment.name for experiment in experiments]
    template = build_template_environment().get_template(
        "report.html.j2",
        globals={"rows_link": link_rows, "step_key": build_step_key, "color": partial(choose_color, names)},
    )
    page = template.render(
        names=names,
        reference=experiments[0].name,
        explorers=explorers,
        **_collect_verdict_values(assessment),
        **_collect_data_values(experiments, recaptions, path),
        **_collect_training_values(assessment),
        **_collect_result_values(experiments, differences),
        **_collect_record_values(experiments),
    )
    write_text(path, page)


def choose_color(names: list[str], label: str) -> str:
    """Return the style sheet's class with the color of an experiment; of the first one if the label joins several."""
    return f"e{names.index(label.partition(' ')[0].rstrip(',')) % COLORS}"


def _collect_verdict_values(assessment: Assessment) -> dict:
    """Return the values of the first screen: verdicts, headline panels, judges and notes on intervals."""
    experiments, differences = assessment.experiments, assessment.differences
    panels = build_headline_panels(experiments, differences)
    estimates = [
        estimate for groups in differences.values() for metrics in groups.values() for estimate in metrics.values()
    ]
    one_seed = any(estimate.seeds == 1 for estimate in estimates)
    count = sum(len(model.differences) for panel in panels for model in panel.models)
    return {
        "dataset": experiments[0].dataset.name,
        "model": experiments[0].config.model.name,
        "cards": assessment.merge_cards(assessment.cards),
        "unlearned": list(assessment.unlearned),
        "faults": describe_faults(assessment.unlearned),
        "changed": describe_changes(experiments),
        "verdicts": build_metric_verdicts(experiments, differences),
        "compared": any(differences.values()),
        "seeds": [experiment.seeds for experiment in experiments],
        "seeds_note": describe_seed_coverage(experiments),
        "chance_note": describe_chance(count, one_seed),
        "one_seed": one_seed,
        "judge_notes": describe_judges(experiments),
        "agreement": measure_judge_agreement(experiments, differences),
        "method_note": describe_method(experiments),
        "coverage": LOW_COVERAGE,
        "several_seeds": any(len(experiment.seeds) > 1 for experiment in experiments),
        "panels": panels,
    }


def _collect_data_values(
    experiments: list[ExperimentResults], recaptions: dict[str, list[RecaptionedRow]], path: str | Path
) -> dict:
    """Return the values of the sections about rows: their flow, statistics, near-duplicates, leaks and new captions."""
    return {
        "lanes": LANES,
        "flows": _build_flows(experiments, recaptions),
        "statistics": _build_statistics(experiments, recaptions),
        "near_duplicates": list(_build_near_duplicate_parts(experiments)),
        "leaks": list(build_leak_sections(experiments, path)),
        "recaptions": list(_build_recaption_parts(experiments, recaptions)),
    }


def _collect_training_values(assessment: Assessment) -> dict:
    """Return the values of the sections about training: what it changed, losses, scores and memory."""
    experiments = assessment.experiments
    return {
        "forgotten": assessment.forgotten,
        "changes_by_training": {name: changes for name, changes in assessment.training_changes.items() if changes},
        "losses": [
            (
                _find_stage_title(name, experiments),
                _describe_trained(name, experiments),
                draw_loss_chart(experiments, name),
            )
            for name in TRAINED
            if all(name in run.records for experiment in experiments for run in experiment.runs)
        ],
        "scores": [
            (f"{_find_stage_title(stage, experiments)}: {chart.quantity.lower()}", chart)
            for stage in TRAINED
            for chart in draw_score_charts(experiments, stage)
        ],
        "memory": [(experiment.name, draw_memory_timeline(experiment)) for experiment in experiments],
        "planned": any(
            record.memory_plan for experiment in experiments for record in experiment.runs[0].records.values()
        ),
    }


def _collect_result_values(experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]) -> dict:
    """Return the values of the sections with outputs of the models and with all metrics."""
    return {
        "galleries": _build_galleries(experiments),
        "metrics": [_build_metrics(experiment, differences) for experiment in experiments],
        "evaluation": _describe_evaluations(experiments),
    }


def _collect_record_values(experiments: list[ExperimentResults]) -> dict:
    """Return the values of the last section: differences of configuration, times and versions."""
    reference, *later_experiments = experiments
    return {
        "changes": [
            {"experiment": experiment.name, "rows": list_config_differences(experiment, reference)}
            for experiment in later_experiments
        ],
        "times": build_times_table(experiments),
        "versions": list_versions(experiments),
        "training": [
            (experiment.name, list(experiment.runs[0].records), build_training_table(experiment.runs[0]))
            for experiment in experiments
        ],
    }


def _describe_trained(stage: str, experiments: list[ExperimentResults]) -> str:
    """Return what a stage trains in these experiments."""
    lora_flags = {experiment.config.finetune.lora is not None for experiment in experiments}
    method = {(True,): "by LoRA", (False,): "all weights"}.get(tuple(lora_flags), "by LoRA or all weights")
    # without stage 1, LoRA trains no projector (docs/models.md)
    has_projector = False in lora_flags or any("pretrain" in experiment.runs[0].records for experiment in experiments)
    projector = ", and the projector between towers and language model" if has_projector else ""
    return TRAINED[stage].format(weights=f"the language model ({method})", projector=projector)


def _find_stage_title(stage: str, experiments: list[ExperimentResults]) -> str:
    """Return a stage's label, without its number if it is the only training stage."""
    number, _, name = STAGES[stage].label.partition(": ")
    is_single_stage = all(len(run.records) == 1 for experiment in experiments for run in experiment.runs)
    return name.capitalize() if is_single_stage else f"{number}: {name}"


def describe_seed_coverage(experiments: list[ExperimentResults]) -> str:
    """Describe what the intervals cover."""
    seeds = {experiment.name: experiment.seeds for experiment in experiments}
    if all(len(numbers) == 1 for numbers in seeds.values()):
        return f"{describe_coverage(1)} To allow for that too, train with more seeds: set seeds=[0,1,2,3,4]."
    if len({tuple(numbers) for numbers in seeds.values()}) == 1:
        numbers = next(iter(seeds.values()))
        seed_names = join_words([str(number) for number in numbers])
        return f"{len(numbers)} seeds ({seed_names}). {describe_coverage(len(numbers))}"
    counts = join_words([f"{name} with {len(numbers)}" for name, numbers in seeds.items()])
    return (
        f"Seeds: {counts}. The 95 % intervals allow for other held-out images and, with at least two seeds, other "
        "seeds. " + describe_paired_seeds(experiments)
    )


def describe_method(experiments: list[ExperimentResults]) -> str:
    """Describe how the intervals are computed, with their degrees of freedom."""
    groups = [group for experiment in experiments for group in experiment.groups.values()]
    images = [estimate.images for group in groups for estimate in group.values()]
    if max(images) == 1:
        return "There is no interval for one image."
    method = (
        f"The intervals use Student's t. The variance over images has {_describe_df(images, 'images')}, and fewer if "
        "images have different numbers of questions."
    )
    if max(seeds := [len(experiment.seeds) for experiment in experiments]) == 1:
        return method
    return (
        f"{method} The variance over seeds has {_describe_df(seeds, 'seeds')}. Few seeds make the intervals wide; five "
        "are recommended."
    )


def _describe_df(numbers: list[int], unit: str) -> str:
    low, high = max(min(numbers), 2), max(numbers)
    if low == high:
        return f"{high - 1} degree{'s' if high > 2 else ''} of freedom for {format_integer(high)} {unit}"
    return f"{low - 1} to {format_integer(high - 1)} degrees of freedom for {low} to {format_integer(high)} {unit}"


def _build_flows(experiments: list[ExperimentResults], recaptions: dict[str, list[RecaptionedRow]]) -> list[dict]:
    """Draw the flow of rows for the first run of each experiment."""
    chains = [build_pretrain_steps(e, e.runs[0], recaptions[e.name]) for e in experiments]
    parts = zip(experiments, chains, draw_flows(chains), strict=True)
    return [_build_flow(*flow_parts) for flow_parts in parts]


def _build_flow(experiment: ExperimentResults, steps: list[FlowStep], drawings: list[list[Shape]]) -> dict:
    start, end = steps[0].lanes, steps[-1].lanes
    return {
        "experiment": experiment.name,
        "steps": list(zip(steps, drawings, strict=True)),
        "lanes": {shape.lane for shapes in drawings for shape in shapes},
        "alt": f"{experiment.name}: {start.left} rows, {end.dropped} dropped, {end.left} left for training",
        "instructions": count_instructions(experiment, experiment.runs[0]),
        "sources": build_source_table(experiment, experiment.runs[0]),
    }


def _build_statistics(experiments: list[ExperimentResults], recaptions: dict[str, list[RecaptionedRow]]) -> list[dict]:
    """Return the histograms of each distinct filter stage, then those of each experiment's synthesis."""
    stages = []
    for folder, group in _group_by_filter(experiments).items():
        stages.append(
            {
                "title": "Filter",
                "name": "filter",
                "experiments": [experiment.name for experiment in group],
                "histograms": build_statistic_histograms(folder, group[0].recipes.filter),
                "similarities": None,
            }
        )
    for experiment in experiments:
        run = experiment.runs[0]
        if run.synthesize:
            similarities = build_similarity_histogram(run, recaptions[experiment.name])
            omitted_names = {"image_text_similarity"} if similarities else set()
            recipe = experiment.recipes.synthesize
            stages.append(
                {
                    "title": "Synthesis",
                    "name": "synthesize",
                    "experiments": [experiment.name],
                    "histograms": build_statistic_histograms(run.stages["synthesize"], recipe, omitted_names),
                    "similarities": similarities,
                }
            )
    return stages


def _build_near_duplicate_parts(experiments: list[ExperimentResults]) -> Iterator[dict]:
    """Yield the near-duplicates of each distinct filter stage."""
    for group in _group_by_filter(experiments).values():
        for section in build_duplicate_sections(group[0]):
            yield {"experiments": [experiment.name for experiment in group], "section": section}


def _group_by_filter(experiments: list[ExperimentResults]) -> dict[Path, list[ExperimentResults]]:
    return group_experiments(experiments, lambda experiment: experiment.runs[0].stages["filter"])


def _build_recaption_parts(
    experiments: list[ExperimentResults], recaptions: dict[str, list[RecaptionedRow]]
) -> Iterator[dict]:
    for experiment in experiments:
        rows = recaptions[experiment.name]
        if rows:
            run, truth = experiment.runs[0], read_truth(experiment)
            yield {
                "experiment": experiment.name,
                "count": len(rows),
                "likelihoods": any(recaption.log_likelihood is not None for recaption in rows),
                "quality": measure_synthesis_quality(run, rows, truth),
                "shown": build_recaption_gallery(run, rows, truth),
            }


def _build_galleries(experiments: list[ExperimentResults]) -> list[dict]:
    """Return one gallery per dataset, since outputs are comparable only on the same images."""
    return [
        {
            "dataset": dataset.name,
            "experiments": [experiment.name for experiment in group],
            "shown": build_gallery(group),
        }
        for dataset, group in group_experiments(experiments, lambda experiment: experiment.dataset).items()
    ]


def _build_metrics(experiment: ExperimentResults, differences: dict[str, GroupEstimates]) -> dict:
    estimates = differences.get(experiment.name)
    return {
        "experiment": experiment.name,
        "metrics": build_metric_table(experiment),
        "differences": build_difference_table(experiment.name, estimates) if estimates else None,
    }


def _describe_evaluations(experiments: list[ExperimentResults]) -> str:
    """Return one note if all experiments are evaluated the same way, otherwise each note with its experiments."""
    names_by_note: dict[str, list[str]] = {}
    for experiment in experiments:
        names_by_note.setdefault(_describe_evaluation(experiment), []).append(experiment.name)
    if len(names_by_note) == 1:
        return next(iter(names_by_note))
    return " ".join(f"{join_words(names)}: {note}" for note, names in names_by_note.items())


def _describe_evaluation(experiment: ExperimentResults) -> str:
    run = experiment.runs[0]
    prompt = f", prompt “{run.prompt}”" if run.prompt else ""
    questions = format_integer(run.question_count) if run.question_count else "no"
    judges = join_words([judge.title for judge in experiment.judges])
    return (
        f"Model: {experiment.config.model.name}. Evaluated on "
        f"{format_integer(experiment.dataset_counts['evaluation'])} held-out images of {experiment.dataset.name} with "
        f"{questions} questions; captions judged by {judges}{prompt}."
    )
