"""The captioner on a server, with a scripted server that fails on request and counts requests."""

import html
import json
import re
import time
import zlib
from dataclasses import replace
from email.utils import formatdate
from threading import Barrier, Lock
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.features.servers import chat_requests, chat_server
from dj2mgm.features.servers.operators import openai_captioning_mapper
from dj2mgm.juicer.operators.captioners import Captioner
from dj2mgm.juicer.operators.declarations import Captions
from dj2mgm.juicer.patched_data_juicer import load_ops
from scripted_server import CaptionRequest, Reply, ScriptedServer, caption

KEY, VARIABLE = "sk-Secret_123", "TEST_CHAT_KEY"


@pytest.fixture(autouse=True)
def quick(monkeypatch, quick_requests):
    monkeypatch.setattr(chat_requests, "MAX_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[str]:
    """Write images of one gray each (0, 10, 20, …), by which the server recognizes them."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(24):
        Image.new("RGB", (40, 20), (10 * number,) * 3).save(folder / f"{number:02}.png")
    return [str(path) for path in sorted(folder.iterdir())]


def read_number(request: CaptionRequest) -> int:
    return round(float(np.asarray(request.image).mean()) / 10)


def reply_with_number(request: CaptionRequest) -> Reply:
    return caption(f"picture {read_number(request)}")


def mapper(server: ScriptedServer, **arguments):
    settings = {"base_url": server.url, "model": "tiny", "concurrency": 4, "timeout_s": 5.0, "retries": 2}
    [operator] = load_ops([{"openai_captioning_mapper": settings | arguments}])
    return operator


def ask(server: ScriptedServer, images: list[str], spent: tuple[int, int] = (0, 0), **arguments) -> dict[int, Captions]:
    operator = mapper(server, **arguments)
    operator.connect(spent)
    return request_answers(operator, images)


def request_answers(operator, images: list[str]) -> dict[int, Captions]:
    answers: dict[int, Captions] = {}
    operator.request_captions(images, answers.__setitem__)
    return answers


def fail_to_ask(
    server: ScriptedServer, images: list[str], spent=(0, 0), **arguments
) -> tuple[dict[int, Captions], str]:
    """Return the answers before the error, and its message."""
    operator, answers = mapper(server, **arguments), {}
    operator.connect(spent)
    with pytest.raises(InputError) as caught:
        operator.request_captions(images, answers.__setitem__)
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)
    return answers, str(caught.value)


def test_images_are_sent_once_and_concurrency_limits_requests(images):
    eight = Barrier(8, timeout=10)

    def by_eights(request):
        eight.wait()
        return reply_with_number(request)

    with ScriptedServer(by_eights) as server:
        answers = ask(server, images, concurrency=8)
    assert answers == {index: Captions([f"picture {index}"], None, None, 10) for index in range(24)}
    assert server.requests == 24 and set(server.request_counts.values()) == {1} and server.lists == 1
    assert server.most_in_flight == 8


def test_at_most_one_image_per_core_is_decoded_at_a_time(images, monkeypatch):
    decoding: list[str] = []
    most: list[int] = []

    def slow_load(image, longest_side):
        decoding.append(image)
        most.append(len(decoding))
        time.sleep(0.02)
        decoding.remove(image)
        return load_image(image, longest_side)

    monkeypatch.setattr(openai_captioning_mapper, "load_image", slow_load)
    monkeypatch.setattr(openai_captioning_mapper.os, "sched_getaffinity", lambda _: {0, 1, 2})
    with ScriptedServer(reply_with_number) as server:
        assert len(ask(server, images, concurrency=12)) == 24
    assert max(most) == 3


def test_the_request_is_a_chat_completion_with_a_scaled_image(images):
    seen: list[CaptionRequest] = []

    def remember(request):
        seen.append(request)
        return reply_with_number(request)

    with ScriptedServer(remember) as server:
        ask(server, images[5:6], longest_side=16, question="What is it?", max_tokens=7, temperature=0.5)
    [request] = seen
    [message] = request.body.pop("messages")
    assert request.body == {"model": "tiny", "max_tokens": 7, "temperature": 0.5}
    assert message["role"] == "user" and message["content"][1] == {"type": "text", "text": "What is it?"}
    assert (request.image.format, request.image.size) == ("JPEG", (16, 8)) and read_number(request) == 5
    assert "Authorization" not in request.headers


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(500, "oops"),
        Reply(429, "slow down"),
        Reply(200, "<html><body>Welcome</body></html>", {"Content-Type": "text/html"}),
        Reply(200, '{"choices": []}'),
        Reply(200, '{"choices": [{"message": {"content": 3}}]}'),
        Reply(200, "[" * 100_000),
        Reply(200, '{"error": {"message": "no capacity"}}'),
        Reply(200, '{"choices": [{"message": {"con'),
        replace(caption("cut"), action="truncate"),
        Reply(action="reset"),
        Reply(action="hang"),
    ],
    ids=lambda reply: f"{reply.status} {reply.action} {reply.body[:20]}",
)
def test_only_failed_requests_are_repeated(images, trouble):
    def first_fails(request):
        return trouble if read_number(request) % 3 == 0 and request.time_of_image == 1 else reply_with_number(request)

    with ScriptedServer(first_fails) as server:
        answers = ask(server, images[:12], timeout_s=1.5 if trouble.action == "hang" else 30.0)
    assert {index: captions.candidates for index, captions in answers.items()} == {
        index: [f"picture {index}"] for index in range(12)
    }
    assert server.requests == 12 + 4 and set(server.caption_counts.values()) == {1}


@pytest.mark.parametrize(("status", "requests"), [(500, 3), (400, 1)])
def test_an_image_without_an_answer_does_not_stop_others(images, capfd, status, requests):
    """A server's failure is retried twice; a rejected request is not repeated."""
    with ScriptedServer(
        lambda request: Reply(status, "oops") if read_number(request) == 3 else reply_with_number(request)
    ) as server:
        answers = ask(server, images)
    assert set(answers) == set(range(24)) - {3}
    assert sorted(server.request_counts.values()) == sorted([1] * 23 + [requests])
    assert f"a question got no answer: {status} 'oops'" in capfd.readouterr().err


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_applies_to_all_requests(images, date):
    times: list[float] = []

    def busy_at_first(request):
        times.append(time.monotonic())
        if request.number == 1:
            # an HTTP date has no fractional seconds
            after = formatdate(time.time() + 2, usegmt=True) if date else "0.4"
            return Reply(429, "slow down", {"Retry-After": after})
        if request.number == 2:
            time.sleep(0.1)
        return reply_with_number(request)

    with ScriptedServer(busy_at_first) as server:
        answers = ask(server, images[:6], concurrency=2)
    assert len(answers) == 6 and server.requests == 7
    assert times[2] - times[0] >= (0.9 if date else 0.4)


def test_a_server_with_one_request_at_a_time_answers_all(images):
    """All images are answered, although each is refused more often than `retries`."""
    lock = Lock()

    def one_at_a_time(request):
        if not lock.acquire(blocking=False):
            return Reply(429, "slow down")
        time.sleep(0.01)
        lock.release()
        return reply_with_number(request)

    with ScriptedServer(one_at_a_time) as server:
        answers = ask(server, images[:12], concurrency=6, retries=5)
    assert len(answers) == 12 and set(server.caption_counts.values()) == {1}


def test_an_answer_without_a_caption_has_a_problem(images):
    answers = [
        (caption("  two\n lines "), "two lines", None),
        (caption(""), "", None),
        (caption(None), "", None),
        (caption([]), "", None),
        (caption("a boat on the", "length"), "a boat on the", "cut off"),
        (caption("", "content_filter"), "", "refused"),
        (caption(None, refusal="I cannot"), "", "refused"),
        (caption([{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]), "a cat", None),
        (caption([{"type": "thinking", "thinking": []}, {"type": "text", "text": "a dog"}]), "a dog", None),
        (caption("no usage", tokens=None), "no usage", None),
        (caption("<think>It is red.</think>\n\nA red square."), "A red square.", None),
        (caption("It is red.\n</think> A red square."), "A red square.", None),
        (caption("<think>It is", "length"), "<think>It is", "cut off"),
        (caption("\n<think>It is"), "<think>It is", "cut off"),
        (caption("<think>It is red.</think>"), "", None),
    ]
    with ScriptedServer(lambda request: answers[read_number(request)][0]) as server:
        captions = ask(server, images[: len(answers)])
    assert server.requests == len(answers)
    found = [(captions[index].candidates[0], captions[index].problem) for index in range(len(answers))]
    assert found == [(text, problem) for _, text, problem in answers]
    assert captions[9].tokens is None and captions[0].tokens == 10


def test_forbidden_characters_invalidate_only_their_answers(images):
    forbidden = ["\ud83d", "\0", "\x9b", "\u202e"]
    scripts = ["गुलाब", "می\u200cخواهم", "👩\u200d🚀 in space", "\u200fא", "e\u0301t\u00e9"]
    texts = [*(f"a cat {character} b" for character in forbidden), *scripts]
    with ScriptedServer(lambda request: caption(texts[read_number(request)])) as server:
        answers = ask(server, images[: len(texts)])
    refused = Captions(["a cat \N{REPLACEMENT CHARACTER} b"], None, "control character", 10)
    expected = [refused] * len(forbidden) + [Captions([text], None, None, 10) for text in scripts]
    assert [answers[index] for index in range(len(texts))] == expected


def test_a_lost_server_stops_the_stage(images):
    def dies(request):
        return reply_with_number(request) if request.number <= 10 else Reply(action="reset")

    with ScriptedServer(dies) as server:
        answers, sentence = fail_to_ask(server, images)
    assert len(answers) == 10
    assert "3 questions in a row got no answer, the last one no answer (" in sentence
    assert "10 answers of this run are kept" in sentence and server.url in sentence
    assert server.requests <= 10 + 3 * (4 + 3), "the others are not asked about any more"


def test_answers_in_flight_are_kept_when_the_stage_stops(images):
    def slow_but_one(request):
        if read_number(request) == 0:
            return Reply(404, "no such model")
        time.sleep(0.1)
        return reply_with_number(request)

    with ScriptedServer(slow_but_one) as server:
        answers, sentence = fail_to_ask(server, images, concurrency=8)
    assert "expected an answer, found 404 'no such model'. Correct model or base_url" in sentence
    assert len(answers) == server.caption_counts.total() == server.requests - 1 <= 8


def test_an_unstorable_answer_does_not_lose_others(images):
    stored: list[int] = []

    def slow(request):
        time.sleep(0.1)
        return reply_with_number(request)

    def keep(index: int, captions: Captions) -> None:
        stored.append(index)
        if len(stored) == 1:
            raise OSError("disk full")

    with ScriptedServer(slow) as server:
        operator = mapper(server)
        operator.connect()
        with pytest.raises(OSError, match="disk full"):
            operator.request_captions(images, keep)
    assert 4 <= len(stored) == server.requests < 24


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply(429, '{"error": {"code": "insufficient_quota"}}'), "insufficient_quota.*Run again when it allows more"),
        (Reply(503, "later", {"Retry-After": "4000"}), "503 'later' and requests a pause of 4000 s. Run again when"),
        (Reply(308, "", {"Location": "http://elsewhere/v1"}), "308 ''. Correct model or base_url"),
        (Reply(402, "no credit"), "402 'no credit'.*check the account"),
    ],
)
def test_a_permanent_refusal_stops_immediately(images, reply, sentence):
    with ScriptedServer(lambda _: reply) as server:
        with pytest.raises(InputError, match=sentence):
            ask(server, images, concurrency=1)
    assert server.requests == 1


