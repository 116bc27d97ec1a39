"""What an operator declares about itself; where it declares nothing, its Data-Juicer base class answers.

The engine asks these functions, and never for an operator's class or name. Declarations are attributes of the
operator's class, and all are optional:

- `limit`: name of the argument that `keep_fraction` stands for. The operator then has an attribute `keep_fraction`
  (None where the recipe gives a limit) and a method `scores_of(stats)`: a row's part in the scores that the fraction is
  a share of. A mapper also has `measure(samples)`, which adds these scores to the rows' stats and edits nothing.
- `quantiles`: by name of an argument that is a quantile of these scores, the name of the limit that it stands for. The
  operator then has attributes of all these names (None where the recipe gives no quantile).
- `select(rows)`: method that says which rows are kept, once all are measured (`selection`). Until then `column`, if it
  is declared, is a column that `compute_stats` has filled for it.
- `needs_all_rows`: whether what happens to a row depends on other rows (beside `keep_fraction`). Left out, it does,
  unless the operator has the `run` of Data-Juicer's filters or mappers. Such an operator is handed the whole dataset.
- `hash_key`: the column that a deduplicator's `compute_hash` fills. Of rows with one hash, the first is kept; the
  engine sees to that partition by partition, without the whole dataset.
- `find_copies(rows, folder)`: of a deduplicator with a `hash_key` whose hashes must not be equal to be those of copies:
  tells from the hashes and stats of all rows which rows are copies of which (`NearDeduplicator`).
- `report_key`: name of the operator's report in summary.json. The operator counts in its attribute `report`, a dict,
  which the engine takes and empties after each batch. At the end `judge_report(report)`, if there is one, returns the
  report to show, warns, or raises an InputError.
- `unreadable_stat`: the stat that names why a row's images cannot be read. Analyses drop what such a filter drops.
- `model_files(arguments)`: static method; files of models that results depend on. Left out, these are the weights and
  configuration in each folder that an argument names.
- `draws_at_random`: False for a captioner whose captions need no seed.
- `connect(spent)` and `captions_as_they_come(images, keep)`: of a captioner that asks a server. The first asks whether
  it is there, the second hands captions one by one to `keep`; `openai_captioning_mapper` has both.
- `without_effect`: names of a captioner's arguments that change no caption.
- `in_one_process`: whether the operator runs where the stage runs, on Ray too, because it counts what it does.
- `budget`: names what the operator spends, or is None; no two operators of a recipe may spend the same.
- `check_ready()`: raises an InputError where the operator could not run; called before the stage starts.
- `close()`: closes files that stay open between batches.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_juicer.ops.base_op import OP, OPERATORS, UNFORKABLE, Deduplicator, Filter, Mapper, Selector

from dj2mgm.config.recipe_check import naming_files

WEIGHTS_AND_CONFIG = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}
Operator = OP | type[OP]


def keeps_or_drops_rows(operator: Operator) -> bool:
    """Whether rows come out as they went in, edited, or not at all; other operators merge or group rows."""
    return issubclass(_class(operator), Filter | Mapper | Deduplicator | Selector)


def measures_rows(operator: Operator) -> bool:
    """Whether the operator can look at rows without changing them, and what it sees decides about each."""
    return issubclass(_class(operator), Filter | Deduplicator) and not selects(operator)


def selects(operator: Operator) -> bool:
    return _declared(operator, "select") is not None


def column(operator: Operator) -> str | None:
    return _declared(operator, "column")


def drops_repeats(operator: Operator) -> bool:
    return issubclass(_class(operator), Deduplicator)


def batch_method(operator: OP, measures: bool = False) -> str | None:
    """The method that works on a batch of rows: a filter computes stats, a deduplicator hashes; a mapper edits rows, or
    scores them where it only `measures`. None for a selector."""
    if isinstance(operator, Filter):
        return "compute_stats"
    if isinstance(operator, Deduplicator):
        return "compute_hash"
    if isinstance(operator, Mapper):
        return "measure" if measures else "process"
    return None


def decision_of(operator: OP) -> Callable[[dict], Any] | None:
    """A filter's: says of each row of a batch with stats whether it is kept. None for other operators."""
    return operator.process if isinstance(operator, Filter) else None


