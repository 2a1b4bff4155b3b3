"""Read a converted folder again, as any reader would, and compare it with what it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from automimo.checkpoint import CheckpointReader
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.convert.plan import Conversion
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.model import model_class_of
from automimo.mimo_v2_flash.source import read_config
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint, StoredMatrix
from automimo.mimo_v2_flash.storage.matrices import VScales
from automimo.mimo_v2_flash.storage.steps import LARGEST_STEPS, rounding_steps
from automimo.mimo_v2_flash.storage.transfer import equals_stored, read_for, stored_bytes

# Rows are compared in pieces of about this many elements.
_PIECE = 2**20


@dataclass(frozen=True)
class Verification:
    """What was found: tensors that are bit for bit what the source holds (decoded in the same dtype), tensors that have
    the bytes of the reference, tensors that were quantised anew, and the largest difference of those, in steps between
    their codes (see `storage.steps`).
    """

    equal: int
    kept: int
    encoded: int
    fp8_steps: float
    mxfp4_steps: float


def verify_conversion(
    conversion: Conversion,
    folder: Path,
    *,
    workers: int,
    v_scales: VScales = "strip",
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Compare every tensor of `folder` with the source (or the reference, for what only that has).

    The folder is opened anew: headers, index and config must describe exactly the planned form. Copies are compared
    byte for byte, plain tensors bit for bit with the decoded source, quantised ones by value. Raises CheckpointError,
    naming the key, for the first difference that is not the rounding of the format. `on_bytes` hears what was compared.
    """
    with CheckpointReader(folder) as reader:
        config = read_config(folder, model_class_of(folder).config_class)
        written = StoredCheckpoint(reader, config, SourceOptions(v_scales=v_scales))
        planned = {**conversion.targets, **conversion.borrowed}
        if written.matrices != planned or set(written.raw) != set(conversion.raw):
            wrong = next((key for key, m in planned.items() if written.matrices.get(key) != m), "the list of tensors")
            raise CheckpointError(f"{folder}: verification failed: {wrong} does not read back in the planned form")
        tasks = list(_tasks(conversion, written))
        # What a thread sets also becomes the default of threads that start later: set it back in the end.
        own_threads = torch.get_num_threads()
        with ThreadPoolExecutor(workers) as pool:
            results = []
            try:
                for nbytes, steps in pool.map(partial(_run, threads=1 if workers > 1 else None), tasks):
                    results.append(steps)
                    on_bytes(nbytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(own_threads)
    encoded = [(kind, steps) for kind, steps in results if kind not in ("equal", "kept")]
    kept = sum(kind == "kept" for kind, _ in results)
    return Verification(
        len(results) - len(encoded) - kept,
        kept,
        len(encoded),
        max((steps for kind, steps in encoded if kind == "fp8"), default=0.0),
        max((steps for kind, steps in encoded if kind == "mxfp4"), default=0.0),
    )


Outcome = tuple[str, float]
Task = tuple[int, Callable[[], Outcome]]


def _run(task: Task, threads: int | None) -> tuple[int, Outcome]:
    if threads is not None:
        torch.set_num_threads(threads)  # of this thread: the others compare at the same time
    return task[0], task[1]()


def _tasks(conversion: Conversion, written: StoredCheckpoint) -> Iterator[Task]:
    for key, reader in conversion.raw.items():
        yield reader.info(key).nbytes, partial(_compare_plain, reader, written.reader, key)
    for matrix in conversion.borrowed.values():
        assert conversion.reference is not None
        reader = conversion.reference.reader
        yield stored_bytes(matrix), partial(_compare_stored, reader, written.reader, matrix, "kept")
    for key, target in conversion.targets.items():
        source = conversion.source.matrices[key]
        if source == target:
            yield stored_bytes(target), partial(_compare_stored, conversion.source.reader, written.reader, target)
        else:
            compare = partial(_compare_values, conversion.source, written, source, target, conversion.reference)
            yield stored_bytes(target), compare


def _compare_plain(source: CheckpointReader, written: CheckpointReader, key: str) -> Outcome:
    """A tensor that nobody interprets: the same bytes, or cast to the dtype it has now."""
    theirs, ours = source.info(key), written.info(key)
    if theirs.dtype == ours.dtype:
        _same_bytes(source, written, key)
    else:
        value = source.read(key).to(TORCH_DTYPES[ours.dtype])
        if not torch.equal(value, written.read(key)):
            raise _differs(key)
    return "equal", 0.0


def _compare_stored(
    source: CheckpointReader, written: CheckpointReader, matrix: StoredMatrix, kind: str = "equal"
) -> Outcome:
    for tensor in matrix.stored:
        _same_bytes(source, written, tensor.key)
    return kind, 0.0


def _same_bytes(source: CheckpointReader, written: CheckpointReader, key: str) -> None:
    pairs = zip(source.iter_bytes(key), written.iter_bytes(key), strict=True)
    if any(ours != theirs for ours, theirs in pairs):
        raise _differs(key)


def _compare_values(
    source: StoredCheckpoint,
    written: StoredCheckpoint,
    matrix: StoredMatrix,
    target: StoredMatrix,
    reference: StoredCheckpoint | None,
) -> Outcome:
    """A tensor whose stored form changed: bit for bit when it is plain now, else by value in steps of its codes."""
    if target.encoding == "plain":
        expected = read_for(source, matrix, target).to(TORCH_DTYPES[target.weight.dtype])
        if not _same_bits(expected, written.read(target.key)):
            raise _differs(target.key)
        return "equal", 0.0
    plain = matrix.encoding == "plain"
    # Other values may round to the same bytes: those are compared like all that were quantised anew.
    if reference is not None and plain and _has_bytes_of(reference, written, target):
        value = source.read(target.key)
        if equals_stored(value, target.key, reference):
            return "kept", 0.0
    worst = 0.0
    exact = True
    step = max(1, _PIECE // max(1, target.shape[1]))
    for start in range(0, target.shape[0], step):
        stop = min(start + step, target.shape[0])
        expected = source.read(target.key, torch.float32, start=start, stop=stop)
        found = written.read(target.key, torch.float32, start=start, stop=stop)
        if torch.equal(expected, found):
            continue
        exact = False
        worst = max(worst, rounding_steps(written.reader, target, expected, start, stop))
    if not worst <= LARGEST_STEPS[target.encoding]:
        raise CheckpointError(
            f"verification failed: {target.key} is {worst:.3f} steps off, rounding explains "
            f"{LARGEST_STEPS[target.encoding]:.1f}"
        )
    return ("equal", 0.0) if exact else (target.encoding, worst)


def _has_bytes_of(reference: StoredCheckpoint, written: StoredCheckpoint, target: StoredMatrix) -> bool:
    try:
        _compare_stored(reference.reader, written.reader, target)
    except CheckpointError:
        return False
    return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _differs(key: str) -> CheckpointError:
    return CheckpointError(
        f"verification failed: {key} is not on the disk what it should be; check the disk and convert again"
    )
