"""FP8 weights: float8_e4m3fn codes with one fp32 scale per block of 128 × 128.

value = float(code) × scale, multiplied in fp32 (DeepSeek-V3 technical report, section 3.3; the files call the scale
`weight_scale_inv`, but it is what one multiplies with).

Decoding without a table: an e4m3 byte S EEEE MMM, moved into the fp16 pattern S 0EEEE MMM0000000, is the fp16 number
value × 2^-8 (the exponent biases are 7 and 15), subnormals and signed zeros included. fp16 widens to fp32 exactly and,
unlike the same trick with bf16, never through a subnormal fp32 number, so a process that flushes those to zero
(`torch.set_flush_denormal`) decodes the same. What is left is a product with scale × 2^8, which rounds exactly where
float(code) × scale does. Two things need the plain way: scales of 2^120 and more, whose product with 2^8 overflows, and
the two NaN codes, which the trick would read as ±480.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from automimo.errors import CheckpointError
from automimo.quantization.chunks import CHUNK, new_matrix, result, row_chunks, store, wide_float
from automimo.quantization.strips import BLOCK, Strip, block_strips, check_strips

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The smallest normal fp32 number. Below it a scale has so few bits that amax / scale may be far above 448.
MIN_SCALE = 2.0**-126
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def decode_fp8(
    codes: Tensor,
    scales: Tensor,
    strips: Sequence[Strip] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    refuse_nan: bool = False,
) -> Tensor:
    """Decode an FP8 matrix.

    codes: float8_e4m3fn [R, C]; scales: fp32 [S, ceil(C / 128)]; strips: which rows use which row of scales, by default
    a plain grid of blocks (then S = ceil(R / 128)). Returns [R, C] in `dtype`: the fp32 product, rounded once. With
    `out`, a [R, C] tensor of any strides and floating dtype (a transposed view of a parameter, say), the values are
    written there and `out` is returned. NaN codes give NaN, or with `refuse_nan` an error; products too large for the
    dtype give inf.

    Raises TypeError for other dtypes, CheckpointError when the shape of the scales does not fit the codes and for
    refused NaN codes, ValueError for strips that do not cover the matrix.
    """
    strips = _checked_strips(codes, scales, strips)
    out = result(codes.shape, dtype, codes.device, out)
    if codes.is_meta or codes.numel() == 0:
        return out
    columns = codes.shape[1]
    rows = min(BLOCK, max(1, CHUNK // columns))
    widened = torch.empty((rows, columns), dtype=torch.int16, device=codes.device)
    product = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    # A scale that is not finite fails the comparison as well; the plain way is right for it too.
    shifted = bool((scales.abs() < 2.0**120).all())
    for strip in strips:
        scale = _over_columns(scales[strip.scale_row], columns)
        shifted_scale = scale * 2.0**8
        for row, count in row_chunks(strip.row, strip.rows, columns):
            part, floats = codes[row : row + count], product[:count]
            nan = (shifted or refuse_nan) and has_nan(part)
            if nan and refuse_nan:
                raise CheckpointError("holds NaN codes; the file is damaged, download or write it again")
            if shifted and not nan:
                halves = widened[:count].copy_(part.view(torch.int8))  # sign-extended: bits 15 and 14 become the sign
                halves.mul_(1 << 7).bitwise_and_(-0x4080)  # 0xBF80: clears bit 14, the top bit of the exponent
                floats.copy_(halves.view(torch.float16)).mul_(shifted_scale)
            else:
                floats.copy_(part).mul_(scale)
            store(out[row : row + count], floats)
    return out


@torch.no_grad()
def encode_fp8(matrix: Tensor, strips: Sequence[Strip] | None = None) -> tuple[Tensor, Tensor]:
    """Encode a floating [R, C] matrix: (float8_e4m3fn [R, C], fp32 scales [S, ceil(C / 128)]).

    S is one more than the largest `scale_row` of the strips (default: a plain grid of blocks). Strips that name the
    same scale row share it: its amax is taken over all of them. Wider inputs are rounded to fp32 first.

    scale = amax / 448 in fp32, but 1 for a block of zeros, and never below 2^-126, where a scale loses bits and
    amax / scale would no longer be near 448. code = x / scale in fp32, rounded half to even. The quotient is at most
    448 × (1 + 2^-23), which rounds to 448 (only above 464 would it not), so the cast never saturates, and every code is
    within half a step of the exact quotient but for the rounding of the division (2^-24 of the quotient). The scale of
    the largest fp32 number times 448 is that number exactly, hence decode(encode(x)) is finite in fp32, and in bf16
    wherever x came from bf16.

    Raises CheckpointError for values that are not finite (in fp32), TypeError for a matrix that is not floating.
    """
    if not wide_float(matrix.dtype):
        raise TypeError(f"only floating tensors of 16 bits and more can be encoded as FP8, got {matrix.dtype}")
    if matrix.ndim != 2:
        raise ValueError(f"FP8 blocks are cut from matrices, got shape {tuple(matrix.shape)}")
    rows, columns = matrix.shape
    strips = block_strips(rows) if strips is None else strips
    scale_rows = check_strips(strips, rows)
    codes = new_matrix((rows, columns), FP8, matrix.device)
    scales = torch.ones((scale_rows, -(-columns // BLOCK)), dtype=torch.float32, device=matrix.device)
    if matrix.is_meta or matrix.numel() == 0:
        return codes, scales
    sharing: dict[int, list[Strip]] = {}
    for strip in strips:
        sharing.setdefault(strip.scale_row, []).append(strip)
    buffer = torch.empty((min(BLOCK, max(1, CHUNK // columns)), columns), dtype=torch.float32, device=matrix.device)
    for scale_row, group in sharing.items():
        chunks = [chunk for strip in group for chunk in row_chunks(strip.row, strip.rows, columns)]
        scales[scale_row] = _block_scales(_column_amax([matrix[row : row + count] for row, count in chunks]))
        scale = _over_columns(scales[scale_row], columns)
        for row, count in chunks:
            codes[row : row + count] = buffer[:count].copy_(matrix[row : row + count]).div_(scale)
    if not scales.isfinite().all():
        raise CheckpointError("a matrix with infinite or NaN values cannot be encoded as FP8; mend the weights first")
    return codes, scales


def check_scales(scales: Tensor, key: str) -> None:
    """Raise CheckpointError, naming `key`, unless the scales are fp32, finite and not negative (as files need them).

    On the meta device only the dtype can be checked.
    """
    if scales.dtype != torch.float32:
        raise CheckpointError(f"{key}: FP8 scales must be float32, got {scales.dtype}")
    if scales.is_meta:
        return
    wrong = scales[~(scales.isfinite() & (scales >= 0))]
    if wrong.numel():
        raise CheckpointError(
            f"{key}: {wrong.numel()} of {scales.numel()} FP8 scales are not finite numbers >= 0 (first: "
            f"{wrong[0].item()}); the file is damaged, download or write it again"
        )


def _checked_strips(codes: Tensor, scales: Tensor, strips: Sequence[Strip] | None) -> Sequence[Strip]:
    if codes.dtype != FP8 or scales.dtype != torch.float32:
        raise TypeError(f"FP8 needs {FP8} codes and torch.float32 scales, got {codes.dtype} and {scales.dtype}")
    if codes.ndim != 2 or scales.ndim != 2:
        raise CheckpointError(f"FP8 codes {tuple(codes.shape)} and scales {tuple(scales.shape)} must be matrices")
    plain = strips is None
    strips = block_strips(codes.shape[0]) if strips is None else strips
    needed = check_strips(strips, codes.shape[0]), -(-codes.shape[1] // BLOCK)
    rows_fit = scales.shape[0] == needed[0] if plain else scales.shape[0] >= needed[0]
    if not rows_fit or scales.shape[1] != needed[1]:
        raise CheckpointError(
            f"scales of shape {list(scales.shape)} do not fit FP8 codes of shape {list(codes.shape)}: "
            f"{list(needed)} are needed for blocks of {BLOCK}"
        )
    return strips


def _over_columns(scale_row: Tensor, columns: int) -> Tensor:
    """[blocks] -> [columns]: every scale 128 times, the last block cut."""
    return scale_row.repeat_interleave(BLOCK)[:columns]


def has_nan(codes: Tensor) -> bool:
    """Whether e4m3 codes (any number of them, at least one) hold a NaN.

    Its bytes, 0x7F and 0xFF, are the largest of all as signed and as unsigned numbers.
    """
    return codes.view(torch.int8).max().item() == 0x7F or codes.view(torch.uint8).max().item() == 0xFF


def _column_amax(parts: Sequence[Tensor]) -> Tensor:
    """Largest magnitude in every column of matrices of equal width: fp32 [C]; inf or NaN where there is one.

    Taken over the bits without the sign, which are in the order of the magnitudes, NaN last: one pass less than abs().
    """
    bits = BITS[parts[0].element_size()]
    largest = torch.stack([(part.view(bits) & torch.iinfo(bits).max).amax(0) for part in parts]).amax(0)
    return largest.view(parts[0].dtype).to(torch.float32)


def _block_scales(amax: Tensor) -> Tensor:
    """Largest magnitude per column (fp32 [C]) -> scale per block (fp32 [ceil(C / 128)])."""
    padded = torch.nn.functional.pad(amax, (0, -amax.numel() % BLOCK))
    largest = padded.view(-1, BLOCK).amax(1)
    scales = (largest / FP8_MAX).clamp_min(MIN_SCALE)
    return torch.where(largest == 0, torch.ones_like(scales), scales)
