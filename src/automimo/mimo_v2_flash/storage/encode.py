"""Bring tensors of the split layout into a stored form: the inverse of `decode`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage.decode import cut_strips, pieces, read_scale, refuse_nan_codes
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix, StoredTensor, stored_tensors
from automimo.quantization import BLOCK, Strip, decode_fp8, encode_fp8, encode_mxfp4


def encode_group(group: Sequence[StoredMatrix], values: Sequence[Tensor]) -> list[Tensor]:
    """The stored tensors (as `stored_tensors(group)` lists them) of matrices that are stored together.

    `values` are the matrices of the group in the split layout, floating. Raises CheckpointError, with the key, for
    values that the stored dtype cannot hold.
    """
    first = group[0]
    if first.encoding == "plain":
        return _encode_plain(group, values)
    try:
        if first.encoding == "mxfp4":
            return list(encode_mxfp4(row_major(values[0])))
        stacked = row_major(values[0]) if len(values) == 1 else torch.cat(list(values))
        codes, table = encode_fp8(stacked, stacked_strips(group))
    except CheckpointError as error:
        raise CheckpointError(f"{', '.join(matrix.key for matrix in group)}: {error}") from error
    return _scatter_fp8(group, codes, table)


def recode_fp8(
    reader: TensorReader, sources: Sequence[StoredMatrix], group: Sequence[StoredMatrix]
) -> tuple[list[Tensor], bool]:
    """FP8 matrices of one checkpoint in the FP8 layout `group`, and whether that was exact.

    Where all rows of a block of the new grid had one scale in the old one, codes and scale are kept, so going to
    another layout loses nothing there; only the other blocks are decoded (fp32) and encoded again. `sources` hold the
    matrices of `group`, in the same order.
    """
    codes = torch.cat([_read_codes(reader, source) for source in sources])
    # A row of scales that k and v share must be one row here too, or their common block would look like two.
    old = torch.cat([read_scale(reader, scale) for scale in stacked_scales(sources)])
    old_strips, new_strips = stacked_strips(sources), stacked_strips(group)
    old_row_of = torch.cat([torch.full((s.rows,), s.scale_row) for s in old_strips])
    kept: dict[int, int] = {}
    mixed: dict[int, None] = {}
    for strip in new_strips:
        rows = old_row_of[strip.row : strip.row + strip.rows].unique().tolist()
        if len(rows) > 1 or kept.setdefault(strip.scale_row, rows[0]) != rows[0]:
            mixed[strip.scale_row] = None
    table = torch.empty((max(s.scale_row for s in new_strips) + 1, old.shape[1]), dtype=torch.float32)
    for new_row, old_row in kept.items():
        table[new_row] = old[old_row]
    again = [strip for strip in new_strips if strip.scale_row in mixed]
    if again:
        compact, place = _compact(again, list(mixed))
        decoded = torch.cat([decode_rows(codes, old, old_strips, s.row, s.row + s.rows) for s in again])
        new_codes, new_table = encode_fp8(decoded, compact)
        for strip, packed in zip(again, compact, strict=True):
            codes[strip.row : strip.row + strip.rows] = new_codes[packed.row : packed.row + packed.rows]
        table[place] = new_table
    return _scatter_fp8(group, codes, table), not again


def decode_rows(codes: Tensor, table: Tensor, strips: Sequence[Strip], start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of FP8 codes in fp32."""
    return decode_fp8(codes[start:stop], table, cut_strips(tuple(strips), start, stop), dtype=torch.float32)


def stacked_scales(group: Sequence[StoredMatrix]) -> list[StoredTensor]:
    """The scales of a group, each once, in the order in which `stacked_strips` counts their rows."""
    return list(dict.fromkeys(scale for matrix in group for scale in matrix.scales))


