"""The one door to Data-Juicer: what the rest of `juicer` uses of it, with its run-time surprises taken out.

Data-Juicer 1.6.1, left alone,
- installs every missing package while it runs (`LazyLoader`), which changes the environment under the workflow's feet;
- loads its Ray executors with `data_juicer.core`, so that the mere import installs Ray;
- imports torch after each operator, to empty the cache of a GPU that most operators never use;
- opens images in its own way: every format that Pillow has, EPS with Ghostscript among them; truncated files; 16 bits
  cut off at 255. Models would be shown other images than those that were judged.
"""

import importlib.util
import os
import sys

from data_juicer.ops import base_op
from data_juicer.utils import mm_utils, model_utils
from data_juicer.utils.lazy_loader import LazyLoader
from PIL import Image

from dj2mgm.data.images import FORMATS, load_image
from dj2mgm.data.shards import file_size
from dj2mgm.errors import InputError
from dj2mgm.streaming import end_with_parent


class MissingPackage(InputError):
    """An operator needs `package`, which the environment lacks."""

    def __init__(self, package: str):
        super().__init__(package)
        self.package = package


def _refuse_to_install(cls: type, package_spec: str, pip_args: list[str] | None = None) -> None:
    raise MissingPackage(package_spec)


def _load_core_without_ray() -> None:
    """Enter `data_juicer.core` as a bare package: its modules load as usual, its `__init__` with Ray does not run."""
    if "data_juicer.core" not in sys.modules:
        spec = importlib.util.find_spec("data_juicer.core")
        sys.modules["data_juicer.core"] = importlib.util.module_from_spec(spec)


def _free_models_if_any() -> None:
    if model_utils.MODEL_ZOO:
        model_utils.free_models()


def _open_images_in_our_way() -> None:
    """Put our functions in place of Data-Juicer's, in every module that has imported them. Operators that call Pillow
    themselves find no formats but ours there.
    """
    for ours, theirs in ((load_image, "load_image"), (file_size, "get_file_size")):
        original = getattr(mm_utils, theirs)
        setattr(mm_utils, theirs, ours)
        for name, module in list(sys.modules.items()):
            if name.startswith("data_juicer.") and vars(module).get(theirs) is original:
                setattr(module, theirs, ours)
    Image.init()  # it adds no format after this
    Image.ID[:] = FORMATS


LazyLoader._install_package = classmethod(_refuse_to_install)
base_op.free_models = _free_models_if_any
_load_core_without_ray()

from data_juicer import __version__  # noqa: E402
from data_juicer.config.config import update_op_attr  # noqa: E402
from data_juicer.core.data import NestedDataset  # noqa: E402
from data_juicer.core.preflight import PipelineConfigError, pre_instantiation_check  # noqa: E402
from data_juicer.ops import OPERATORS, Filter, Mapper, load_ops  # noqa: E402
from data_juicer.ops.base_op import OP  # noqa: E402
from data_juicer.utils.constant import Fields  # noqa: E402
from data_juicer.utils.mm_utils import SpecialTokens  # noqa: E402

_open_images_in_our_way()  # operators have been imported by now, and with them the original

__all__ = [
    "OP",
    "OPERATORS",
    "Fields",
    "Filter",
    "Mapper",
    "MissingPackage",
    "NestedDataset",
    "PipelineConfigError",
    "SpecialTokens",
    "__version__",
    "end_workers_with_this_process",
    "forbid_surprises",
    "load_ops",
    "pre_instantiation_check",
    "ray_dataset_class",
    "update_op_attr",
]


def ray_dataset_class() -> type:
    """`RayDataset`, what Data-Juicer's Ray executor runs operators on; only here, because it imports Ray."""
    from data_juicer.core.data.ray_dataset import RayDataset

    return RayDataset


def forbid_surprises() -> None:
    """Make pip and uv useless to this process and its children: a few operators call them directly. And answer no
    questions: transformers would ask whether to run the code that comes with a model.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(PIP_NO_INDEX="1", PIP_DRY_RUN="1", UV_NO_INDEX="1", UV_OFFLINE="1")


def end_workers_with_this_process() -> None:
    """Data-Juicer's and datasets' pools do not end their workers when this process is killed."""
    os.register_at_fork(after_in_child=end_with_parent)
