"""Data-Juicer, with this workflow's patches of it. The patches were tested with Data-Juicer 1.6.1.

Entry points call `prepare_process` (or `patch_data_juicer` alone) before they run a recipe; an import changes nothing.
`data_juicer.core` is imported inside of functions, because one of the patches replaces its `__init__`.
"""

import importlib.util
import os
import sys
from collections.abc import Callable

from data_juicer import __version__
from data_juicer.ops import OPERATORS, Filter, Mapper, base_op, load_ops
from data_juicer.ops.base_op import OP
from data_juicer.ops.common import helper_func
from data_juicer.utils import mm_utils, model_utils
from data_juicer.utils.constant import Fields, StatsKeys
from data_juicer.utils.lazy_loader import LazyLoader
from data_juicer.utils.mm_utils import SpecialTokens
from PIL import Image

from dj2mgm.data.images import IMAGE_FORMATS, load_image
from dj2mgm.data.texts import measure_length, separate_words
from dj2mgm.errors import InputError
from dj2mgm.storage.image_files import read_file_size
from dj2mgm.storage.streaming import end_with_parent

__all__ = [
    "OP",
    "OPERATORS",
    "Fields",
    "Filter",
    "Mapper",
    "MissingPackageError",
    "SpecialTokens",
    "__version__",
    "patch_data_juicer",
    "check_arguments",
    "load_ops",
    "load_step",
    "make_package_error",
    "load_nested_dataset_class",
    "prepare_process",
    "load_ray_dataset_class",
    "list_valid_arguments",
]


class MissingPackageError(InputError):
    """The error for an operator that needs `package`, which the environment lacks."""

    def __init__(self, package: str):
        super().__init__(package)
        self.package = package


def make_package_error(operator: str, package: str) -> InputError:
    return InputError(
        f"operator {operator} needs the package {package}, which is not installed; "
        "install it in envs/data_juicer.yaml (nothing is installed at run time) or remove the operator from the recipe"
    )


def _refuse_to_install(cls: type, package_spec: str, pip_args: list[str] | None = None) -> None:
    raise MissingPackageError(package_spec)


def _forbid_installations() -> None:
    """Make Data-Juicer raise an error for a missing package, instead of installing it.

    `LazyLoader` installs missing packages with uv or pip while a recipe runs, and has no switch for it
    (https://github.com/datajuicer/data-juicer/pull/660). One operator replaced torch and broke the environment.
    """
    LazyLoader._install_package = classmethod(_refuse_to_install)


def _load_core_without_ray() -> None:
    """Register `data_juicer.core` as an empty package, so that its modules load without its `__init__`.

    The `__init__` imports the Ray executors. Without Ray in the environment, the import alone would install it.
    """
    if "data_juicer.core" not in sys.modules:
        spec = importlib.util.find_spec("data_juicer.core")
        sys.modules["data_juicer.core"] = importlib.util.module_from_spec(spec)


def _free_models_if_any() -> None:
    if model_utils.MODEL_ZOO:
        model_utils.free_models()


def _import_torch_for_models_only() -> None:
    """Free models after an operator only if there are any.

    `free_models` imports torch to empty the cache of a GPU. The import takes seconds, and most operators use no GPU.
    """
    base_op.free_models = _free_models_if_any


def _open_images_like_the_workflow() -> None:
    """Replace Data-Juicer's functions by this workflow's functions, in every module that has imported them.

    Data-Juicer's own functions open every format of Pillow (also EPS, with Ghostscript) and truncated files, and clip
    16-bit values at 255, so operators would measure other images than the training uses. Operators that call Pillow
    themselves find only this workflow's formats.
    """
    for ours, theirs in ((load_image, "load_image"), (read_file_size, "get_file_size")):
        original = getattr(mm_utils, theirs)
        _replace_in_modules(original, ours, theirs)
    Image.init()  # from now on, Pillow adds no format by itself
    Image.ID[:] = IMAGE_FORMATS


