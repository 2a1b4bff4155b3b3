"""What the formats have in common: work by rows that fit the caches, results that are written once.

A pass over a whole matrix reads and writes main memory; the same pass over a piece that stays in the caches is several
times as fast. So every format works through all its steps on one piece, then goes to the next, on buffers of its own
call (several threads may decode at once). PyTorch shares the steps of a piece out to its threads.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# Elements of a piece: 2 MiB as fp32. Half as many cost 20 % (too little work per call), twice as many gain nothing.
CHUNK = 1 << 19
# numpy asks the system for 2 MiB pages from here on.
HUGE_BYTES = 1 << 22


def row_chunks(begin: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Cut rows `begin` .. `begin + rows` into runs (first row, number of rows) of about `CHUNK` elements."""
    step = max(1, CHUNK // max(1, columns))
    for row in range(begin, begin + rows, step):
        yield row, min(step, begin + rows - row)


def new_matrix(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor.

    The first touch of a fresh 4 KiB page costs as much time as decoding four thousand elements: a new result of 64 MiB
    took three times as long as one that was there already. numpy's allocator asks for huge pages where the system gives
    them only on request, torch's does not.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(*shape)


def result(shape: Sequence[int], dtype: torch.dtype, device: torch.device, out: Tensor | None) -> Tensor:
    """`out` if there is one, else a new tensor. Raises ValueError when `out` cannot hold floats of this shape."""
    if out is None:
        return new_matrix(shape, dtype, device)
    if tuple(out.shape) != tuple(shape) or not wide_float(out.dtype):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; floats of 16 bits or more, {tuple(shape)}, are needed"
        )
    return out


def wide_float(dtype: torch.dtype) -> bool:
    """Whether the dtype is one of ordinary floats (16 bits and more)."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def store(target: Tensor, values: Tensor) -> None:
    """Copy the contiguous matrix `values` into `target`, of any strides and dtype.

    A target that is a transposed view is written in two steps, because torch transposes quickly only between
    contiguous matrices of one dtype: 26 ms instead of 51 ms for 8192 x 4096 values into bf16.
    """
    if target.stride(0) == 1 and target.stride(1) != 1:
        target.t().copy_(values.to(target.dtype).t().contiguous())
    else:
        target.copy_(values)
