"""Parts of a study's page about its search: the verdict on the winner, and the scores of all trials in each rung."""

from dj2mgm.config.settings.look_records import LookRecord
from dj2mgm.config.settings.page_settings import ShownSearch, ShownTrial
from dj2mgm.config.settings.shared import DecideSection
from dj2mgm.messages import format_duration
from dj2mgm.reporting.comparison import format_score
from dj2mgm.reporting.decision import describe_decision
from dj2mgm.reporting.first_screen import LABELS, Brief
from dj2mgm.reporting.headline import HeadlineScore, HeadlineVerdict
from dj2mgm.reporting.variants_page import PlainTable

TONES = {"better": "good", "worse": "bad"}


def confirm_briefs(search: ShownSearch) -> list[Brief]:
    """Return the verdict on the winner, then on its difference from each experiment."""
    if not search.winner:
        return []
    kinds = {other: look.kind for other, look in search.looks.items()}
    decided = bool(kinds) and {*kinds.values()} == {"better"}
    names = " and ".join(kinds)
    if decided:
        text = f"The winner is better than {names}."
    elif not kinds:
        text = "The budget was spent before the winner could be compared on fresh seeds."
    else:
        text = f"It is not shown that the winner is better than {names}."
    label, tone = ("Winner", "good") if decided else ("Undecided", "same")
    verdict = HeadlineVerdict(search.winner, 0, "", "better" if decided else "undecided", text)
    first = Brief(verdict, label, tone, "", search.progress, "", "")
    return [first, *(_look_brief(other, look, search.confirm_seeds) for other, look in search.looks.items())]


def _look_brief(other: str, look: LookRecord, seeds: int) -> Brief:
    text = describe_decision(look, DecideSection(seeds=seeds))
    verdict = HeadlineVerdict(f"Compared with {other}", 0, "", look.kind, text)
    label = LABELS.get(look.kind, "Nothing learned")
    cost = "Not recorded." if look.seconds is None else f"{format_duration(look.seconds)} for the seeds of both."
    return Brief(verdict, label, TONES.get(look.kind, "same"), "", cost, "", "")


def trial_table(search: ShownSearch, headline: HeadlineScore) -> list[PlainTable]:
    """Return the scores of all trials in each rung, best first; no table for a single rung."""
    if len(search.rungs) == 1 and not search.winner:
        return []

    def reached(trial: ShownTrial) -> tuple:
        scores = [score for score in [*trial.scores, trial.final] if score is not None]
        return (trial.name != search.winner, trial.final is None, -len(scores), -(scores or [0.0])[-1])

    heads = ["Trial", *(f"{100 * rung:g} % of the rows" for rung in search.rungs), "Finalists' seeds", "Changes"]
    rows = []
    for trial in sorted(search.trials, key=reached):
        scores = ["–" if one is None else format_score(headline.metric, one) for one in [*trial.scores, trial.final]]
        rows.append([trial.name, *scores, "; ".join(f"{key} {value}" for key, value in trial.changes.items())])
    note = (
        f"The {headline.title} in each rung. Only the best trials of a rung are trained on more rows. Scores by which "
        "trials were chosen are too high on average; the fresh seeds of the winner have no part in them."
    )
    return [PlainTable("Trials", note, heads, rows)]
