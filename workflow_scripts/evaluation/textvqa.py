"""VQA accuracy after TextVQA: an answer counts as right as far as ten people agree with it.

Both sides are normalised as EvalAI's server does it, oddities included, since every published figure rests on them.
"""

import re

from evaluation.groups import Metrics, Rows
from evaluation.intervals import Measurements

ARTICLES = {"a", "an", "the"}
NUMBERS = {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
NUMBERS |= {"none": "0"}
MARKS = ';/[]"{}()=+\\_-><@`!'  # commas and question marks go before these
FULL_STOP = re.compile(r"\.(?!\d)")  # not the point of 0.5
# Words that are known without one of their apostrophes ("couldnt've") and get it back.
CONTRACTIONS = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
    haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've
    must've mustn't needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've we've weren't
    what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're
    why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
""".split()
REPAIRED = {
    word[:place] + word[place + 1 :]: word
    for word in CONTRACTIONS
    for place, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # the server's table has this one the wrong way round


def normalise(answer: str) -> str:
    """Lower case, digits for small numbers, no articles and hardly any punctuation ("The two cats." is "2 cats")."""
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    words = [NUMBERS.get(word, word) for word in _without_marks(text).split()]
    return " ".join(REPAIRED.get(word, word) for word in words if word not in ARTICLES)


def _without_marks(text: str) -> str:
    """A mark that stands beside a space anywhere in the text goes; one inside words becomes a space."""
    text = re.sub(r"[\n\t]", " ", text)
    left = text
    for mark in MARKS:
        left = left.replace(mark, "" if f"{mark} " in text or f" {mark}" in text else " ")
    return FULL_STOP.sub("", left)


def vqa_accuracy(prediction: str, answers: list[str]) -> float:
    """min(1, 0.3 n) for n of ten answers equal to the prediction.

    It is the mean over the ten subsets of nine answers of min(1, n / 3), n counted within the subset: the definition of
    Antol et al. 2015 (VQA), which TextVQA (Singh et al. 2019) takes over.
    """
    said = normalise(prediction)
    return min(1.0, 3 * sum(normalise(answer) == said for answer in answers) / 10)


def measure_textvqa(rows: Rows) -> Metrics:
    """`score`: VQA accuracy in per cent, of answers.jsonl's rows; questions about one image belong together."""
    scores = [100 * vqa_accuracy(row["prediction"], row["answers"]) for row in rows]
    return {"score": Measurements.of(scores, [row["image_id"] for row in rows])}