def _replace_in_modules(original: object, replacement: object, name: str) -> None:
    """Replace a function in every module of Data-Juicer that has imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("data_juicer.") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def _count_in_all_scripts() -> None:
    """Let operators count words and characters in scripts without spaces, too.

    Data-Juicer splits texts at white space, so that a Chinese caption has one word. Its alternative, `tokenization`,
    downloads a model, and is a choice for all rows.
    """
    split = helper_func.get_words_from_document

    def split_in_all_scripts(document: str, token_func: Callable | None = None, *args, **kwargs) -> list[str]:
        return split(document if token_func else separate_words(document), token_func, *args, **kwargs)

    _replace_in_modules(split, split_in_all_scripts, "get_words_from_document")
    OPERATORS.get("text_length_filter").compute_stats_batched = _measure_text_lengths


def _measure_text_lengths(operator: Filter, samples: dict) -> dict:
    """Measure the number of characters of texts, as `text_length_filter` does, with a lower limit for wide characters.

    A text that is shorter than `min_len` counts wide characters as two, at most up to `min_len`: it has as much content
    as longer texts in other scripts. `max_len` limits characters in all scripts.
    """
    for text, stats in zip(samples[operator.text_key], samples[Fields.stats], strict=True):
        length = min(measure_length(text), max(len(text), operator.min_len))
        stats.setdefault(StatsKeys.text_len, length)
    return samples


def patch_data_juicer() -> None:
    """Change Data-Juicer once, in this process and in the processes that it forks."""
    if _is_patched():
        return
    _forbid_installations()
    _load_core_without_ray()
    _import_torch_for_models_only()
    _open_images_like_the_workflow()
    _count_in_all_scripts()


def prepare_process() -> None:
    """Prepare this process to run a recipe: no installations, no questions, and no workers that outlive it."""
    patch_data_juicer()
    # a few operators call pip and uv directly
    os.environ.update(PIP_NO_INDEX="1", PIP_DRY_RUN="1", UV_NO_INDEX="1", UV_OFFLINE="1")
    # transformers would ask whether to run the code that comes with a model
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # pools of Data-Juicer and datasets do not end their workers when this process is killed
    os.register_at_fork(after_in_child=end_with_parent)


def _is_patched() -> bool:
    return getattr(LazyLoader._install_package, "__func__", None) is _refuse_to_install


def _require_patches() -> None:
    if not _is_patched():
        raise RuntimeError("Data-Juicer could install packages: call patch_data_juicer() in the entry point")


def load_nested_dataset_class() -> type:
    """Return `NestedDataset`, the dataset of Data-Juicer's operators."""
    _require_patches()
    from data_juicer.core.data import NestedDataset

    return NestedDataset


def load_ray_dataset_class() -> type:
    """Return `RayDataset`, on which Data-Juicer's Ray executor runs operators; its import needs Ray."""
    _require_patches()
    from data_juicer.core.data.ray_dataset import RayDataset

    return RayDataset


def check_arguments(name: str, arguments: dict) -> list[str]:
    """Return the problems that Data-Juicer's own check finds in an operator's arguments."""
    _require_patches()
    from data_juicer.core.preflight import PipelineConfigError, pre_instantiation_check

    try:
        pre_instantiation_check([{name: arguments}])
    except PipelineConfigError as error:
        return [str(problem) for problem in error.errors]
    except AttributeError:  # the check cannot print annotations such as `float | None`
        return [f"{name}: one of {', '.join(arguments)} has a value of the wrong type"]
    return []


def list_valid_arguments(operator: type[OP]) -> set[str]:
    """Return the names of an operator's arguments, as Data-Juicer's own check finds them."""
    _require_patches()
    from data_juicer.core.preflight import _get_valid_params

    return _get_valid_params(operator)


def load_step(name: str, arguments: dict, settings: dict) -> OP:
    """Build an operator with `settings` of its base class."""
    _require_patches()
    from data_juicer.config.config import update_op_attr

    # copied, since Data-Juicer adds to the mappings that it gets
    [operator] = load_ops(update_op_attr([{name: dict(arguments)}], settings))
    return operator
