"""What all ranks must agree on."""

import os
import time

import pytest
import torch.distributed as dist
from ranks import RankFailedError, run_ranks

from automimo.cli_errors import lost_contact
from automimo.distributed.world import exchange_texts, main_first, max_numbers, on_main, sum_numbers, together
from automimo.errors import ConfigError, DataError, DistributedError


def agreements(rank: int) -> None:
    size = dist.get_world_size()
    assert sum_numbers([rank, 0.5]) == [size * (size - 1) / 2, size * 0.5]
    assert sum_numbers([2.0**60 + 0.0]) == [size * 2.0**60]
    assert max_numbers([-rank, rank]) == [0, size - 1]
    assert exchange_texts("") == [""] * size
    assert exchange_texts("é" * rank) == ["é" * r for r in range(size)]
    assert on_main("work", lambda: f"rank {rank}") == "rank 0"
    seen = []
    assert main_first("work", lambda: seen.append(rank) or f"own {rank}") == f"own {rank}"
    assert seen == [rank]


def failures(rank: int) -> None:
    with pytest.raises(DataError if rank == 1 else DistributedError, match="bad row") as caught, together("reading"):
        if rank == 1:
            raise DataError("bad row 7")
    if rank != 1:
        assert str(caught.value) == "reading: rank 1 failed: bad row 7"
    # Not only our own errors, and more than one.
    with pytest.raises((KeyError, DistributedError)) as many, together("x"):
        if rank > 0:
            raise KeyError(rank)
    if rank == 0:
        assert str(many.value).startswith("x: rank 1 failed (and 2 other ranks failed): KeyError: 1")
    with pytest.raises(DataError if rank == 0 else DistributedError, match="no file"):
        on_main("looking", lambda: (_ for _ in ()).throw(DataError("no file")))
    # After all this the ranks still fit together.
    assert sum_numbers([1]) == [4]


def lost_peer(rank: int, dying: int) -> str:
    """What a rank with an error of its own says when a peer is gone as well."""
    if rank == dying:
        os._exit(0)
    try:
        with together("reading"):
            time.sleep(1)
            raise ConfigError("my own trouble")
    except ConfigError as error:
        assert lost_contact(error) is None
        return str(error)


def test_an_own_failure_is_not_taken_for_a_lost_contact():
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, lost_peer, 1)
    # The rank that went says nothing; the other one got through its own assertions and only lost the final barrier.
    assert "my own trouble" not in str(caught.value)
    assert "assert" not in str(caught.value)


def test_ranks_agree():
    run_ranks(4, agreements)


def test_a_failure_of_one_rank_is_raised_on_all():
    run_ranks(4, failures)


def test_a_process_alone_needs_nobody():
    assert sum_numbers([3, 4]) == [3, 4]
    assert exchange_texts("a") == ["a"]
    assert on_main("work", lambda: "b") == "b"
    with pytest.raises(DataError), together("reading"):
        raise DataError("bad")
