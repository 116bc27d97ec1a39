"""Process that renders chat templates within limits of time and memory, for dj2mgm/data/chat_template.py.

    python -I chat_template_process.py

It reads one request per line and writes one response per line, both as JSON. A request has a template's name and
variables, and the first time also its source. A template comes with a model's folder and may be hostile: transformers'
sandbox blocks code, but a template can still loop forever or write endless output. The Jinja environment equals that of
`transformers.utils.chat_template_utils`, which is not imported because the import takes seconds and memory.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 5.0  # limit of one rendering, which normally takes a millisecond
MEMORY_LIMIT = 1 << 30  # bytes of address space; Python and Jinja need 60 MiB
MAX_OUTPUT_LENGTH = 1 << 26  # characters of a rendered conversation
OUT_OF_MEMORY = "memory"  # code of a problem, for which the caller has a message; other problems are messages


class AssistantTracker(Extension):
    """Jinja extension for `{% generation %}`, which records the spans of the model's answers."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(tracked=self.tracked)
        self.rendered_parts: list[str] | None = None
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record_span"), [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def _record_span(self, context: jinja2.nodes.EvalContext, caller: jinja2.runtime.Macro) -> str:
        text = caller()
        if self.rendered_parts is not None:
            begin = len("".join(self.rendered_parts))
            self.spans.append((begin, begin + len(text)))
        return text

    @contextmanager
    def tracked(self, parts: list[str]):
        self.rendered_parts, self.spans = parts, []
        try:
            yield self.spans
        finally:
            self.rendered_parts = None


class Dict:
    """Constructor `dict` for templates: not the class, because its attributes lead to Python's internals."""

    def __call__(self, *args, **kwargs) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs) -> dict:
        return dict.fromkeys(*args, **kwargs)


class Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without names that begin with an underscore."""

    def __init__(*args, **kwargs):  # no parameter names, so that `namespace(self=...)` works
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} begins with an underscore")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment() -> jinja2.Environment:
    jinja_environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AssistantTracker, loopcontrols]
    )
    jinja_environment.filters["tojson"] = _to_json
    jinja_environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return jinja_environment


def answer_request(request: dict, compile_template: Callable[[dict], jinja2.Template]) -> dict:
    """Return the rendered conversation and the spans of the answers in it, or the template's problem."""
    try:
        template, blocks = compile_template(request), []
        with template.environment.tracked(blocks) as spans:
            length = 0
            for block in template.generate(**request["variables"]):
                blocks.append(block)
                length += len(block)
                if length > MAX_OUTPUT_LENGTH:
                    return {"problem": f"it writes more than {MAX_OUTPUT_LENGTH} characters"}
            return {"text": "".join(blocks), "spans": spans}
    except MemoryError:
        return {"problem": OUT_OF_MEMORY}
    except Exception as error:  # templates can cause errors of any type
        return {"problem": f"{error}"[:1000] or type(error).__name__}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to end
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    templates: dict[str, jinja2.Template] = {}

    def compile_template(request: dict) -> jinja2.Template:
        if request["name"] not in templates:
            templates[request["name"]] = build_environment().from_string(request["source"])
        return templates[request["name"]]

    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the timer's signal ends the process
        response = answer_request(request, compile_template)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
