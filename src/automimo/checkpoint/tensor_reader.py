"""Read tensors out of open safetensors files: whole, by rows, into given memory, or as bytes.

Positioned reads go straight into their final memory. Nothing is mapped, so the resident memory of a process is what it
holds and nothing else.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import torch

from automimo.checkpoint.safetensors_file import TensorInfo
from automimo.errors import CheckpointError

# What a converting or strided read holds at a time besides its destination (and torch its converted copy).
CHUNK_BYTES = 16 * 2**20
# Files kept open. A released model has up to a few hundred, and the usual limit of a process is 1024.
_OPEN_FILES = 64
# Linux reads at most 0x7ffff000 bytes at once; this stays below and aligned.
_MAX_READ = 2**30

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TensorReader:
    """Reads the tensors of a table of TensorInfo; a context manager that closes its files. Threads may share it."""

    def __init__(self, tensors: Mapping[str, TensorInfo], where: Path) -> None:
        """`where` is the file or folder that an error about an unknown key names."""
        self.tensors = dict(tensors)
        self._where = where
        self._handles: OrderedDict[Path, _Handle] = OrderedDict()
        self._lock = Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""
        with self._lock:
            self._closed = True
            self._handles.clear()

    def info(self, key: str) -> TensorInfo:
        """The TensorInfo of `key`; CheckpointError with the folder's name when it has none."""
        try:
            return self.tensors[key]
        except KeyError:
            raise CheckpointError(f"{self._where}: no tensor {key!r} among its {len(self.tensors)}") from None

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor on the CPU, in the dtype and shape that it is stored in."""
        info = self.info(key)
        return self._tensor(info, info.begin, info.shape)

    def read_rows(self, key: str, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows `start` to `stop` (exclusive) of dimension 0; only their bytes are read.

        `out` is a contiguous CPU buffer of the tensor's dtype that holds at least so many rows; then its first rows are
        filled and returned.
        """
        info = self.info(key)
        if not info.shape:
            raise CheckpointError(f"{info.file}: tensor {key!r} is a scalar and has no rows")
        if not 0 <= start <= stop <= info.shape[0]:
            raise CheckpointError(f"{info.file}: rows {start}:{stop} of tensor {key!r}, which has {info.shape[0]} rows")
        row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
        offset, shape = info.begin + start * row_bytes, (stop - start, *info.shape[1:])
        if out is None:
            return self._tensor(info, offset, shape)
        rows = out[: stop - start]
        if rows.dtype != info.torch_dtype or rows.shape != shape or not rows.is_contiguous():
            raise CheckpointError(f"{info.file}: {list(shape)} of tensor {key!r} do not fit a buffer {list(out.shape)}")
        if rows.numel():
            self._fill(info, offset, rows.reshape(-1).view(torch.uint8))
        return rows

    def read_into(self, key: str, destination: torch.Tensor) -> None:
        """Fill `destination` (same shape; any strides, any device; a parameter is allowed) with the stored tensor.

        The dtype is converted between F64, F32, BF16 and F16; every other pair must be equal, since 8-bit codes mean
        nothing without their scales. Besides the destination a chunk of at most 16 MiB and its converted copy are held.
        """
        info = self.info(key)
        self._check_destination(info, destination)
        with torch.no_grad():
            target = destination.detach()
            direct = target.is_contiguous() and target.dtype == info.torch_dtype and target.device.type == "cpu"
            if direct and info.nbytes:
                self._fill(info, info.begin, target.reshape(-1).view(torch.uint8))
                return
            offset = info.begin
            for index, shape in row_chunks(info.shape, max(1, CHUNK_BYTES // info.torch_dtype.itemsize)):
                piece = self._tensor(info, offset, shape)
                target[index].copy_(piece)
                offset += piece.nbytes

    def iter_bytes(self, key: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
        """The stored bytes of the tensor in chunks. A chunk is only valid until the next one is asked for."""
        info = self.info(key)
        buffer = torch.empty(min(chunk_bytes, info.nbytes), dtype=torch.uint8)
        for offset in range(info.begin, info.end, chunk_bytes):
            piece = buffer[: min(chunk_bytes, info.end - offset)]
            self._fill(info, offset, piece)
            yield piece.numpy().data

    def _check_destination(self, info: TensorInfo, destination: torch.Tensor) -> None:
        where = f"{info.file}: tensor {info.name!r}"
        if tuple(destination.shape) != info.shape:
            raise CheckpointError(f"{where} has shape {list(info.shape)}, its destination {list(destination.shape)}")
        if destination.device.type == "meta":
            raise CheckpointError(f"{where}: its destination is on the meta device; materialise it first")
        same = destination.dtype == info.torch_dtype
        if not same and not (destination.dtype in _FLOATS and info.torch_dtype in _FLOATS):
            raise CheckpointError(
                f"{where} is stored as {info.dtype} and its destination is {destination.dtype}; only "
                "F64, F32, BF16 and F16 convert into each other, quantised tensors have to be decoded"
            )

    def _tensor(self, info: TensorInfo, offset: int, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=info.torch_dtype)
        if tensor.numel():
            self._fill(info, offset, tensor.reshape(-1).view(torch.uint8))
        return tensor

    def _fill(self, info: TensorInfo, offset: int, buffer: torch.Tensor) -> None:
        """Read `buffer` (uint8, contiguous, CPU) full from absolute `offset` on."""
        view = buffer.numpy().data
        handle = self._handle(info.file)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(handle.descriptor, [view[done : done + _MAX_READ]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{info.file}: reading tensor {info.name!r} failed: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{info.file}: became shorter while tensor {info.name!r} was read")
            done += count

    def _handle(self, path: Path) -> "_Handle":
        with self._lock:
            if self._closed:
                raise CheckpointError(f"{self._where}: the reader is closed")
            handle = self._handles.pop(path, None) or _Handle(path)
            self._handles[path] = handle
            if len(self._handles) > _OPEN_FILES:
                self._handles.popitem(last=False)
            return handle


class _Handle:
    """An open file that closes itself with its last user, so that a thread in the middle of a read keeps it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def row_chunks(shape: Sequence[int], max_elements: int) -> Iterator[tuple[tuple[int | slice, ...], tuple[int, ...]]]:
    """Cut a tensor into pieces that are contiguous in row-major order and hold at most `max_elements` (at least 1).

    Yields (index into the tensor, shape of the piece), in order. Nothing for a tensor without elements.
    """
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    row = 1
    for size in shape[1:]:
        row *= size
    if row > max_elements:
        for i in range(shape[0]):
            for index, piece in row_chunks(shape[1:], max_elements):
                yield (i, *index), piece
        return
    step = max_elements // row
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield (slice(start, stop),), (stop - start, *shape[1:])
