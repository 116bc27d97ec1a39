"""Settings of published models and exported data, licenses of data and models, and names in cards."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.errors import InputError
from dj2mgm.records import RecipeContents
from dj2mgm.settings.base import ImageRootSettings, StageSettings, setting
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.dataset_files import ReadableDataset, ReadableSources
from dj2mgm.settings.string_formats import has_format, make_name

ADAPTER_FOLDER = "language_model_adapter"  # folder of the adapter of MGM's language model, for stock PEFT
STAGE = "stage"  # folder of the stage's output, which this project loads
ESCAPED_MARKS = str.maketrans({"|": "\\|", "`": "'"})


class SharedPairs(StageSettings):
    """Origin of exported or published pairs."""

    experiment: str = setting()
    dataset: str = setting(..., "name of the dataset")
    licenses: dict[str, str | None] = setting(..., "by source or by split; null: none is stated")
    recipes: RecipeContents = setting()


class ExportSettings(SharedPairs, ImageRootSettings):
    """Settings of an export of a run's pairs."""


class PublishSettings(SharedPairs):
    """Settings of a published model, its pairs and their cards.

    They do not include repositories, so that a change of a repository repeats nothing.
    """

    seed: int = setting()
    model: str = setting(..., "name of the model")
    license: Annotated[str, Field(min_length=1)] = setting(..., "of the model")
    base_models: list[str] = setting(..., "hub ids")
    adapter_base: str | None = setting(..., "hub id of the model that an adapter belongs to; null: there is none")
    mgm: bool = setting(..., "whether the model is an MGM, for which transformers has no class")
    trained_by_workflow: bool = setting(..., "whether this workflow trained all parts of the model")
    weights: Literal["merged", "adapter"] = setting()
    allow_unlearned: bool = setting(..., "whether a model that has learned nothing is published, too")
    question: str = setting(..., "request for a caption")
    max_new_tokens: int = setting(..., "tokens of an answer", ge=1)
    records: dict[str, str] = setting(..., "files whose figures the cards state, by their names next to the cards")


# https://huggingface.co/docs/hub/repositories-licenses
HUB_LICENSES = frozenset(
    """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openrail++
    osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2
    llama3.3 llama4 gemma unknown other""".split()
)


def check_licenses(name: str, dataset: ReadableDataset) -> None:
    """Check that every part of a dataset states a license.

    Raises:
        InputError: names the part without a license, and where to state it.
    """
    for part, text in dataset.licenses.items():
        if not text:
            group = "sources" if isinstance(dataset, ReadableSources) else ""
            key = ".".join(filter(None, [group, part, "license"]))
            remedy = f"state {key} in config/datasets/{name}.yaml (docs/features/publish.md); this repeats no training"
            if not has_format("name", name) or name not in list_config_names("datasets"):  # no file in config/datasets/
                new = make_name(name)
                remedy = (
                    f"describe the folder in config/datasets/{new}.yaml with {key} (docs/features/publish.md), and set "
                    f"dataset: {new}"
                )
            raise InputError(f"publish: {part or name} has no license, and nothing is published without one; {remedy}")


def build_license_keys(*licenses: str) -> dict[str, str]:
    """Return the keys of a card for licenses.

    A single license that the hub knows is stated by the hub's name. Any other license, or several, are stated as
    `other` with their names.
    """
    names = sorted({" ".join(text.split()) for text in licenses}, key=str.lower)
    if len(names) == 1 and names[0].lower() in HUB_LICENSES:
        return {"license": names[0].lower()}
    return {"license": "other", "license_name": ", ".join(names)}


def format_inline_code(text: str) -> str:
    """Return a name as inline code; names are untrusted and may contain digits and Markdown marks."""
    return f"`{' '.join(text.split()).translate(ESCAPED_MARKS)}`"
