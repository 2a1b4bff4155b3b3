"""The verb `evaluate`: the loss of a model on held-out data, every target weighing the same."""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from automimo.data import Batch, Example, SourceSpec, collate, load_examples
from automimo.data.packing import Piece
from automimo.data.sources import SourceKind
from automimo.errors import DataError
from automimo.generate import load_model
from automimo.mimo_v2_flash.source import resolve_folder
from automimo.mimo_v2_flash.tokenizer import load_tokenizer
from automimo.training.evaluation import evaluate

# Documents are packed, never cut, into batches of about this many tokens; a longer one is a batch of its own.
BATCH_TOKENS = 8192
LOSS_CHUNK = 1024
BUILT_IN: SourceKind = "python_docs"


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per target over `targets` supervised tokens of `examples` documents (`tokens` in all)."""

    loss: float
    examples: int
    tokens: int
    targets: int
    fully_masked: int


def evaluate_data(model: str | Path, spec: SourceSpec) -> Evaluation:
    """Mean cross entropy of `model` (folder or Hub id) on a source, whole documents, in the dtype of the checkpoint.

    Raises CheckpointError, DataError, and TrainingError when a loss is not finite.
    """
    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder)
    examples, report = load_examples([spec], tokenizer, part="validation")
    loss = evaluate(load_model(folder), batches(examples), loss_chunk=LOSS_CHUNK)
    if loss is None:
        raise AssertionError("evaluate() stops early only when asked to")
    return Evaluation(loss, report.examples, report.tokens, report.supervised_tokens, report.fully_masked)


def batches(examples: list[Example]) -> Iterator[Batch]:
    """All examples once, whole, in batches of at most BATCH_TOKENS; sorted by length, so that a batch is even."""
    pending: list[Piece] = []
    used = 0
    for index in sorted(range(len(examples)), key=lambda i: (len(examples[i].input_ids), i)):
        length = len(examples[index].input_ids)
        if pending and used + length > BATCH_TOKENS:
            yield collate(examples, [pending])
            pending, used = [], 0
        pending.append(Piece(index, 0, length))
        used += length
    if pending:
        yield collate(examples, [pending])


def source_spec(data: str, kind: str | None) -> SourceSpec:
    """The source that `--data` means: `python_docs`, or a file whose kind is seen from its name and first record.

    Raises DataError for an unknown kind, and when the kind cannot be seen.
    """
    if data == BUILT_IN and not Path(data).exists():
        return SourceSpec(BUILT_IN)
    named: dict[str, SourceKind] = {name: name for name in get_args(SourceKind) if name != BUILT_IN}
    if kind is not None and kind not in named:
        raise DataError(f"--kind {kind}: unknown; choose one of: {', '.join(named)}")
    return SourceSpec(guess_kind(Path(data)) if kind is None else named[kind], data)


def guess_kind(path: Path) -> SourceKind:
    """`chat` or `text` by the keys of the first record of a JSONL file; `hf` for folders, Hub ids and other files."""
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return "hf"
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        keys = json.loads(first.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return "hf" if path.suffix == ".json" else "chat"  # the reader names the line and what is wrong with it
    if isinstance(keys, dict) and "messages" in keys:
        return "chat"
    if isinstance(keys, dict) and "text" in keys:
        return "text"
    raise DataError(f'{path}: its first record has neither "messages" nor "text"; name its kind with --kind')


def run_evaluate(model: str, data: str, kind: str | None) -> int:
    """The verb: print the figures, one `name value` per line."""
    result = evaluate_data(model, source_spec(data, kind))
    left_out = f", {result.fully_masked:,} without any target left out" if result.fully_masked else ""
    sys.stdout.write(
        f"examples    {result.examples:,}{left_out}\n"
        f"tokens      {result.tokens:,}\n"
        f"targets     {result.targets:,}\n"
        f"loss        {result.loss:.4f} nats per target\n"
        f"perplexity  {math.exp(min(result.loss, 700)):,.2f}\n"
    )
    return 0
