"""Questions of benchmarks, which the search for leaks compares with the training data."""

from collections.abc import Iterator

from dj2mgm.features.challenge.benchmarks import load_benchmark, read_questions


def list_questions(benchmarks: dict[str, dict[str, str]]) -> Iterator[tuple[str, Iterator[dict]]]:
    """Yield each benchmark with its questions.

    A question has the keys `id`, `image` and, if the benchmark provides them, `text`: the text without instructions,
    and the right answers.
    """
    for name, files in benchmarks.items():
        yield name, _read_texts(name, files)


def _read_texts(name: str, files: dict[str, str]) -> Iterator[dict]:
    get_text = load_benchmark(name).get_text
    for row in read_questions(name, files):
        yield row | {"text": get_text(row)} if get_text else row
