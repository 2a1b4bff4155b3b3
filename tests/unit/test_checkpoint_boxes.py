"""The arithmetic of parts of tensors, against masks and slices of small arrays."""

import json
import zlib
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from automimo.checkpoint.boxes import (
    Box,
    SavedTensor,
    boxes_problem,
    contiguous_pieces,
    parse_part_key,
    part_key,
)
from automimo.checkpoint.safetensors_file import dtype_name
from automimo.checkpoint.saved_step import SavedFile, load_tensors, read_step, step_document
from automimo.checkpoint.writer import tensor_entry, write_safetensors

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that make up `shape`, as shards do: each dimension cut anywhere, also twice at the same place."""
    ranges = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        ranges.append(list(pairwise([0, *cuts, size])))
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*ranges)]
    return draw(st.permutations(boxes))


@st.composite
def shape_with_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that make it up, or not: some lost, doubled, moved or resized."""
    shape = draw(SHAPES)
    boxes = list(draw(grids(shape)))
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(boxes) - 1)) if boxes else None
        if index is None:
            break
        box = boxes[index]
        change = draw(st.sampled_from(["lose", "double", "move", "resize"]))
        by = draw(st.tuples(*(st.integers(-1, 1) for _ in shape)))
        moved = tuple(max(-1, a + d) for a, d in zip(box.offsets, by, strict=True))
        resized = tuple(max(0, a + d) for a, d in zip(box.sizes, by, strict=True))
        if change == "lose":
            del boxes[index]
        elif change == "double":
            boxes.append(box)
        else:
            boxes[index] = Box(moved, box.sizes) if change == "move" else Box(box.offsets, resized)
    return shape, boxes


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


@settings(max_examples=400, deadline=None)
@given(shape_with_boxes())
def test_boxes_are_complete_exactly_when_every_element_is_there_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    inside = all(
        a >= 0 and a + n <= size for box in boxes for a, n, size in zip(box.offsets, box.sizes, shape, strict=True)
    )
    count = np.zeros(shape, int)
    if inside:
        for box in boxes:
            count[slices(box)] += 1
    assert (boxes_problem(shape, boxes) is None) == (inside and bool((count == 1).all()))


def test_boxes_of_another_number_of_dimensions() -> None:
    assert "number of dimensions" in str(boxes_problem((4,), [Box((0, 0), (4, 1))]))
    assert "number of dimensions" in str(boxes_problem((4,), [Box((0,), (4, 1))]))
    assert "number of dimensions" in str(boxes_problem((), [Box((0,), (1,))]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_contiguous_pieces_are_the_box_in_as_few_runs_as_there_are(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(st.sampled_from(data.draw(grids(shape))))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    expected = whole[slices(box)]
    found = np.full(box.sizes, -1)
    pieces = list(contiguous_pieces(shape, box.offsets, box.sizes))
    for index, start, piece in pieces:
        count = int(np.prod(piece))
        found[index] = np.arange(start, start + count).reshape(piece)
    assert (found == expected).all()
    # A run ends where the next element of the box is not the next one of the tensor.
    flat = expected.reshape(-1)
    runs = 1 + int((np.diff(flat) != 1).sum()) if flat.size else 0
    ones = all(a != 1 for a in shape)  # along dimensions of size 1 there may be one piece more than runs
    assert len(pieces) == runs if ones and 1 not in box.sizes else len(pieces) >= runs


@given(st.text(), st.lists(st.integers(0, 2**62), max_size=5))
def test_keys_of_parts_come_back(name: str, offsets: list[int]) -> None:
    assert parse_part_key(part_key(name, offsets)) == (name, tuple(offsets))


@pytest.mark.parametrize("key", ["", "w", "w@x", "w@-1", "w@1,", "w@,1", "w@01", "w@1.0", "w@ 1", "w@٣", f"w@{10**30}"])
def test_keys_that_are_none(key: str) -> None:
    assert parse_part_key(key) is None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_tensor_saved_in_any_parts_is_loaded_whole(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]))
    value = (torch.arange(int(np.prod(shape))) % (2 if dtype == torch.bool else 251)).to(dtype).reshape(shape)
    boxes = data.draw(grids(shape))
    ranks = [data.draw(st.integers(0, 2)) for _ in boxes]
    keys = [part_key("w", box.offsets) for box in boxes]
    # Parts without elements may share their offsets with others; a save never writes them.
    filled = [i for i in range(len(boxes)) if boxes[i].numel]
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = {}
        for rank in range(3):
            path = folder / f"tensors-{rank:05d}.safetensors"
            mine = [i for i in filled if ranks[i] == rank]
            write_safetensors(path, [tensor_entry(keys[i], value[slices(boxes[i])].contiguous()) for i in mine])
            raw = path.read_bytes()
            files[path.name] = SavedFile(len(raw), zlib.crc32(raw))
        saved = SavedTensor(dtype_name(dtype), shape)
        (folder / "state.json").write_text(json.dumps(step_document(3, {}, {"w": saved}, files)))
        strided = torch.zeros((*reversed(shape), 2), dtype=dtype)[..., 0]
        destination = strided.permute(*reversed(range(len(shape)))) if len(shape) > 1 else strided
        load_tensors(read_step(folder), {"w": destination})
    assert torch.equal(destination, value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_torch_asks_for_every_element_of_a_shard_once(data: st.DataObject) -> None:
    """What the reader is asked for (DCP's planner) together with what it reads gives each shard of another layout."""
    shape = data.draw(SHAPES)
    value = np.arange(int(np.prod(shape))).reshape(shape)
    saved = [box for box in data.draw(grids(shape)) if box.numel]
    metadata = TensorStorageMetadata(
        TensorProperties(dtype=torch.int64), torch.Size(shape), [ChunkStorageMetadata(*torch_box(box)) for box in saved]
    )
    for box in data.draw(grids(shape)):
        shard = np.full(box.sizes, -1)
        for item in create_read_items_for_chunk_list("w", metadata, [ChunkStorageMetadata(*torch_box(box))]):
            (part,) = [part for part in saved if part.offsets == tuple(item.storage_index.offset)]
            flat = value[slices(part)].reshape(-1)
            target = shard[(*slices(Box(tuple(item.dest_offsets), tuple(item.lengths))), ...)]  # a view, never a number
            for index, start, piece in contiguous_pieces(part.sizes, item.storage_offsets, item.lengths):
                target[index] = flat[start : start + int(np.prod(piece))].reshape(piece)
        assert (shard == value[slices(box)]).all()


def torch_box(box: Box) -> tuple[torch.Size, torch.Size]:
    return torch.Size(box.offsets), torch.Size(box.sizes)
