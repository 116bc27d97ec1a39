"""Words, length and script of texts in languages with and without spaces, and texts that are compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dj2mgm.data.texts import find_script, measure_length, normalize_words, separate_words


@pytest.mark.parametrize(
    ("text", "words", "length", "script"),
    [
        ("a red circle", 3, 12, "Latin"),
        ("ein größerer Kreis", 3, 18, "Latin"),
        ("красный круг", 2, 12, "Cyrillic"),
        ("浅色的桌子上放着一个红色的圆球", 8, 30, "Chinese"),
        ("红色box", 2, 7, "Latin"),
        ("テーブルの上に赤いボール", 6, 24, "Japanese"),
        ("ﾃｰﾌﾞﾙ", 3, 5, "Japanese"),
        ("ボーーール", 3, 10, "Japanese"),
        ("ＡＢＣ", 1, 6, "Latin"),
        ("식탁 위의 빨간 공", 4, 17, "Korean"),
        ("ลูกบอลสีแดงบนโต๊ะ", 5, 17, "Thai"),
        ("मेज पर लाल गेंद", 4, 15, "Devanagari"),
        ("", 0, 0, None),
        ("12 34!", 2, 6, None),
    ],
)
def test_words_length_and_script(text, words, length, script):
    assert (len(separate_words(text).split()), measure_length(text), find_script(text)) == (words, length, script)


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), min_size=1), st.randoms())
def test_case_punctuation_and_space_are_ignored(words, random):
    written = "".join(word + random.choice([" ", ", ", "\t", "? ", " – ", "_"]) for word in words)
    assert normalize_words(written) == normalize_words(" ".join(words)) == normalize_words(normalize_words(written))
    assert normalize_words(written.upper().lower()) == normalize_words(" ".join(words).upper().lower())


def test_combining_marks_belong_to_their_word():
    assert normalize_words("लाल,  नीला?") == "लाल नीला"
    assert len({normalize_words(word) for word in ("लाल", "लील", "लल")}) == 3, "vowels of Hindi are marks"
    assert normalize_words("cafe\u0301 AU lait!") == "café au lait"
