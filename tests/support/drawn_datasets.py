"""The embedded dataset in other sizes."""

from dj2mgm.settings.dataset_files import FaultRates, ShapesDataset


def draw_dataset(seed: int, pairs: int, instructions: int, images: int, **rates: float) -> ShapesDataset:
    """Return the settings of an embedded dataset; `rates` are shares of pairs by fault."""
    return ShapesDataset(
        generator="shapes",
        seed=seed,
        pretrain_pairs=pairs,
        finetune_instructions=instructions,
        evaluation_images=images,
        fault_rates=FaultRates(**rates),
    )