def test_a_model_without_captions_stops_after_few_requests(images):
    with ScriptedServer(lambda _: caption("and so on", "length")) as server:
        answers, sentence = fail_to_ask(server, images * 4, concurrency=2)
    assert "50 answers in a row are unusable, the last one is cut off. Change question, max_tokens or" in sentence
    assert len(answers) == server.requests <= 52


def test_a_budget_of_requests_counts_retries_and_earlier_runs(images):
    def first_fails(request):
        return Reply(500) if request.time_of_image == 1 else reply_with_number(request)

    with ScriptedServer(first_fails) as server:
        answers, sentence = fail_to_ask(server, images, spent=(5, 50), max_requests=15, concurrency=1)
    assert server.requests == 10 and len(answers) == 5
    assert (
        "max_requests: 15 is used up. Raise it (null: no limit) and run again (15 requests and 100 tokens so"
        in sentence
    )
    with ScriptedServer(reply_with_number) as server:
        operator = mapper(server, max_requests=10)
        operator.connect()
        assert len(request_answers(operator, images[:10])) == 10
    assert operator.report == {"requests": 10, "answers": 10, "tokens": 100}


def test_a_budget_of_tokens_stops_when_it_is_reached(images):
    with ScriptedServer(reply_with_number) as server:
        answers, sentence = fail_to_ask(server, images, max_total_tokens=95, concurrency=1)
        assert server.requests == len(answers) == 10 and "max_total_tokens: 95 is used up" in sentence
    for tokens in (None, -9, 10**4200):
        with ScriptedServer(lambda _, tokens=tokens: caption("x", tokens=tokens)) as server:
            answers, sentence = fail_to_ask(server, images, max_total_tokens=95, concurrency=1)
        assert len(answers) == 1 and "does not report tokens" in sentence


