"""Words, length and script of texts in any language, and texts that are compared.

Of scripts without spaces, two Chinese or Japanese characters count as one word, and so do four letters of Thai, Lao,
Tibetan, Burmese and Khmer, which is about the length of their words. A wide character (Chinese, Japanese, Korean)
counts as two characters, as in a terminal.
"""

import re
import unicodedata
from collections import Counter
from itertools import takewhile

WIDE_PATTERN = re.compile(r"[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff]")
UNSPACED_PATTERN = re.compile(
    r"[\u3005-\u3007\u3041-\u3096\u3099-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff]{1,2}"
    r"|[\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ecd\u0edc-\u0edf\u0f40-\u0fbc\u1000-\u109f\u1780-\u17d3]{1,4}"
)
SCRIPT_NAMES = {"cjk": "Chinese", "hiragana": "Japanese", "katakana": "Japanese", "hangul": "Korean"}


def separate_words(text: str) -> str:
    """Return a text with spaces around the words of scripts without spaces."""
    return text if text.isascii() else UNSPACED_PATTERN.sub(r" \g<0> ", text)


def measure_length(text: str) -> int:
    """Return the number of characters, with wide ones as two."""
    return len(text) if text.isascii() else len(text) + len(WIDE_PATTERN.findall(text))


def find_script(text: str) -> str | None:
    """Return the name of the script that most letters belong to, such as Latin or Chinese; None without letters."""
    if text.isascii():
        return "Latin" if any(map(str.isalpha, text)) else None
    letters = Counter(character for character in text if character.isalpha())
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        usual_form = unicodedata.normalize("NFKC", letter)[0]  # of half-width Japanese and full-width Latin letters
        name = unicodedata.name(usual_form, "").replace("-", " ").partition(" ")[0].lower()
        scripts[SCRIPT_NAMES.get(name, name.capitalize())] += count
    if scripts["Japanese"] and scripts["Chinese"]:  # Japanese has Chinese characters, too
        scripts["Japanese"] += scripts.pop("Chinese")
    return max(scripts, key=scripts.__getitem__, default=None)


NOT_A_WORD = re.compile(r"[\W_]+")
MIN_WORDS = 8  # shorter questions fit many images, so they do not count as leaks


def normalize_words(text: str) -> str:
    """Return the words of a text in lower case, separated by one space."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return NOT_A_WORD.sub(" " if text.isascii() else _separate, text).strip()


def _separate(match: re.Match) -> str:
    """Return the blank between two words, after the combining marks that belong to the first (vowels in Hindi)."""
    text = match.group()
    marks = "".join(takewhile(lambda character: unicodedata.category(character).startswith("M"), text))
    return marks if marks == text else f"{marks} "


def normalize_lines(text: str) -> list[str]:
    """Return the words of a text and of each of its lines, without repetitions.

    A line of a question may be an instruction, such as "Answer with one word.".
    """
    return list(dict.fromkeys(map(normalize_words, (text, *text.splitlines()))))
