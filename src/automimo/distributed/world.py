"""The processes of a run: who we are, and what all of them must agree on.

Every function here also works in a process that is alone and never made a process group: then it does nothing but
what it would do for one rank. What is exchanged is small and lies on the CPU (gloo, also where the model uses nccl).
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from automimo.distributed.rendezvous import open_store
from automimo.errors import AutoMiMoError, ConfigError, DistributedError

T = TypeVar("T")
# What torchrun and our own launcher tell every process.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, `local_rank` on its machine, and the device it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes what only one may write."""
        return self.rank == 0


@contextmanager
def open_world(timeout_s: float) -> Iterator[World]:
    """Join the processes that torchrun or `automimo train --nproc` started; a process started alone stays alone.

    CPU tensors go through gloo and, where there are GPUs, their tensors through nccl. A collective that is not
    finished after `timeout_s` seconds fails. Nothing of torch.distributed may outlive this context: keep meshes and
    groups in local variables inside it, because those that live until the interpreter ends abort its exit now and then.

    Raises ConfigError when the environment names some processes but not how to reach them.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
                "start no more processes than that, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPUs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ and size == 1:
        yield World(0, 1, 0, device)
        return
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start all processes with torchrun, or with "
            "automimo train --nproc N"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = open_store(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, local_rank, device)
    except BaseException:
        # nccl may wait here for collectives that the others never join, and the message would not come out.
        if device.type != "cuda":
            dist.destroy_process_group()
        raise
    # Models refer to themselves in circles and with that to groups of their meshes: let go of them while they live.
    gc.collect()
    dist.destroy_process_group()


def is_distributed() -> bool:
    """Whether there is a process group, even if only of one process."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def together(what: str) -> Iterator[None]:
    """A part of the work that succeeds on all ranks or fails on all; all ranks have to come here.

    Whoever failed raises its own error, the others DistributedError with its message; `what` is for that message
    ("saving step 3"). The wait at the end is also a barrier. BaseExceptions (Ctrl-C) are not held back.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know
        failure = error
    agree(what, failure)


def agree(what: str, failure: Exception | None) -> None:
    """Raise on every rank if any rank has a failure; see `together`."""
    messages: list[str] = []
    try:
        messages = exchange_texts("" if failure is None else _message(failure))
    except RuntimeError:
        # A peer is gone, perhaps because of the same thing: what happened here says more than that, and is raised
        # outside of this block, so that the loss of contact is not taken for its cause.
        if failure is None:
            raise
    if failure is not None:
        raise failure
    failed = [(rank, message) for rank, message in enumerate(messages) if message]
    if failed:
        rank, message = failed[0]
        others = f" (and {len(failed) - 1} other ranks failed)" if len(failed) > 1 else ""
        raise DistributedError(f"{what}: rank {rank} failed{others}: {message}")


def _message(failure: Exception) -> str:
    return str(failure) if isinstance(failure, AutoMiMoError) else f"{type(failure).__name__}: {failure}"


def on_main(what: str, work: Callable[[], str]) -> str:
    """Do `work` on rank 0 alone and give its text to all; fails on all ranks when it fails there."""
    text = ""
    with together(what):
        if rank() == 0:
            text = work()
    return exchange_texts(text)[0]


def main_first(what: str, work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on all others at once: for what fills a cache or a folder that the others then find."""
    result: list[T] = []
    with together(what):
        if rank() == 0:
            result.append(work())
    with together(what):
        if rank() != 0:
            result.append(work())
    return result[0]


def exchange_texts(text: str) -> list[str]:
    """The text of every rank, by rank."""
    if not is_distributed():
        return [text]
    data = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    lengths = [int(size) for size in sizes]
    padded = torch.tensor([*data, *bytes(max(lengths) - len(data))], dtype=torch.uint8)
    pieces = [torch.empty_like(padded) for _ in lengths]
    if padded.numel():
        dist.all_gather(pieces, padded)
    return [bytes(piece[:length].tolist()).decode() for piece, length in zip(pieces, lengths, strict=True)]


def sum_numbers(numbers: Sequence[float]) -> list[float]:
    """Sum over all ranks, number by number (float64)."""
    return _reduce(numbers, dist.ReduceOp.SUM)


def max_numbers(numbers: Sequence[float]) -> list[float]:
    """Largest over all ranks, number by number (float64)."""
    return _reduce(numbers, dist.ReduceOp.MAX)


def rank() -> int:
    """Our number; 0 in a process that is alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes; 1 in a process that is alone."""
    return dist.get_world_size() if is_distributed() else 1


def _reduce(numbers: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if not is_distributed():
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.tolist()
