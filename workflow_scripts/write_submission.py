"""Writes MMBench's submission file from the model's answers.

    python workflow_scripts/write_submission.py --answers results/baseline/benchmarks/mmbench/answers.jsonl \\
        --output-dir results/baseline/benchmarks/mmbench

submission.xlsx has a row for each question: index, question, A to D, the prediction as it was said, answer, split.
"""

from collections.abc import Iterable

from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

from command_line import command_line, path_arguments
from files import read_jsonl, replace_whole
from formats.mmbench import LETTERS

COLUMNS = ["index", "question", *LETTERS, "prediction", "answer", "split"]


@command_line
def main() -> None:
    paths = path_arguments(__doc__, "--answers", "--output-dir")
    workbook = submission(read_jsonl(paths.answers))
    with replace_whole(paths.output_dir / "submission.xlsx", "wb") as file:
        workbook.save(file)


def submission(rows: Iterable[dict]) -> Workbook:
    workbook = Workbook()
    workbook.active.append(COLUMNS)
    for row in rows:
        values = row | {letter: row["options"].get(letter) for letter in LETTERS}
        workbook.active.append([_printable(values[column]) for column in COLUMNS])
    for cells in workbook.active.iter_rows(min_row=2):
        for cell in cells:
            if isinstance(cell.value, str):
                cell.data_type = "s"  # "= 4" is an answer, not a formula
    return workbook


def _printable(value: object) -> object:
    """Without the control characters that no spreadsheet can hold, which a model may say."""
    return ILLEGAL_CHARACTERS_RE.sub("", value) if isinstance(value, str) else value


if __name__ == "__main__":
    main()
