"""Settings of `snakemake check`: where the images and the model's tokenizer are, and what is known about noise."""

from dj2mgm.reporting.verdicts.power import PowerSettings
from dj2mgm.settings.base import Section, section, setting
from dj2mgm.settings.targets import ReportSection


class CheckSettings(Section):
    """Settings of the check of a dataset."""

    dataset: str = setting(..., "name of the dataset")
    keys: dict[str, str] = setting(..., "dataset and model of the training command, if they are not the defaults")
    fetches_model: bool = setting(..., "whether `snakemake fetch` has to download the model first")
    note: str = setting(..., "lines about a recognized format; empty if a file in config/datasets states it")
    images: dict[str, str] = setting(..., "folder that image paths are relative to, by split")
    model: str = setting(..., "model whose tokens are counted; empty if the configured one is not made for photos")
    tokenizer: str = setting(..., "file of the model's tokenizer; empty if it is not on this machine")
    max_length: int = setting(..., "tokens after which stage 2 cuts a conversation")
    refuses_bad_rows: bool = setting(..., "whether a row that cannot be trained on stops the run")
    report: ReportSection = section(ReportSection)
    power: PowerSettings = setting(..., "without the number of held-out images, which the check counts")
