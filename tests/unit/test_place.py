"""Which tokens of a step a rank computes: padding of documents, shares, counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_examples import ragged_examples

from automimo.data import DataStream, Example
from automimo.data.batches import NO_TARGET, Batch, collate, idle_batch, pad_documents
from automimo.data.packing import Piece
from automimo.distributed.mesh import infer_sizes
from automimo.training.place import Place


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    examples = [
        Example(rng.integers(1, 50, n).astype(np.int32), rng.random(n) < 0.6, f"doc:{i}") for i, n in enumerate(lengths)
    ]
    return collate(examples, [[Piece(i, 0, n) for i, n in enumerate(lengths)]])


def documents(batch: Batch) -> list[dict[str, list]]:
    """What each document of a whole batch has, padding told apart."""
    found = []
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        padding = [False] * (stop - start) if batch.padding_mask is None else batch.padding_mask[start:stop].tolist()
        found.append(
            {
                "ids": batch.input_ids[start:stop].tolist(),
                "targets": batch.targets[start:stop].tolist(),
                "positions": batch.position_ids[start:stop].tolist(),
                "padding": padding,
            }
        )
    return found


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 2, 4, 8, 6]))
@settings(max_examples=60, deadline=None)
def test_documents_are_padded_at_their_ends(lengths: list[int], multiple: int) -> None:
    batch = batch_of(lengths)
    padded = pad_documents(batch, multiple)
    assert (padded.tokens, padded.valid_targets) == (batch.tokens, batch.valid_targets)
    for before, after in zip(documents(batch), documents(padded), strict=True):
        n, total = len(before["ids"]), len(after["ids"])
        assert n <= total < n + multiple and total % multiple == 0
        assert after["ids"][:n] == before["ids"] and after["targets"] == before["targets"] + [NO_TARGET] * (total - n)
        assert after["positions"] == list(range(total))
        assert after["padding"] == [False] * n + [True] * (total - n)


def test_nothing_is_padded_without_need() -> None:
    batch = batch_of([8, 4, 12])
    assert pad_documents(batch, 4) is batch


@pytest.mark.parametrize("size", [2, 4])
def test_shares_add_up_to_the_batch(size: int) -> None:
    data = DataStream(ragged_examples(50, 40, 33), sequence_length=64)
    rows = data.next_rows(5)
    whole = data.batch(rows)
    shares = [Place(context_rank=rank, context_ranks=size).tokens_of(whole) for rank in range(size)]
    assert sum(share.tokens for share in shares) == whole.tokens
    assert sum(share.valid_targets for share in shares) == whole.valid_targets > 0
    assert len({len(share.input_ids) for share in shares}) == 1
    seen = []
    for rank, share in enumerate(shares):
        assert (share.cp_size, share.cp_rank) == (size, rank)
        assert int(share.cu_seqlens[-1]) == size * len(share.input_ids)
        real = torch.ones_like(share.input_ids, dtype=torch.bool) if share.padding_mask is None else ~share.padding_mask
        assert share.tokens == int(real.sum())
        assert (
            share.valid_targets
            == int((share.targets != NO_TARGET).sum())
            == int((share.targets[real] != NO_TARGET).sum())
        )
        seen += list(
            zip(
                share.input_ids[real].tolist(),
                share.targets[real].tolist(),
                share.position_ids[real].tolist(),
                strict=True,
            )
        )
    expected = zip(whole.input_ids.tolist(), whole.targets.tolist(), whole.position_ids.tolist(), strict=True)
    assert sorted(seen) == sorted(expected)


def test_an_idle_batch_is_shared_as_padding() -> None:
    for rank in range(4):
        share = Place(context_rank=rank, context_ranks=4).tokens_of(idle_batch())
        assert (share.tokens, share.valid_targets, len(share.input_ids)) == (0, 0, 2)
        assert share.padding_mask is not None and share.padding_mask.all()


def test_a_rank_that_is_alone_has_the_batch_as_it_is() -> None:
    batch = batch_of([3, 5])
    assert Place().tokens_of(batch) is batch


def test_neighbours_share_a_row() -> None:
    sizes = infer_sizes(8, context=2, replicate=2)
    places = [Place.of(rank, sizes) for rank in range(8)]
    assert [(p.data_rank, p.context_rank) for p in places] == [(i // 2, i % 2) for i in range(8)]
    assert {(p.data_ranks, p.context_ranks) for p in places} == {(4, 2)}


def test_every_rank_gets_equally_many_micro_batches_and_every_row_once() -> None:
    data = DataStream(ragged_examples(50, 40, 33), sequence_length=40)
    rows = data.next_rows(5)
    sizes = infer_sizes(4, context=2)
    of_ranks = [Place.of(rank, sizes).micro_batches(data, rows, 2) for rank in range(4)]
    assert {len(batches) for batches in of_ranks} == {2}
    assert sum(batch.tokens for batches in of_ranks for batch in batches) == data.batch(rows).tokens
    assert [b.origins for b in of_ranks[0]] == [b.origins for b in of_ranks[1]]
    assert not set(of_ranks[0][0].origins) & set(of_ranks[2][0].origins)
