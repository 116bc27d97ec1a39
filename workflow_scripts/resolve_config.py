"""Writes the settings that one stage is handed, as a YAML file that the stage can be run from by hand.

python workflow_scripts/resolve_config.py --settings '{"seed": 0}' --output results/baseline/jsonl/config.yaml
"""

import argparse
import json
from pathlib import Path

from dj2mgm.files import write_yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=json.loads, required=True, help="the settings as JSON")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    write_yaml(args.output, args.settings)


if __name__ == "__main__":
    main()
