"""Words, length and script of texts in languages with and without spaces."""

import pytest

from dj2mgm.data.texts import find_script, measure_length, separate_words


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
