"""The parts of a tensor that lie in several files: names, whether they make up the whole, and where their bytes are.

A part is a box, `offsets` and `sizes` along every dimension of the whole tensor; a scalar has one box without
dimensions. In a file a part is a tensor of its own whose key is `NAME@OFFSETS` (`model/norm.weight@1024`,
`model/experts.up@0,64,0`, `optimizer/norm.step@` for a scalar), so that the file alone says what is in it.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

_OFFSETS = re.compile(r"(?:(?:0|[1-9]\d{0,18})(?:,(?:0|[1-9]\d{0,18}))*)?")


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: its safetensors dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: elements `offsets[d]` to `offsets[d] + sizes[d]` along each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlaps(self, other: "Box") -> bool:
        """Whether the two have an element in common; boxes without elements have none."""
        return all(
            max(mine, theirs) < min(mine + size, theirs + other_size)
            for mine, size, theirs, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


def part_key(name: str, offsets: Sequence[int]) -> str:
    """The key of the part of tensor `name` that begins at `offsets`."""
    return f"{name}@{','.join(str(offset) for offset in offsets)}"


def parse_part_key(key: str) -> tuple[str, tuple[int, ...]] | None:
    """Name and offsets of a part; None for a key that is not one."""
    name, mark, offsets = key.rpartition("@")
    if not mark or not _OFFSETS.fullmatch(offsets):
        return None
    return name, tuple(int(offset) for offset in offsets.split(",")) if offsets else ()


def boxes_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not hold every element of a tensor of `shape` exactly once; None when they do.

    Inside the tensor, disjoint, and as many elements as it has: then nothing is missing either. Boxes are compared
    along the dimension with the most offsets, each only with those that it meets there: for a grid of a × b boxes with
    a >= b that is a · b² comparisons and not (a · b)².
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"the part at {list(box.offsets)} of size {list(box.sizes)} has another number of dimensions"
        for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                return f"the part at {list(box.offsets)} of size {list(box.sizes)} lies outside it"
    filled = [box for box in boxes if box.numel]
    if shape:
        axis = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in filled}))
        active: list[Box] = []
        for box in sorted(filled, key=lambda box: box.offsets[axis]):
            active = [other for other in active if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
            if any(box.overlaps(other) for other in active):
                return f"the part at {list(box.offsets)} overlaps another one"
            active.append(box)
    elif len(filled) > 1:
        return "a scalar is there twice"
    count, whole = sum(box.numel for box in filled), math.prod(shape)
    if count != whole:
        return f"its parts hold {count} of its {whole} elements"
    return None


def contiguous_pieces(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Cut the box (`offsets`, `lengths`) of a row-major tensor of `sizes` into pieces that are contiguous in it.

    Yields (index into the box, first element in the tensor, shape of the piece): as few and as long as they can be,
    since each is one read. Nothing for a box without elements.
    """
    if 0 in lengths:
        return
    # Behind the last dimension that is cut every row is whole, so one run goes along that dimension.
    cut = max((d for d in range(len(sizes)) if lengths[d] != sizes[d]), default=0)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in product(*(range(length) for length in lengths[:cut])):
        start = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield index, start, tuple(lengths[cut:])