def needs_all_rows(operator: Operator) -> bool:
    own_run = _class(operator).run not in (Filter.run, Mapper.run)
    return _declared(operator, "needs_all_rows", own_run)


def hash_key(operator: Operator) -> str | None:
    return _declared(operator, "hash_key")


def finds_copies(operator: Operator) -> bool:
    return _declared(operator, "find_copies") is not None


def unreadable_stat(operator: Operator) -> str | None:
    return _declared(operator, "unreadable_stat")


def shares(operator: OP) -> dict[str, str]:
    """Arguments that the recipe gives as a share or a quantile of all rows' scores, and the limits they stand for."""
    return {name: limit for name, limit in _shares(operator).items() if getattr(operator, name) is not None}


def limits_of(operator: OP) -> list[str]:
    """Arguments that a share or a quantile may stand for."""
    return list(dict.fromkeys(_shares(operator).values()))


def _shares(operator: OP) -> dict[str, str]:
    limit = _declared(operator, "limit")
    return _declared(operator, "quantiles", {}) | ({} if limit is None else {"keep_fraction": limit})


def draws_at_random(operator: Operator) -> bool:
    return _declared(operator, "draws_at_random", True)


def answers_one_by_one(operator: Operator) -> bool:
    return _declared(operator, "captions_as_they_come") is not None


def without_effect(operator: Operator) -> set[str]:
    return _declared(operator, "without_effect", set())


def in_one_process(operator: OP) -> bool:
    return _declared(operator, "in_one_process") is not None and operator.in_one_process


def budget(operator: OP) -> str | None:
    return operator.budget if _declared(operator, "budget") else None


def check_ready(operator: OP) -> None:
    if _declared(operator, "check_ready"):
        operator.check_ready()


def holds_model(operator: OP) -> bool:
    return operator._accelerator == "cuda" or is_unforkable(operator)


def is_unforkable(operator: OP) -> bool:
    """Whether the operator fails in a forked process; Data-Juicer has a registry of these."""
    return operator._name in UNFORKABLE.modules


def close(operator: OP) -> None:
    if _declared(operator, "close"):
        operator.close()


def report_key(operator: Operator) -> str | None:
    return _declared(operator, "report_key")


def take_report(operator: OP) -> dict:
    """What the operator has counted since the last time."""
    if report_key(operator) is None:
        return {}
    report, operator.report = operator.report, {}
    return report


def judge_report(operator: OP, report: dict) -> dict:
    """The report of all rows as summary.json shows it.

    Raises:
        InputError: the operator refuses to go on.
    """
    return operator.judge_report(report) if _declared(operator, "judge_report") else report


def merge_reports(first: dict, second: dict) -> dict:
    """Counts of some rows and of others together: numbers add up, so do those in dicts, and the first text stays."""
    merged = dict(first)
    for key, value in second.items():
        if isinstance(value, dict):
            merged[key] = merge_reports(merged.get(key, {}), value)
        elif isinstance(value, str):
            merged[key] = merged.get(key) or value
        else:
            merged[key] = merged.get(key, 0) + value
    return merged


def model_files(value: object) -> list[Path]:
    """Files of all models in a recipe, or in a part of one: a list of operators, {operator: arguments}, arguments."""
    if isinstance(value, str):
        return weight_files(Path(value)) if os.path.isdir(value) else []  # "" is no folder, but Path("") is
    if isinstance(value, list):
        return [file for item in value for file in model_files(item)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1:
        [(name, arguments)] = value.items()
        if files := _declared(OPERATORS.modules.get(name), "model_files"):
            return files(arguments or {})
        if name in OPERATORS.modules:
            value = naming_files(name, arguments or {})
    return [file for _, item in sorted(value.items()) for file in model_files(item)]


def weight_files(folder: Path) -> list[Path]:
    """A model folder's weights and configuration, sorted; none if there is no such folder."""
    return sorted(path for path in folder.glob("*") if path.suffix in WEIGHTS_AND_CONFIG)


def _declared(operator: Operator | None, name: str, default: Any = None) -> Any:
    return getattr(_class(operator), name, default)


def _class(operator: Operator | None) -> type:
    return operator if isinstance(operator, type) else type(operator)
