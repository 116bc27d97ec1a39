# Shell commands of stages, and the files that they run.
import json
import os
import shlex
from glob import escape, glob
from itertools import chain

from dj2mgm.script_modules import find_modules

# Print a command's output and keep it in its log. The console prints the marked lines of the log; without a console, when
# STAGE_OUTPUT is set, they are printed here.
PRINT_AND_LOG = (
    "2>&1 | tee {log:q} | sed --unbuffered --regexp-extended"
    """ "${{STAGE_OUTPUT:+#}}/^(error|note|warning|progress): /d\""""
)


def quote_script_path(name):
    """Return the path of a script, quoted for a shell command that Snakemake formats."""
    path = os.path.relpath(SCRIPTS / name)
    return shlex.quote(path).replace("{", "{{").replace("}", "}}")


def build_stage_command(command, launcher=""):
    """Return a stage's shell command, which writes its output to its log, and a diagnosis if it fails.

    The console shows a part of the log. Without a console everything is printed, to the descriptor STAGE_OUTPUT.

    Args:
        command: file of the script, and its flags.
        launcher: arguments of launch.sh, which starts the script in several processes.
    """
    name, _, flags = command.partition(" ")
    start = (
        f"bash {quote_script_path('launch.sh')} {launcher}" if launcher else "python"
    )
    redirection = '3> /dev/null >&"${{STAGE_OUTPUT:-3}}"'
    diagnosis = f"python {quote_script_path('diagnose.py')} {{log:q}} --exit-status $?"
    logged = f"{start} {quote_script_path(name)} {flags} 2>&1 | tee {{log:q}}"
    return f"{logged} {redirection} || {diagnosis} {redirection}"


def optional_flags(name, flag, *others):
    """Return the params function of flags for the files of an input; no flag if the input has none.

    One flag takes all files. Each of several flags takes one.
    """

    def flag_words(wildcards, input):
        files = getattr(input, name)
        files = [files] if isinstance(files, str) else files
        if not files:
            return []
        return list(chain(*zip([flag, *others], files))) if others else [flag, *files]

    return flag_words


def list_script_files(*scripts):
    """Return scripts and the modules that they import, as inputs, so that a rule runs again when its code changes."""
    files = {module for script in scripts for module in find_modules(SCRIPTS / script)}
    return sorted(map(os.path.relpath, files))


def list_templates(*patterns, feature=None):
    """Return templates of a page, the style sheet of all pages, and a feature's templates and page scripts, as inputs."""
    library = escape(os.path.relpath(SCRIPTS / "dj2mgm"))
    paths = [f"reporting/templates/{name}" for name in (*patterns, "base_style.css")]
    paths += [f"features/{feature}/*.{end}" for end in ("j2", "js", "css") if feature]
    return sorted(file for path in paths for file in glob(f"{library}/{path}"))


def config_as_json(wildcards):
    """Params function: the values of --config; a function, so that braces in them are not read as wildcards."""
    return json.dumps(config)
