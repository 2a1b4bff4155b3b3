"""The verb `evaluate`: what `--data` means, and that every document is in exactly one batch, whole."""

from pathlib import Path

import numpy as np
import pytest

from automimo.data import Example
from automimo.errors import DataError
from automimo.evaluate import BATCH_TOKENS, batches, guess_kind, source_spec


def example(length: int, number: int) -> Example:
    return Example(np.full(length, number, np.int32), np.ones(length, np.bool_), f"document {number}")


def test_every_document_is_in_one_batch_and_whole() -> None:
    lengths = [5, BATCH_TOKENS + 10, 3000, 3000, 3000, 1, BATCH_TOKENS, 7]
    made = list(batches([example(length, number) for number, length in enumerate(lengths)]))
    origins = [origin for batch in made for origin in batch.origins]
    assert sorted(origins) == sorted(f"document {number}" for number in range(len(lengths)))
    for batch in made:
        # Only a document that is too long by itself makes a batch too long.
        assert batch.tokens <= BATCH_TOKENS or len(batch.origins) == 1
    assert sum(batch.tokens for batch in made) == sum(lengths)
    # Of a document with every token supervised, all but the first are targets.
    assert sum(batch.valid_targets for batch in made) == sum(lengths) - len(lengths)
    assert list(batches([])) == []


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", '\n{"messages": []}\n', "chat"),
        ("a.jsonl", '\ufeff{"text": "x"}\n', "text"),
        ("a.jsonl", "not json\n", "chat"),
        ("a.jsonl", "[" * 100_000 + "\n", "chat"),
        ("a.json", '{"messages": []}\n', "chat"),
        ("a.json", '[\n{"messages": []}]\n', "hf"),
        ("a.parquet", "PAR1", "hf"),
    ],
)
def test_the_kind_is_seen_from_the_first_record(name: str, content: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert guess_kind(path) == kind
    assert source_spec(str(path), None).kind == kind
    assert source_spec(str(path), "text").kind == "text"


def test_folders_and_hub_ids_are_data_sets(tmp_path: Path) -> None:
    assert guess_kind(tmp_path) == "hf"
    assert source_spec("owner/name", None).kind == "hf"


def test_python_docs_is_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = source_spec("python_docs", None)
    assert (spec.kind, spec.path) == ("python_docs", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python_docs").mkdir()
    assert source_spec("python_docs", None).kind == "hf", "a folder of that name is what was meant"


def test_what_cannot_be_told_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: its first record has neither .* --kind"):
        source_spec(str(path), None)
    with pytest.raises(DataError, match=r"choose one of: chat, text, hf$"):
        source_spec(str(path), "python_docs")