@pytest.mark.parametrize("status", [200, 500])
def test_tokens_of_invalid_answers_count(images, status):
    with ScriptedServer(lambda _: Reply(status, '{"choices": [], "usage": {"total_tokens": 10}}')) as server:
        _, sentence = fail_to_ask(server, images, max_total_tokens=15, concurrency=1)
    assert server.requests == 2 and "(2 requests and 20 tokens so far" in sentence


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        (["a", "b"], r"\(model tiny\): the server does not list this model, but 'a', 'b'. Name one of these"),
        ([f"m{number}" for number in range(12)], "but 'm0', 'm1', .*, 'm9' and 2 more. Name one"),
        (
            Reply(200, "<html>hello"),
            "expected a list of models, found 200 '<html>hello'. Correct base_url, which often",
        ),
        (
            Reply(502, "bad gateway"),
            "3 requests for its list of models failed, the last with 502 'bad gateway'. Start the server or",
        ),
        (Reply(action="reset"), r"3 requests for its list of models failed, the last with no answer \("),
        (
            Reply(action="hang"),
            r"3 requests for its list of models failed, the last with no answer in 0.1 s. Start the server",
        ),
        (Reply(403, "go"), r"the server needs a key \(403\). Put one into OPENAI_API_KEY"),
        (
            Reply(body=" " * 2**20, action="flood"),
            "for its list of models failed, the last with an answer of more than 4 MiB. Start the",
        ),
        (
            Reply(body=" ", action="drip"),
            "for its list of models failed, the last with no whole answer in 0.3 s. Start the server",
        ),
    ],
)
def test_a_server_without_the_model_is_named_immediately(images, models, sentence, monkeypatch):
    monkeypatch.setattr(chat_server, "TIMEOUT_FACTOR", 3)
    waits = getattr(models, "action", "") in ("hang", "drip")
    with ScriptedServer(reply_with_number, models) as server, pytest.raises(InputError, match=sentence):
        ask(server, images, timeout_s=0.1 if waits else 5)
    assert server.requests == 0


