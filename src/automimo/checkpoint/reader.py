"""A strict view of a checkpoint folder in safetensors: one file, or shards with an index.

The headers of all shards are read and compared with the index when the reader is opened, so that a folder that is
incomplete or contradicts itself fails before any tensor is read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automimo.checkpoint.folder import plain_file
from automimo.checkpoint.ledger import group_keys
from automimo.checkpoint.publish import interrupted_replacement
from automimo.checkpoint.safetensors_file import TensorInfo, parse_json, read_header
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Layout:
    """What a folder holds. `files` are the shard names, `metadata` comes from the index, or from the only file."""

    tensors: dict[str, TensorInfo]
    files: tuple[str, ...]
    metadata: dict[str, Any]


class CheckpointReader(TensorReader):
    """Reads tensors of a checkpoint folder; a context manager that closes its files.

    `tensors` maps each key to its TensorInfo in the order of the files and of their bytes, `files` are the names of
    the weight files, `metadata` is that of the index (of the single file, without `format`, when there is no index).

    With both an index and a `model.safetensors` in the folder the index wins; they must list the same tensors.
    Raises CheckpointError for anything malformed, incomplete or leading out of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        layout = read_layout(self.folder)
        super().__init__(layout.tensors, self.folder)
        self.files = layout.files
        self.metadata = layout.metadata


def read_layout(folder: Path) -> Layout:
    """Find and check the weight files of a checkpoint folder."""
    if not folder.is_dir():
        aside = interrupted_replacement(folder)
        hint = f"; a replacement was interrupted, its old content is in {aside}, rename it back" if aside else ""
        raise CheckpointError(f"{folder}: no such folder{hint}")
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.exists() or index.is_symlink():
        layout = _indexed_layout(folder)
        if SINGLE_FILE not in layout.files and (single.exists() or single.is_symlink()):
            _check_same_tensors(folder, layout.tensors)
        return layout
    if single.exists() or single.is_symlink():
        tensors, metadata = read_header(plain_file(folder, SINGLE_FILE))
        return Layout(tensors, (SINGLE_FILE,), {name: value for name, value in metadata.items() if name != "format"})
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    hint = f" ({pickled[0]} is a pickle and is never opened; convert it to safetensors first)" if pickled else ""
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is in this folder{hint}")


def _indexed_layout(folder: Path) -> Layout:
    path = plain_file(folder, INDEX_FILE)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    index = parse_json(raw, str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map with tensors in it")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map each key to a file name")
    metadata = index.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: metadata is not a JSON object")
    files = tuple(sorted(set(weight_map.values())))
    tensors: dict[str, TensorInfo] = {}
    doubled: list[str] = []
    for name in files:
        header, _ = read_header(plain_file(folder, name))
        doubled += [f"{key} in {tensors[key].file.name} and {name}" for key in header.keys() & tensors.keys()]
        tensors.update(header)
    _check_index(path, weight_map, tensors, sorted(doubled))
    return Layout(tensors, files, metadata)


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo], doubled: list[str]) -> None:
    absent = [f"{key} in {name}" for key, name in weight_map.items() if key not in tensors]
    moved = [
        f"{key}: index says {name}, it is in {tensors[key].file.name}"
        for key, name in weight_map.items()
        if key in tensors and tensors[key].file.name != name
    ]
    extra = [f"{key} in {info.file.name}" for key, info in tensors.items() if key not in weight_map]
    problems = []
    for title, lines in (
        ("tensors are stored twice", doubled),
        ("tensors of the index are in no shard", absent),
        ("tensors are in another shard than the index says", [] if doubled else moved),
        ("tensors of the shards are not in the index", extra),
    ):
        if lines:
            groups = group_keys(lines)
            more = [f"... and {len(groups) - 8} more groups"] if len(groups) > 8 else []
            problems += [f"  {len(lines)} {title}:", *(f"    {line}" for line in [*groups[:8], *more])]
    if problems:
        raise CheckpointError("\n".join([f"{path}: index and shards disagree", *problems]))


def _check_same_tensors(folder: Path, tensors: dict[str, TensorInfo]) -> None:
    other, _ = read_header(plain_file(folder, SINGLE_FILE))
    here = {key: (info.dtype, info.shape) for key, info in tensors.items()}
    there = {key: (info.dtype, info.shape) for key, info in other.items()}
    differing = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if differing:
        raise CheckpointError(
            f"{folder}: holds {INDEX_FILE} and a {SINGLE_FILE} with other tensors ({len(differing)} differ, such as "
            f"{differing[0]!r}); remove the one that is stale"
        )


def index_text(weight_map: dict[str, str], metadata: dict[str, Any]) -> str:
    """An index file as Hugging Face writes it."""
    return (
        json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True, allow_nan=False) + "\n"
    )
