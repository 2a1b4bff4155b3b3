"""The key-value store over which the processes of one attempt find each other.

torchrun restarts the processes of a job when one of them dies, and keeps one store over all attempts. What a dead
process left there (the address on which its gloo listened) is found by those of the next attempt, which then fail to
connect or wait for a process that is gone: after 9 kills of one of two ranks, 2 jobs went on, 5 ended and 2 hung until
a time-out. The number of the attempt that torchrun tells does not help, because on several machines each counts its
own. So rank 0 draws a token for the attempt, and all its keys get that as their prefix.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from automimo.errors import DistributedError

POLL_S = 0.02


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """A store that only this attempt's processes use, this process's rank, and how many there are.

    Reads what torchrun or our own launcher set in the environment. Raises DistributedError when a process does not
    come within `timeout`.
    """
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"attempt-{agree_on_token(store, rank, size, timeout)}", store), rank, size


def agree_on_token(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """The token that rank 0 drew for these `size` processes, whatever others left in the store before.

    Raises DistributedError when one does not come within `timeout` (for ranks above 0: the store's own).
    """
    return _welcome(store, size, timeout) if rank == 0 else _join(store, rank)


def _join(store: dist.Store, rank: int) -> str:
    """Ask rank 0 for the token under a name nobody used before, so that an answer can only be a fresh one."""
    name = uuid.uuid4().hex
    store.set(f"join/{rank}", name)
    try:
        token = store.get(f"token/{name}").decode()
    except dist.DistStoreError as error:
        raise DistributedError(f"rank {rank} had no answer from rank 0 while joining: {error}") from error
    store.set(f"joined/{token}/{rank}", "")
    return token


def _welcome(store: dist.Store, size: int, timeout: timedelta) -> str:
    """Draw the token and answer every rank's newest request until all have taken it."""
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    waiting = set(range(1, size))
    answered: dict[int, bytes] = {}
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"joined/{token}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"join/{rank}"]):
                # Perhaps what a dead process asked: then a newer request will follow, and get its answer too.
                name = store.get(f"join/{rank}")
                if answered.get(rank) != name:
                    store.set(f"token/{name.decode()}", token)
                    answered[rank] = name
        if waiting and time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(waiting)[:16]))
            raise DistributedError(
                f"{len(waiting)} of {size} processes did not come within {timeout.total_seconds():g} s "
                f"(parallel.timeout): rank {missing}"
            )
        if waiting:
            time.sleep(POLL_S)
    return token
