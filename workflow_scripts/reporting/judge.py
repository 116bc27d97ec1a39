"""Whether the CLIP that judges captions has also selected the data, which makes its scores a weaker witness."""

from reporting.experiment import Experiment
from reporting.scales import listed

# parts of the names of the operators that ask a CLIP; the stages fill in model.clip_score, the CLIP that judges
CLIP_OPERATORS = ("image_text_similarity", "low_similarity_recaption")


def judge_note(experiments: list[Experiment]) -> str:
    """That the CLIP which judges has selected data, too; empty where it has not."""
    chosen = [one.name for one in experiments if one.runs[0].clip["clip"] in selecting_clips(one)]
    if not chosen:
        return ""
    return (
        f"The CLIP that judges here has also selected the data of {listed(chosen)}, which favours what this CLIP "
        "likes: see whether scores without CLIP say the same."
    )


def selecting_clips(experiment: Experiment) -> set[str]:
    """The CLIPs by which an experiment's recipes choose captions. An operator that names none is given the judge."""
    steps = [step for recipe in experiment.recipes.values() if recipe for step in recipe["process"]]
    return {
        (arguments or {}).get("hf_clip", experiment.runs[0].clip["clip"])
        for step in steps
        for operator, arguments in step.items()
        if any(part in operator for part in CLIP_OPERATORS)
    }
