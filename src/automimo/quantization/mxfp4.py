"""MXFP4 weights: 4-bit E2M1 codes with one power-of-two scale per 32 elements along the last dimension.

OCP Microscaling Formats specification 1.0: value = e2m1 × 2^(scale byte - 127), where a code is a sign bit (8) and one
of 0, 0.5, 1, 1.5, 2, 3, 4, 6; scale byte 255 is NaN. A byte holds two codes, the earlier element in its low nibble.

Decoding is one look-up per byte: the pair of results for every scale byte and every packed byte stands in a table of
65,536 entries (256 KiB for 16-bit results; real weights use a few dozen scales, so what is read of it stays in the
first-level cache). The table is made with integers: no result depends on whether the process flushes
subnormals to zero.
"""

from functools import lru_cache

import torch
from torch import Tensor

from automimo.errors import CheckpointError
from automimo.quantization.chunks import new_matrix, result, row_chunks, store, wide_float

GROUP = 32
NAN_SCALE = 255
# 4 × 2^126 is 2^128: from this scale byte on, large codes overflow bf16 and fp32.
OVERFLOW_SCALE = 253
_INTEGERS = {2: torch.int32, 4: torch.int64}


@torch.no_grad()
def decode_mxfp4(
    packed: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Decode MXFP4 matrices.

    packed: uint8 [..., R, C / 2]; scales: uint8 [..., R, C / 32]. Returns [..., R, C] in `dtype`, or `out` of that
    shape and any strides and floating dtype (fp64 by way of fp32). All but fp16 hold every value exactly, subnormals
    included; fp16 rounds values below 2^-14.

    Raises TypeError when a tensor is not uint8, CheckpointError when the shapes do not belong together, a scale is NaN
    (byte 255), or a value overflows the dtype.
    """
    shape = _checked_shape(packed, scales)
    out = result(shape, dtype, packed.device, out)
    if packed.is_meta or packed.numel() == 0:
        return out
    largest = int(scales.max())
    if largest == NAN_SCALE:
        count = int((scales == NAN_SCALE).sum())
        raise CheckpointError(
            f"{count} of {scales.numel()} MXFP4 scales are NaN (byte 255); the file is damaged, download it again"
        )
    _decode(packed, scales, out)
    # Only the largest scales can overflow, and weights are far from them: fp16 ends at 65504.
    may_overflow = largest >= (127 + 13 if out.dtype == torch.float16 else OVERFLOW_SCALE)
    if may_overflow and out.isinf().any():
        raise CheckpointError(
            f"MXFP4 values with scales up to 2^{largest - 127} overflow {_table_dtype(out)}; the file is damaged"
            + (", or decode it into bfloat16" if out.dtype == torch.float16 else "")
        )
    return out


@torch.no_grad()
def encode_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a floating [R, C] matrix, C a multiple of 32: (packed uint8 [R, C / 2], scales uint8 [R, C / 32]).

    OCP rule: the scale's exponent is floor(log2(amax)) - 2, clamped to the range of E8M0, so that the largest element
    of a group becomes 4 or 6 (or saturates at 6); codes are rounded half to even and keep the sign bit, also of zeros.
    A group of zeros gets scale byte 0, which is where the clamp ends for ever smaller amax. fp64 is rounded to fp32
    first.

    Decoded groups come back with every value, and with every byte where their largest code was 4 or 6.

    Raises CheckpointError for values that are not finite and for a C that is not a multiple of 32, TypeError for a
    matrix that is not floating.
    """
    if not wide_float(matrix.dtype):
        raise TypeError(f"only floating tensors of 16 bits and more can be encoded as MXFP4, got {matrix.dtype}")
    if matrix.ndim != 2 or matrix.shape[1] % GROUP:
        raise CheckpointError(f"MXFP4 needs a matrix with a multiple of {GROUP} columns, got {list(matrix.shape)}")
    rows, columns = matrix.shape
    packed = new_matrix((rows, columns // 2), torch.uint8, matrix.device)
    scales = torch.empty((rows, columns // GROUP), dtype=torch.uint8, device=matrix.device)
    if matrix.is_meta or matrix.numel() == 0:
        return packed, scales
    # bf16 and fp16 have few enough bits for the sums of `_magnitude_codes` to be exact in fp32.
    working = torch.float32 if matrix.element_size() == 2 else torch.float64
    for row, count in row_chunks(0, rows, columns):
        values = matrix[row : row + count].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        codes = (values.view(torch.int32) >> 28).to(torch.int16).bitwise_and_(8)  # the signs
        values.abs_()
        exponent = values.view(torch.int32).view(count, -1, GROUP).amax(-1) >> 23
        if int(exponent.max()) == 0xFF:
            raise CheckpointError("a matrix with infinite or NaN values cannot be encoded as MXFP4; mend the weights")
        # A biased exponent of 0 is a subnormal or zero: below every scale anyway.
        byte = (exponent - 2).clamp_min_(0)
        scales[row : row + count] = byte
        # 2^(127 - byte) as fp32 bits; byte <= 252, so it is a normal number, and what scaling rounds becomes 0 anyway.
        inverse = ((254 - byte) << 23).view(torch.float32)
        scaled = values.to(working).view(count, -1, GROUP).mul_(inverse.unsqueeze(-1))
        codes |= _magnitude_codes(scaled).view(count, columns)
        pairs = codes.view(torch.int32)  # little-endian: the earlier code in the low half
        packed[row : row + count] = (pairs >> 12).bitwise_or_(pairs).bitwise_and_(0xFF)
    return packed, scales


def _magnitude_codes(x: Tensor) -> Tensor:
    """E2M1 codes 0 .. 7 (int16) of magnitudes below 8, rounded half to even, 6 and more to 7.

    Code as a function of value is 2x up to 2, x + 2 up to 4 and x / 2 + 4 up to 6: a concave curve, hence the minimum
    of the three lines. Rounding it rounds the value, and an even code is an even mantissa.
    """
    line = torch.add(x, 2)
    curve = torch.minimum(x * 2, line)
    torch.add(torch.full((), 4, dtype=x.dtype, device=x.device), x, alpha=0.5, out=line)
    return torch.minimum(curve, line, out=curve).round_().to(torch.int16).clamp_max_(7)


def _checked_shape(packed: Tensor, scales: Tensor) -> tuple[int, ...]:
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"MXFP4 codes and scales are uint8, got {packed.dtype} and {scales.dtype}")
    if packed.ndim < 2 or packed.shape[-1] * 2 % GROUP:
        raise CheckpointError(f"packed MXFP4 must be [..., rows, a multiple of {GROUP // 2}], got {list(packed.shape)}")
    columns = packed.shape[-1] * 2
    expected = (*packed.shape[:-1], columns // GROUP)
    if tuple(scales.shape) != expected:
        raise CheckpointError(
            f"scales of shape {list(scales.shape)} do not fit packed MXFP4 of shape {list(packed.shape)}: "
            f"{list(expected)} are needed, one per {GROUP} elements"
        )
    return (*packed.shape[:-1], columns)


def _decode(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    if packed.ndim > 2:
        for part in zip(packed, scales, out, strict=True):
            _decode(*part)
        return
    rows, half = packed.shape
    dtype = _table_dtype(out)
    table = _pair_table(dtype, packed.device)
    direct = out.dtype == dtype and out.is_contiguous() and out.device == packed.device
    step = min(rows, next(row_chunks(0, rows, 2 * half))[1])
    index = torch.empty((step, half), dtype=torch.int32, device=packed.device)
    pairs = torch.empty(0 if direct else step * half, dtype=table.dtype, device=packed.device)
    for row, count in row_chunks(0, rows, 2 * half):
        entry = index[:count].copy_(packed[row : row + count])
        entry.view(count, -1, GROUP // 2).add_((scales[row : row + count].to(torch.int32) << 8).unsqueeze(-1))
        target = out[row : row + count]
        found = target.view(-1).view(table.dtype) if direct else pairs[: count * half]
        torch.index_select(table, 0, entry.view(-1), out=found)
        if not direct:
            store(target, found.view(dtype).view(count, 2 * half))


def _table_dtype(out: Tensor) -> torch.dtype:
    return out.dtype if out.element_size() == 2 else torch.float32


@lru_cache(maxsize=8)
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[65536] integers, at scale byte × 256 + packed byte: the bits of the two values, the earlier one lower.

    Read only once made, so threads may share it. In fp32 a code k / 2 = 1.f × 2^(e - 1) (k = 1, 2, 3, 4, 6, 8, 12) at
    scale byte b has the biased exponent b - 1 + e; 0 and -1 are subnormals.
    """
    # Always made on the CPU, whatever device a surrounding `with torch.device(...)` says.
    e = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3], device="cpu")
    half = torch.tensor([0, 0, 0, 1, 0, 1, 0, 1], device="cpu")
    exponent = torch.arange(256, device="cpu").unsqueeze(1) - 1 + e
    significand = (1 << 23) | (half << 22)
    bits = (exponent.clamp_min(1) - 1 << 23) + (significand >> (1 - exponent).clamp_min(0))
    bits = torch.where(exponent >= 255, 0x7F800000, bits)
    bits[:, 0] = 0
    bits = torch.cat([bits, bits - 2**31], dim=1).to(torch.int32)  # [scale byte, code]
    if dtype == torch.float32:
        halves = bits
    elif dtype == torch.bfloat16:
        halves = (bits >> 16).to(torch.int16)
    else:
        halves = bits.view(torch.float32).to(torch.float16).view(torch.int16)
    pairs = torch.stack([halves.unsqueeze(1).expand(256, 16, 16), halves.unsqueeze(2).expand(256, 16, 16)], dim=-1)
    return pairs.contiguous().view(_INTEGERS[halves.element_size()]).reshape(-1).to(device)
