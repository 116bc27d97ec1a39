"""Chat templates are rendered like in transformers, within limits of time, memory and length."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from dj2mgm.data import chat_template, chat_template_process
from dj2mgm.data.chat_template import ChatTemplate, render_chat
from dj2mgm.errors import InputError
from dj2mgm.models.generators import load_family
from dj2mgm.settings.models import list_chat_template_names, read_chat_template
from tiny_families import BUILDERS, save_tiny_family
from tiny_models import tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "Wo ist der „Apfel“? 🍎\n{{ 7 * 7 }} <b>"},
    {"role": "assistant", "content": "Dort, \\n & hier."},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "5"},
]
FEATURES = {
    "tojson": "{{ messages | tojson(indent=2) }}{{ {'a': '<ü>'} | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "macros": "{% macro show(m) %}[{{ m['content'] | trim }}]{% endmacro %}{{ show(messages[0]) }}",
    "blanks": "  {% if true %}\n  x\n  {% endif %}\ny {{- 'z' }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['b']) }}{{ bos_token }}{{ undefined_name }}{{ tools is none }}",
    "methods": "{{ messages[0].content.split(' ')[-1].upper() }}{{ 'a-b'.replace('-', '+') }}{{ '%s!' % 'x' }}",
    "generation": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %};{% endfor %}",
}


def stock(source: str, messages: list[dict], **variables) -> tuple[str, list]:
    masks = "endgeneration" in source
    texts, spans = render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=masks, **variables
    )
    return texts[0], spans[0] if masks else []


@pytest.mark.parametrize("source", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("asks", [False, True])
def test_templates_render_as_in_transformers(source, asks):
    variables = {"add_generation_prompt": asks, "bos_token": "<bos>"}
    assert render_chat(source, MESSAGES, **variables) == stock(source, MESSAGES, **variables)


@pytest.mark.parametrize("name", sorted(set(list_chat_template_names()) - {"tokenizer"}))
def test_shipped_templates_render_as_in_transformers(name):
    source = read_chat_template(name)["chat_template"]
    for count in (1, 2, 4):
        variables = {"add_generation_prompt": count == 1, "eos_token": "<eos>"}
        assert render_chat(source, MESSAGES[:count], **variables) == stock(source, MESSAGES[:count], **variables)


@pytest.mark.parametrize("family", [family for family in BUILDERS if family != "paligemma"])
def test_a_processors_template_equals_its_own_method(tmp_path, family):
    save_tiny_family(family, tmp_path)
    encoder = load_family(tmp_path).make_encoder("", 512)
    content = [{"type": "image"}, {"type": "text", "text": "What is shown?"}]
    messages = [{"role": "user", "content": content}]
    messages += [{"role": "assistant", "content": [{"type": "text", "text": "A boat."}]}]
    for count, asks in ((1, True), (2, False)):
        own = encoder.processor.apply_chat_template(messages[:count], add_generation_prompt=asks)
        assert encoder.renderer.render(messages[:count], asks) == own and "What is shown?" in own


def test_sandbox_has_the_class_of_transformers():
    assert isinstance(chat_template_process.build_environment(), ImmutableSandboxedEnvironment)
    for escape in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/hostname' %}",
        "{{ raise_exception('refused') }}",
    ):
        with pytest.raises(InputError):
            render_chat(escape + "{{ undefined.attribute }}", MESSAGES)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = {
    "times": "{{ 'a' * 10**10 }}",  # Jinja computes this during compilation
    "times at run time": "{{ messages[0].content * 10**10 }}",
    "power": "{% set n = 10 ** (10 ** 9) %}",
    "list": "{{ (messages * 10**9) | length }}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "width": "{{ '%9999999999d' % 1 }}",
    "justify": "{{ messages[0].content.ljust(9999999999) }}",
}


@pytest.mark.parametrize("source", MEMORY.values(), ids=MEMORY)
def test_template_that_fills_memory_is_refused_in_a_sentence(source, short_limits):
    started = time.monotonic()
    with pytest.raises(InputError, match="it takes more than|too large|bits"):
        render_chat(source, MESSAGES)
    assert time.monotonic() - started < 30
    assert render_chat("{{ messages[2].content }}", MESSAGES) == ("3", [])


@pytest.mark.parametrize("source", [LOOPS, "{% if messages[0].role == 'user' %}" + LOOPS + "{% endif %}"])
def test_template_that_never_ends_is_refused_in_a_sentence(source, short_limits):
    with pytest.raises(InputError, match=r"it takes more than [\d.]+ s for one conversation"):
        render_chat(source, MESSAGES)
    assert render_chat("{{ messages[2].content }}", MESSAGES) == ("3", [])


def test_endless_output_of_a_template_is_refused_in_a_sentence(short_limits):
    source = "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}"
    with pytest.raises(InputError, match="it writes more than|it takes more than"):
        render_chat(source, MESSAGES)


@pytest.fixture
def short_limits(monkeypatch, tmp_path):
    """Use a limit of one second instead of five, in a copy of the module for the process."""
    source = open(chat_template_process.__file__, encoding="utf-8").read()
    (tmp_path / "process.py").write_text(source.replace("CPU_S = 5.0", "CPU_S = 0.3"))
    monkeypatch.setattr(chat_template_process, "__file__", str(tmp_path / "process.py"))
    monkeypatch.setattr(chat_template, "_renderer", None)


def test_hostile_template_of_a_model_is_refused(tmp_path, short_limits):
    save_tiny_family("qwen3_vl", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(LOOPS)
    with pytest.raises(InputError, match="model: its chat template cannot be rendered .it takes more than"):
        load_family(tmp_path / "model").make_encoder("", 512)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'a' * 10**10 }}"
    with pytest.raises(InputError, match="template tokenizer: it cannot be rendered .it takes more than .* of memory"):
        ChatTemplate.load("tokenizer", tokenizer)


def test_threads_and_forked_processes_get_their_own_answers():
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda n: render_chat("{{ n }}", [], n=n)[0], range(200)))
    assert texts == [str(n) for n in range(200)]
    here = chat_template._renderer.process.pid
    with multiprocessing.get_context("fork").Pool(2) as pool:
        others = pool.map(_render_in_worker, range(40))
    assert [text for text, _ in others] == [str(n) for n in range(40)]
    assert here not in {pid for _, pid in others}
    assert render_chat("{{ n }}", [], n=1) == ("1", []) and chat_template._renderer.process.pid == here


def _render_in_worker(number: int) -> tuple[str, int]:
    return render_chat("{{ n }}", [], n=number)[0], chat_template._renderer.process.pid


def test_a_killed_renderer_is_restarted():
    render_chat("x", [])
    os.kill(chat_template._renderer.process.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="of memory"):
        render_chat("x", [])
    assert render_chat("x", []) == ("x", [])


def test_killed_renderer_with_unread_request_is_restarted():
    render_chat("x", [])
    renderer = chat_template._renderer
    os.kill(renderer.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, renderer.process.pid, os.WEXITED | os.WNOWAIT)  # no process reads the pipe from now on
    with pytest.raises(InputError, match="of memory"):
        render_chat("x", [])
    assert render_chat("x", []) == ("x", [])
