"""This workflow's own operators, one module per kind.

Each module of this folder and of `features/<name>/operators/` is imported, and registers its operators in Data-Juicer.
A new operator is one new file.
`declarations` lists the possible declarations in addition to Data-Juicer's own attributes; docs/examples/operator.py
is a complete example. Code with slow imports, such as torch, belongs outside of this folder, in a module such as
`juicer/clip_similarity.py`, which an operator imports at first use.
"""

from importlib import import_module
from pkgutil import iter_modules

from dj2mgm.script_modules import import_feature_modules

for module in iter_modules(__path__):
    if not module.ispkg:
        import_module(f"{__name__}.{module.name}")
import_feature_modules("operators")
