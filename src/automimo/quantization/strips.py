"""Which rows of an FP8 matrix share a row of scales.

A block covers 128 rows and 128 columns; blocks at an edge are partial. Columns are always cut at multiples of 128, but
rows are not: where a matrix was quantised in pieces (tensor-parallel shards, attention heads), the grid of rows
restarts at every piece, and a row of scales can even belong to rows of two matrices. A list of strips says it all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows `row` .. `row + rows` of a matrix that share the scale row `scale_row`; 1 <= rows <= 128."""

    row: int
    rows: int
    scale_row: int


@lru_cache
def block_strips(rows: int, shards: int = 1) -> tuple[Strip, ...]:
    """Strips of a matrix of `rows` rows that is a stack of `shards` equal shards.

    Every shard has its own grid of 128-row blocks, whose last block is partial; the scale rows of the shards follow
    each other. Raises ValueError when the rows cannot be shared out equally.
    """
    shard_rows = _shard_rows(rows, shards)
    strips: list[Strip] = []
    for begin in range(0, rows, shard_rows) if rows else ():
        for row in range(begin, begin + shard_rows, BLOCK):
            strips.append(Strip(row, min(BLOCK, begin + shard_rows - row), len(strips)))
    return tuple(strips)


def scale_shape(rows: int, columns: int, shards: int = 1) -> tuple[int, int]:
    """Shape of the scales of a [rows, columns] matrix made of `shards` shards, as `block_strips` cuts it."""
    return shards * -(-_shard_rows(rows, shards) // BLOCK), -(-columns // BLOCK)


def check_strips(strips: Sequence[Strip], rows: int) -> int:
    """The number of scale rows that the strips speak of: one more than the largest `scale_row`, 0 without strips.

    Raises ValueError unless the strips cover rows 0 .. `rows` exactly, in order, each with 1 to 128 rows.
    """
    end = 0
    for strip in strips:
        if strip.row != end or not 1 <= strip.rows <= BLOCK or strip.scale_row < 0:
            raise ValueError(f"{strip} does not follow row {end}: strips cover the rows in order, 1 to {BLOCK} at once")
        end += strip.rows
    if end != rows:
        raise ValueError(f"the strips cover {end} rows, the matrix has {rows}")
    return max((strip.scale_row for strip in strips), default=-1) + 1


def _shard_rows(rows: int, shards: int) -> int:
    if shards < 1 or rows < 0 or rows % shards:
        raise ValueError(f"{rows} rows cannot be shared out to {shards} equal shards")
    return rows // shards
