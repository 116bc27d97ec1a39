"""Writer of a finished run's record (run.json) and its RO-Crate.

The crate follows the Workflow Run RO-Crate profile: https://w3id.org/ro/wfrun/provenance/0.5. It contains code,
configuration and small results. Weights, images and large files are described by path, size and digest.
"""

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from rocrate.model import ContextEntity
from rocrate.rocrate import ROCrate

from dj2mgm.errors import pluralize
from dj2mgm.features.crate.crate_files import (
    SNAKEFILE,
    describe_inputs,
    describe_this_machine,
    digest_images,
    find_commit,
    find_input,
    list_code_files,
    list_config_files,
)
from dj2mgm.features.crate.crate_record import (
    CrateDataset,
    CrateImages,
    CrateInput,
    CrateRecord,
    CrateSettings,
    FinishedJob,
    find_jobs,
)
from dj2mgm.runs.stages import InputKind
from dj2mgm.storage.files import compute_sha256, replace_file, write_json

RECORD = "run.json"
MAX_INCLUDED_BYTES = 1 << 20  # bytes; larger files are only described
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
MEDIA_TYPES = dict.fromkeys(("", ".log", ".txt", ".j2", ".rst", ".smk", ".sh"), "text/plain") | {
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".py": "text/x-python",
    ".tsv": "text/tab-separated-values",
    ".yaml": "application/yaml",
}

TERMS = "https://w3id.org/ro/terms/workflow-run"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/provenance/0.5": ("Provenance Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
TOOL = ["File", "SoftwareSourceCode"]
WORKFLOW = [*TOOL, "ComputationalWorkflow", "HowTo"]
BIOSCHEMAS = "https://bioschemas.org/profiles"
LICENSE = "https://spdx.org/licenses/Apache-2.0"
SOURCE = "https://github.com/snakemake/snakemake"
USED_UNITS = {"max_rss": ("MB", "4L"), "cpu_time": ("s", "SEC")}  # FinishedJob.used: unit, and its code by UN/CEFACT


