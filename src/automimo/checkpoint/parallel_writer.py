"""Write a checkpoint folder in safetensors with several threads, so that an interrupted run can go on later.

The plan comes first: dtypes and shapes decide the header of every file and the place of every tensor before the first
one is produced. Threads take units (tensors that are produced together) and write each tensor at its place in
`.NAME.partial`; the thread that writes the last tensor of a file synchronises it to disk and renames it to NAME. A file
under its final name is therefore complete, and a later run of the same plan keeps it. The index is written last.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from automimo.checkpoint.folder import check_free_space, check_plain_name, make_folder
from automimo.checkpoint.publish import fsync_folder, write_text_atomic
from automimo.checkpoint.reader import INDEX_FILE, SINGLE_FILE, index_text
from automimo.checkpoint.tensor_reader import CHUNK_BYTES
from automimo.checkpoint.units import Unit, plan_files
from automimo.checkpoint.writer import (
    Chunk,
    PlannedTensor,
    Produced,
    WrittenCheckpoint,
    byte_order,
    check_keys,
    check_no_other_weights,
    header_bytes,
    planned_chunks,
)
from automimo.errors import CheckpointError

__all__ = ["BackgroundWriter", "Progress", "Unit", "plan_files", "write_units"]

# How often the caller hears of progress.
_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a run is. Bytes count what is read and what is written; those of an earlier run are done from the start.

    `seconds` is the time since this run started, `kept_bytes` the part of `done_bytes` that an earlier run had done.
    """

    done_bytes: int
    total_bytes: int
    seconds: float
    kept_bytes: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Speed of this run: what an earlier run had done does not count."""
        return (self.done_bytes - self.kept_bytes) / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Expected time until the end; None before anything was done."""
        speed = self.bytes_per_second
        return (self.total_bytes - self.done_bytes) / speed if speed > 0 else None


def write_units(
    folder: Path,
    units: Sequence[Unit],
    files: Mapping[str, Sequence[str]],
    *,
    workers: int,
    metadata: Mapping[str, Any],
    on_progress: Callable[[Progress], None] | None = None,
) -> WrittenCheckpoint:
    """Write `units` into the `files` (name -> keys) of `folder`, with `workers` threads, and then the index.

    `files` come from `plan_files`, or are those of another checkpoint: any plain names that end in `.safetensors`, with
    the tensors of a unit in several of them. Units are taken in the order of the files, so that files are finished one
    after the other. At most `workers` units are held at a time. The index has `metadata` and `total_size`; there is
    none when the only file is `model.safetensors` and `metadata` is empty. The bytes do not depend on `workers`.

    Files of `folder` that an earlier run of the same plan finished are kept; units that lie in them completely are not
    produced again. `on_progress` is called in the calling thread, about ten times a second and once at the end.

    An exception of a unit stops the other threads and is raised here; then no file of this run is left. After
    KeyboardInterrupt or SystemExit the finished files stay for the next run.

    Raises CheckpointError for doubled keys, keys that are only planned or only in `files`, weights in `folder` that are
    not those of this plan, too little free disk space, or a unit that produces something else than planned.
    """
    if workers < 1:
        raise CheckpointError(f"workers must be at least 1, got {workers}")
    planned = _planned_by_key(folder, units, files)
    total = sum(tensor.nbytes for tensor in planned.values())
    with_index = bool(metadata) or list(files) != [SINGLE_FILE]
    weight_map = {key: name for name, keys in files.items() for key in keys}
    targets = [_File(folder / name, [planned[key] for key in keys]) for name, keys in files.items()]
    make_folder(folder)
    check_no_other_weights(folder, {*files, INDEX_FILE} if with_index else set(files))
    for leftover in folder.glob(".*.safetensors.partial"):
        leftover.unlink()
    for target in targets:
        target.done = target.is_kept()
    missing = [target for target in targets if not target.done]
    check_free_space(folder, sum(target.size for target in missing))
    index = folder / INDEX_FILE if with_index else None
    try:
        if index is not None and missing:
            index.unlink(missing_ok=True)  # the index comes last: where there is one, the files are complete
        _run(_Job(units, targets), workers, on_progress)
        if index is not None:
            write_text_atomic(index, index_text(weight_map, {**metadata, "total_size": total}))
    except BaseException as error:
        for target in missing:
            target.partial.unlink(missing_ok=True)
            if isinstance(error, Exception):
                target.path.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    return WrittenCheckpoint(folder, tuple(files), index, weight_map, total)


