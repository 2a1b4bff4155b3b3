"""Encoding as FP8: scales from their definition in numpy, codes within half a step in float64, both ways together."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantization_fp8 import DTYPES, E4M3, FP8, LargestTensor, random_codes
from torch import Tensor

from automimo.errors import CheckpointError
from automimo.quantization import Strip, block_strips, check_scales, decode_fp8, encode_fp8, scale_shape


def code_distance_in_steps(matrix: Tensor, codes: Tensor, factors: np.ndarray) -> np.ndarray:
    """|code × scale - x| minus what rounding the division may add, in half e4m3 steps at x; all in float64."""
    x = matrix.double().numpy()
    decoded = E4M3[codes.view(torch.uint8).numpy()] * factors
    quotient = np.maximum(np.abs(x) / factors, 2.0**-6)  # below 2^-6 steps stay 2^-9
    half_step = 2.0 ** (np.floor(np.log2(quotient)) - 4) * factors
    return (np.abs(decoded - x) - 2.0**-24 * np.abs(x)) / half_step


def spread(scales: Tensor, strips: Sequence[Strip], columns: int) -> np.ndarray:
    rows = np.concatenate([np.repeat(strip.scale_row, strip.rows) for strip in strips])
    return scales.double().numpy()[rows][:, np.arange(columns) // 128]


def test_every_bf16_amax_mantissa_with_every_bf16_mantissa_below_it() -> None:
    """Blocks of 40 × 128: 20 binades of bf16 numbers of both signs below an amax, for each of its mantissas.

    Exponents: the smallest amax, around the amax below which a scale would be subnormal (448 × 2^-126), 1, the largest.
    """
    mantissas = torch.arange(128, 256, dtype=torch.float64)
    below = (mantissas * 2.0 ** -torch.arange(8, 28).view(-1, 1)).view(-1)
    below = torch.cat([below, -below])
    for exponent in (-126, -118, -117, 0, 127):
        amax = mantissas / 128 * 2.0**exponent
        blocks = (below * 2.0**exponent).clamp(-amax.view(-1, 1), amax.view(-1, 1))
        blocks[:, 0] = amax
        matrix = blocks.view(128 * 40, 128).to(torch.bfloat16)
        strips = [Strip(40 * block, 40, block) for block in range(128)]
        codes, scales = encode_fp8(matrix, strips)
        assert (scales.double() * 448 / amax.view(-1, 1) >= 1 - 2.0**-22).all()
        assert codes.float().isfinite().all()
        distance = code_distance_in_steps(matrix, codes, spread(scales, strips, 128))
        assert distance.max() <= 1 + 1e-9  # float64 rounds too
        assert distance.max() > 0.9  # the bound is met, so the test measures something
        decoded = decode_fp8(codes, scales, strips)
        assert decoded.isfinite().all()
        if exponent >= -117:  # scales are amax / 448: the largest element is the code 448
            assert torch.equal(codes.view(128, -1)[:, 0].float(), torch.full((128,), 448.0))
            assert torch.equal(decoded.view(128, -1)[:, 0], matrix.view(128, -1)[:, 0])


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    shards=st.integers(1, 3),
    shard_rows=st.integers(1, 200),
    columns=st.integers(1, 300),
    exponent=st.integers(-140, 120),
    seed=st.integers(0, 10**6),
)
def test_codes_are_within_half_a_step(dtype, shards, shard_rows, columns, exponent, seed) -> None:
    rows = shards * shard_rows
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    matrix = matrix * torch.rand(rows, 1, generator=generator) ** 8
    matrix = (matrix * 2.0 ** (exponent if dtype != torch.float16 else exponent % 10)).to(dtype)
    strips = block_strips(rows, shards)
    codes, scales = encode_fp8(matrix, strips)
    assert tuple(scales.shape) == scale_shape(rows, columns, shards)
    check_scales(scales, "key")
    single = matrix.float()  # what is encoded; float64 is rounded on the way in
    for strip in strips:
        for column in range(scales.shape[1]):
            block = single[strip.row : strip.row + strip.rows, column * 128 : column * 128 + 128]
            amax = np.float32(block.abs().max().item())
            expected = max(amax / np.float32(448), np.float32(2.0**-126)) if amax else 1.0
            assert scales[strip.scale_row, column].item() == expected
    assert code_distance_in_steps(single, codes, spread(scales, strips, columns)).max() <= 1 + 1e-9


def test_amax_is_taken_over_all_rows_that_share_a_scale() -> None:
    """K (192 rows a head) and V (128) quantised as strips of 320: 64 rows of K and 64 of V in the middle block."""
    heads, columns = 3, 200
    k = torch.randn(heads, 192, columns)
    v = torch.randn(heads, 128, columns) * torch.tensor([0.01, 100.0, 1.0]).view(3, 1, 1)
    strips = []
    for head in range(heads):
        strips += [Strip(192 * head, 128, 3 * head), Strip(192 * head + 128, 64, 3 * head + 1)]
    for head in range(heads):
        row = 192 * heads + 128 * head
        strips += [Strip(row, 64, 3 * head + 1), Strip(row + 64, 64, 3 * head + 2)]
    matrix = torch.cat([k.reshape(-1, columns), v.reshape(-1, columns)])
    codes, scales = encode_fp8(matrix, strips)
    # The same rows, brought together: one grid that restarts every 320 rows.
    together = torch.cat([k, v], dim=1).reshape(-1, columns)
    expected, expected_scales = encode_fp8(together, block_strips(heads * 320, heads))
    assert torch.equal(scales, expected_scales)
    expected_k, expected_v = expected.float().view(heads, 320, columns).split([192, 128], dim=1)
    assert torch.equal(codes.float(), torch.cat([expected_k.reshape(-1, columns), expected_v.reshape(-1, columns)]))
    assert scales[1, 0] == torch.maximum(k[0, 128:, :128].abs().max(), v[0, :64, :128].abs().max()) / 448


def test_zeros_keep_their_sign_and_get_scale_one() -> None:
    matrix = torch.zeros(130, 130)
    matrix[3, 129] = -0.0
    matrix[129, 0] = 2.0
    codes, scales = encode_fp8(matrix)
    assert scales.tolist() == [[1.0, 1.0], [np.float32(2) / np.float32(448), 1.0]]
    nonzero = codes.view(torch.uint8).nonzero().tolist()
    assert nonzero == [[3, 129], [129, 0]]
    assert codes.view(torch.uint8)[3, 129] == 0x80
    assert codes[129, 0].float() == 448


def test_a_scale_row_that_no_strip_names_is_one() -> None:
    _, scales = encode_fp8(torch.full((2, 2), 448.0), [Strip(0, 1, 0), Strip(1, 1, 2)])
    assert scales.tolist() == [[1.0], [1.0], [1.0]]


def test_the_largest_fp32_numbers_decode_to_finite_fp32() -> None:
    top = np.frombuffer(np.arange(0x7F7FFF00, 0x7F800000, dtype=np.uint32).tobytes(), dtype=np.float32)
    matrix = torch.from_numpy(top.copy()).view(256, 1)
    strips = [Strip(row, 1, row) for row in range(256)]
    codes, scales = encode_fp8(matrix, strips)
    decoded = decode_fp8(codes, scales, strips, dtype=torch.float32)
    assert decoded.isfinite().all()
    assert ((decoded.double() / matrix.double() - 1).abs() <= 2.0**-22).all()
    assert torch.equal(codes.float(), torch.full((256, 1), 448.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    matrix = torch.ones(200, 300, dtype=dtype)
    matrix[150, 299] = value
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        encode_fp8(matrix)
    if dtype == torch.float64:
        with pytest.raises(CheckpointError, match="infinite or NaN"):
            encode_fp8(torch.full((1, 1), 1e39, dtype=dtype))


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(TypeError, match="int32"):
        encode_fp8(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match="float8"):
        encode_fp8(torch.ones(2, 2).to(FP8))
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        encode_fp8(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match="cover 1 rows"):
        encode_fp8(torch.ones(2, 2), [Strip(0, 1, 0)])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    codes, scales = encode_fp8(torch.empty(shape))
    assert tuple(codes.shape) == shape
    assert tuple(scales.shape) == scale_shape(*shape)
    assert tuple(decode_fp8(codes, scales).shape) == shape


def test_inputs_of_any_strides_encode_the_same() -> None:
    matrix = torch.randn(200, 300).bfloat16().requires_grad_()
    codes, scales = encode_fp8(matrix)
    for other in (matrix.t().contiguous().t(), torch.cat([matrix, matrix], 1)[:, :300]):
        other_codes, other_scales = encode_fp8(other)
        assert torch.equal(codes.view(torch.uint8), other_codes.view(torch.uint8))
        assert torch.equal(scales, other_scales)
    assert not scales.requires_grad


@pytest.mark.parametrize("seed", range(5))
def test_encoding_decoded_values_again_stays_within_one_step(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(300, 300, generator=generator) * 40).to(FP8)
    decoded = decode_fp8(codes, torch.rand(3, 3, generator=generator))
    new_codes, new_scales = encode_fp8(decoded)
    again = decode_fp8(new_codes, new_scales)
    factors = spread(new_scales, block_strips(300), 300)
    quotient = np.maximum(np.abs(decoded.double().numpy()) / factors, 2.0**-6)
    step = 2.0 ** (np.floor(np.log2(quotient)) - 3) * factors
    assert (np.abs((again.double() - decoded.double()).numpy()) <= step).all()


def test_no_temporary_is_larger_than_the_codes() -> None:
    matrix = torch.ones(2048, 2048)
    with LargestTensor() as encoding:
        codes, _ = encode_fp8(matrix)
    assert 0 < encoding.largest <= codes.numel()


def test_threads_do_not_disturb_each_other() -> None:
    inputs = [(random_codes(256, 2048, seed), torch.rand(2, 16)) for seed in range(8)]
    expected = [decode_fp8(*pair) for pair in inputs]
    encoded = [encode_fp8(matrix) for matrix in expected]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(lambda pair: decode_fp8(*pair), inputs), expected))
            for (codes, scales), (ours, other) in zip(pool.map(encode_fp8, expected), encoded, strict=True):
                assert torch.equal(codes.view(torch.uint8), ours.view(torch.uint8))
                assert torch.equal(scales, other)


def test_meta_tensors() -> None:
    decoded = decode_fp8(torch.empty(300, 200, dtype=FP8, device="meta"), torch.empty(3, 2, device="meta"))
    assert (decoded.device.type, decoded.dtype, tuple(decoded.shape)) == ("meta", torch.bfloat16, (300, 200))
    codes, scales = encode_fp8(decoded, block_strips(300, 2))
    assert (codes.device.type, codes.dtype, tuple(codes.shape)) == ("meta", FP8, (300, 200))
    assert (scales.device.type, scales.dtype, tuple(scales.shape)) == ("meta", torch.float32, (4, 2))
    check_scales(scales, "key")
