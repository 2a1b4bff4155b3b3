"""Records of a Hugging Face data set: local files through the `datasets` library, or a Hub id."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from automimo.data.records import Record, chat_record, text_record
from automimo.data.sources import Part, SourceSpec
from automimo.errors import DataError

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def read_hf(spec: SourceSpec, part: Part) -> tuple[str, Callable[[Any, str], Record], Iterator[tuple[str, Any]]]:
    """(name for people, function that makes a record, (origin, row) pairs) of a data set. Raises DataError."""
    splits = _open(spec)
    wanted = spec.split or (part if part in splits or len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        raise DataError(f"{spec.path}: no split {wanted!r}; it has {', '.join(splits)}. Set split to one of them")
    data = splits[wanted]
    columns = list(data.column_names)
    name = f"{spec.path}[{wanted}]"
    keep = [column for column in ("messages", "tools") if column in columns] if "messages" in columns else ["text"]
    if keep == ["text"] and "text" not in columns:
        raise DataError(f"{name}: expected a column messages or text; it has {', '.join(columns)}")
    make = _chat if "messages" in keep else text_record
    return name, make, ((f"{name}[{i}]", row) for i, row in enumerate(data.select_columns(keep)))


def _chat(row: dict[str, Any], origin: str) -> Record:
    return chat_record({key: _without_nulls(value) for key, value in row.items()}, origin)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys of all rows, null where a row had none; take those out again."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _open(spec: SourceSpec) -> dict[str, Any]:
    """Split name -> data set."""
    import datasets

    assert spec.path is not None
    path = Path(spec.path)
    looks_local = path.is_absolute() or spec.path.startswith((".", "~")) or path.suffix in _BUILDERS
    if looks_local and not path.exists():
        raise DataError(f"{spec.path}: no such file or folder")
    try:
        if path.is_file():
            if path.suffix not in _BUILDERS:
                raise DataError(f"{spec.path}: expected a file that ends in {', '.join(_BUILDERS)}")
            return dict(datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path)))
        if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
            loaded = datasets.load_from_disk(str(path))
            return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        return dict(datasets.load_dataset(spec.path, spec.subset, revision=spec.revision))
    except DataError:
        raise
    except Exception as error:  # of datasets itself, of pyarrow, of the Hub client, of the network
        reason = str(error) or type(error).__name__
        raise DataError(f"{spec.path}: the data set cannot be opened: {reason}") from error
