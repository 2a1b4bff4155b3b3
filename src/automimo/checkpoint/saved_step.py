"""A complete training checkpoint: what is in it, and how its tensors come back. See resume.py for the format."""

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from automimo.checkpoint.boxes import Box, SavedTensor, boxes_problem, parse_part_key
from automimo.checkpoint.folder import plain_file
from automimo.checkpoint.safetensors_file import (
    TORCH_DTYPES,
    TensorInfo,
    dtype_name,
    parse_json,
    read_header,
    tensor_bytes,
)
from automimo.checkpoint.tensor_reader import CHUNK_BYTES
from automimo.distributed.world import rank, together, world_size
from automimo.errors import CheckpointError

STATE_FILE = "state.json"
FORMAT = 2
STEP_NAME = re.compile(r"step-(0|[1-9]\d{0,17})")
_FILE = re.compile(r"tensors-\d{5,}\.safetensors")
_FIELDS = {"format", "step", "files", "tensors", "state"}


@dataclass(frozen=True)
class SavedFile:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class SavedStep:
    """What `state.json` says: everything that is not a tensor, the tensors by name, and the files by name."""

    folder: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]


def step_document(
    step: int, state: Mapping[str, Any], tensors: Mapping[str, SavedTensor], files: Mapping[str, SavedFile]
) -> dict[str, Any]:
    """The JSON document that `read_step` reads."""
    return {
        "format": FORMAT,
        "step": step,
        "files": {name: asdict(file) for name, file in files.items()},
        "tensors": {name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in tensors.items()},
        "state": dict(state),
    }


def read_step(path: str | Path) -> SavedStep:
    """Read `state.json` of a checkpoint alone: cheap, by any process, before there is a model.

    Raises CheckpointError that names the file and the way out when it is missing, malformed or of another format.
    """
    folder = Path(path)
    with _loading(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        file = plain_file(folder, STATE_FILE)
        document = parse_json(file.read_bytes(), str(file), non_finite=True)  # a loss may be NaN
        if not isinstance(document, dict) or "format" not in document:
            raise CheckpointError(f"{file}: not a training state (expected {', '.join(sorted(_FIELDS))})")
        if document["format"] != FORMAT:
            raise CheckpointError(f"{file}: format {document['format']!r}, this version reads {FORMAT}")
        return _parse(folder, file, document)


def load_tensors(saved: SavedStep, destinations: Mapping[str, torch.Tensor]) -> None:
    """Fill `destinations`, by name, in place: plain tensors or DTensors of any layout. All ranks have to call this.

    Names may differ from rank to rank, and not all tensors need a destination; shape and dtype must be equal. A rank
    reads the bytes of its own shards, and besides those the files that it compares with their checksums, which are
    shared out over the ranks. Raises CheckpointError that names the file, on the others DistributedError, when
    anything is missing or damaged; destinations may then hold anything.
    """
    what = f"loading {saved.folder}"
    with together(what):
        check_file_sizes(saved)
        with _loading(saved.folder):
            _verify_checksums(saved)
    with together(what), _loading(saved.folder):
        boxes, parts = _index_parts(saved)
        _check_destinations(saved, destinations)
    from automimo.checkpoint import dcp_storage  # here, for DCP takes 0.6 s to import

    with _loading(saved.folder):
        reader = dcp_storage.ShardReader(saved.folder, saved.tensors, boxes, parts)
        dcp_storage.load_tensors(what, destinations, reader)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Add the way out to a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nThe training checkpoint {folder} cannot be resumed. Delete that folder to continue from the one "
            "before it, or restore it from a copy."
        ) from error


