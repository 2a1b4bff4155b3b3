"""FP8 and MXFP4, encode and decode: ours against the plain formulation and against a copy, in one run.

Same data, same process; the sides take turns, so that a busy machine slows all of them alike, and the best of the turns
counts. Before anything is timed, the results are compared bit for bit. Both sides write into memory that is there
already, as when a parameter is loaded; `new` is ours with a result allocated by the call. Rates are in thousand
million matrix elements a second; the copy is one of bf16 elements, and `of copy` compares bytes moved a second.

    python benchmarks/quantization.py [--quick] [--threads N]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measure import peak_mib, reset_peak
from torch import Tensor

from automimo.quantization import BLOCK, GROUP, decode_fp8, decode_mxfp4, encode_fp8, encode_mxfp4, scale_shape

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LIMITS = {
    "FP8 -> BF16": "six passes over cached pieces: widen, scale the exponent, mask, to fp32, multiply, to bf16",
    "BF16 -> FP8": "the cast from fp32 to e4m3 (half of the time), then the column maxima",
    "MXFP4 -> BF16": "one table read per byte (four fifths of the time): a gather, not a vector load",
    "BF16 -> MXFP4": "twenty passes over cached pieces: no cast of torch does this rounding",
}
# Decoding at this multiple of the plain formulation is what the project asks for.
REQUIRED = {"FP8 -> BF16": 8.0, "MXFP4 -> BF16": 4.0}


@dataclass(frozen=True)
class Side:
    """One conversion: ours (into given memory if it can), ours with a new result, the plain way; bytes an element."""

    name: str
    ours: Callable[[], object]
    new: Callable[[], object]
    plain: Callable[[], object]
    bytes_moved: float


def plain_decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    rows, columns = codes.shape
    blocks = codes.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).float()
    return (blocks * scales[:, None, :, None]).view(rows, columns).to(torch.bfloat16)


def plain_encode_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    blocks = matrix.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).float()
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn), scales


def plain_decode_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    low, high = E2M1[(packed & 15).int()], E2M1[(packed >> 4).int()]
    values = torch.stack([low, high], dim=-1).view(packed.shape[0], -1, GROUP)
    return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).view(packed.shape[0], -1).to(torch.bfloat16)


def plain_encode_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    groups = matrix.float().view(matrix.shape[0], -1, GROUP)
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 3
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = (torch.round(size / step) * step).clamp_max(6)
    codes = torch.bucketize(rounded, E2M1[:8]).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    codes = codes.view(matrix.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponent + 127).to(torch.uint8)


def same_bits(ours: object, plain: object) -> bool:
    pairs = zip(ours, plain, strict=True) if isinstance(ours, tuple) else [(ours, plain)]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def sides(rows: int, columns: int) -> list[Side]:
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns).to(torch.bfloat16)
    codes, scales = encode_fp8(matrix)
    assert scales.shape == scale_shape(rows, columns)
    packed, exponents = encode_mxfp4(matrix)
    out = torch.empty_like(matrix)
    return [
        Side(
            "FP8 -> BF16",
            lambda: decode_fp8(codes, scales, out=out),
            lambda: decode_fp8(codes, scales),
            lambda: out.copy_(plain_decode_fp8(codes, scales)),
            1 + 2 + 4 / BLOCK**2,
        ),
        Side(
            "BF16 -> FP8",
            lambda: encode_fp8(matrix),
            lambda: encode_fp8(matrix),
            lambda: plain_encode_fp8(matrix),
            2 + 1 + 4 / BLOCK**2,
        ),
        Side(
            "MXFP4 -> BF16",
            lambda: decode_mxfp4(packed, exponents, out=out),
            lambda: decode_mxfp4(packed, exponents),
            lambda: out.copy_(plain_decode_mxfp4(packed, exponents)),
            0.5 + 2 + 1 / GROUP,
        ),
        Side(
            "BF16 -> MXFP4",
            lambda: encode_mxfp4(matrix),
            lambda: encode_mxfp4(matrix),
            lambda: plain_encode_mxfp4(matrix),
            2 + 0.5 + 1 / GROUP,
        ),
    ]


def best_seconds(works: list[Callable[[], object]], turns: int) -> list[float]:
    """Best time of each over the turns, after one that warms up."""
    best = [float("inf")] * len(works)
    for turn in range(turns + 1):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def peak_of(work: Callable[[], object]) -> float:
    """MiB above where the process stood, results included."""
    reset_peak()
    before = peak_mib()
    work()
    return peak_mib() - before


def run_case(rows: int, columns: int, turns: int) -> bool:
    """Print one line per conversion; whether all reach what is required of them."""
    elements = rows * columns
    source, target = torch.randn(rows, columns).to(torch.bfloat16), torch.empty(rows, columns, dtype=torch.bfloat16)
    reached = True
    print(f"{rows} x {columns}, {elements / 1e6:.1f} M elements, {2 * elements / 2**20:.0f} MiB as bf16")
    for side in sides(rows, columns):
        assert same_bits(side.ours(), side.plain()), f"{side.name}: ours and the plain formulation differ"
        works = [side.ours, side.new, side.plain, lambda: target.copy_(source)]
        ours, new, plain, copy = best_seconds(works, turns)
        bandwidth = side.bytes_moved / ours / (4 / copy)
        required = REQUIRED.get(side.name)
        note = f" (required {required:g})" if required else ""
        reached &= plain / ours >= (required or 0)
        print(
            f"  {side.name:13} {elements / ours / 1e9:5.2f} G/s  x{plain / ours:5.1f} plain{note:15}"
            f"  new {elements / new / 1e9:5.2f} G/s  {bandwidth:4.0%} of copy ({4 * elements / copy / 1e9:.0f} GB/s)"
            f"  peak {peak_of(side.ours):5.0f} MiB, plain {peak_of(side.plain):5.0f} MiB",
            flush=True,
        )
        print(f"  {'':13} limited by: {LIMITS[side.name]}")
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small matrix")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads")
    shapes = [(512, 1024)] if options.quick else [(8192, 4096), (2048, 4096)]
    reached = [run_case(rows, columns, turns=2 if options.quick else 7) for rows, columns in shapes]
    print("required ratios reached" if all(reached) else "REQUIRED RATIOS NOT REACHED (is the machine busy?)")


if __name__ == "__main__":
    main()
