"""Checkpoints that are written while training goes on, and what memory checkpoints take."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automimo.checkpoint import dcp_storage, load_step, newest_step
from automimo.checkpoint.resume import begin_step, save_step
from automimo.checkpoint.saved_step import load_tensors, read_step
from automimo.distributed.world import together


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def background(rank: int, folder: Path) -> None:
    value = torch.arange(4000.0)
    weight = distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(0)])
    state = {"row": 1}
    pending = begin_step(folder, 1, {"w": weight, "rank": torch.tensor(5)}, state, keep=0)
    weight += 1
    state["row"] = 2
    assert newest_step(folder) is None
    assert pending.publish() == folder / "step-1"
    assert names_in(folder) == ["step-1"]
    destination = {"w": torch.empty(4000)}
    load_tensors(read_step(folder / "step-1"), destination)
    assert torch.equal(destination["w"], value)
    assert read_step(folder / "step-1").state == {"row": 1}
    given_up = begin_step(folder, 2, {"w": weight}, {}, keep=0)
    given_up.discard()
    with together("giving up"):
        pass
    save_step(folder, 3, {"w": weight}, {}, keep=0)
    assert names_in(folder) == ["step-1", "step-3"]


def test_training_goes_on_while_shards_are_written(tmp_path: Path) -> None:
    run_ranks(2, background, tmp_path)
    assert torch.equal(load_step(tmp_path / "step-3")[0]["w"], torch.arange(4000.0) + 1)


# Memory


def address(chunk: Any) -> int:
    return int(np.frombuffer(chunk, np.uint8).ctypes.data)


def copies(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = {str(i): DTensor.from_local(torch.full((5000,), float(i)), mesh, [Shard(0)]) for i in range(6)}
    live = {shard.to_local().data_ptr() for shard in shards.values()}
    written: list[int] = []
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []
    count, copy = dcp_storage.FileJob._on_bytes, dcp_storage._copy_to_cpu

    def on_bytes(job: Any, chunk: Any) -> None:
        written.append(address(chunk))
        alive.append(sum(ref() is not None for ref in made))
        count(job, chunk)

    def counted_copy(tensor: torch.Tensor) -> torch.Tensor:
        copied = copy(tensor)
        made.append(weakref.ref(copied))
        return copied

    dcp_storage.FileJob._on_bytes = on_bytes  # type: ignore[method-assign]
    dcp_storage._copy_to_cpu = counted_copy
    save_step(folder, 1, shards, {}, keep=0)
    assert set(written[1:]) == live  # the first chunk is the header
    assert made == []
    written.clear()
    alive.clear()
    pending = begin_step(folder, 2, shards, {}, keep=0)
    assert len(made) == 6
    pending.publish()
    assert live.isdisjoint(written)
    assert alive == [6, 6, 5, 4, 3, 2, 1]
    assert all(ref() is None for ref in made)


def test_no_copy_at_once_and_one_in_the_background_which_shrinks(tmp_path: Path) -> None:
    """Looked at in the memory itself: the kernel's count of resident pages is off by 16 to 32 MiB in both ways."""
    run_ranks(2, copies, tmp_path)
