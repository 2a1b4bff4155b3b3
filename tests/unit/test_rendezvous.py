"""The processes of one attempt find each other in a store that earlier attempts left full of old keys."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from automimo.distributed.rendezvous import agree_on_token
from automimo.errors import DistributedError


def attempt(store: dist.Store, size: int, order: list[int]) -> list[str]:
    """One attempt of `size` processes that come in this order."""
    with ThreadPoolExecutor(size) as pool:
        tokens = {rank: pool.submit(agree_on_token, store, rank, size, timedelta(seconds=20)) for rank in order}
        return [tokens[rank].result() for rank in range(size)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_every_attempt_has_a_token_of_its_own(order: list[int]) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    seen = set()
    for _ in range(3):
        tokens = attempt(store, 4, order)
        assert len(set(tokens)) == 1
        seen.add(tokens[0])
    assert len(seen) == 3


def test_a_request_of_a_dead_process_is_not_taken_for_a_living_one() -> None:
    """The dead rank 1 asked and never took its answer; rank 0 comes before the new rank 1 does."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    store.set("join/1", "of-the-dead")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_token, store, 0, 2, timedelta(seconds=20))
        store.get("token/of-the-dead")
        assert not first.done()
        second = pool.submit(agree_on_token, store, 1, 2, timedelta(seconds=20))
        assert first.result() == second.result()


def test_an_answer_of_a_dead_rank_zero_is_not_taken() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    old = attempt(store, 2, [0, 1])[0]
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(agree_on_token, store, 1, 2, timedelta(seconds=20))
        fresh = pool.submit(agree_on_token, store, 0, 2, timedelta(seconds=20)).result()
        assert late.result() == fresh != old


def test_processes_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(DistributedError, match=r"2 of 3 processes did not come within 0.3 s .*rank 1, 2"):
        agree_on_token(store, 0, 3, timedelta(seconds=0.3))
    with pytest.raises(DistributedError, match="rank 1 had no answer from rank 0"):
        agree_on_token(store, 1, 3, timedelta(seconds=0.3))
