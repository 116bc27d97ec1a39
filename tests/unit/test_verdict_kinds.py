"""Kinds of verdicts have labels, tones and classes."""

from dj2mgm.verdict_kinds import VerdictKind


def test_kinds_are_shown_by_label_tone_and_class():
    shown = {kind: (kind.label, kind.tone, kind.css_class, kind.is_decided) for kind in VerdictKind}
    assert shown["better"] == ("Better", "good", "better", True)
    assert shown["worse"] == ("Worse", "bad", "worse", True)
    assert shown["equivalent"] == ("Equivalent", "same", "same", True)
    assert shown["undecided"] == ("Undecided", "same", "same", False)
    assert shown["withheld"] == ("Nothing learned", "bad", "same", False)
    assert shown[""] == ("No verdict", "same", "same", False)
    assert not VerdictKind.NONE and f"{VerdictKind.BETTER}" == "better"
