"""The packing plan: conservation, first-fit-decreasing against a slow twin, overflow, order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automimo.data.packing import Piece, plan_epoch, shuffled
from automimo.errors import DataError

lengths_of_documents = st.lists(st.integers(1, 40), max_size=60)


def slow_first_fit_decreasing(sizes, capacity):
    rows = []
    for size in sorted(sizes, reverse=True):
        for row in rows:
            if sum(row) + size <= capacity:
                row.append(size)
                break
        else:
            rows.append([size])
    return rows


def cut_by_hand(length, capacity):
    return [capacity] * (length // capacity) + ([length % capacity] if length % capacity else [])


@settings(max_examples=300, deadline=None)
@given(lengths=lengths_of_documents, capacity=st.integers(1, 45), packing=st.booleans(), epoch=st.integers(0, 3))
def test_split_conserves_every_token_and_packs_first_fit_decreasing(lengths, capacity, packing, epoch):
    plan = plan_epoch(lengths, sequence_length=capacity, overflow="split", packing=packing, seed=3, epoch=epoch)
    covered = sorted((p.example, i) for row in plan.rows for p in row for i in range(p.start, p.stop))
    assert covered == [(example, i) for example, n in enumerate(lengths) for i in range(n)]
    assert all(row for row in plan.rows)
    assert all(sum(p.stop - p.start for p in row) <= capacity for row in plan.rows)
    sizes = sorted([p.stop - p.start for p in row] for row in plan.rows)
    pieces = [size for n in lengths for size in cut_by_hand(n, capacity)]
    if packing:
        assert sizes == sorted(slow_first_fit_decreasing(pieces, capacity))
    else:
        assert sizes == sorted([size] for size in pieces)
    assert plan.tokens == sum(lengths)
    assert plan.split_count == sum(n > capacity for n in lengths)
    assert (plan.dropped, plan.dropped_tokens, plan.idle_pieces, plan.idle_tokens) == (0, 0, 0, 0)
    if lengths:
        assert plan.efficiency == pytest.approx(sum(lengths) / (len(plan.rows) * capacity))
    else:
        assert (plan.rows, plan.efficiency) == ([], 0.0)


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of_documents, capacity=st.integers(1, 45), packing=st.booleans())
def test_drop_leaves_out_whole_examples_and_counts_them(lengths, capacity, packing):
    plan = plan_epoch(lengths, sequence_length=capacity, overflow="drop", packing=packing)
    assert sorted(p for row in plan.rows for p in row) == [
        Piece(i, 0, n) for i, n in enumerate(lengths) if n <= capacity
    ]
    assert plan.dropped == sum(n > capacity for n in lengths)
    assert plan.dropped_tokens == sum(n for n in lengths if n > capacity)
    assert plan.tokens + plan.dropped_tokens == sum(lengths)
    assert plan.split_count == 0


def test_error_names_the_example_and_the_numbers():
    with pytest.raises(DataError) as caught:
        plan_epoch([3, 90, 5, 120], sequence_length=64, name=["a:1", "a:2", "a:3", "a:4"].__getitem__)
    message = str(caught.value)
    for part in (
        "example 1 (a:2) has 90 tokens",
        "sequence_length is 64",
        "2 of 4",
        "example 3 (a:4) with 120",
        "split",
    ):
        assert part in message
    assert plan_epoch([3, 64], sequence_length=64).tokens == 67
    with pytest.raises(DataError, match="example 0 has 65 tokens"):
        plan_epoch([65], sequence_length=64)


def test_pieces_without_a_target_are_left_out_and_counted():
    """A prompt of 25 tokens whose answer is in tokens 27 to 29; short examples are never asked about."""
    plan = plan_epoch(
        [30, 4], sequence_length=10, overflow="split", has_target=lambda p: p.example == 1 or p.stop > 27, packing=False
    )
    assert sorted(p for row in plan.rows for p in row) == [Piece(0, 20, 30), Piece(1, 0, 4)]
    assert (plan.idle_pieces, plan.idle_tokens, plan.split_count, plan.tokens) == (2, 20, 1, 14)


def test_the_plan_follows_from_seed_and_epoch_alone():
    lengths = [(i * 37) % 50 + 1 for i in range(300)]

    def rows(**keys):
        return plan_epoch(lengths, sequence_length=64, **keys).rows

    assert rows(seed=1, epoch=2) == rows(seed=1, epoch=2)
    others = [rows(seed=1, epoch=3), rows(seed=2, epoch=2), rows(seed=2, epoch=1)]
    assert all(other != rows(seed=1, epoch=2) for other in others)
    # Ties too: the same documents do not always meet in a row.
    together = {frozenset(p.example for p in row) for row in rows(seed=1, epoch=2)}
    assert together != {frozenset(p.example for p in row) for row in rows(seed=1, epoch=3)}
    # And the rows are not in the order of their sizes.
    firsts = [row[0].stop for row in rows(seed=1, epoch=2)]
    assert firsts != sorted(firsts, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "keys", "message"),
    [
        ([1], {"sequence_length": 0}, "at least 1, not 0"),
        ([4, 0], {"sequence_length": 8}, "example 1 has no tokens"),
        ([4], {"sequence_length": 8, "overflow": "truncate"}, "error, drop or split, not 'truncate'"),
    ],
)
def test_wrong_arguments(lengths, keys, message):
    with pytest.raises(ValueError, match=message):
        plan_epoch(lengths, **keys)


def test_a_big_plan_does_not_go_quadratic():
    """60,000 examples into 60,000 / 3 rows: a scan over rows would need 10^9 steps and run into the time limit."""
    lengths = [i % 512 + 1 for i in range(60_000)]
    plan = plan_epoch(lengths, sequence_length=700)
    assert plan.tokens == sum(lengths) and plan.efficiency > 0.97


# The permutation


def splitmix64(state):
    """Steele, Lea, Flood (2014), one output for a state, in plain integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_the_plain_splitmix64_gives_the_published_numbers():
    """First outputs for the state 1234567, as in the test vectors of the generator's common ports."""
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973


@pytest.mark.parametrize("key", [(), (0,), (7, 1), (2**63, -1, 12)])
def test_the_permutation_sorts_by_splitmix64(key):
    state = 0
    for part in key:
        state = splitmix64(state ^ (part % 2**64))
    keys = [splitmix64((state + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(50)]
    assert shuffled(50, *key).tolist() == sorted(range(50), key=keys.__getitem__)
    assert shuffled(0, *key).tolist() == []


def test_permutations_are_even():
    """Each of 6 items is first about 1/6 of the time over 6,000 keys; 5 standard deviations are 144."""
    firsts = [int(shuffled(6, 11, epoch)[0]) for epoch in range(6000)]
    assert all(abs(firsts.count(i) - 1000) < 145 for i in range(6))
