"""Licenses of datasets and models, as their files state them.

A license changes no result, so it is not in the settings of stages.
"""

import re

from dj2mgm.config.reading import names_in
from dj2mgm.errors import InputError

# https://huggingface.co/docs/hub/repositories-licenses
OF_THE_HUB = frozenset(
    """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openrail++
    osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2
    llama3.3 llama4 gemma unknown other""".split()
)


def take_licenses(settings: dict) -> tuple[dict, dict[str, str | None]]:
    """Return a dataset's settings without licenses, and the licenses by part of the dataset."""
    if "generator" in settings:
        return {key: value for key, value in settings.items() if key != "license"}, {"": settings.get("license")}
    group = settings.get("sources", settings)
    parts = [name for name in group if group is not settings or name in ("pretrain", "finetune")]
    licenses = {name: group[name].get("license") for name in parts}
    bare = {name: {key: value for key, value in group[name].items() if key != "license"} for name in parts}
    return settings | ({"sources": bare} if group is not settings else bare), licenses


def check_licenses(dataset: dict) -> None:
    """Check that every part of a dataset states a license.

    Args:
        dataset: name, settings and licenses (config/datasets.py).

    Raises:
        InputError: names the part without a license, and where to state it.
    """
    name = dataset["name"]
    for part, text in dataset["licenses"].items():
        if not text:
            key = ".".join(filter(None, ["sources" if "sources" in dataset["settings"] else "", part, "license"]))
            remedy = f"state {key} in config/datasets/{name}.yaml (docs/publishing.md), which trains nothing again"
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
            if plain != name or name not in names_in("datasets"):  # a folder, which states nothing
                name = plain[:100].strip("-._") or "my_data"
                remedy = (
                    f"describe the folder in config/datasets/{name}.yaml with {key} (docs/publishing.md), and set "
                    f"dataset: {name}"
                )
            raise InputError(
                f"publish: {part or dataset['name']} has no license, and nothing is published without one; {remedy}"
            )


def card_license(*licenses: str) -> dict[str, str]:
    """Return the keys of a card for licenses.

    A single license that the hub knows is stated by the hub's name. Any other license, or several, are stated as
    `other` with their names.
    """
    names = sorted({" ".join(text.split()) for text in licenses}, key=str.lower)
    if len(names) == 1 and names[0].lower() in OF_THE_HUB:
        return {"license": names[0].lower()}
    return {"license": "other", "license_name": ", ".join(names)}