@pytest.mark.parametrize("models", [[], Reply(404, "none here"), Reply(500, "no cache")])
def test_a_server_without_a_list_of_models_is_accepted(images, models, capfd):
    with ScriptedServer(reply_with_number, models) as server:
        assert len(ask(server, images[:2])) == 2
    assert "note: " in capfd.readouterr().err


def test_an_address_without_a_server_is_reported(images):
    with ScriptedServer(reply_with_number) as server:
        url = server.url
    with pytest.raises(InputError, match=f"{url} .*no answer .*Connection refused.*Start the server"):
        ask(server, images)


def test_the_key_from_the_environment_is_in_no_message(images, monkeypatch, capfd):
    with ScriptedServer(reply_with_number, key=KEY) as server:
        with pytest.raises(InputError, match=rf"the server needs a key \(401\). Put one into {VARIABLE}"):
            ask(server, images, key_variable=VARIABLE)
        monkeypatch.setenv(VARIABLE, KEY + "x")
        with pytest.raises(InputError, match=rf"the server rejects the key in {VARIABLE} \(401\)") as caught:
            ask(server, images, key_variable=VARIABLE)
        assert "sk-" not in str(caught.value)
        monkeypatch.setenv(VARIABLE, f" {KEY}\n")
        operator = mapper(server, key_variable=VARIABLE)
        operator.connect()
        assert len(request_answers(operator, images)) == 24
        with pytest.raises(InputError, match="the server needs a key"):
            ask(server, images, key_variable=None)
        server.reply = lambda request: Reply(400, f"you sent {request.headers['Authorization']}")
        answers, sentence = fail_to_ask(server, images * 3, key_variable=VARIABLE, concurrency=1)
        assert "<key>" in sentence and not answers
    assert KEY not in capfd.readouterr().err


