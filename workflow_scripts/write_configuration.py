"""Write the generated files: config/config.yaml, JSON schemas, docs/configuration.md, tables in docs/.

    python workflow_scripts/write_configuration.py

Values in config/config.yaml are replaced by the defaults.
"""

from dj2mgm.documents import build_documents
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.storage.files import replace_file


def main() -> None:
    for path, content in build_documents().items():
        with replace_file(SCRIPTS.parent / path) as file:
            file.write(content)


if __name__ == "__main__":
    main()
