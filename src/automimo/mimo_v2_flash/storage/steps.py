"""How far values are from their stored codes, in steps of the codes: 0.5 is what rounding to the nearest one costs."""

from __future__ import annotations

import torch
from torch import Tensor

from automimo.checkpoint.tensor_reader import TensorReader
from automimo.mimo_v2_flash.storage.decode import cut_strips, pieces, read_scales
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix
from automimo.quantization import GROUP, decode_fp8, decode_mxfp4

# Rounding to the nearest code is at most half a step off; the quotient that is rounded is itself a rounded number.
# MXFP4 takes its exponent from the largest value of a group, of which up to 8 then becomes 6: one step of 2.
LARGEST_STEPS = {"fp8": 0.5 + 2**-10, "mxfp4": 1.0 + 2**-10}


def rounding_steps(reader: TensorReader, matrix: StoredMatrix, values: Tensor, start: int, stop: int) -> float:
    """The largest |value / scale - code| of rows `start` to `stop`, in steps between neighbouring codes there.

    `values` [stop - start, columns] fp32 are what a quantised `matrix` should hold.
    """
    read = _fp8_codes if matrix.encoding == "fp8" else _mxfp4_codes
    codes, scales = read(reader, matrix, start, stop)
    magnitude = codes.abs()
    if matrix.encoding == "fp8":  # 3 bits after the leading one; below 2^-6 the codes are equally spaced
        step = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=2.0**-6))) - 3)
    else:  # 0, .5, 1, 1.5, 2, 3, 4, 6
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    off = (values / scales - codes).abs() / step
    off[(values == 0) & (codes == 0)] = 0.0  # whatever the scale is
    return float(off.max()) if off.numel() else 0.0


def _fp8_codes(reader: TensorReader, matrix: StoredMatrix, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows, both as fp32 matrices."""
    table = read_scales(reader, matrix)
    codes = torch.empty((stop - start, matrix.shape[1]))
    for first, rows, at in pieces(matrix, start, stop):
        codes[at : at + rows] = reader.read_rows(matrix.weight.key, first, first + rows).float()
    ones = torch.ones(codes.shape).to(torch.float8_e4m3fn)
    return codes, decode_fp8(ones, table, cut_strips(matrix.strips, start, stop), dtype=torch.float32)


def _mxfp4_codes(reader: TensorReader, matrix: StoredMatrix, start: int, stop: int) -> tuple[Tensor, Tensor]:
    packed = reader.read_rows(matrix.weight.key, start, stop)
    exponents = reader.read_rows(matrix.scales[0].key, start, stop)
    codes = decode_mxfp4(packed, torch.full_like(exponents, 127), dtype=torch.float32)
    scales = torch.exp2(exponents.to(torch.float64) - 127).to(torch.float32)
    return codes, scales.repeat_interleave(GROUP, dim=1)
