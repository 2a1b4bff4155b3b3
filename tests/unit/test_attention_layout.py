"""Document layouts: what they say about each token, that their tiles cover the visible pairs, and stay small."""

import pytest
import torch
from attention_oracle import bounds, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.attention import build_layout
from automimo.attention.tiled import _chunks
from automimo.errors import ConfigError

LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 40), st.sampled_from([64, 127, 128, 129, 257, 400])), max_size=8
)


def test_fields():
    for given_bounds in ([0, 3, 3, 4], torch.tensor([0, 3, 3, 4]), torch.tensor([0, 3, 3, 4], dtype=torch.int32)):
        layout = build_layout(given_bounds, window=2)
        assert layout.cu_seqlens.tolist() == [0, 3, 3, 4]
        assert layout.cu_seqlens.dtype == torch.int32
        assert layout.lengths == (3, 0, 1)
        assert (layout.total, layout.max_length, layout.window) == (4, 3, 2)
        assert layout.position_ids.tolist() == [0, 1, 2, 0]
        assert layout.document_ids.tolist() == [0, 0, 0, 2]
        assert layout.position_ids.dtype == layout.document_ids.dtype == torch.int64
    assert build_layout([0], window=None).total == 0


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([1, 3], r"must start at 0, not \[1\]"),
        ([], "must start at 0"),
        ([0, 4, 3], "entry 2 is 3 after 4"),
        (torch.tensor([[0, 3]]), r"shape \(1, 2\)"),
        (torch.tensor([0.0, 3.0]), "float32"),
        ([0, 1.5], "integers"),
    ],
)
def test_bad_boundaries(cu_seqlens, message):
    with pytest.raises(ConfigError, match=message):
        build_layout(cu_seqlens, window=None)


def test_bad_windows():
    with pytest.raises(ConfigError, match="window is 0"):
        build_layout([0, 3], window=0)
    layout = build_layout([0, 10], window=4)
    with pytest.raises(ConfigError, match="window 5 was asked of a layout that was built for window 4"):
        layout.tiles(5)
    # A window that reaches over the longest document is full attention, for any layout.
    assert layout.tiles(10) is layout.tiles(None)


def seen_pairs(layout, window, group):
    """How often the tiles compute each visible pair, int [T, T]; pairs with a bias of -inf do not count."""
    total = torch.zeros(layout.total, layout.total, dtype=torch.int64)
    for chunk in _chunks(layout.tiles(window), group, torch.float32):
        scores = torch.zeros(chunk.shape)
        chunk.add_bias(scores)
        assert ((scores == 0) | (scores == float("-inf"))).all()
        seen = (scores == 0).view(chunk.count, chunk.rows, group, -1)
        assert (seen == seen[:, :, :1]).all()
        for tile in range(chunk.count):
            first = chunk.first_row + tile * chunk.rows
            total[first : first + chunk.rows, first - chunk.reach : first + chunk.rows] += seen[tile, :, 0]
    return total


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, window=st.one_of(st.none(), st.integers(1, 300)), group=st.sampled_from([1, 3]))
def test_tiles_cover_exactly_the_visible_pairs_once(lengths, window, group):
    layout = build_layout(bounds(lengths), window=window)
    expected = torch.zeros(layout.total, layout.total, dtype=torch.int64)
    for row, keys in enumerate(visible_keys(lengths, window)):
        expected[row, keys.start : keys.stop] = 1
    assert torch.equal(seen_pairs(layout, window, group), expected)


@pytest.mark.parametrize(("length", "window"), [(1500, None), (1500, 700), (4700, None)])
def test_tiles_of_long_documents(length, window):
    lengths = [5, length, 7]
    layout = build_layout(bounds(lengths), window=window)
    row = torch.arange(layout.total)
    document = torch.repeat_interleave(torch.tensor(lengths))
    distance = row[:, None] - row
    expected = (document[:, None] == document) & (distance >= 0) & (distance < (window or length))
    assert torch.equal(seen_pairs(layout, window, 2) == 1, expected)


def test_many_short_documents_need_no_loop_per_document():
    lengths = [1 + n % 100 for n in range(600)]
    layout = build_layout(bounds(lengths), window=16)
    for window in (None, 16):
        assert sum(1 for _ in _chunks(layout.tiles(window), 4, torch.float32)) < 60
    ones = build_layout(list(range(2001)), window=128)
    assert sum(1 for _ in _chunks(ones.tiles(None), 4, torch.float32)) < 10


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                # An expanded view owns no more than its storage.
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("window", [None, 128, 1000])
@pytest.mark.parametrize("mean", [40, 1000, None])
def test_building_a_layout_is_linear_in_memory(window, mean):
    largest = []
    for tokens in (4096, 8192):
        lengths = [tokens] if mean is None else [mean] * (tokens // mean)
        with LargestTensor() as record:
            build_layout(bounds(lengths), window=window)
        largest.append(record.numel)
        assert record.numel < tokens * 300
    assert largest[1] <= 2.2 * largest[0]
