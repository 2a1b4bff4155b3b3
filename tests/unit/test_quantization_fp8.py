"""FP8 blocks against a slow oracle: e4m3 spelled out from its bits, products in float64, roundings in numpy."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from flushing import flushed_subnormals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.errors import CheckpointError
from automimo.quantization import Strip, block_strips, check_scales, decode_fp8, scale_shape
from automimo.quantization.chunks import CHUNK

FP8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EDGE_SCALES = [
    0.0,
    2.0**-149,
    3 * 2.0**-140,
    2.0**-126,
    1e-30,
    0.0123,
    1.0,
    255.9,
    256.0,
    1e9,
    2.0**119.5,
    2.0**120,
    3e38,
]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


E4M3 = np.array([e4m3(byte) for byte in range(256)])


def bits_of(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bits of float64 numbers rounded to fp32 and then, half to even, to `dtype`; every NaN as one pattern."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if dtype == torch.float16:
            bits = single.astype(np.float16).view(np.uint16)
        elif dtype == torch.float32:
            bits = single.view(np.uint32)
        else:
            wide = single.view(np.uint32).astype(np.uint64)
            bits = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), 1, bits)


def bits(tensor: Tensor) -> np.ndarray:
    integers = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    unsigned = integers.view(np.uint16 if tensor.element_size() == 2 else np.uint32)
    return np.where(tensor.isnan().numpy(), 1, unsigned)


def oracle(codes: Tensor, scales: Tensor, strips: Sequence[Strip]) -> np.ndarray:
    """Exact products in float64 (4 bits times 24 bits), element by element through the definition of the blocks."""
    values = E4M3[codes.view(torch.uint8).numpy()]
    factors = np.empty_like(values)
    for strip in strips:
        for column in range(values.shape[1]):
            factors[strip.row : strip.row + strip.rows, column] = scales[strip.scale_row, column // 128].item()
    return values * factors


def random_codes(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Every byte but the two NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    return torch.where(codes & 0x7F == 0x7F, codes - 1, codes).view(FP8)


# Decoding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_nan", [False, True])
def test_every_code_times_every_edge_scale(dtype: torch.dtype, with_nan: bool) -> None:
    every = torch.tensor([byte for byte in range(256) if with_nan or byte & 0x7F != 0x7F], dtype=torch.uint8)
    for scales in ([scale] for scale in EDGE_SCALES):  # one by one: a large scale sends the whole call the plain way
        codes = every.repeat(3, 1).view(FP8)
        scale = torch.tensor([scales * 2])
        decoded = decode_fp8(codes, scale, dtype=dtype)
        assert decoded.dtype == dtype
        np.testing.assert_array_equal(bits(decoded), bits_of(oracle(codes, scale, block_strips(3)), dtype))


@pytest.mark.parametrize("scale", [-0.5, -1e38, math.inf, -math.inf, math.nan])
def test_scales_that_a_file_may_not_hold_still_multiply(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(FP8)
    scales = torch.tensor([[scale, 1.0]])
    with np.errstate(invalid="ignore"):
        expected = oracle(codes, scales, block_strips(1))
    np.testing.assert_array_equal(bits(decode_fp8(codes, scales)), bits_of(expected, torch.bfloat16))


def test_too_large_products_are_infinite() -> None:
    codes = torch.tensor([[448.0, -448.0, 1.0]]).to(FP8)
    assert decode_fp8(codes, torch.tensor([[1e36]])).tolist()[0][:2] == [math.inf, -math.inf]
    assert decode_fp8(codes, torch.tensor([[1e36]])).isfinite()[0, 2]


@settings(deadline=None, max_examples=40)
@given(
    shards=st.integers(1, 4),
    shard_rows=st.integers(0, 300),
    columns=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_partial_blocks_and_restarting_grids(shards, shard_rows, columns, dtype, seed) -> None:
    rows = shards * shard_rows
    codes = random_codes(rows, columns, seed)
    scales = torch.rand(scale_shape(rows, columns, shards), generator=torch.Generator().manual_seed(seed))
    strips = block_strips(rows, shards)
    decoded = decode_fp8(codes, scales, strips, dtype=dtype)
    np.testing.assert_array_equal(bits(decoded), bits_of(oracle(codes, scales, strips), dtype))
    if shards == 1:
        assert torch.equal(decode_fp8(codes, scales, dtype=dtype), decoded)


def test_shared_and_unused_scale_rows() -> None:
    strips = [Strip(0, 100, 4), Strip(100, 64, 0), Strip(164, 64, 4), Strip(228, 2, 2)]
    codes = random_codes(230, 140)
    scales = torch.rand(6, 2)
    decoded = decode_fp8(codes, scales, strips)
    np.testing.assert_array_equal(bits(decoded), bits_of(oracle(codes, scales, strips), torch.bfloat16))


@pytest.mark.parametrize("columns", [CHUNK // 128, CHUNK // 100, CHUNK + 5])
def test_matrices_wider_than_a_piece_of_work(columns: int) -> None:
    codes = random_codes(131, 257).repeat(1, columns // 257 + 1)[:3, :columns]
    scales = torch.rand(1, -(-columns // 128))
    plain = (codes.float() * scales.repeat_interleave(128, dim=1)[:, :columns]).bfloat16()
    assert torch.equal(decode_fp8(codes, scales), plain)
    if columns < 10_000:
        codes = random_codes(131, columns)
        scales = torch.rand(2, -(-columns // 128))
        grown = scales.repeat_interleave(128, dim=0)[:131].repeat_interleave(128, dim=1)[:, :columns]
        assert torch.equal(decode_fp8(codes, scales), (codes.float() * grown).bfloat16())


def test_one_nan_among_many_codes_is_found_wherever_it_is() -> None:
    codes = random_codes(300, 4096)
    scales = torch.rand(3, 32) + 0.1
    for position, byte in [((0, 0), 0x7F), ((299, 4095), 0xFF), ((128, 77), 0x7F)]:
        damaged = codes.clone()
        damaged.view(torch.uint8)[position] = byte
        decoded = decode_fp8(damaged, scales)
        assert decoded.isnan().nonzero().tolist() == [list(position)]
        decoded[position] = decode_fp8(codes, scales)[position]
        assert torch.equal(decoded, decode_fp8(codes, scales))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_out_of_any_strides_and_dtype(dtype: torch.dtype) -> None:
    codes, scales = random_codes(200, 190), torch.rand(2, 2)
    expected = decode_fp8(codes, scales, dtype=dtype)
    large = torch.full((3, 400, 400), 7.0, dtype=dtype)
    parameter = torch.nn.Parameter(torch.empty(190, 200, dtype=dtype))
    outs = [
        torch.empty(200, 190, dtype=dtype),
        parameter.t(),
        large[0, :200, :190],
        large[1, ::2, 5:195],
        large[2, :380:2, 3:203].t(),
    ]
    for out in outs:
        assert decode_fp8(codes, scales, out=out, dtype=torch.float16) is out
        assert torch.equal(out, expected)
    assert torch.equal(parameter.t(), expected)
    assert (large[0, 200:] == 7).all()
    assert (large[0, :, 190:] == 7).all()
    assert (large[1, 1::2] == 7).all()


def test_codes_of_any_strides() -> None:
    codes, scales = random_codes(200, 300), torch.rand(2, 3)
    expected = decode_fp8(codes, scales)
    assert torch.equal(decode_fp8(codes.t().contiguous().t(), scales), expected)
    assert torch.equal(decode_fp8(torch.cat([codes, codes], 1)[:, :300], scales.t().contiguous().t()), expected)
    assert torch.equal(decode_fp8(codes[:128, 128:], scales[:1, 1:]), expected[:128, 128:])


def test_decoding_where_subnormals_are_flushed() -> None:
    """The codes below 2^-6 are subnormal in e4m3; no step may turn them into subnormals of a wider type."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)[:, :127].view(FP8)
    for scale in (2.0**-110, 0.37, 2.0**119):
        scales = torch.tensor([[scale]])
        expected = bits_of(oracle(codes, scales, block_strips(1)), torch.bfloat16)
        with flushed_subnormals():
            decoded = decode_fp8(codes, scales)
        np.testing.assert_array_equal(bits(decoded), expected)


