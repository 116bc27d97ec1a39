"""This workflow's own operators: each module of this folder is imported, and registers its operators in Data-Juicer.

A new operator is one new file here. What it may declare beside Data-Juicer's own attributes is in `declarations`;
docs/examples/operator.py is a whole one. What takes long to import, as torch does, belongs into `models/`, which an
operator imports when it first needs it.

The operators work in a plain Data-Juicer run too (which needs Ray installed), with the workflow's library on the path:

    PYTHONPATH=workflow_scripts dj-process --config recipe.yaml \
        --custom-operator-paths workflow_scripts/dj2mgm/juicer/operators
"""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    if not module.ispkg:
        import_module(f"{__name__}.{module.name}")
