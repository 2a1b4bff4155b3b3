"""Where training text comes from: the description of a source, and the records in it. Imports no torch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from automimo.data.records import ChatRecord, Record, TextRecord, chat_record, parse_json_line, text_record
from automimo.errors import ConfigError, DataError

__all__ = ["ChatRecord", "Part", "Record", "SourceKind", "SourceSpec", "TextRecord", "read_source", "source_name"]

SourceKind = Literal["chat", "text", "hf", "python_docs"]
Part = Literal["train", "validation"]
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class SourceSpec:
    """One source of a recipe.

    kind: `chat` (JSONL of conversations), `text` (JSONL of documents), `hf` (a Hugging Face data set with a column
      `messages` or `text`), `python_docs` (Python's own documentation, built in).
    path: the file (chat, text); a json, jsonl, parquet or arrow file, a folder of those, or a Hub id (hf).
    weight: how often an epoch shows the source; 2 = twice, 0.5 = a half of it, the other half next epoch.
    split: which split of an `hf` data set, or `train` / `validation` of `python_docs`. None: the part of the recipe
      that the source stands in (`train` or `validation`); an `hf` data set of one split needs none.
    subset, revision: configuration name and commit of a Hub data set.

    Raises ConfigError for values that do not go together.
    """

    kind: SourceKind
    path: str | None = None
    weight: float = 1.0
    split: str | None = None
    subset: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(SourceKind):
            raise ConfigError(f"kind is {self.kind!r}; expected one of {', '.join(get_args(SourceKind))}")
        if self.kind == "python_docs" and self.path is not None:
            raise ConfigError(f"path is {self.path!r}, but python_docs is built in and takes none")
        if self.kind != "python_docs" and not self.path:
            raise ConfigError(f"path is missing: a source of kind {self.kind} needs one")
        if not 0 < self.weight < 1e6:
            raise ConfigError(f"weight is {self.weight}; expected a number above 0")
        if self.kind == "python_docs" and self.split not in (None, "train", "validation"):
            raise ConfigError(f"split is {self.split!r}; python_docs has train and validation")
        if self.kind in ("chat", "text") and self.split is not None:
            raise ConfigError(f"split is {self.split!r}, but a {self.kind} file has no splits; give the held-out file")
        if self.kind != "hf" and (self.subset is not None or self.revision is not None):
            raise ConfigError("subset and revision belong to sources of kind hf")


def source_name(spec: SourceSpec) -> str:
    """Short name for reports: `chat train.jsonl`."""
    split = f" [{spec.split}]" if spec.split else ""
    return f"{spec.kind} {spec.path}{split}" if spec.path else f"{spec.kind}{split}"


def read_source(spec: SourceSpec, part: Part = "train") -> list[Record]:
    """All records of a source, checked, in a fixed order.

    part: `train` or `validation`, the split of a source that names none (see SourceSpec).
    Raises DataError that names the first bad lines (`file:line: what is wrong; what was expected`) and counts all.
    """
    if spec.kind == "python_docs":
        from automimo.data.python_docs import python_docs_records

        return list(python_docs_records("validation" if (spec.split or part) == "validation" else "train"))
    assert spec.path is not None
    if spec.kind == "hf":
        from automimo.data.hf_dataset import read_hf

        name, make, rows = read_hf(spec, part)
        return check_rows(rows, make, name)
    return check_rows(_lines(Path(spec.path)), _parse_chat if spec.kind == "chat" else _parse_text, spec.path)


def check_rows(rows: Iterable[tuple[str, Any]], make: Callable[[Any, str], Record], name: str) -> list[Record]:
    """Records of (origin, raw row) pairs; all bad ones are collected into one DataError."""
    records: list[Record] = []
    shown: list[str] = []
    bad = total = 0
    for origin, row in rows:
        total += 1
        try:
            records.append(make(row, origin))
        except DataError as error:
            bad += 1
            if len(shown) < _SHOWN_PROBLEMS:
                shown.append(f"{origin}: {error}")
    if bad:
        more = [f"... and {bad - len(shown)} more"] if bad > len(shown) else []
        head = f"{bad} of {total} records of {name} cannot be used:\n  "
        raise DataError((head if bad > 1 else "") + "\n  ".join(shown + more))
    if not records:
        raise DataError(f"{name}: holds no records; expected at least one")
    return records


def _parse_chat(line: bytes, origin: str) -> Record:
    return chat_record(parse_json_line(line), origin)


def _parse_text(line: bytes, origin: str) -> Record:
    return text_record(parse_json_line(line), origin)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file:line, bytes) of the lines that are not blank, numbered from 1."""
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder; expected a JSONL file' if path.is_dir() else 'no such file'}")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if content.strip():
                    yield f"{path}:{number}", content
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
