"""The number of NVIDIA cards without a driver."""

from dj2mgm.health.driver_probe import count_cards


def test_cards_are_counted_without_a_driver(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x8086", "0x030000"), ("c", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert count_cards(tmp_path) == 1