class BackgroundWriter:
    """Writes the `files` of one of several processes into a folder that they share, in a thread, while the caller goes
    on. The folder has to be new: nothing else in it is looked at, nothing is removed, and the index is the caller's.

    Units are produced one after the other, in the order of the files. Raises CheckpointError as `write_units` for keys.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], files: Mapping[str, Sequence[str]]) -> None:
        planned = _planned_by_key(folder, units, files)
        targets = [_File(folder / name, [planned[key] for key in keys]) for name, keys in files.items()]
        self._job = _Job(units, targets)
        self._worker = _Worker(self._job, False, "checkpoint-writer")

    def start(self) -> None:
        self._worker.start()

    @property
    def error(self) -> BaseException | None:
        """What ended the writing early."""
        return self._job.error

    @property
    def ended(self) -> bool:
        return self._worker.ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, but not longer; whether it has come."""
        return self._worker.ended.wait(seconds)

    def stop(self) -> None:
        """Stop between two pieces, if it has not ended, and wait for that; what is written stays. A unit that waits for
        something has to be woken by the caller."""
        self._job.stop.set()
        self._worker.wait()


def _planned_by_key(
    folder: Path, units: Sequence[Unit], files: Mapping[str, Sequence[str]]
) -> dict[str, PlannedTensor]:
    """All tensors of the units by key, after checking that `files` hold each of them once and nothing else."""
    planned = {tensor.key: tensor for unit in units for tensor in unit.tensors}
    check_keys(tensor.key for unit in units for tensor in unit.tensors)
    check_keys(key for keys in files.values() for key in keys)
    placed = {key: name for name, keys in files.items() for key in keys}
    for name in files:
        check_plain_name(folder, name)
        if name.startswith(".") or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder}: {name!r} cannot be the name of a weight file; it must end in .safetensors and not be hidden"
            )
    for key in sorted(planned.keys() - placed.keys()):
        raise CheckpointError(f"{folder}: tensor {key!r} is produced but belongs to no file; it would be lost")
    for key in sorted(placed.keys() - planned.keys()):
        raise CheckpointError(f"{folder}: tensor {key!r} belongs to {placed[key]} but nothing produces it")
    return planned


