"""The plan of the halo exchange against what each single token sees."""

from itertools import accumulate, pairwise

import pytest
import torch
from attention_oracle import visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from automimo.attention.halo import HALO_LIMIT, HaloPlan, halo_pays, plan_halo
from automimo.distributed.context.partition import thd_partition
from automimo.errors import ConfigError


def boundaries_of(size: int, multiples: list[int]) -> list[int]:
    """Of documents with these multiples of 2 * size tokens."""
    return [0, *accumulate(2 * size * multiple for multiple in multiples)]


def exchanged(plans: list[HaloPlan], boundaries: list[int]) -> list[list[int]]:
    """The extended stream of every rank, as places in the stream: what the all-to-all does, with lists."""
    size = len(plans)
    shares = [thd_partition(boundaries, size, rank).tolist() for rank in range(size)]
    arrived: list[list[int]] = [[] for _ in plans]
    for source, plan in enumerate(plans):
        leaving = [shares[source][row] for row in plan.send_index.tolist()]
        assert len(leaving) == sum(plan.sent)
        for target, (start, stop) in enumerate(pairwise(accumulate(plan.sent, initial=0))):
            assert stop - start == plans[target].got[source]
            arrived[target] += leaving[start:stop]
    extended = []
    for rank, plan in enumerate(plans):
        places = plan.own.tolist() + plan.halo.tolist()
        assert sorted(places) == list(range(len(places)))
        tokens = shares[rank] + arrived[rank]
        extended.append([token for _, token in sorted(zip(places, tokens, strict=True))])
    return extended


def check_plans(boundaries: list[int], window: int, size: int) -> None:
    plans = [plan_halo(boundaries, window, size, rank) for rank in range(size)]
    seen_in_stream = visible_keys([b - a for a, b in pairwise(boundaries)], window)
    for rank, (plan, extended) in enumerate(zip(plans, exchanged(plans, boundaries), strict=True)):
        own = thd_partition(boundaries, size, rank).tolist()
        assert [extended[place] for place in plan.own.tolist()] == own
        assert extended == sorted(set(extended))  # in the order of the stream, no row twice
        assert plan.layout.total == len(extended) == plan.rows + plan.halo_rows
        seen_in_pieces = visible_keys(plan.layout.lengths, window)
        useful = set()
        for place, token in zip(plan.own.tolist(), own, strict=True):
            keys = [extended[key] for key in seen_in_pieces[place]]
            assert keys == list(seen_in_stream[token])
            useful.update(keys)
        assert useful == set(extended)  # no row travels in vain
        assert plan.sent[rank] == plan.got[rank] == 0
        for start, stop in pairwise(plan.layout.cu_seqlens.tolist()):
            assert extended[stop - 1] - extended[start] == stop - start - 1
    share = boundaries[-1] / size
    assert halo_pays(boundaries, window, size) == (max(p.halo_rows for p in plans) <= HALO_LIMIT * share)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 5), max_size=5), st.integers(1, 70))
def test_each_own_token_sees_exactly_its_keys(size: int, multiples: list[int], window: int) -> None:
    check_plans(boundaries_of(size, multiples), window, size)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 17, 10_000])
@pytest.mark.parametrize("multiples", [[1], [1] * 12, [40], [1, 2, 3, 1, 9]], ids=["least", "tiny", "giant", "mixed"])
def test_plans_of_typical_batches(multiples: list[int], window: int, size: int) -> None:
    check_plans(boundaries_of(size, multiples), window, size)


def test_a_long_document_costs_one_window_per_chunk() -> None:
    plans = [plan_halo([0, 131072], 128, 8, rank) for rank in range(8)]
    # The first rank's early chunk starts the document; the last rank's chunks touch.
    assert [plan.halo_rows for plan in plans] == [127, *[254] * 6, 127]
    assert [plan.layout.lengths for plan in plans[6:]] == [(8192 + 127, 8192 + 127), (16384 + 127,)]


def test_a_window_over_several_chunks_comes_from_several_ranks() -> None:
    plan = plan_halo([0, 64], 20, 4, 1)  # chunks of 8: rows 8-15 and 48-55
    assert plan.got == (8, 0, 8, 11)
    assert plan.layout.lengths == (16, 27)


def test_chunks_without_a_gap_are_one_piece_and_with_one_they_are_two() -> None:
    assert plan_halo([0, 32], 9, 4, 2).layout.lengths == (24,)  # rows 8-11 and 20-23: keys 0-11 and 12-23
    assert plan_halo([0, 32], 8, 4, 2).layout.lengths == (11, 11)  # keys 1-11 and 13-23


def test_a_batch_without_tokens() -> None:
    plan = plan_halo([0], 4, 2, 1)
    assert (plan.rows, plan.halo_rows, plan.sent, plan.layout.total) == (0, 0, (0, 0), 0)


def test_pays_for_long_documents_only() -> None:
    for size in (2, 4, 8):
        assert halo_pays([0, 16384], 128, size)
        assert halo_pays([0, 131072], 128, size)
        assert not halo_pays(list(range(0, 16384 + 1, 2 * size)), 128, size)
        assert halo_pays(list(range(0, 16384 + 1, 2 * size)), 1, size)
    assert not halo_pays([0, 16384], 16384, 2)
    # One long document does not carry many short ones.
    assert not halo_pays([0, 1024, *range(1024 + 64, 16384 + 1, 64)], 128, 4)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="document 1 has 12 tokens, which is not divisible by 2 \\* cp_size = 8"):
        plan_halo([0, 16, 28], 4, 4, 0)
    with pytest.raises(ConfigError, match="no context-parallel rank 4 among 4"):
        plan_halo([0, 16], 4, 4, 4)
    for window in (0, -1):
        with pytest.raises(ConfigError, match=f"window is {window}"):
            plan_halo([0, 16], window, 4, 0)
        with pytest.raises(ConfigError, match=f"window is {window}"):
            halo_pays([0, 16], window, 4)


def test_plan_goes_to_the_device_asked_for() -> None:
    plan = plan_halo([0, 16], 4, 2, 0, torch.device("meta"))
    assert {plan.send_index.device.type, plan.halo.device.type, plan.own.device.type} == {"meta"}