def test_an_operator_stores_the_keys_variable_not_the_key(monkeypatch):
    """Ray and Data-Juicer pass the operator's values to other processes and record them."""
    monkeypatch.setenv(VARIABLE, KEY)
    [operator] = load_ops([{"openai_captioning_mapper": {"model": "m", "key_variable": VARIABLE}}])
    written = repr(vars(operator))
    assert VARIABLE in written and KEY not in written


ODD_KEY = 'sk-ab/cd+"e\\'
SPELLINGS = {
    "plain": ODD_KEY,
    "json": json.dumps(ODD_KEY)[1:-1],
    "php": json.dumps(ODD_KEY)[1:-1].replace("/", "\\/"),
    "json twice": json.dumps(json.dumps(ODD_KEY)),
    "code points": "".join(f"\\u{ord(character):04X}" for character in ODD_KEY),
    "address": quote(ODD_KEY, safe=""),
    "address twice": quote(quote(ODD_KEY, safe=""), safe=""),
    "html": html.escape(ODD_KEY),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_the_key_is_masked_in_any_spelling_of_the_server(images, monkeypatch, spelling):
    monkeypatch.setenv(VARIABLE, ODD_KEY)
    with ScriptedServer(lambda _: Reply(404, f"no scope: {spelling}.")) as server:
        _, sentence = fail_to_ask(server, images, key_variable=VARIABLE, concurrency=1)
        assert re.search(r"found 404 .no scope: \W*<key>\W*\.", sentence)
        server.reply = lambda _: caption(f"a boat {spelling} at sea")
        [captions] = ask(server, images[:1], key_variable=VARIABLE).values()
        assert re.fullmatch(r"a boat \W*<key>\W* at sea", captions.candidates[0])
        assert captions.problem == "quotes the key"
        server.models = [spelling]
        with pytest.raises(InputError, match=r"does not list this model, but \W*<key>\W*. Name one"):
            ask(server, images, key_variable=VARIABLE)


def test_the_key_is_masked_in_utf16(images, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    wide = KEY.encode("utf-16-le").decode()
    with ScriptedServer(lambda _: Reply(500, wide)) as server:
        _, sentence = fail_to_ask(server, images[:3], retries=0, key_variable=VARIABLE)
    assert "the last one 500 '<key>'" in sentence


def test_a_placeholder_key_can_be_a_word_of_a_caption(images, monkeypatch):
    monkeypatch.setenv(VARIABLE, "EMPTY")
    with ScriptedServer(lambda _: caption("an EMPTY street")) as server:
        [captions] = ask(server, images[:1], key_variable=VARIABLE).values()
    assert (captions.candidates, captions.problem) == (["an EMPTY street"], None)


@pytest.mark.parametrize("action", ["drip head", "drip"])
def test_a_slow_answer_ends_at_its_deadline(images, action, monkeypatch):
    monkeypatch.setattr(chat_server, "TIMEOUT_FACTOR", 2)
    with ScriptedServer(lambda _: Reply(body=" ", action=action)) as server:
        started = time.monotonic()
        _, sentence = fail_to_ask(server, images[:1] * 3, timeout_s=0.3, retries=0, concurrency=3)
    assert time.monotonic() - started < 3
    assert {"drip head": "no answer in 0.3 s", "drip": "no whole answer in 0.6 s"}[action] in sentence


def test_a_compressed_answer_is_not_decompressed(images):
    body = zlib.compress(b" " * 10**6)
    reply = Reply(body=body.decode("latin-1"), headers={"Content-Encoding": "deflate", "Content-Length": "10"})
    with ScriptedServer(lambda request: reply) as server:
        _, sentence = fail_to_ask(server, images[:1] * 50, retries=0, concurrency=1)
    assert "a compressed answer, although the request excludes it" in sentence


@pytest.mark.parametrize(("status", "charset"), [(200, "zlib"), (500, "undefined"), (500, "rot13")])
def test_codecs_that_are_not_text_encodings_are_not_used(images, charset, status):
    reply = Reply(status, "6161 out of memory", {"Content-Type": f"text/plain; charset={charset}"})
    with ScriptedServer(lambda _: reply) as server:
        _, sentence = fail_to_ask(server, images[:3], retries=0)
    assert f"the last one {status} '6161 out of memory'" in sentence


def test_a_too_long_answer_is_truncated(images):
    """A server cannot fill the disk with unused answers."""
    flood = "x" * (chat_server.MAX_TEXT_LENGTH + 1)
    with ScriptedServer(lambda _: caption(flood)) as server:
        [captions] = ask(server, images[:1]).values()
    assert captions == Captions(["x" * chat_server.KEPT_CHARACTERS], None, "too long", 10)


def test_cookies_are_not_sent_back(images):
    seen = []
    reply = replace(caption("a boat"), headers={"Set-Cookie": "name=value; Max-Age=9999"})
    with ScriptedServer(lambda request: seen.append(request.headers) or reply) as server:
        ask(server, images[:3], concurrency=1)
    assert len(seen) == 3 and not any("Cookie" in headers for headers in seen)


def test_a_long_wait_is_shown(images, capfd, monkeypatch):
    monkeypatch.setattr(chat_requests, "MIN_SHOWN_PAUSE_S", 0.1)
    late = Reply(429, "later", {"Retry-After": "0.2"})
    with ScriptedServer(lambda request: late if request.number == 1 else reply_with_number(request)) as server:
        assert len(ask(server, images[:4], concurrency=2)) == 4
    assert capfd.readouterr().err.count("the server requests a pause of 0 s: 429 'later'") == 1


def test_names_of_models_are_shown_shortened_on_one_line(images):
    with ScriptedServer(reply_with_number, ["m\n\x1b[31m" + "x" * 1000]) as server, pytest.raises(InputError) as caught:
        ask(server, images)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["sk-two\nlines", "sk-schlüssel", "sk a"])
def test_an_invalid_key_is_refused_without_showing_it(images, monkeypatch, key):
    monkeypatch.setenv(VARIABLE, key)
    with (
        ScriptedServer(reply_with_number) as server,
        pytest.raises(InputError, match=f"environment variable {VARIABLE}") as caught,
    ):
        ask(server, images, key_variable=VARIABLE)
    assert "sk" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_url": "http://me:hunter2@host/v1"}, "'base_url' must be an address"),
        ({"base_url": "http://host/v1?key=hunter2"}, "'base_url' must be an address"),
        ({"key_variable": "sk-hunter2"}, "'key_variable' must be the name of an environment variable"),
        ({"model": ""}, "'model' is missing. Name one of http://"),
    ],
)
def test_secrets_in_arguments_are_refused_without_showing_them(arguments, message):
    with ScriptedServer(reply_with_number) as server, pytest.raises(InputError, match=message) as caught:
        mapper(server, **arguments)
    assert "hunter2" not in str(caught.value)


