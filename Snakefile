# Data to model: `snakemake --cores 1 baseline`. Every experiment in config/experiments/ is a target.
from snakemake.utils import min_version

min_version("9.0")


report: "report/workflow.rst"


include: "rules/runs.smk"
include: "rules/resources.smk"
include: "rules/common.smk"
include: "rules/inputs/data.smk"
include: "rules/inputs/training.smk"
include: "rules/inputs/evaluation.smk"
include: "rules/inputs/sharing.smk"
include: "rules/inputs/decision.smk"
include: "rules/inputs/search.smk"
include: "rules/settings.smk"
include: "rules/dataset.smk"
include: "rules/foundation.smk"
include: "rules/filter.smk"
include: "rules/analyze.smk"
include: "rules/synthesize.smk"
include: "rules/leaks.smk"
include: "rules/jsonl.smk"
include: "rules/plan.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/benchmarks.smk"
include: "rules/lmms_eval.smk"
include: "rules/report.smk"
include: "rules/decide.smk"
include: "rules/search.smk"
include: "rules/tools.smk"
include: "rules/attention_benchmark.smk"
include: "rules/influence.smk"
include: "rules/export.smk"
include: "rules/publish.smk"
include: "rules/crate.smk"


for name in EXPERIMENTS:

    rule:
        name:
            name
        default_target: name == REFERENCE
        input:
            target_files(name, f"results/{pages.page_folder(RUNS, name)}/report.html"),
        localrule: True


rule analyze:
    input:
        lambda w: f"results/datasets/{RUNS.first_seed(REFERENCE).dataset.name}/analyze/analysis.html",
    localrule: True


for name in RUNS.experiments.studies:

    rule:
        name:
            name
        input:
            target_files(name, f"results/{PLACE}{name}/{name}.html"),
            all_scores(name),
        localrule: True


rule attention_benchmark:
    input:
        f"results/{PLACE}attention_benchmark/attention.html",
    localrule: True


rule export:
    input:
        target_files(
            RUNS.shared.export.experiment,
            f"results/{PLACE}{RUNS.shared.export.experiment}/export/{RUNS.shared.format}/README.md",
        ),
    localrule: True


rule influence:
    input:
        influence_page,
    localrule: True


rule publish:
    input:
        publication_files,
    localrule: True


rule crate:
    input:
        target_files(
            RUNS.shared.provenance.experiment,
            f"results/{pages.page_folder(RUNS, RUNS.shared.provenance.experiment)}/crate/run.crate.zip",
        ),
    localrule: True


rule finetune_minimal:
    input:
        target_files(
            "finetune_minimal",
            f"results/{PLACE}finetune_minimal/finetune/metrics.json",
        ),
    localrule: True


rule evaluate:
    input:
        evaluation_report,
    localrule: True


rule challenge:
    input:
        f"results/{PLACE}challenge/challenge.csv",
        lambda w: challenge_files(WITH_SUBMISSION, "submission.xlsx"),
    localrule: True


# a mistake in an experiment's file is reported when that experiment is requested
for name in RUNS.experiments.errors:
    if not workflow.is_rule(name):

        rule:
            name:
                name
            input:
                target_files(name),
            localrule: True


include: "rules/graph.smk"
