"""The plan's text on the power of a comparison."""

import re

from noisy_runs import build_power_settings, write_finished_runs
from plan_power import describe_power


def test_plan_states_power_and_the_time_of_a_seed(tmp_path):
    text = describe_power(build_power_settings(write_finished_runs(tmp_path, {"baseline": 0.5, "other": 0.6}, seeds=3)))
    chance, power = text.splitlines()[:2]
    assert chance.startswith("One seed, as in your configuration, cannot tell better data from chance")
    assert not re.search(r"\d\.\d", chance), "a difference that one seed shows would look the best"
    assert power.startswith(
        "Power: how small a true difference would four of five comparisons find, on 200 held-out images? In the "
    )
    assert " points with 2 seeds, " in text and " points with 10.\n" in text
    assert "With 2 seeds, the smallest difference may be " in text and " (80 % interval)." in text
    assert "One more seed of other and baseline takes about 20 min 00 s, as measured" in text
    one_seed = describe_power(build_power_settings(write_finished_runs(tmp_path / "one", {"other": 0.6}, seeds=1)))
    assert "One more seed of other takes about 10 min 00 s, as measured" in one_seed, (
        "without the baseline, which has not run"
    )
    first = describe_power(build_power_settings({}, images=500, images_are_known=False, seeds=4))
    assert "500 held-out images (assumed, since the dataset is not made yet)" in first
    assert re.findall(r" with (\d+)", first) == ["2", "3", "4", "5", "10"]
    few = describe_power(build_power_settings({}, images=10, seeds=4))
    assert re.findall(r" with (\d+)", few) == ["2", "3"] and "because 10 held-out images limit it" in few
    assert "is known after a first run" in first and first.startswith("Power: ")
    assert describe_power(build_power_settings({}, headline="clip_score")) == (
        "Power: the noise of the CLIPScore is not known before a first run.\n"
    )
