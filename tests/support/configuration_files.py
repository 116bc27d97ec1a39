"""Types of the files in config/, except config.yaml."""

from dj2mgm.settings.dataset_files import FilesDataset, ShapesDataset, SourcesDataset
from dj2mgm.settings.models import AssembledModel, MgmModel, PresetFile, TinyModel, TransformersModel

FILES = (
    FilesDataset,
    ShapesDataset,
    SourcesDataset,
    AssembledModel,
    MgmModel,
    TinyModel,
    TransformersModel,
    PresetFile,
)
