r"""TextVQA: validation questions with LLaVA's prompts, and VQA accuracy against the answers of ten annotators.

`questions` is LLaVA's llava_textvqa_val_v051_ocr.jsonl with one question per line. Its `question_id` is the image's id,
and the OCR line may be missing:

    {"question_id": "003a8ae2ef43b901", "image": "003a8ae2ef43b901.jpg", "text": "What is the brand of this camera?
     \nReference OCR token: DAKOTA, DIGITAL\nAnswer the question using a single word or phrase."}

`answers` is TextVQA's own TextVQA_0.5.1_val.json:

    {"data": [{"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": "what is the brand of this camera?",
               "answers": ["nous les gosses", "dakota", …]}, …]}

`images` is the folder of the validation images.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.data.formats import check_no_control
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.errors import InputError, quote_value
from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.evaluation.vqa import ARTICLES
from dj2mgm.features.challenge.benchmarks import Benchmark
from dj2mgm.storage.streaming import check_object, read_json_file, read_objects

OCR_LINE = "Reference OCR token"
ANSWER_COUNT = 10  # answers per question, by ten people

Key = tuple[str, str]  # image id and question in lower case, which occur in both files


def read(questions: str | Path, answers: str | Path, images: str | Path) -> Iterator[dict]:
    """Yield questions with their ground truth, every image opened once.

    {"variant", "id": TextVQA's question id, "image_id", "image": path, "prompt", "answers": ten texts}
    """
    truth = _read_answers(Path(answers))
    variant, first_numbers, paths = None, {}, {}
    for number, row in read_objects(questions):
        location = f"{questions}, row {number}"
        for name in ("question_id", "image", "text"):
            if not isinstance(row.get(name), str):
                raise InputError(
                    f"{location}: {quote_value(name)} must be a string, found {quote_value(row.get(name))}"
                )
        question, own_variant = _parse_prompt(row["text"], location)
        variant = variant or own_variant
        if own_variant != variant:
            raise InputError(
                f"{location} has the variant {own_variant}, but row 1 has {variant}; "
                "use OCR tokens in all prompts or none"
            )
        key = row["question_id"], question
        if (first_number := first_numbers.setdefault(key, number)) != number:
            raise InputError(f"{location} repeats the question of row {first_number}; delete one of them")
        if key not in truth:
            raise InputError(
                f"{location}: {answers} has no answers to {quote_value(question)} about the image {key[0]}"
            )
        if row["image"] not in paths:
            paths[row["image"]] = _check_image(images, row["image"], location)
        yield {
            "variant": variant,
            "id": str(truth[key]["question_id"]),
            "image_id": row["question_id"],
            "image": paths[row["image"]],
            "prompt": row["text"],
            "answers": truth[key]["answers"],
        }
    if missing := len(truth) - len(first_numbers):
        raise InputError(
            f"{questions}: {missing} of the {len(truth)} questions in {answers} are missing; use the complete file"
        )


def get_text(row: dict) -> tuple[str, list[str]]:
    """Return the question and its answers, which the search for leaks compares with the training rows."""
    return row["prompt"].split("\n")[0], row["answers"]


def _parse_prompt(text: str, location: str) -> tuple[str, str]:
    """Return a prompt's question in lower case, and the prompt's variant."""
    check_no_control(text, location)
    lines = text.split("\n")
    has_ocr = len(lines) == 3 and lines[1].startswith(OCR_LINE)
    if not has_ocr and len(lines) != 2:
        raise InputError(
            f"{location}: 'text' must be the question, optionally a line {OCR_LINE!r}, and the instruction, "
            "one line each"
        )
    return lines[0].strip().lower(), "ocr_tokens" if has_ocr else "no_ocr_tokens"


def _check_image(root: str | Path, relative: str, location: str) -> Path:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImageError as error:
        raise InputError(f"{location}: image {error}; check benchmarks.textvqa.images") from None
    return path


def _read_answers(path: Path) -> dict[Key, dict]:
    """Return the rows of the file with answers by image and question, which has ten answers for each."""
    content = read_json_file(path)
    if not isinstance(content, dict) or not isinstance(content.get("data"), list) or not content["data"]:
        raise InputError(f"{path}: expected TextVQA's {{'data': [questions with answers]}}")
    truth: dict[Key, dict] = {}
    for number, row in enumerate(content["data"], start=1):
        location = f"{path}, row {number}"
        check_object(row, location)
        if not isinstance(row.get("image_id"), str) or not isinstance(row.get("question"), str):
            raise InputError(f"{location}: 'image_id' and 'question' must be strings")
        if not isinstance(row.get("question_id"), int | str) or isinstance(row["question_id"], bool):
            raise InputError(f"{location}: 'question_id' must be a number, found {quote_value(row.get('question_id'))}")
        answers = row.get("answers")
        if (
            not isinstance(answers, list)
            or len(answers) != ANSWER_COUNT
            or not all(isinstance(text, str) for text in answers)
        ):
            raise InputError(
                f"{location}: 'answers' must contain {ANSWER_COUNT} strings; the test split has none, use validation"
            )
        key = row["image_id"], row["question"].strip().lower()
        if key in truth:
            raise InputError(
                f"{location} repeats the question {quote_value(row['question'])} about {key[0]}; delete one row"
            )
        truth[key] = row
    return truth


# Answers and predictions are normalized as EvalAI's server does it, including its peculiarities, because all published
# figures were computed so.

NUMBERS = {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
NUMBERS |= {"none": "0"}
MARKS = ';/[]"{}()=+\\_-><@`!'  # commas and question marks are removed before these
FULL_STOP = re.compile(r"\.(?!\d)")  # excludes the point of 0.5
# Contractions, whose missing apostrophes ("couldnt've") are restored.
CONTRACTIONS = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
    haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've
    must've mustn't needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've
    somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've
    something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've
    we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've
    why'll why're why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll
    you're you've
""".split()
REPAIRED = {
    word[:index] + word[index + 1 :]: word
    for word in CONTRACTIONS
    for index, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # reversed in the server's table


def normalize_like_evalai(answer: str) -> str:
    """Normalize to lower case, digits, no articles and little punctuation: "The two cats." → "2 cats"."""
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    words = [NUMBERS.get(word, word) for word in _remove_marks(text).split()]
    return " ".join(REPAIRED.get(word, word) for word in words if word not in ARTICLES)


def _remove_marks(text: str) -> str:
    """Remove marks that occur next to a space anywhere in the text; replace other marks by a space."""
    text = re.sub(r"[\n\t]", " ", text)
    cleaned_text = text
    for mark in MARKS:
        cleaned_text = cleaned_text.replace(mark, "" if f"{mark} " in text or f" {mark}" in text else " ")
    return FULL_STOP.sub("", cleaned_text)


def compute_vqa_accuracy(prediction: str, answers: list[str]) -> float:
    """Return min(1, 0.3 n) for n of ten answers equal to the prediction.

    This is the mean of min(1, n / 3) over the ten subsets of nine answers, with n counted within the subset, as defined
    by Antol et al. 2015 (VQA) and used by TextVQA (Singh et al. 2019).
    """
    predicted = normalize_like_evalai(prediction)
    return min(1.0, 3 * sum(normalize_like_evalai(answer) == predicted for answer in answers) / 10)


def measure(rows: Rows) -> Metrics:
    """Compute `score`, the VQA accuracy in percent of the rows of answers.jsonl, grouped by image."""
    scores = [100 * compute_vqa_accuracy(row["prediction"], row["answers"]) for row in rows]
    return {"score": Measurements.from_values(scores, [row["image_id"] for row in rows])}


BENCHMARK = Benchmark(
    files={
        "questions": "LLaVA's llava_textvqa_val_v051_ocr.jsonl",
        "answers": "TextVQA_0.5.1_val.json",
        "images": "folder of the validation images",
    },
    variants=("ocr_tokens", "no_ocr_tokens"),  # prompts with or without the tokens that an OCR system read
    read=read,
    measure=measure,
    get_text=get_text,
)