@dataclass
class _File:
    """One file that is to be written. All but the constants are guarded by the lock of the job."""

    path: Path
    tensors: list[PlannedTensor]  # afterwards in the order of their bytes
    header: bytes = b""
    begin: dict[str, int] = field(default_factory=dict)  # absolute offset of each tensor
    size: int = 0
    done: bool = False
    started: bool = False
    missing: int = 0  # tensors that are not written yet

    def __post_init__(self) -> None:
        self.tensors.sort(key=byte_order)
        self.header = header_bytes(self.tensors)
        self.size = len(self.header)
        self.missing = len(self.tensors)
        for tensor in self.tensors:
            self.begin[tensor.key] = self.size
            self.size += tensor.nbytes

    @property
    def partial(self) -> Path:
        return self.path.with_name(f".{self.path.name}.partial")

    def is_kept(self) -> bool:
        """Whether an earlier run finished this file; an error when something else has its name."""
        if not self.path.exists() and not self.path.is_symlink():
            return False
        if self.path.is_file() and not self.path.is_symlink() and self.path.stat().st_size == self.size:
            with self.path.open("rb") as file:
                if file.read(len(self.header)) == self.header:
                    return True
        raise CheckpointError(f"{self.path}: exists already and is not what would be written; remove it")

    def start(self) -> None:
        with _named_errors(self.path), self.partial.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)
        self.started = True

    def finish(self) -> None:
        with _named_errors(self.path):
            descriptor = os.open(self.partial, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.partial.replace(self.path)


class _Output:
    """The file that one worker writes to. It stays open until the worker turns to another: a worker holds one
    descriptor, and tensors that follow each other in a file do not open it anew (on network disks closing flushes)."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.descriptor = -1

    def write(self, file: _File, offset: int, piece: memoryview) -> None:
        with _named_errors(file.path):
            if self.path != file.path:
                self.close()
                self.descriptor = os.open(file.partial, os.O_WRONLY | os.O_CLOEXEC)
                self.path = file.path
            done = 0
            while done < len(piece):
                done += os.pwrite(self.descriptor, piece[done:], offset + done)

    def close(self) -> None:
        if self.path is not None:
            self.path = None
            os.close(self.descriptor)


class _Job:
    """What the workers share: the units that are left, the files, the count of bytes and the first error."""

    def __init__(self, units: Sequence[Unit], files: Sequence[_File]) -> None:
        self.files = files
        self.file_of = {tensor.key: file for file in files for tensor in file.tensors}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.total = sum(unit.source_bytes + unit.nbytes for unit in units)
        rank = {file.path: i for i, file in enumerate(files)}
        todo = [unit for unit in units if not all(self.file_of[tensor.key].done for tensor in unit.tensors)]
        self.kept = self.done = self.total - sum(unit.source_bytes + unit.nbytes for unit in todo)
        # The order of the units for files that `plan_files` made; for other files the order in which files get full.
        todo.sort(key=lambda unit: min(rank[self.file_of[tensor.key].path] for tensor in unit.tensors))
        self.todo = iter(todo)
        self.started = time.monotonic()

    def progress(self) -> Progress:
        with self.lock:
            return Progress(self.done, self.total, time.monotonic() - self.started, self.kept)

    def work(self, single_threaded: bool) -> None:
        """What each worker does until there are no units left or one has failed."""
        output = _Output()
        try:
            if single_threaded:
                torch.set_num_threads(1)
            while (unit := self._next()) is not None:
                self._write_unit(unit, output)  # what it produced is gone when this returns
        except BaseException as error:  # noqa: BLE001 -- the calling thread raises it
            with self.lock:
                self.error = error if self.error is None else self.error
            self.stop.set()
        finally:
            output.close()

    def _next(self) -> Unit | None:
        with self.lock:
            return None if self.stop.is_set() else next(self.todo, None)

    def _write_unit(self, unit: Unit, output: _Output) -> None:
        results = unit.produce()
        self._count(unit.source_bytes)
        if len(results) != len(unit.tensors):
            keys = [tensor.key for tensor in unit.tensors]
            raise CheckpointError(f"{len(keys)} tensors were planned but {len(results)} came, for {keys}")
        for tensor, produced in zip(unit.tensors, results, strict=True):
            file = self.file_of[tensor.key]
            if file.done:
                self._count(tensor.nbytes)
            else:
                self._write_tensor(file, tensor, produced, output)
            if self.stop.is_set():
                return

    def _write_tensor(self, file: _File, tensor: PlannedTensor, produced: Produced, output: _Output) -> None:
        with self.lock:
            if not file.started:
                file.start()
        offset = file.begin[tensor.key]
        for chunk in planned_chunks(file.path, tensor, produced):
            for piece in _pieces(chunk):
                if self.stop.is_set():
                    return
                output.write(file, offset, piece)
                offset += len(piece)
                self._count(len(piece))
        with self.lock:
            file.missing -= 1
            last = file.missing == 0
        if last:
            file.finish()

    def _count(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes


def _pieces(chunk: Chunk) -> Iterator[memoryview]:
    """A chunk in parts small enough to stop and to show progress between them."""
    view = memoryview(chunk)
    if view.nbytes:
        flat = view.cast("B")
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


def _run(job: _Job, workers: int, on_progress: Callable[[Progress], None] | None) -> None:
    """Run the workers to their end and raise the first error of them; stop them when this thread is interrupted."""
    for file in job.files:
        if not file.done and not file.tensors:
            file.start()
            file.finish()
    # set_num_threads() holds for the thread that calls it, but also becomes the default of threads that start later:
    # the calling thread sets its own number again in the end.
    own_threads = torch.get_num_threads()
    team = [_Worker(job, workers > 1, f"checkpoint-writer-{i}") for i in range(workers)]
    try:
        for worker in team:
            worker.start()
        for worker in team:
            while not worker.ended.wait(_PROGRESS_SECONDS):
                if on_progress is not None:
                    on_progress(job.progress())
    finally:
        job.stop.set()
        for worker in team:
            worker.wait()
        torch.set_num_threads(own_threads)
    if job.error is not None:
        raise job.error
    if on_progress is not None:
        on_progress(job.progress())


class _Worker(threading.Thread):
    """A thread of the job that says when it has ended.

    `Thread.join` cannot be used while it works: interrupted by Ctrl-C, Python 3.11 and 3.12 take the thread for ended
    although it runs on, and a process that exits then is aborted inside torch.
    """

    def __init__(self, job: _Job, single_threaded: bool, name: str) -> None:
        super().__init__(name=name)
        self.ended = threading.Event()
        self._job, self._single_threaded = job, single_threaded

    def run(self) -> None:
        try:
            self._job.work(self._single_threaded)
        finally:
            self.ended.set()

    def wait(self) -> None:
        """Wait until it has ended after it was told to stop; at once if it was never started. Another Ctrl-C does not
        end the wait: it takes one unit at most, and a thread that is left behind could rename a file while the next run
        writes it."""
        while self.ident is not None and not self.ended.is_set():
            with suppress(KeyboardInterrupt, SystemExit):
                self.ended.wait()
        if self.ident is not None:
            self.join()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """An error of the system while writing, as a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
