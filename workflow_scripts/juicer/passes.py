"""What can be done to a partition of the data alone, and what needs all rows first: a recipe cut into passes.

A pass takes each partition through a chain of operators. It ends where a decision needs all rows: an operator then only
measures in this pass, and the decision is made
- at its end, row by row in their order (`image_text_deduplicator`: was the pair there before?), or
- by the pass that follows, which begins with the same operator and a limit in place of a fraction (`keep_fraction`).
Data-Juicer's other deduplicators and its selectors are handed the whole dataset, in a pass of their own.
"""

from dataclasses import dataclass

from juicer.chain import Link, holds_model
from juicer.library import OP, Filter, Mapper
from juicer.operators.batched_image_text_similarity_filter import BatchedImageTextSimilarityFilter
from juicer.operators.image_text_deduplicator import ImageTextDeduplicator
from juicer.operators.recaptioning import LowSimilarityRecaptionMapper

OWN = (BatchedImageTextSimilarityFilter, LowSimilarityRecaptionMapper)  # with a `run` of their own, for plain runs


@dataclass(frozen=True)
class Pass:
    """One way through the data.

    Args:
        links: the operators of the chain, the first of them perhaps with a fraction that has become a limit by now.
        deduplicates: whether the last of them is a deduplicator, whose hashes say which rows are repeats.
        whole: number of the one operator that is handed the whole dataset instead.
    """

    links: tuple[Link, ...] = ()
    deduplicates: bool = False
    whole: int | None = None


def passes_of(process: list[dict], operators: list[OP]) -> list[Pass]:
    """The recipe's passes. A first model begins one: models run in few processes, what comes before them in many."""
    passes, links = [], []

    def end(**closing) -> None:
        if links or closing:
            passes.append(Pass(tuple(links), **closing))
        links.clear()

    for number, (spec, operator) in enumerate(zip(process, operators, strict=True), start=1):
        if holds_model(operator) and not any(holds_model(operators[link.number - 1]) for link in links):
            end()
        if isinstance(operator, ImageTextDeduplicator):
            links.append(Link(number, spec, measures=True))
            end(deduplicates=True)
        elif not row_by_row(operator):
            end()
            end(whole=number)
        else:
            if has_fraction(operator):
                links.append(Link(number, spec, measures=True))
                end()
            links.append(Link(number, spec))
    end()
    return passes


def row_by_row(operator: OP) -> bool:
    """Whether the operator does the same to a row whatever the other rows are, but for a `keep_fraction`."""
    return isinstance(operator, OWN) or type(operator).run in (Filter.run, Mapper.run)


def has_fraction(operator: OP) -> bool:
    return isinstance(operator, OWN) and operator.keep_fraction is not None


def with_limit(link: Link, operator: OP, limit: float) -> Link:
    """The link with a limit in place of its operator's fraction."""
    [(name, arguments)] = link.spec.items()
    return Link(link.number, {name: arguments | {"keep_fraction": None, operator.LIMIT: limit}})
