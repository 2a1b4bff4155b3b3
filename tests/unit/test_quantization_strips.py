"""Strips of rows against a row-by-row count; shapes of scales against the released ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automimo.quantization import BLOCK, Strip, block_strips, scale_shape
from automimo.quantization.strips import check_strips


def scale_row_of_every_row(rows: int, shards: int) -> list[int]:
    """Counted row by row: a new scale row at every shard and after every 128 rows of a shard."""
    result, scale_row, used = [], -1, 0
    for row in range(rows):
        if row % (rows // shards) == 0 or used == 128:
            scale_row, used = scale_row + 1, 0
        used += 1
        result.append(scale_row)
    return result


@given(st.integers(1, 8), st.integers(0, 700), st.integers(0, 400))
def test_strips_agree_with_a_count_of_rows(shards: int, shard_rows: int, columns: int) -> None:
    rows = shards * shard_rows
    strips = block_strips(rows, shards)
    spread = [strip.scale_row for strip in strips for _ in range(strip.rows)]
    assert spread == scale_row_of_every_row(rows, shards)
    scale_rows, scale_columns = scale_shape(rows, columns, shards)
    assert check_strips(strips, rows) == len(strips) == scale_rows
    assert (scale_columns - 1) * BLOCK < columns <= scale_columns * BLOCK


@pytest.mark.parametrize(
    ("rows", "columns", "shards", "shape"),
    [
        (13568, 4096, 4, (108, 32)),  # V2.5, global attention: the last block of a shard has 64 rows
        (14848, 4096, 4, (116, 32)),  # V2.5, sliding window: shards end with a whole block
        (27136, 6144, 8, (216, 48)),  # V2.5-Pro
        (13568, 4096, 1, (106, 32)),
        (768, 4096, 4, (8, 32)),  # V2-Flash, K of global attention: every head of 192 rows is a shard of its own
        (2048, 6144, 1, (16, 48)),
        (0, 6144, 1, (0, 48)),
        (5, 0, 1, (1, 0)),
    ],
)
def test_released_shapes(rows: int, columns: int, shards: int, shape: tuple[int, int]) -> None:
    assert scale_shape(rows, columns, shards) == shape
    assert len(block_strips(rows, shards)) == shape[0]


def test_partial_block_at_the_end_of_a_shard() -> None:
    assert block_strips(384, 2) == (Strip(0, 128, 0), Strip(128, 64, 1), Strip(192, 128, 2), Strip(320, 64, 3))


@pytest.mark.parametrize(("rows", "shards"), [(10, 3), (10, 0), (10, -2), (-4, 2)])
def test_rows_that_cannot_be_shared_out_are_refused(rows: int, shards: int) -> None:
    with pytest.raises(ValueError, match="equal shards"):
        block_strips(rows, shards)
    with pytest.raises(ValueError, match="equal shards"):
        scale_shape(rows, 128, shards)


@pytest.mark.parametrize(
    "strips",
    [
        [Strip(0, 128, 0)],  # too few rows
        [Strip(0, 128, 0), Strip(128, 72, 1), Strip(200, 1, 1)],  # too many
        [Strip(0, 128, 0), Strip(100, 100, 1)],  # overlap
        [Strip(0, 100, 0), Strip(128, 72, 1)],  # hole
        [Strip(100, 100, 1), Strip(0, 100, 0)],  # out of order
        [Strip(0, 129, 0), Strip(129, 71, 1)],  # larger than a block
        [Strip(0, 128, 0), Strip(128, 0, 1), Strip(128, 72, 1)],  # empty strip
        [Strip(0, 128, -1), Strip(128, 72, 0)],
    ],
)
def test_strips_that_do_not_cover_the_rows_are_refused(strips: list[Strip]) -> None:
    with pytest.raises(ValueError, match="rows"):
        check_strips(strips, 200)


def test_strips_may_share_a_scale_row() -> None:
    assert check_strips([Strip(0, 64, 0), Strip(64, 64, 5), Strip(128, 64, 0)], 192) == 6
    assert check_strips([], 0) == 0
