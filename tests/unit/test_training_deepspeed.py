import copy

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from places import PROJECT

from files import read_json
from training.deepspeed_config import complete_deepspeed_config

CONFIGS = sorted((PROJECT / "config" / "deepspeed").glob("*.json"))
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def as_transformers_completes_it(value):
    """What transformers puts in the place of the remaining "auto"s, from its training arguments."""
    arguments = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "enabled": True,
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    if not isinstance(value, dict):
        return value
    return {k: arguments.get(k, v) if v == "auto" else as_transformers_completes_it(v) for k, v in value.items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_deepspeed_file_is_completed_with_integers_that_deepspeed_accepts(path):
    completed = complete_deepspeed_config(read_json(path), hidden_size=2048)
    zero = completed["zero_optimization"]
    assert "auto" not in zero.values()
    assert all(type(zero[key]) is int for key in SIZES if key in zero)
    accepted = DeepSpeedConfig(as_transformers_completes_it(completed))
    assert accepted.zero_config.stage == zero["stage"]
    assert accepted.zero_config.reduce_bucket_size == 2048**2
    assert (accepted.train_batch_size, accepted.gradient_accumulation_steps) == (8, 2)


def test_sizes_at_hidden_2048():
    zero = complete_deepspeed_config({"zero_optimization": dict.fromkeys(SIZES, "auto")}, 2048)["zero_optimization"]
    assert zero == {
        "reduce_bucket_size": 4194304,
        "stage3_prefetch_bucket_size": 3774873,
        "stage3_param_persistence_threshold": 20480,
    }


def test_deepspeed_refuses_the_float_that_auto_would_become():
    """Why the sizes are filled in here."""
    config = as_transformers_completes_it(read_json(PROJECT / "config" / "deepspeed" / "zero3_offload.json"))
    config["zero_optimization"] |= {key: 1000 for key in SIZES} | {"stage3_prefetch_bucket_size": 0.9 * 2048**2}
    with pytest.raises(ValueError, match="stage3_prefetch_bucket_size|prefetch_bucket_size"):
        DeepSpeedConfig(config)


def test_sizes_that_were_chosen_stay_and_the_file_is_not_changed():
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "stage3_prefetch_bucket_size": "auto"}}
    before = copy.deepcopy(config)
    completed = complete_deepspeed_config(config, 100)
    assert completed["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 5,
        "stage3_prefetch_bucket_size": 9000,
    }
    assert config == before
