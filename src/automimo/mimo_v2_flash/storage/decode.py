"""Read a tensor of the split layout out of its stored form, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix, StoredTensor
from automimo.quantization import Strip, check_scales, decode_fp8, decode_mxfp4, has_nan

E4M3_MAX = 448.0
PIECE = 2**20
"""Elements that `iter_matrix` gives at a time."""
READ = 2**23
"""Elements that `read_matrix` reads at a time: 8 MiB of codes, 16 MiB of bf16, whatever the size of the matrix."""


def read_matrix(
    reader: TensorReader,
    matrix: StoredMatrix,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows `start` to `stop` of a stored matrix in `dtype`, or written into `out` (floating, any strides, any device).

    Only the bytes of these rows are read, and for FP8 the rows of scales that they use (24 rows of 4096 columns: 1 or 2
    rows, 0.3 % of their bytes). Besides the result at most `READ` stored elements are held. `dtype` defaults to the
    stored one, for quantised matrices to bfloat16. Values are scaled in fp32 and rounded once. Raises CheckpointError,
    with file and key, for NaN codes, scales that are no numbers, and values that the dtype cannot hold.
    """
    if not matrix.shape:
        return _into(out, reader.read(matrix.weight.key), dtype)
    stop = matrix.shape[0] if stop is None else stop
    if not 0 <= start <= stop <= matrix.shape[0]:
        raise CheckpointError(f"{matrix.key}: rows {start}:{stop} of {matrix.shape[0]}")
    if out is None:
        plain = reader.info(matrix.weight.key).torch_dtype
        dtype = dtype or (plain if matrix.encoding == "plain" else torch.bfloat16)
        if matrix.encoding == "plain" and dtype == plain and not matrix.rows:
            return reader.read_rows(matrix.weight.key, start, stop)
        out = torch.empty((stop - start, *matrix.shape[1:]), dtype=dtype)
    elif tuple(out.shape) != (stop - start, *matrix.shape[1:]):
        raise CheckpointError(
            f"{matrix.key}: rows {start}:{stop} are {[stop - start, *matrix.shape[1:]]}, their destination is "
            f"{list(out.shape)}"
        )
    elif matrix.encoding == "plain" and not matrix.rows and (start, stop) == (0, matrix.shape[0]):
        reader.read_into(matrix.weight.key, out)
        return out
    if start == stop:
        return out
    target = out.detach()
    scales = used_scales(reader, matrix, start, stop) if matrix.encoding == "fp8" else None
    step = max(1, READ // max(1, math.prod(matrix.shape[1:])))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        _decode_rows(reader, matrix, scales, first, last, target[first - start : last - start], None)
    return out


def iter_matrix(reader: TensorReader, matrix: StoredMatrix, dtype: torch.dtype) -> Iterator[Tensor]:
    """A stored matrix in `dtype`, about a million elements at a time, as `read_matrix` reads it.

    Each piece [rows, columns] is valid until the next one is asked for: all lie in one buffer, so that memory is
    touched for the first time only once and what was decoded is still in the caches when it is written.
    """
    step = max(1, PIECE // max(1, matrix.shape[1]))
    rows = min(step, matrix.shape[0])
    buffer = torch.empty((rows, matrix.shape[1]), dtype=dtype)
    codes = torch.empty((rows, *matrix.weight.shape[1:]), dtype=TORCH_DTYPES[matrix.weight.dtype])
    scales = used_scales(reader, matrix, 0, matrix.shape[0]) if matrix.encoding == "fp8" else None
    for start in range(0, matrix.shape[0], step):
        stop = min(start + step, matrix.shape[0])
        piece = buffer[: stop - start]
        _decode_rows(reader, matrix, scales, start, stop, piece, codes)
        yield piece


@torch.no_grad()
def _decode_rows(
    reader: TensorReader,
    matrix: StoredMatrix,
    scales: tuple[Tensor, Sequence[Strip]] | None,
    start: int,
    stop: int,
    out: Tensor,
    buffer: Tensor | None,
) -> None:
    """Rows `start` to `stop` into `out`; `scales` are the `used_scales` of an FP8 matrix, `buffer` takes the stored
    rows."""
    with _naming(reader, matrix):
        if matrix.encoding == "mxfp4":
            codes = reader.read_rows(matrix.weight.key, start, stop, buffer)
            exponents = reader.read_rows(matrix.scales[0].key, start, stop)
            decode_mxfp4(codes.to(out.device), exponents.to(out.device), out=out)
            return
        for first, rows, at in pieces(matrix, start, stop):
            target = out[at : at + rows]
            if scales is None and buffer is None and _as_stored(target, matrix):
                reader.read_rows(matrix.weight.key, first, first + rows, target)
                continue
            stored = reader.read_rows(matrix.weight.key, first, first + rows, buffer)
            if scales is None:
                target.copy_(stored)
            else:
                table, strips = scales
                _decode_piece(stored, table, cut_strips(strips, start + at, start + at + rows), target)


def _as_stored(target: Tensor, matrix: StoredMatrix) -> bool:
    """Whether stored rows can be read straight into `target`."""
    return target.device.type == "cpu" and target.is_contiguous() and target.dtype == TORCH_DTYPES[matrix.weight.dtype]


def used_scales(reader: TensorReader, matrix: StoredMatrix, start: int, stop: int) -> tuple[Tensor, list[Strip]]:
    """The rows of scales that rows `start` to `stop` of an FP8 matrix use, and no others: (fp32 [rows of scales,
    columns / 128], checked; the strips of these rows, whose `row` counts in the matrix and `scale_row` in the first
    result)."""
    strips = [s for s in matrix.strips if s.row < stop and start < s.row + s.rows]
    needed = sorted({strip.scale_row for strip in strips})
    tables: list[Tensor] = []
    above = 0
    for scale in matrix.scales:
        inside = [row - above for row in needed if above <= row < above + scale.shape[0]]
        for first, end in _runs(inside):
            tables.append(reader.read_rows(scale.key, first, end))
            check_scales(tables[-1], f"{reader.info(scale.key).file}: {scale.key}")
        above += scale.shape[0]
    place = {row: number for number, row in enumerate(needed)}
    table = torch.cat(tables) if tables else torch.empty((0, matrix.scales[0].shape[1]))
    return table, [Strip(s.row, s.rows, place[s.scale_row]) for s in strips]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges (first, end)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def read_scales(reader: TensorReader, matrix: StoredMatrix) -> Tensor:
    """The scales of an FP8 matrix, [rows of scales, columns / 128] fp32, checked; several tensors stacked."""
    tables = [read_scale(reader, scale) for scale in matrix.scales]
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def read_scale(reader: TensorReader, scale: StoredTensor) -> Tensor:
    """One tensor of FP8 scales, checked."""
    table = reader.read(scale.key)
    check_scales(table, scale.key)
    return table


def pieces(matrix: StoredMatrix, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(first row in the stored weight, rows, place among the rows from `start` on) of rows `start` to `stop`."""
    row = 0
    for first, count in matrix.rows or ((0, matrix.shape[0]),):
        begin, end = max(start, row), min(stop, row + count)
        if begin < end:
            yield first + begin - row, end - begin, begin - start
        row += count


def cut_strips(strips: Sequence[Strip], start: int, stop: int) -> list[Strip]:
    """The strips of rows `start` to `stop`, counted from `start`."""
    return [
        Strip(max(s.row, start) - start, min(s.row + s.rows, stop) - max(s.row, start), s.scale_row)
        for s in strips
        if s.row < stop and start < s.row + s.rows
    ]


def refuse_nan_codes(codes: Tensor) -> None:
    """Raise CheckpointError if e4m3 codes hold a NaN: weights have none, so the file is damaged."""
    if codes.numel() and has_nan(codes):
        raise CheckpointError("holds NaN codes; the file is damaged, download or write it again")


def _decode_piece(codes: Tensor, table: Tensor, strips: list[Strip], target: Tensor) -> None:
    decode_fp8(codes.to(target.device), table.to(target.device), strips, out=target, refuse_nan=True)
    used = table[[strip.scale_row for strip in strips]]
    limit = torch.finfo(target.dtype).max
    if used.numel() and float(used.max()) * E4M3_MAX > limit and not bool(torch.isfinite(target).all()):
        raise CheckpointError(
            f"has values beyond the range of {target.dtype} (largest scale {float(used.max()):.3g}), which no weights "
            "have; the file is damaged, download or write it again"
        )


def _into(out: Tensor | None, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    if out is None:
        return value if dtype is None else value.to(dtype)
    with torch.no_grad():
        return out.detach().copy_(value)


@contextmanager
def _naming(reader: TensorReader, matrix: StoredMatrix) -> Iterator[None]:
    """Errors of the decoders know no keys: put file and stored key in front."""
    try:
        yield
    except (ValueError, TypeError) as error:  # CheckpointError is a ValueError
        if matrix.weight.key in str(error) or any(scale.key in str(error) for scale in matrix.scales):
            raise
        raise CheckpointError(f"{reader.info(matrix.weight.key).file}: {matrix.weight.key}: {error}") from error
