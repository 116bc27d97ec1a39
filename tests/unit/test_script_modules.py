"""Imports of the project's modules are found in every form of import statement."""

import ast

import pytest

from dj2mgm.script_modules import find_modules

FORMS = {
    "two in one line": "import dj2mgm.compute, dj2mgm.errors as wrong\n",
    "behind a colon and a semicolon": "if True: import dj2mgm.compute; from dj2mgm import errors\n",
    "in parentheses with a comment": "from dj2mgm import (  # ours (not others)\n    compute,\n    errors,\n)\n",
    "on continued lines": "from dj2mgm \\\n    import compute, \\\n    errors\n",
    "in a function": "def later():\n    import dj2mgm.compute\n    from dj2mgm.errors import InputError\n",
    "below prose": '"""\nimport what you need\n"""\nimport dj2mgm.compute\nfrom dj2mgm import errors\n',
    "below code in a string": 'TEXT = """\nimport os\n"""\nimport dj2mgm.compute\nfrom dj2mgm import errors\n',
}


@pytest.mark.parametrize("form", FORMS)
def test_an_import_is_found_in_every_form(tmp_path, form):
    script = tmp_path / "script.py"
    script.write_text(FORMS[form], encoding="utf-8")
    ast.parse(FORMS[form])
    assert {"compute.py", "errors.py"} <= {path.name for path in find_modules(script)}
