"""MXFP4 against a slow oracle: values as Python floats from their definition, codes by comparing fractions."""

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from flushing import flushed_subnormals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.errors import CheckpointError
from automimo.quantization import decode_mxfp4, encode_mxfp4
from automimo.quantization.chunks import CHUNK
from automimo.quantization.mxfp4 import _pair_table

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = MAGNITUDES + [-value for value in MAGNITUDES]


def oracle(packed: Tensor, scales: Tensor) -> Tensor:
    """float64 [..., R, C], exact: three bits times a power of two."""
    rows = packed.flatten(0, -2).tolist()
    factors = scales.flatten(0, -2).tolist()
    values = [
        [E2M1[code] * 2.0 ** (factor[i // 16] - 127) for i, byte in enumerate(row) for code in (byte & 15, byte >> 4)]
        for row, factor in zip(rows, factors, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).view(*packed.shape[:-1], 2 * packed.shape[-1])


def exact_bits(tensor: Tensor) -> Tensor:
    """float64 bits: tells -0.0 from 0.0."""
    return tensor.double().view(torch.int64)


def every_byte_with(scale: int, limit: int = 8) -> tuple[Tensor, Tensor]:
    """[1, 256] packed bytes (those whose codes have magnitudes below `limit`, others 0) and their [1, 16] scales."""
    packed = torch.arange(256, dtype=torch.uint8)
    packed[((packed & 7) >= limit) | ((packed >> 4 & 7) >= limit)] = 0
    return packed.view(1, 256), torch.full((1, 16), scale, dtype=torch.uint8)


def random_groups(rows: int, groups: int, seed: int, low: int = 0, high: int = 253) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, 16 * groups), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(low, high, (rows, groups), dtype=torch.uint8, generator=generator)


# Decoding


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    """Codes that overflow (from scale byte 253 on) are left out here."""
    parts = [every_byte_with(scale, {253: 6, 254: 4}.get(scale, 8)) for scale in range(255)]
    packed, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    decoded = decode_mxfp4(packed, scales, dtype=dtype)
    assert decoded.dtype == dtype
    assert torch.equal(exact_bits(decoded), exact_bits(oracle(packed, scales)))


def test_fp16_rounds_small_values_half_to_even() -> None:
    parts = [every_byte_with(scale) for scale in range(141)]
    packed, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    expected = oracle(packed, scales).numpy().astype(np.float16).view(np.int16)
    decoded = decode_mxfp4(packed, scales, dtype=torch.float16)
    np.testing.assert_array_equal(decoded.view(torch.int16).numpy(), expected)


@pytest.mark.parametrize(
    ("dtype", "scale", "code"),
    [
        *((dtype, scale, code) for dtype in DTYPES for scale, code in [(253, 6), (253, 15), (254, 4), (254, 13)]),
        *((torch.float16, scale, code) for scale, code in [(141, 6), (141, 15), (142, 4), (200, 1)]),
    ],
)
def test_values_that_overflow_are_refused(dtype: torch.dtype, scale: int, code: int) -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    scales = torch.full((2, 2), 120, dtype=torch.uint8)
    scales[1, 1] = scale
    assert (decode_mxfp4(packed, scales, dtype=dtype) == 0).all()
    packed[1, 20] = code << 4
    with pytest.raises(CheckpointError, match=rf"2\^{scale - 127} overflow"):
        decode_mxfp4(packed, scales, dtype=dtype)


def test_nan_scales_are_refused() -> None:
    packed, scales = random_groups(3, 4, seed=0)
    scales[2, 1] = 255
    with pytest.raises(CheckpointError, match="1 of 12 MXFP4 scales are NaN"):
        decode_mxfp4(packed, scales)


def test_low_nibble_is_the_earlier_element() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 1] = 0xD2  # codes 2 (1.0) and 13 (-3.0)
    decoded = decode_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert decoded[0].nonzero().flatten().tolist() == [2, 3]
    assert decoded[0, 2:4].tolist() == [2.0, -6.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_where_subnormals_are_flushed(dtype: torch.dtype) -> None:
    """Scale byte 0 gives subnormal numbers: they must come out even where arithmetic would lose them."""
    parts = [every_byte_with(scale) for scale in (0, 1, 2, 127)]
    packed, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    with flushed_subnormals():
        decoded = decode_mxfp4(packed, scales, dtype=dtype)
    assert torch.equal(exact_bits(decoded), exact_bits(oracle(packed, scales)))


@settings(deadline=None, max_examples=30)
@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(0, 5),
    groups=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_leading_dimensions_and_empty_shapes(lead, rows, groups, dtype, seed) -> None:
    shape = (*lead, rows)
    packed, scales = random_groups(math.prod(shape), groups, seed)
    packed, scales = packed.view(*shape, 16 * groups), scales.view(*shape, groups)
    decoded = decode_mxfp4(packed, scales, dtype=dtype)
    assert (tuple(decoded.shape), decoded.dtype) == ((*shape, 32 * groups), dtype)
    assert torch.equal(exact_bits(decoded), exact_bits(oracle(packed, scales)))


def test_more_than_one_piece_of_work() -> None:
    packed, scales = random_groups(1500, 16, seed=3)
    assert packed.numel() * 2 > CHUNK
    decoded = decode_mxfp4(packed, scales)
    assert torch.equal(exact_bits(decoded), exact_bits(oracle(packed, scales)))
    wide = CHUNK // 32 + 1
    packed, scales = random_groups(2, wide, seed=4)
    assert torch.equal(exact_bits(decode_mxfp4(packed, scales)), exact_bits(oracle(packed, scales)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_out_of_any_strides_and_dtype(dtype: torch.dtype) -> None:
    packed, scales = random_groups(60, 5, seed=1, low=110, high=130)
    expected = decode_mxfp4(packed, scales, dtype=dtype)
    large = torch.full((2, 100, 400), 7.0, dtype=dtype)
    parameter = torch.nn.Parameter(torch.empty(160, 60, dtype=dtype))
    outs = [torch.empty(60, 160, dtype=dtype), parameter.t(), large[0, :60, :160], large[1, :60, 5:325:2]]
    for out in outs:
        assert decode_mxfp4(packed, scales, out=out, dtype=torch.float16) is out
        assert torch.equal(out, expected)
    assert torch.equal(parameter.t(), expected)
    assert (large[0, 60:] == 7).all()
    assert (large[1, :, 6::2] == 7).all()
    stacked = torch.empty(160, 2, 30, dtype=dtype)
    decode_mxfp4(packed.view(2, 30, 80), scales.view(2, 30, 5), out=stacked.permute(1, 2, 0))
    assert torch.equal(stacked.permute(1, 2, 0).reshape(60, 160), expected)


def test_inputs_of_any_strides() -> None:
    packed, scales = random_groups(60, 5, seed=2)
    expected = decode_mxfp4(packed, scales)
    columns_first = packed.t().contiguous().t(), scales.t().contiguous().t()
    assert torch.equal(decode_mxfp4(*columns_first), expected)
    assert torch.equal(decode_mxfp4(packed[:, 32:64], scales[:, 2:4]), expected[:, 64:128])


def test_threads_do_not_disturb_each_other() -> None:
    inputs = [random_groups(64, 32, seed) for seed in range(8)]
    expected = [decode_mxfp4(*pair) for pair in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(lambda pair: decode_mxfp4(*pair), inputs), expected))
            encoded = list(pool.map(encode_mxfp4, expected))
            assert all(map(torch.equal, (decode_mxfp4(*pair) for pair in encoded), expected))


def test_the_device_of_the_surroundings_does_not_matter() -> None:
    packed, scales = random_groups(4, 2, seed=5)
    expected = decode_mxfp4(packed, scales)
    _pair_table.cache_clear()
    with torch.device("meta"):
        assert torch.equal(decode_mxfp4(packed, scales, dtype=torch.bfloat16), expected)
        again = encode_mxfp4(expected)
    assert torch.equal(decode_mxfp4(*again), expected)


def test_meta_tensors() -> None:
    packed = torch.empty(3, 8, 64, dtype=torch.uint8, device="meta")
    decoded = decode_mxfp4(packed, torch.empty(3, 8, 4, dtype=torch.uint8, device="meta"))
    assert (decoded.device.type, decoded.dtype, tuple(decoded.shape)) == ("meta", torch.bfloat16, (3, 8, 128))
    again, scales = encode_mxfp4(decoded[0])
    assert (again.device.type, again.dtype, tuple(again.shape)) == ("meta", torch.uint8, (8, 64))
    assert (scales.device.type, scales.dtype, tuple(scales.shape)) == ("meta", torch.uint8, (8, 4))


class LargestTensor(TorchDispatchMode):
    """The most bytes that one operation put into a new tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def test_no_temporary_is_larger_than_a_piece() -> None:
    packed, scales = random_groups(2048, 64, seed=0)
    decode_mxfp4(packed, scales, dtype=torch.float32)  # the table is made once
    for out in (torch.empty(2048, 2048), torch.empty(2048, 2048).t()):
        with LargestTensor() as decoding:
            decode_mxfp4(packed, scales, out=out)
        assert 0 < decoding.largest <= 4 * CHUNK
    with LargestTensor() as encoding:
        encode_mxfp4(decode_mxfp4(packed, scales))
    assert 0 < encoding.largest <= max(4 * CHUNK, packed.numel())


@pytest.mark.parametrize(
    ("packed", "scales", "error", "message"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), TypeError, "float32 and torch.uint8"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int8), TypeError, "int8"),
        (torch.zeros(2, 16).byte(), torch.zeros(2, 2).byte(), CheckpointError, r"\[2, 2\].*\[2, 16\].*\[2, 1\]"),
        (torch.zeros(2, 32).byte(), torch.zeros(1, 2).byte(), CheckpointError, r"\[1, 2\]"),
        (torch.zeros(1, 2, 32).byte(), torch.zeros(2, 2).byte(), CheckpointError, r"\[1, 2, 2\]"),
        (torch.zeros(2, 15).byte(), torch.zeros(2, 1).byte(), CheckpointError, "multiple of 16"),
        (torch.zeros(16).byte(), torch.zeros(1).byte(), CheckpointError, r"\[16\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(packed, scales, error, message) -> None:
    with pytest.raises(error, match=message):
        decode_mxfp4(packed, scales)


def test_outs_that_do_not_fit_are_refused() -> None:
    packed, scales = random_groups(4, 1, seed=0)
    for out in (torch.empty(32, 4), torch.empty(4, 32, dtype=torch.int16)):
        with pytest.raises(ValueError, match="out is"):
            decode_mxfp4(packed, scales, out=out)


# Encoding


def oracle_code(x: Fraction) -> int:
    """The code 0 .. 7 of a magnitude: the nearest of the eight, the even code at a tie."""
    distances = [abs(x - Fraction(value)) for value in MAGNITUDES]
    return min(range(8), key=lambda code: (distances[code], code % 2))


def oracle_group(values: list[float]) -> tuple[int, list[int]]:
    """Scale byte and codes by the OCP rule in exact arithmetic."""
    amax = max(abs(value) for value in values)
    byte = 0 if amax == 0 else max(0, math.frexp(amax)[1] - 1 - 2 + 127)
    scale = Fraction(2) ** (byte - 127)
    codes = [oracle_code(abs(Fraction(value)) / scale) + (8 if math.copysign(1, value) < 0 else 0) for value in values]
    return byte, codes


def check_against_oracle(matrix: Tensor) -> None:
    packed, scales = encode_mxfp4(matrix)
    groups = matrix.double().view(-1, 32).tolist()
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(-1, 32).tolist()
    for group, byte, ours in zip(groups, scales.view(-1).tolist(), codes, strict=True):
        assert (byte, ours) == oracle_group(group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ties_and_their_neighbours(dtype: torch.dtype) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=dtype)
    up, down = torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties / 2)
    for amax in (4.0, 6.0, 7.5):
        row = torch.cat([ties, up, down, torch.tensor([amax, 0, -0.0, 6, 5.5, 3, 2, 0.125], dtype=dtype)])
        row = row.clamp_max(7.99)
        check_against_oracle(torch.stack([row, -row, row * 2.0**-9, -row * 2.0**7]))


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    groups=st.lists(
        st.tuples(st.integers(-135, 120), st.lists(st.floats(-8, 8, width=32), min_size=32, max_size=32)),
        min_size=1,
        max_size=3,
    ),
)
def test_any_values_follow_the_rule(dtype, groups) -> None:
    values = [[value * 2.0**exponent for value in group] for exponent, group in groups]
    if dtype == torch.float16:
        values = [group for _, group in groups]
    check_against_oracle(torch.tensor(values, dtype=torch.float64).to(dtype))


def test_the_ends_of_the_range() -> None:
    """The smallest subnormals, groups whose scale is clamped to byte 0, and the largest number of each dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        info = torch.finfo(dtype)
        smallest = 2.0**-133 if dtype == torch.bfloat16 else 2.0**-149
        ramp = torch.linspace(-1, 1, 32, dtype=torch.float64)
        rows = [ramp * smallest, ramp * info.tiny, ramp * info.tiny * 4, ramp * info.tiny * 7.9, ramp * info.max]
        matrix = torch.stack(rows).to(dtype)
        matrix[0, 0] = smallest
        check_against_oracle(matrix)
        assert decode_mxfp4(*encode_mxfp4(matrix), dtype=dtype).isfinite().all()


def test_zeros_get_scale_byte_zero_and_keep_their_signs() -> None:
    matrix = torch.zeros(1, 32)
    matrix[0, 3] = -0.0
    packed, scales = encode_mxfp4(matrix)
    assert scales.tolist() == [[0]]
    assert packed[0, :3].tolist() == [0, 0x80, 0]
    assert torch.equal(exact_bits(decode_mxfp4(packed, scales)), exact_bits(matrix))


def with_largest_code(packed: Tensor, largest: int) -> Tensor:
    """The same bytes with magnitudes cut to `largest`, which the first element of every group has."""
    low, high = packed & 15, packed >> 4
    low, high = ((code & 8) | (code & 7).clamp_max(largest) for code in (low, high))
    low[:, ::16] = largest | (low[:, ::16] & 8)
    return low | high << 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", range(8))
def test_decoded_groups_come_back(dtype: torch.dtype, largest: int) -> None:
    """Every value; and every byte where the largest code is 4 or 6. 253 scales, all codes and signs, -0.0 too."""
    scales = torch.arange(253, dtype=torch.uint8).view(-1, 1).repeat(1, 64)
    packed = with_largest_code(random_groups(253, 64, seed=largest)[0], largest)
    decoded = decode_mxfp4(packed, scales, dtype=dtype)
    again, again_scales = encode_mxfp4(decoded)
    assert torch.equal(exact_bits(decode_mxfp4(again, again_scales, dtype=dtype)), exact_bits(decoded))
    if largest >= 6:
        assert torch.equal(again, packed)
        assert torch.equal(again_scales, scales)
    else:
        assert (again_scales[-1] < scales[-1]).all()


def test_every_pair_of_codes_comes_back() -> None:
    """All 256 bytes at every place of a group that has a 6 at another place."""
    for place in range(16):
        packed = torch.zeros(256, 16, dtype=torch.uint8)
        packed[:, (place + 1) % 16] = 7
        packed[:, place] = torch.arange(256, dtype=torch.uint8)
        scales = torch.full((256, 1), 121, dtype=torch.uint8)
        again, again_scales = encode_mxfp4(decode_mxfp4(packed, scales))
        assert torch.equal(again, packed)
        assert torch.equal(again_scales, scales)


def test_fp64_is_rounded_to_fp32_first() -> None:
    matrix = torch.full((1, 32), 4.0, dtype=torch.float64)
    matrix[0, 1] = 2.5 + 2.0**-40  # fp32 2.5, a tie that rounds down
    assert decode_mxfp4(*encode_mxfp4(matrix))[0, :2].tolist() == [4.0, 2.0]


def test_encoding_several_pieces_of_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(1500, 512, generator=generator).bfloat16().requires_grad_()
    assert matrix.numel() > CHUNK
    before = matrix.detach().clone()
    packed, scales = encode_mxfp4(matrix)
    assert torch.equal(matrix, before)
    for other in (matrix.t().contiguous().t(), torch.cat([matrix, matrix], 1)[:, 512:]):
        assert all(map(torch.equal, encode_mxfp4(other), (packed, scales)))
    rows = [0, 1, 700, 1023, 1024, 1025, 1499]
    for row in rows:
        assert all(
            map(torch.equal, encode_mxfp4(matrix[row : row + 1]), (packed[row : row + 1], scales[row : row + 1]))
        )
    check_against_oracle(matrix[1022:1026].detach())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    matrix = torch.ones(5, 64, dtype=dtype)
    matrix[4, 63] = value
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        encode_mxfp4(matrix)
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        encode_mxfp4(torch.full((1, 32), 1e39, dtype=torch.float64))


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(TypeError, match="uint8"):
        encode_mxfp4(torch.ones(2, 32, dtype=torch.uint8))
    for shape in ((2, 31), (2, 48), (32,), (2, 2, 32)):
        with pytest.raises(CheckpointError, match="multiple of 32"):
            encode_mxfp4(torch.ones(shape))


@pytest.mark.parametrize("shape", [(0, 32), (5, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    packed, scales = encode_mxfp4(torch.empty(shape))
    assert tuple(packed.shape) == (shape[0], shape[1] // 2)
    assert tuple(scales.shape) == (shape[0], shape[1] // 32)
    assert tuple(decode_mxfp4(packed, scales).shape) == shape