class LargestTensor(TorchDispatchMode):
    """The most bytes that one operation put into a new tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            # Views and `out` tensors are not new; their storage is the one of an argument.
            given = [a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_no_temporary_is_larger_than_a_piece() -> None:
    codes, scales = random_codes(2048, 2048), torch.rand(16, 16)
    out = torch.empty(2048, 2048)
    with LargestTensor() as decoding:
        decode_fp8(codes, scales, out=out)
    assert 0 < decoding.largest <= 4 * CHUNK  # one strip as fp32; the matrix would need 16 MiB


@pytest.mark.parametrize(
    ("codes", "scales", "error", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1, 1), TypeError, "float8_e4m3fn"),
        (torch.zeros(4, 4).to(FP8), torch.ones(1, 1).bfloat16(), TypeError, "bfloat16"),
        (torch.zeros(4, 4).to(FP8), torch.ones(2, 1), CheckpointError, r"\[2, 1\].*\[4, 4\].*\[1, 1\]"),
        (torch.zeros(4, 4).to(FP8), torch.ones(1, 2), CheckpointError, r"\[1, 2\]"),
        (torch.zeros(129, 129).to(FP8), torch.ones(1, 2), CheckpointError, r"\[2, 2\]"),
        (torch.zeros(4).to(FP8), torch.ones(1, 1), CheckpointError, "matrices"),
        (torch.zeros(4, 4).to(FP8), torch.ones(1), CheckpointError, "matrices"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(codes, scales, error, message) -> None:
    with pytest.raises(error, match=message):
        decode_fp8(codes, scales)


def test_outs_and_strips_that_do_not_fit_are_refused() -> None:
    codes, scales = random_codes(200, 10), torch.ones(2, 1)
    for out in (torch.empty(10, 200), torch.empty(200, 10, dtype=torch.int32), torch.empty(200, 10).to(FP8)):
        with pytest.raises(ValueError, match="out is"):
            decode_fp8(codes, scales, out=out)
    with pytest.raises(ValueError, match="cover 128 rows, the matrix has 200"):
        decode_fp8(codes, scales, [Strip(0, 128, 0)])
    with pytest.raises(CheckpointError, match="do not fit"):
        decode_fp8(codes, scales, [Strip(0, 128, 0), Strip(128, 72, 2)])


def test_check_scales() -> None:
    check_scales(torch.tensor([[0.0, 1e-45, 3e38]]), "key")
    check_scales(torch.empty(0, 3), "key")
    for value in (math.nan, math.inf, -math.inf, -1e-30):
        with pytest.raises(CheckpointError, match=r"layers.1.x: 1 of 4 .*first: (nan|inf|-inf|-1e-30|-1\.0)"):
            check_scales(torch.tensor([[1.0, 1.0], [value, 1.0]]), "layers.1.x")
    for dtype in (torch.bfloat16, torch.float64, torch.uint8):
        with pytest.raises(CheckpointError, match=f"layers.1.x.*float32.*{dtype}"):
            check_scales(torch.ones(1, 1, dtype=dtype), "layers.1.x")
