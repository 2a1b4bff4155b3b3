"""From one stored form to another, a group of tensors at a time: what to copy, what to decode, what to encode anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from automimo.checkpoint import CheckpointReader, TensorInfo, dtype_name
from automimo.checkpoint.parallel_writer import Unit
from automimo.checkpoint.safetensors_file import TORCH_DTYPES, tensor_bytes
from automimo.checkpoint.tensor_reader import CHUNK_BYTES, row_chunks
from automimo.checkpoint.writer import PlannedTensor, Produced
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage.decode import iter_matrix
from automimo.mimo_v2_flash.storage.encode import cast, encode_group, recode_fp8
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix, StoredTensor, stored_tensors, stored_together
from automimo.mimo_v2_flash.storage.stored_checkpoint import StoredCheckpoint
from automimo.quantization import check_scales, has_nan

How = Literal["copied", "converted", "encoded", "unchanged", "borrowed"]
Group = tuple[StoredMatrix, ...]


class Tally:
    """How many tensors of the split layout went which way; threads share it.

    `copied`: stored bytes as they were. `converted`: decoded, cast or rearranged without a new quantisation. `encoded`:
    quantised anew. `unchanged`: would have been encoded, but equals the reference, whose bytes were taken. `borrowed`:
    only the reference has it.
    """

    def __init__(self) -> None:
        self._counts: Counter[How] = Counter()
        self._lock = Lock()

    def add(self, how: How, tensors: int) -> None:
        with self._lock:
            self._counts[how] += tensors

    def __getitem__(self, how: How) -> int:
        return self._counts[how]


def transfer_units(
    source: StoredCheckpoint,
    targets: Mapping[str, StoredMatrix],
    tally: Tally,
    reference: StoredCheckpoint | None = None,
) -> list[Unit]:
    """Units that write `targets` (all keys of the split layout that they name are in `source`).

    A group that is stored in the same way in both is copied byte for byte. With a `reference`, a group that would have
    to be quantised anew but has the values that the reference has takes the bytes of the reference.
    """
    units = []
    for group in stored_together(targets.values()):
        sources = tuple(source.matrices[matrix.key] for matrix in group)
        if sources == group:
            units.append(raw_unit(source.reader, group, tally))
        elif _only_cast(sources, group):
            info = source.reader.info(group[0].weight.key)
            units.append(cast_unit(source.reader, info, TORCH_DTYPES[group[0].weight.dtype], tally))
        elif _only_decoded(sources, group):
            units.append(_unit(group, partial(_decode_chunks, source.reader, sources[0], group[0], tally), sources))
        else:
            produce = partial(_convert, source, sources, group, reference, tally)
            units.append(_unit(group, produce, sources))
    return units


def raw_unit(reader: CheckpointReader, group: Group, tally: Tally, how: How = "copied") -> Unit:
    """A unit that copies the stored tensors of a group byte for byte, and refuses NaN scales and codes."""
    return _unit(group, partial(_copy, reader, group, tally, how), group)


def cast_unit(reader: CheckpointReader, info: TensorInfo, dtype: torch.dtype, tally: Tally) -> Unit:
    """A unit that writes a floating tensor in another dtype, in small pieces; values must fit into it."""
    target = PlannedTensor(info.name, dtype_name(dtype), info.shape)
    return Unit((target,), partial(_cast_chunks, reader, info, dtype, tally), info.nbytes)


def tensor_unit(reader: CheckpointReader, key: str, tally: Tally, dtype: str | None = None) -> Unit:
    """A unit for a tensor that nobody interprets: its bytes, or cast where another `dtype` is asked for."""
    info = reader.info(key)
    if dtype is not None and dtype != info.dtype:
        return cast_unit(reader, info, TORCH_DTYPES[dtype], tally)
    return Unit((PlannedTensor(key, info.dtype, info.shape),), partial(_bytes_of, reader, key, tally), info.nbytes)


def encode_unless_unchanged(
    group: Group, values: Sequence[Tensor], reference: StoredCheckpoint | None, tally: Tally
) -> Sequence[Produced]:
    """The stored tensors of a group; those of the `reference`, raw, if it stores the same values in the same form."""
    if group[0].encoding != "plain":
        if reference is not None and _same_values(group, values, reference):
            tally.add("unchanged", len(group))
            return _copy_tensors(reference.reader, group)
        tally.add("encoded", len(group))
    else:
        tally.add("converted", len(group))
    return encode_group(group, values)


def planned(tensor: StoredTensor) -> PlannedTensor:
    """A stored tensor as the writer plans it."""
    return PlannedTensor(tensor.key, tensor.dtype, tensor.shape)


def stored_bytes(matrix: StoredMatrix) -> int:
    """Bytes that hold one matrix, its scales included."""
    weight = tensor_bytes(matrix.weight.dtype, matrix.shape)
    if matrix.encoding == "mxfp4":
        weight //= 2
    return weight + sum(tensor_bytes(scale.dtype, scale.shape) for scale in matrix.scales)


def _unit(group: Group, produce: Callable[[], Sequence[Produced]], sources: Sequence[StoredMatrix]) -> Unit:
    return Unit(tuple(planned(t) for t in stored_tensors(group)), produce, sum(map(stored_bytes, sources)))


def _convert(
    source: StoredCheckpoint, sources: Group, group: Group, reference: StoredCheckpoint | None, tally: Tally
) -> Sequence[Produced]:
    if group[0].encoding == "fp8" and all(matrix.encoding == "fp8" for matrix in sources):
        tensors, exact = recode_fp8(source.reader, sources, group)
        tally.add("converted" if exact else "encoded", len(group))
        return tensors
    values = [read_for(source, matrix, target) for matrix, target in zip(sources, group, strict=True)]
    return encode_unless_unchanged(group, values, reference, tally)


def read_for(source: StoredCheckpoint, matrix: StoredMatrix, target: StoredMatrix) -> Tensor:
    """A matrix in the dtype from which `target` is made with a single rounding."""
    if matrix.encoding == "plain":
        return source.read(matrix.key)
    return source.read(matrix.key, TORCH_DTYPES[target.weight.dtype] if target.encoding == "plain" else torch.float32)


def _only_cast(sources: Group, group: Group) -> bool:
    """Whether one tensor changes its dtype and nothing else, so that it can go through in small pieces."""
    source, target = sources[0], group[0]
    return (
        len(group) == 1
        and (source.encoding, target.encoding) == ("plain", "plain")
        and not (source.rows or target.rows)
    )


def _only_decoded(sources: Group, group: Group) -> bool:
    """Whether one matrix is decoded, or cut out of a fused one, so that it can go through in small pieces."""
    source, target = sources[0], group[0]
    if len(group) > 1 or target.encoding != "plain" or target.rows:
        return False
    return source.encoding != "plain" or source.weight.dtype == target.weight.dtype


def _decode_chunks(
    reader: CheckpointReader, source: StoredMatrix, target: StoredMatrix, tally: Tally
) -> list[Produced]:
    tally.add("converted", 1)
    pieces = iter_matrix(reader, source, TORCH_DTYPES[target.weight.dtype])
    return [(piece.reshape(-1).view(torch.uint8).numpy().data for piece in pieces)]


def _cast_chunks(reader: CheckpointReader, info: TensorInfo, dtype: torch.dtype, tally: Tally) -> list[Produced]:
    tally.add("converted", 1)
    return [_cast_bytes(reader, info, dtype)]


def _cast_bytes(reader: CheckpointReader, info: TensorInfo, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a floating tensor in another dtype, about 16 MiB at a time."""
    if len(info.shape) == 0 or 0 in info.shape:
        value = cast(reader.read(info.name), dtype, info.name).reshape(-1)
        if value.numel():
            yield value.view(torch.uint8).numpy().data
        return
    step = max(1, CHUNK_BYTES // tensor_bytes(info.dtype, info.shape[1:]))
    for start in range(0, info.shape[0], step):
        rows = reader.read_rows(info.name, start, min(start + step, info.shape[0]))
        yield cast(rows, dtype, info.name).reshape(-1).view(torch.uint8).numpy().data


def _bytes_of(reader: CheckpointReader, key: str, tally: Tally) -> list[Produced]:
    tally.add("copied", 1)
    return [reader.iter_bytes(key)]


def _copy(reader: CheckpointReader, group: Group, tally: Tally, how: How) -> Sequence[Produced]:
    tally.add(how, len(group))
    return _copy_tensors(reader, group)


def _copy_tensors(reader: CheckpointReader, group: Group) -> Sequence[Produced]:
    scales = {scale.key for matrix in group for scale in matrix.scales}
    return [
        _checked_scales(reader, tensor) if tensor.key in scales else _checked_bytes(reader, tensor)
        for tensor in stored_tensors(group)
    ]


def _checked_bytes(reader: CheckpointReader, tensor: StoredTensor) -> Iterator[memoryview]:
    for chunk in reader.iter_bytes(tensor.key):
        if tensor.dtype == "F8_E4M3" and has_nan(torch.frombuffer(chunk, dtype=torch.float8_e4m3fn)):
            raise CheckpointError(f"{tensor.key}: holds NaN codes; the file is damaged, download or write it again")
        yield chunk


def _checked_scales(reader: CheckpointReader, tensor: StoredTensor) -> Tensor:
    scales = reader.read(tensor.key)
    if tensor.dtype == "F32":
        check_scales(scales, tensor.key)
    elif scales.numel() and int(scales.max()) == 255:
        raise CheckpointError(f"{tensor.key}: holds NaN scales (byte 255); the file is damaged, download it again")
    return scales


def _same_values(group: Group, values: Sequence[Tensor], reference: StoredCheckpoint) -> bool:
    if any(reference.matrices.get(matrix.key) != matrix for matrix in group):
        return False
    return all(equals_stored(value, matrix.key, reference) for matrix, value in zip(group, values, strict=True))


def equals_stored(value: Tensor, key: str, reference: StoredCheckpoint) -> bool:
    """Whether `value` is the reference's tensor, decoded to its dtype, or decoded to bfloat16 and then widened."""
    for index, shape in row_chunks(value.shape, CHUNK_BYTES // 4):
        rows = index[0]
        assert isinstance(rows, slice), shape  # matrices of the model have rows of far less than a chunk
        part = value[rows].cpu()
        stored = reference.read(key, torch.float32, start=rows.start, stop=rows.stop)
        if not (torch.equal(stored.to(part.dtype), part) or torch.equal(stored.bfloat16().to(part.dtype), part)):
            return False
    return True