class RunCrate:
    """RO-Crate of a run; each entity is added once.

    Args:
        record: inputs, software and machine.
        record_file: the record as a file.
        jobs: all finished jobs in the order of data flow; the last one wrote the page.
    """

    def __init__(self, record: CrateRecord, record_file: Path, jobs: list[FinishedJob]):
        self.record, self.jobs = record, jobs
        self.crate = ROCrate(version="1.1")
        self.file_entities: dict[Path, Any] = {}  # files of inputs and results
        self.crate.metadata.extra_contexts.append(f"{TERMS}/context")
        self.crate.name = f"dj2mgm: {', '.join(record.experiments)}"
        self.crate.description = (
            "Image–text data that Data-Juicer filtered, a vision-language model trained on it, and its scores: code, "
            "configuration, digests of the inputs, jobs and results."
        )
        profiles = [self.add_entity(uri, "CreativeWork", name=n, version=v) for uri, (n, v) in PROFILES.items()]
        self.crate.root_dataset["conformsTo"] = profiles
        self.version = record.commit or "not in git"
        code = {name: path for name, path in list_code_files().items() if name != SNAKEFILE}
        self.code = {name: self.include_file(path, name, self._describe_script(name)) for name, path in code.items()}
        self.crate.license = self.add_entity(
            LICENSE, "CreativeWork", name="Apache License 2.0, of the code", url=LICENSE
        )
        self.workflow = self._add_workflow(list_code_files()[SNAKEFILE])
        self.config = [self.include_file(path, name) for name, path in list_config_files().items()]
        self.record_entity = self.include_file(record_file, record_file.name)
        self.inputs: dict[InputKind, list] = {kind: [] for kind in get_args(InputKind)}
        for entry in record.inputs:
            self.inputs[entry.kind].append(self._add_input(entry))
        self.inputs["dataset"] += [self._add_images(entry) for entry in record.images]
        self.user = self.add_entity("#user", "Person", name="the user who ran the workflow")
        self._add_jobs()

    def _add_jobs(self) -> None:
        """Add jobs with inputs and results, the steps of the workflow, and the run that controls them."""
        jobs = self.jobs
        results: dict[Path, list] = {}
        for job in jobs:
            results.setdefault(job.folder, []).extend(map(self.add_result, job.results))
        actions = []
        for job in jobs:
            inputs = [entity for folder in job.reads for entity in results.get(folder, ())]
            inputs += [self.add_result(job.settings)] if job.settings else []
            inputs += [entity for kind in job.inputs for entity in self.inputs[kind]]
            actions.append(self._add_action(job, inputs))
        scripts = list(dict.fromkeys(job.script for job in jobs))
        steps = {script: self._add_step(position, script) for position, script in enumerate(scripts, start=1)}
        self.workflow["hasPart"] = [self._find_tool(script) for script in scripts]
        self.workflow["step"] = list(steps.values())
        page = [self.add_result(path) for path in jobs[-1].results]
        run = self._add_run(page)
        controls = [
            self.add_entity(f"{action.id}/control", "ControlAction", instrument=steps[job.script], object=action)
            for job, action in zip(jobs, actions, strict=True)
        ]
        self.add_entity(
            "#snakemake/run",
            "OrganizeAction",
            name="Snakemake's run",
            instrument=self.add_entity(
                SOURCE, "SoftwareApplication", name="Snakemake", url=SOURCE, softwareVersion=self.record.snakemake
            ),
            agent=self.user,
            object=controls,
            result=run,
            endTime=run["endTime"],
        )
        self._add_parameters(page)

    def add_result(self, path: Path) -> Any:
        """Add a file of the results once: a copy of a small file, a description of others."""
        if path not in self.file_entities:
            name, is_small = (
                path.as_posix(),
                path.stat().st_size <= MAX_INCLUDED_BYTES and path.suffix not in WEIGHT_SUFFIXES,
            )
            properties = {"name": name, **describe_size(path)}
            self.file_entities[path] = (
                self.include_file(path, name) if is_small else self.describe_file(path, properties)
            )
        return self.file_entities[path]

    def include_file(self, path: Path, name: str, properties: dict | None = None) -> Any:
        """Add a file with its content under this name."""
        file_properties = {"name": name, **describe_size(path), **describe_type(path)} | (properties or {})
        return self.crate.add_file(path, name, properties=file_properties)

    def describe_file(self, path: Path, properties: dict) -> Any:
        """Add a description of a file that stays in its place."""
        return self.crate.add_file(path.absolute().as_uri(), properties=properties | describe_type(path))

    def add_entity(self, uri: str, kind: str, **values: object) -> Any:
        """Add an entity that is not a file, once per address; a list of one item becomes the item."""
        if entity := self.crate.dereference(uri):
            return entity
        entity = self.crate.add(ContextEntity(self.crate, uri, properties={"@type": kind}))
        for key, value in values.items():
            entity[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
        return entity

    def mention(self, uri: str, kind: str, **values: object) -> Any:
        entity = self.add_entity(uri, kind, **values)
        self.crate.root_dataset.append_to("mentions", entity)
        return entity

    def _add_workflow(self, path: Path) -> Any:
        """Add the Snakefile as the crate's main workflow, with the type and the profile that Bioschemas demands."""
        workflow = self.crate.add_workflow(
            path,
            SNAKEFILE,
            main=True,
            lang="snakemake",
            lang_version=self.record.snakemake,
            properties={
                "@type": WORKFLOW,
                **describe_type(path),
                "name": "dj2mgm",
                "version": self.version,
                **describe_size(path),
            },
        )
        workflow["conformsTo"] = {"@id": f"{BIOSCHEMAS}/ComputationalWorkflow/1.0-RELEASE"}
        return workflow

    def _add_run(self, page: list) -> Any:
        start_times = [job.started for job in self.jobs if job.started]
        times = {"startTime": min(start_times).isoformat()} if start_times else {}
        return self.mention(
            "#run",
            "CreateAction",
            name=f"the workflow's run for {', '.join(self.record.experiments)}",
            description="All jobs behind one page of results; jobs that several experiments share ran once.",
            instrument=self.workflow,
            object=[*self.config, self.record_entity, *chain.from_iterable(self.inputs.values())],
            result=page,
            agent=self.user,
            **times,
            endTime=max(job.ended for job in self.jobs).isoformat(),
        )

    def _add_action(self, job: FinishedJob, inputs: list) -> Any:
        """Add a job with its times, memory and packages; `inputs` are entities, which may be repeated."""
        name = f"#{job.folder}/{job.script}"
        values: dict = {"startTime": job.started.isoformat()} if job.started else {}
        if job.used:
            values["resourceUsage"] = [self._add_usage(name, *usage) for usage in job.used.items()]
        if job.versions:
            values["softwareRequirements"] = [self._add_package(*pair) for pair in sorted(job.versions.items())]
        return self.mention(
            name,
            "CreateAction",
            name=f"{job.script} in {job.folder}",
            description=f"The job of the script {job.script}.py that wrote {job.folder}.",
            instrument=self._find_tool(job.script),
            object=list(dict.fromkeys(inputs)),
            result=[self.add_result(path) for path in job.results],
            agent=self.user,
            **values,
            endTime=job.ended.isoformat(),
        )

    def _describe_script(self, name: str) -> dict:
        """Return the properties of a code file that is a tool of the workflow; {} for other files."""
        path = Path(name)
        is_script = name in {f"workflow_scripts/{job.script}.py" for job in self.jobs}
        return {"@type": TOOL, "name": path.stem, "version": self.version} if is_script else {}

    def _find_tool(self, script: str) -> Any:
        return self.code[f"workflow_scripts/{script}.py"]

    def _add_step(self, position: int, script: str) -> Any:
        step = {"name": script, "position": str(position), "workExample": self._find_tool(script)}
        return self.add_entity(f"#step/{script}", "HowToStep", **step)

    def _add_usage(self, job: str, name: str, value: float) -> Any:
        unit, code = USED_UNITS[name]
        values = {"name": name, "value": str(value), "unitText": unit, "unitCode": code}
        return self.add_entity(
            f"{job}/{name}", "PropertyValue", propertyID=f"https://snakemake.github.io/{name}", **values
        )

    def _add_package(self, name: str, version: str) -> Any:
        url = f"https://pypi.org/project/{name}/"
        uri = f"{url}{version}/"
        return self.add_entity(uri, "SoftwareApplication", name=name, softwareVersion=version, url=url)

    def _add_parameters(self, page: list) -> None:
        """Add inputs and outputs of the workflow as formal parameters with the files of this run."""
        self.workflow["input"] = [self._add_parameter("record", self.record_entity)]
        self.workflow["output"] = [self._add_parameter(Path(entity.id).name, entity) for entity in page]

    def _add_parameter(self, name: str, entity: Any) -> Any:
        parameter = self.add_entity(
            f"#parameter/{name}",
            "FormalParameter",
            name=name,
            additionalType="File",
            workExample=entity,
            conformsTo={"@id": f"{BIOSCHEMAS}/FormalParameter/1.0-RELEASE"},
        )
        entity["exampleOfWork"] = parameter
        return parameter

    def _add_input(self, entry: CrateInput) -> Any:
        """Describe a file of the user, which stays in its place."""
        path = find_input(entry.configured_path, entry.file)
        if path not in self.file_entities:
            digest = {"sha256": entry.sha256, "contentSize": str(entry.bytes)}
            name = f"{entry.configured_path}/{entry.file}".rstrip("/")
            self.file_entities[path] = self.describe_file(path, {"name": name, **digest})
        return self.file_entities[path]

    def _add_images(self, entry: CrateImages) -> Any:
        return self.mention(
            f"#images/{entry.dataset}",
            "Collection",
            name=f"the images of the dataset {entry.dataset}",
            description=f"{pluralize(entry.count, 'image')}; the digest is that of their digests, in the order of "
            "the rows",
            sha256=entry.sha256,
        )


def describe_size(path: Path) -> dict[str, str]:
    return {"sha256": compute_sha256(path), "contentSize": str(path.stat().st_size)}


def describe_type(path: Path) -> dict[str, str]:
    return {"encodingFormat": MEDIA_TYPES.get(path.suffix, "application/octet-stream")}


def write_crate(settings: CrateSettings, target: Path) -> int:
    """Write the crate of a page's experiments as a zip file; return the number of its jobs."""
    jobs = find_jobs(settings)
    record = CrateRecord.from_sections(
        format=1,
        page=settings.page,
        experiments=[experiment.name for experiment in settings.experiments],
        command_line=settings.command_line,
        commit=find_commit(),
        snakemake=settings.snakemake,
        versions=_collect_versions(jobs),
        machine=describe_this_machine(),
        inputs=describe_inputs(settings),
        images=[_describe_images(name, dataset) for name, dataset in settings.datasets.items()],
    )
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, RECORD), record.model_dump(by_alias=True))
        crate = RunCrate(record, Path(folder, RECORD), jobs)
        with replace_file(target, "wb") as file:
            for chunk in crate.crate.stream_zip():
                file.write(chunk)
    return len(jobs)


def _describe_images(name: str, dataset: CrateDataset) -> CrateImages:
    digest = digest_images(Path("results/datasets", name), dataset.images)
    return CrateImages.from_sections(dataset=name, drawn=dataset.settings.is_rendered, **digest)


def _collect_versions(jobs: list[FinishedJob]) -> dict[str, list[str]]:
    """Return the versions of each package; jobs may differ in them."""
    versions_by_package: dict[str, set[str]] = {}
    for job in jobs:
        for name, version in job.versions.items():
            versions_by_package.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in sorted(versions_by_package.items())}