def test_only_relevant_arguments_change_the_fingerprint(tmp_path):
    base = {"base_url": "http://h/v1", "model": "m"}

    def fingerprint(seed: int = 0, **arguments) -> str:
        return Captioner({"openai_captioning_mapper": base | arguments}, seed).compute_fingerprint()

    first = fingerprint()
    same = {"concurrency": 1, "timeout_s": 1.0, "retries": 0, "max_requests": 9, "max_total_tokens": 9}
    same |= {"key_variable": None}
    assert {fingerprint(1), *(fingerprint(**{key: value}) for key, value in same.items())} == {first}
    for equivalent in (
        {"temperature": 0},
        {"max_tokens": 128, "longest_side": 768.0, "question": "Describe the image in one sentence."},
        {"base_url": "http://h/v1/"},
        {"base_url": "HTTP://H/v1"},
    ):
        assert fingerprint(**equivalent) == first
    other = {"model": "n", "question": "?", "max_tokens": 1, "temperature": 0.1, "longest_side": 64}
    other |= {"base_url": "http://i/v1"}
    assert len({first, *(fingerprint(**{key: value}) for key, value in other.items())}) == 7
    (tmp_path / "m").mkdir()
    assert fingerprint(model=str(tmp_path)) != fingerprint(model=str(tmp_path / "m")), "a name, not a folder"


def test_the_captioner_cannot_be_a_separate_step():
    [operator] = load_ops([{"openai_captioning_mapper": {"model": "m"}}])
    with pytest.raises(InputError, match="cannot be a step of a recipe. Name it as the captioner of low_similarity"):
        operator.process_batched({})
