# Input functions of rules/tools.smk.
import json


def config_as_json(wildcards):
    """Params function: the values of --config; a function, so that braces in them are not read as wildcards."""
    return json.dumps(config)
