"""Run a function of a test in several real processes that talk through gloo.

The processes are forked from a server that has imported torch once, so a call costs a fraction of a second and not the
seconds that an import takes. A test that hangs is killed and reported with what each rank was doing.
"""

import faulthandler
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch", "torch._dynamo", "torch._refs", "torch.fx.experimental.symbolic_shapes", "safetensors.torch"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "automimo.parallelize"),
]


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`function(rank, *args)` in `size` processes with a default process group; what each returned, by rank.

    `function` is a top-level function of a module, `args` and results are picklable. Raises RankFailedError with the
    tracebacks of all ranks that failed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, rank, size, folder, timeout, function, args)
            process = context.Process(target=_child, args=arguments, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(pipes):
        open_pipes = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in results and rank not in failures}
        # Once one rank has failed, the others only wait for it: give them a moment to say what they lost.
        limit = deadline if not failures else min(deadline, time.monotonic() + 10)
        ready = wait(list(open_pipes), max(0, limit - time.monotonic()))
        if not ready:
            failures.update(dict.fromkeys(open_pipes.values(), "did not end in time"))
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "died without a word"
            (results if succeeded else failures)[rank] = value
    if failures:
        raise RankFailedError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def _child(
    sender: Connection, rank: int, size: int, folder: str, timeout: float, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    faulthandler.dump_traceback_later(max(1, timeout - 2), exit=True, file=sys.__stderr__)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = f"file://{Path(folder, 'store')}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        answer = (True, result)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
        answer = (False, traceback.format_exc())
    # By value: connections would send tensors as handles of a process that is about to end.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
