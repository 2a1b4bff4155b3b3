"""Write a checkpoint folder in safetensors, one tensor in memory at a time.

The plan comes first: dtypes and shapes decide the shards and every header before the first tensor is produced. Each
shard is written under a temporary name, synchronised to disk and renamed; the index is written last.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import torch

from automimo.checkpoint.folder import check_free_space, make_folder
from automimo.checkpoint.publish import fsync_folder, write_text_atomic
from automimo.checkpoint.reader import INDEX_FILE, SINGLE_FILE, index_text
from automimo.checkpoint.safetensors_file import (
    LENGTH_BYTES,
    METADATA_KEY,
    TORCH_DTYPES,
    dtype_name,
    tensor_bytes,
)
from automimo.checkpoint.tensor_reader import CHUNK_BYTES, TensorReader, row_chunks
from automimo.errors import CheckpointError

MAX_SHARD_BYTES = 5 * 2**30

Chunk = bytes | bytearray | memoryview
Produced = torch.Tensor | Iterable[Chunk]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=_Sized)


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a file that is to be written: its key, safetensors dtype name and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        dtype_name(self.dtype)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor to write: its key, dtype (torch's, or the safetensors name), shape and how to get it.

    `produce` is called once, when it is the tensor's turn. It returns the tensor (any device, any strides) or its
    bytes in chunks; what it returns must have the planned dtype and shape.
    """

    key: str
    dtype: torch.dtype | str
    shape: Sequence[int]
    produce: Callable[[], Produced]

    @property
    def stored_dtype(self) -> str:
        return dtype_name(self.dtype)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.stored_dtype, self.shape)

    @property
    def planned(self) -> PlannedTensor:
        return PlannedTensor(self.key, self.stored_dtype, tuple(int(dim) for dim in self.shape))


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written: shard names, the index (None for a single file), key -> shard, and bytes of all tensors."""

    folder: Path
    files: tuple[str, ...]
    index: Path | None
    weight_map: dict[str, str]
    total_bytes: int


def tensor_entry(key: str, tensor: torch.Tensor) -> TensorEntry:
    """An entry that writes `tensor` as it is."""
    return TensorEntry(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def raw_entry(reader: TensorReader, key: str, new_key: str | None = None) -> TensorEntry:
    """An entry that copies a tensor of an open reader byte for byte, under its own key or `new_key`."""
    info = reader.info(key)
    return TensorEntry(new_key or key, info.dtype, info.shape, partial(reader.iter_bytes, key))


def write_checkpoint(
    folder: str | Path,
    entries: Iterable[TensorEntry],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, Any] | None = None,
) -> WrittenCheckpoint:
    """Write `entries` as a safetensors checkpoint into `folder` (made if absent; it must not hold weights yet).

    One `model.safetensors` when all tensors fit into `max_shard_bytes` and there is no `metadata`; otherwise shards
    `model-00001-of-000NN.safetensors`, filled in the order of the entries, and `model.safetensors.index.json` with
    `total_size` and `metadata`. A tensor larger than a shard gets a shard of its own.

    Raises CheckpointError, and leaves none of its files behind, for doubled keys, too little free disk space, weights
    already in the folder, or an entry that produces another dtype, shape or size than planned.
    """
    target = Path(folder)
    planned = list(entries)
    check_keys(entry.key for entry in planned)
    shards = plan_shards(planned, max_shard_bytes)
    single = len(shards) == 1 and not metadata
    names = [SINGLE_FILE] if single else shard_names(len(shards))
    make_folder(target)
    check_no_other_weights(target, ())
    total = sum(entry.nbytes for entry in planned)
    check_free_space(target, total)
    written: list[Path] = []
    index: Path | None = None
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(target / name)
            write_safetensors(target / name, shard)
        weight_map = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        if not single:
            index = target / INDEX_FILE
            write_text_atomic(index, index_text(weight_map, {**(metadata or {}), "total_size": total}))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    fsync_folder(target)
    return WrittenCheckpoint(target, tuple(names), index, weight_map, total)


def shard_names(count: int) -> list[str]:
    """The file names of `count` shards, as Hugging Face numbers them."""
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def check_no_other_weights(folder: Path, expected: Collection[str]) -> None:
    """Refuse a folder with weight files or an index that are not `expected`."""
    names = (path.name for path in folder.iterdir() if path.name.endswith((".safetensors", INDEX_FILE)))
    present = sorted(name for name in names if name not in expected)
    if present:
        raise CheckpointError(f"{folder}: already holds {present[0]}; weights of two checkpoints never share a folder")


def plan_shards(entries: Sequence[SizedT], max_shard_bytes: int) -> list[list[SizedT]]:
    """Fill shards in order; a new one starts when the next tensor would exceed `max_shard_bytes`."""
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    shards: list[list[SizedT]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    return shards


def write_safetensors(
    path: Path, entries: Sequence[TensorEntry], on_bytes: Callable[[Chunk], None] | None = None
) -> None:
    """Write one safetensors file under a temporary name, synchronise it and rename it to `path`.

    `on_bytes` sees every chunk that goes to the file, in order (for a checksum).
    """
    ordered = sorted(entries, key=lambda entry: byte_order(entry.planned))
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            _write_chunks(file, [header_bytes([entry.planned for entry in ordered])], on_bytes)
            for entry in ordered:
                _write_chunks(file, planned_chunks(path, entry.planned, entry.produce()), on_bytes)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
        raise


def _write_chunks(file: BinaryIO, chunks: Iterable[Chunk], on_bytes: Callable[[Chunk], None] | None) -> None:
    # A function of its own: the last chunk keeps its whole tensor alive, and must be gone before the next is produced.
    for chunk in chunks:
        file.write(chunk)
        if on_bytes is not None:
            on_bytes(chunk)


def byte_order(tensor: PlannedTensor) -> int:
    """The sort key of the tensors inside a file; tensors of one width keep the order they have.

    Wide dtypes first: with a header of whole 8 bytes every tensor is then aligned to its element, as in files of the
    safetensors library.
    """
    return -TORCH_DTYPES[tensor.dtype].itemsize


def header_bytes(tensors: Sequence[PlannedTensor]) -> bytes:
    """Everything before the first tensor of a file that holds `tensors` one after the other, in this order."""
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}  # transformers opens only files that say so
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def planned_chunks(path: Path, planned: PlannedTensor, produced: Produced) -> Iterator[Chunk]:
    """The bytes of one produced tensor, checked against its plan; never more of them than planned.

    Raises CheckpointError with the key and `path`, the file that they are for.
    """
    if isinstance(produced, torch.Tensor):
        if dtype_name(produced.dtype) != planned.dtype or tuple(produced.shape) != planned.shape:
            raise CheckpointError(
                f"{path}: tensor {planned.key!r} was planned as {planned.dtype} {list(planned.shape)} but came as "
                f"{dtype_name(produced.dtype)} {list(produced.shape)}"
            )
        yield from _tensor_chunks(produced.detach())
        return
    count = 0
    for chunk in produced:
        count += memoryview(chunk).nbytes
        if count > planned.nbytes:
            break  # what lies behind may belong to another tensor
        yield chunk
    if count != planned.nbytes:
        raise CheckpointError(
            f"{path}: tensor {planned.key!r} was planned with {planned.nbytes} bytes ({planned.dtype} "
            f"{list(planned.shape)}) but came with {count}{' or more' if count > planned.nbytes else ''}"
        )


def _tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    whole = tensor.is_contiguous() and tensor.device.type == "cpu"
    limit = tensor.numel() if whole else max(1, CHUNK_BYTES // tensor.element_size())
    for index, _ in row_chunks(tensor.shape, limit):
        piece = tensor[index].to("cpu").contiguous()
        yield piece.reshape(-1).view(torch.uint8).numpy().data


def check_keys(keys: Iterable[str]) -> None:
    """Refuse a key that comes twice and one that a file cannot hold."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise CheckpointError(f"the key {key!r} is to be written twice; one of the tensors would be lost")
        if not key or key == METADATA_KEY:
            raise CheckpointError(f"{key!r} cannot be the key of a tensor")
        seen.add(key)