def _parse(folder: Path, file: Path, document: dict[str, Any]) -> SavedStep:
    if document.keys() != _FIELDS:
        raise CheckpointError(f"{file}: not a training state (expected {', '.join(sorted(_FIELDS))})")
    step, files, tensors, state = (document[key] for key in ("step", "files", "tensors", "state"))
    match = STEP_NAME.fullmatch(folder.name)
    if not _is_count(step) or (match and int(match[1]) != step):
        raise CheckpointError(f"{file}: holds step {step!r}, but its folder is {folder.name}")
    if not all(isinstance(value, dict) for value in (files, tensors, state)):
        raise CheckpointError(f"{file}: files, tensors and state must be JSON objects")
    for name, entry in files.items():
        fits = isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"}
        if not _FILE.fullmatch(name) or not fits or not all(_is_count(value) for value in entry.values()):
            raise CheckpointError(f"{file}: file {name!r} is not described by bytes and crc32")
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape"} or not _is_tensor(**entry):
            raise CheckpointError(f"{file}: tensor {name!r} is not described by dtype and shape")
    return SavedStep(
        folder,
        step,
        state,
        {name: SavedTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()},
        {name: SavedFile(entry["bytes"], entry["crc32"]) for name, entry in files.items()},
    )


def _is_tensor(dtype: Any, shape: Any) -> bool:
    known = isinstance(dtype, str) and dtype in TORCH_DTYPES
    return known and isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(prod(s or 1 for s in shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # bool is an int too


def check_file_sizes(saved: SavedStep) -> None:
    """Raise CheckpointError unless every file is there with its size, and the tensors can fit into them."""
    with _loading(saved.folder):
        for name, file in saved.files.items():
            path = plain_file(saved.folder, name)
            size = path.stat().st_size
            if size != file.bytes:
                raise CheckpointError(f"{path}: has {size} bytes, {STATE_FILE} says {file.bytes}")
        room = sum(file.bytes for file in saved.files.values())
        needed = sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in saved.tensors.values())
        if needed > room:
            raise CheckpointError(
                f"{saved.folder / STATE_FILE}: lists tensors of {needed} bytes, but the files have {room}"
            )


def _verify_checksums(saved: SavedStep) -> None:
    """Compare the checksums of this rank's share of the files with the state."""
    for name in _share({name: file.bytes for name, file in saved.files.items()}, world_size())[rank()]:
        path = saved.folder / name
        value = 0
        try:
            with path.open("rb") as opened:
                while chunk := opened.read(CHUNK_BYTES):
                    value = zlib.crc32(chunk, value)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if value != saved.files[name].crc32:
            raise CheckpointError(f"{path}: checksum {value:#010x} differs from the one in {STATE_FILE}")


def _share(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Share out names so that the sums of their sizes are about equal: the largest first, to whoever has least."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sums = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = sums.index(min(sums))
        shares[least].append(name)
        sums[least] += sizes[name]
    return shares


def _index_parts(saved: SavedStep) -> tuple[dict[str, list[Box]], dict[str, TensorInfo]]:
    """The boxes of every tensor, checked to make it up, and every part by its key."""
    boxes: dict[str, list[Box]] = {name: [] for name in saved.tensors}
    parts: dict[str, TensorInfo] = {}
    for file in saved.files:
        path = plain_file(saved.folder, file)
        for key, info in read_header(path)[0].items():
            name, offsets = parse_part_key(key) or ("", ())
            if name not in saved.tensors:
                raise CheckpointError(f"{path}: holds {key!r}, which is no part of a tensor that {STATE_FILE} lists")
            if info.dtype != saved.tensors[name].dtype:
                raise CheckpointError(f"{path}: {key!r} is {info.dtype}, {STATE_FILE} says {saved.tensors[name].dtype}")
            if key in parts:
                raise CheckpointError(f"{path}: {key!r} is in {parts[key].file.name} as well")
            parts[key] = info
            boxes[name].append(Box(offsets, info.shape))
    for name, tensor in saved.tensors.items():
        problem = boxes_problem(tensor.shape, boxes[name])
        if problem:
            files = sorted({info.file.name for key, info in parts.items() if key.rpartition("@")[0] == name})
            raise CheckpointError(
                f"{saved.folder}: tensor {name!r} {list(tensor.shape)} in {', '.join(files) or 'no file'}: {problem}"
            )
    return boxes, parts


def _check_destinations(saved: SavedStep, destinations: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in destinations.items():
        mine = SavedTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
        if saved.tensors.get(name) != mine:
            raise CheckpointError(f"tensor {name!r}: {saved.tensors.get(name, 'absent')} cannot be loaded into {mine}")
        if tensor.device.type == "meta":
            raise CheckpointError(f"tensor {name!r}: its destination is on the meta device; materialise it first")
