"""Storage for torch.distributed.checkpoint (DCP) in safetensors, where DCP's own needs a pickle.

DCP's planners decide which rank writes and reads which part of which tensor. Here is what they use: a writer that puts
the parts of a rank into one file `tensors-RANK.safetensors` (see boxes.py for its keys), and a reader that fills
tensors of any layout from such files. Imported only where tensors are saved or loaded: DCP takes 0.6 s to import.
"""

import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from automimo.checkpoint.boxes import Box, SavedTensor, contiguous_pieces, part_key
from automimo.checkpoint.folder import check_free_space
from automimo.checkpoint.safetensors_file import TORCH_DTYPES, TensorInfo, dtype_name
from automimo.checkpoint.tensor_reader import CHUNK_BYTES, TensorReader, row_chunks
from automimo.checkpoint.writer import Chunk, TensorEntry, write_safetensors
from automimo.distributed.world import is_distributed, rank
from automimo.errors import AutoMiMoError, CheckpointError, DistributedError


class FileJob:
    """The writing of one file, in this thread (`run`) or in one of its own (`start`, then `wait`)."""

    def __init__(self, path: Path, entries: list[TensorEntry]) -> None:
        self.path = path
        self._entries = entries
        self._crc32 = 0
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Write the file. Raises CheckpointError."""
        entries, self._entries = self._entries, []  # they hold the tensors, which nobody needs afterwards
        write_safetensors(self.path, entries, self._on_bytes)

    def start(self) -> None:
        """Write the file in a thread; what it raises is raised by `wait`."""
        self._thread = threading.Thread(target=self._run_kept, name=f"writer of {self.path.name}")
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the thread has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> tuple[int, int]:
        """Wait for the thread; (bytes, CRC-32) of the file."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.path.stat().st_size, self._crc32

    def cancel(self) -> None:
        """End the thread after the tensor it is at and wait for that; the file is then not there or to be dropped."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _run_kept(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._failure = error

    def _on_bytes(self, chunk: Chunk) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"{self.path}: writing was cancelled")
        self._crc32 = zlib.crc32(chunk, self._crc32)


class ShardWriter(StorageWriter):
    """Writes the parts that this rank was given into `folder`.

    With `staging` they are copied to the CPU and nothing is written: `job` then writes the copies. After a save
    `tensors` has, on rank 0 alone, every tensor of all ranks.
    """

    def __init__(self, folder: Path, *, staging: bool) -> None:
        self.folder = folder
        self.tensors: dict[str, SavedTensor] = {}
        self._staging = staging
        self._job: FileJob | None = None

    @property
    def job(self) -> FileJob:
        assert self._job is not None  # DCP has called write_data on every rank that comes back from a save
        return self._job

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        check_free_space(self.folder, sum(_nbytes(item) for plan in plans for item in plan.items))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        entries = []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)  # `save_tensors` has looked
            live = data.detach()
            # One entry gives its copy away when it is written, so that memory shrinks while the file grows.
            # A single element may have any stride and count as contiguous; only a copy can be viewed as bytes.
            held = [_copy_to_cpu(live) if self._staging or live.numel() == 1 else live]
            key = part_key(item.index.fqn, item.index.offset or ())
            entries.append(TensorEntry(key, live.dtype, tuple(live.shape), held.pop))
        self._job = FileJob(self.folder / f"tensors-{rank():05d}.safetensors", entries)
        if not self._staging:
            self._job.run()
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - DCP's signature
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            self.tensors[name] = SavedTensor(dtype_name(entry.properties.dtype), tuple(entry.size))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 - DCP's signature
        return False  # not to be found by DCP from a path; callers pass a writer


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner without the parts that have no elements: shards of small tensors on many ranks."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if not _is_empty_shard(item)])


def _is_empty_shard(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    return 0 in item.tensor_data.chunk.sizes and 0 not in item.tensor_data.size


def check_saveable(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for a tensor that cannot be cut into parts that make up the whole."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name}: {type(tensor).__name__} is no tensor; it belongs into the state")
        dtype_name(tensor.dtype)
        if isinstance(tensor, DTensor):
            # Exactly these: a subclass (strided shards) may lie in several boxes, a partial sum in none.
            other = [item for item in tensor.placements if type(item) not in (Shard, Replicate)]
            if other:
                raise CheckpointError(f"{name}: a tensor placed as {other[0]!r} cannot be saved; redistribute it first")


def save_tensors(what: str, tensors: Mapping[str, Tensor], writer: ShardWriter) -> None:
    """Save on all ranks through `writer`; fails on all when it fails on one. `what` is for that message."""
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(what):
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not is_distributed())


class ShardReader(StorageReader):
    """Reads out of files that have been checked: `parts` has every part by its key, `boxes` those of each tensor."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, SavedTensor],
        boxes: Mapping[str, list[Box]],
        parts: Mapping[str, TensorInfo],
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._boxes = boxes
        self._parts = parts

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        found: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes[name]]
            properties = TensorProperties(dtype=TORCH_DTYPES[tensor.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The parts are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        keys = {part_key(item.storage_index.fqn, item.storage_index.offset or ()) for item in plan.items}
        flat = {key: replace(self._parts[key], shape=(self._parts[key].numel,)) for key in keys}
        with TensorReader(flat, self._folder) as reader, torch.no_grad():
            for item in plan.items:
                self._read(reader, item, planner.resolve_tensor(item).detach())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, reader: TensorReader, item: ReadItem, target: Tensor) -> None:
        key = part_key(item.storage_index.fqn, item.storage_index.offset or ())
        for index, start, _ in contiguous_pieces(self._parts[key].shape, item.storage_offsets, item.lengths):
            _fill(reader, key, start, target[index])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 - DCP's signature
        return False


def _fill(reader: TensorReader, key: str, start: int, target: Tensor) -> None:
    """Fill `target` (any device and strides) with the elements of part `key` from `start` on."""
    # A single element counts as contiguous whatever its stride is, but cannot be viewed as bytes then.
    if target.device.type == "cpu" and target.is_contiguous() and target.numel() > 1:
        reader.read_rows(key, start, start + target.numel(), target.view(-1))
        return
    for index, shape in row_chunks(target.shape, max(1, CHUNK_BYTES // target.element_size())):
        piece = target[index]
        piece.copy_(reader.read_rows(key, start, start + piece.numel()).view(shape))
        start += piece.numel()


def load_tensors(what: str, destinations: Mapping[str, Tensor], reader: ShardReader) -> None:
    """Fill `destinations` in place on all ranks; fails on all when it fails on one."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(what):
        dcp.load(dict(destinations), storage_reader=reader, planner=planner, no_dist=not is_distributed())


@contextmanager
def _dcp_errors(what: str) -> Iterator[None]:
    """DCP's summary of what failed where, which it raises on all ranks, as the errors of `automimo.distributed`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone is no mistake
        try:
            yield
        except CheckpointException as error:
            raise _error_of(what, error.failures) from error


def _error_of(what: str, failures: Mapping[int, tuple[BaseException, object]]) -> BaseException:
    """What this rank raises: its own error as it was, or the first of the others'."""
    failed = rank() if rank() in failures else min(failures)
    error = failures[failed][0]
    message = str(error) if isinstance(error, AutoMiMoError) else f"{type(error).__name__}: {error}"
    if failed != rank():
        return DistributedError(f"{what}: rank {failed} failed: {message}")
    if isinstance(error, AutoMiMoError) or not isinstance(error, Exception):
        return error
    return CheckpointError(f"{what}: {message}")
