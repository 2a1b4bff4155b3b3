"""Sources -> examples, and the figures that a run prints about them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from automimo.data.records import Record
from automimo.data.render import Example, Renderer
from automimo.data.sources import Part, SourceSpec, read_source, source_name
from automimo.errors import DataError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SourceReport:
    """Figures of one source.

    records: read. examples: kept. fully_masked: left out because nothing in them is learnt (records = examples +
    fully_masked). tokens, supervised_tokens: of the kept ones (the latter are targets). longest: tokens of the longest
    example.
    """

    name: str
    weight: float
    records: int
    examples: int
    fully_masked: int
    tokens: int
    supervised_tokens: int
    longest: int


@dataclass(frozen=True)
class LoadReport:
    """Figures of all sources, and their sums."""

    sources: tuple[SourceReport, ...]

    @property
    def records(self) -> int:
        return sum(source.records for source in self.sources)

    @property
    def examples(self) -> int:
        return sum(source.examples for source in self.sources)

    @property
    def fully_masked(self) -> int:
        return sum(source.fully_masked for source in self.sources)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def supervised_tokens(self) -> int:
        return sum(source.supervised_tokens for source in self.sources)


def load_examples(
    sources: Sequence[SourceSpec],
    tokenizer: PreTrainedTokenizerFast,
    *,
    part: Part = "train",
    template_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[list[Example], LoadReport]:
    """Read and render all sources.

    part: `train` or `validation`, the split of sources that name none. template_kwargs: variables for the template.
    progress: called with (source name, records done, records of the source) now and then and at the end of each source.
    Examples without any target are left out and counted, never trained. Raises DataError for bad sources, records and
    tokenizers, and when a source has no target at all: then its template or its masks do not fit.
    """
    renderer = Renderer(tokenizer, template_kwargs)
    examples: list[Example] = []
    reports = []
    for number, spec in enumerate(sources):
        name = source_name(spec)
        records = read_source(spec, part)
        rendered = list(_with_progress(renderer, records, name, progress))
        kept = [replace(example, source=number, weight=spec.weight) for example in rendered if example.has_target]
        if not kept:
            raise DataError(
                f"{name}: nothing to learn from: all of its {len(records)} records are fully masked (the first: "
                f"{records[0].origin}). Look at one with `automimo inspect RECIPE`"
            )
        examples += kept
        reports.append(
            SourceReport(
                name=name,
                weight=spec.weight,
                records=len(records),
                examples=len(kept),
                fully_masked=len(rendered) - len(kept),
                tokens=sum(len(example.input_ids) for example in kept),
                supervised_tokens=sum(int(example.target_mask[1:].sum()) for example in kept),
                longest=max(len(example.input_ids) for example in kept),
            )
        )
    if not examples:
        raise DataError("no data sources; expected at least one")
    return examples, LoadReport(tuple(reports))


def _with_progress(
    renderer: Renderer, records: list[Record], name: str, progress: Progress | None
) -> Iterator[Example]:
    for done, example in enumerate(renderer.render(records), start=1):
        yield example
        if progress is not None and (done % 1000 == 0 or done == len(records)):
            progress(name, done, len(records))