def stacked_strips(group: Sequence[StoredMatrix]) -> list[Strip]:
    """Strips of the matrices of a group stacked in order, over all scales of the group stacked in order."""
    place: dict[StoredTensor, int] = {}
    offset = 0
    for tensor in stacked_scales(group):
        place[tensor] = offset
        offset += tensor.shape[0]
    result: list[Strip] = []
    row = 0
    for matrix in group:
        rows_of = [place[scale] + i for scale in matrix.scales for i in range(scale.shape[0])]
        result += [Strip(s.row + row, s.rows, rows_of[s.scale_row]) for s in matrix.strips]
        row += matrix.shape[0]
    return result


def cast(value: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    """`value` in `dtype`. Raises CheckpointError where a finite value becomes infinite."""
    result = value.to(dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    if narrower and not bool(torch.isfinite(result).all()):
        largest = float(value.abs().nan_to_num(0.0).max())
        raise CheckpointError(f"{key} overflows {dtype} (largest magnitude {largest:.3g}) or is not finite")
    return result


def row_major(matrix: Tensor) -> Tensor:
    """A contiguous copy of a matrix, or itself.

    The view of one expert in a stack is a transposed slice. torch has a fast transposition, but only for whole
    matrices: packing the slice first takes 27 ms for a bf16 gate of V2.5 [2048, 4096], `contiguous` 65 ms (one core).
    """
    if matrix.is_contiguous() or matrix.ndim != 2:
        return matrix.contiguous()
    return torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device).copy_(matrix.t().contiguous().t())


def _encode_plain(group: Sequence[StoredMatrix], values: Sequence[Tensor]) -> list[Tensor]:
    weight = group[0].weight
    dtype = TORCH_DTYPES[weight.dtype]
    if not group[0].rows:
        return [cast(values[0], dtype, group[0].key)]
    result = torch.empty(weight.shape, dtype=dtype, device=values[0].device)
    for matrix, value in zip(group, values, strict=True):
        _scatter_rows(matrix, cast(value, dtype, matrix.key), result)
    return [result]


def _scatter_fp8(group: Sequence[StoredMatrix], codes: Tensor, table: Tensor) -> list[Tensor]:
    """Codes of stacked matrices, and their scales, as the stored tensors of the group."""
    outputs: dict[StoredTensor, Tensor] = {}
    row = 0
    for matrix in group:
        part = codes[row : row + matrix.shape[0]]
        row += matrix.shape[0]
        if not matrix.rows:
            outputs[matrix.weight] = part
            continue
        if matrix.weight not in outputs:
            outputs[matrix.weight] = torch.empty(matrix.weight.shape, dtype=codes.dtype, device=codes.device)
        _scatter_rows(matrix, part, outputs[matrix.weight])
    offset = 0
    for scale in stacked_scales(group):
        outputs[scale] = table[offset : offset + scale.shape[0]]
        offset += scale.shape[0]
    return [outputs[tensor] for tensor in stored_tensors(group)]


def _scatter_rows(matrix: StoredMatrix, value: Tensor, weight: Tensor) -> None:
    for first, rows, at in pieces(matrix, 0, matrix.shape[0]):
        weight[first : first + rows].copy_(value[at : at + rows])


def _read_codes(reader: TensorReader, matrix: StoredMatrix) -> Tensor:
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for first, rows, at in pieces(matrix, 0, matrix.shape[0]):
        codes[at : at + rows] = reader.read_rows(matrix.weight.key, first, first + rows)
    try:
        refuse_nan_codes(codes)
    except CheckpointError as error:
        raise CheckpointError(f"{matrix.weight.key}: {error}") from error
    return codes


def _compact(strips: Sequence[Strip], scale_rows: Sequence[int]) -> tuple[list[Strip], list[int]]:
    """The strips as those of a matrix that holds nothing else, and which scale row each of its scale rows was."""
    number = {scale_row: i for i, scale_row in enumerate(scale_rows)}
    result = []
    row = 0
    for strip in strips:
        assert strip.rows <= BLOCK
        result.append(Strip(row, strip.rows, number[strip.scale_row]))
        row += strip.rows
    return result, list(scale_rows)
