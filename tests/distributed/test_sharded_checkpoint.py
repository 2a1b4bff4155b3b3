"""Training checkpoints of several processes: any layout and number of them into any other, kills, failures, threads."""

import os
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailedError, run_ranks
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from automimo.checkpoint import dcp_storage, load_step, newest_step, resume
from automimo.checkpoint.resume import begin_step, save_step
from automimo.checkpoint.saved_step import load_tensors, read_step
from automimo.distributed.world import together
from automimo.errors import CheckpointError, DistributedError

# name: (shape, dtype). What shards of them look like in each world is in `layout`.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "dense": ((7, 3), torch.float32),  # 7 rows on 2 or 4 ranks: shards of different size
    "small": ((2, 3), torch.float32),  # on 4 ranks two have nothing
    "one_row": ((1, 5), torch.bfloat16),
    "half": ((8, 2, 2), torch.bfloat16),
    "experts": ((4, 6, 5), torch.float32),
    "experts_uneven": ((4, 5, 3), torch.bfloat16),
    "columns": ((6, 10), torch.float32),
    "counts": ((9,), torch.int64),
    "flags": ((11,), torch.bool),
    "step": ((), torch.float32),
    "empty": ((0, 3), torch.float32),
    "empty_columns": ((4, 0), torch.float32),
    "sink": ((5,), torch.float32),
    "copies": ((3, 3), torch.float32),
}


def full(name: str) -> Tensor:
    """The whole tensor, the same in every process."""
    shape, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-120, 120, shape, generator=generator).to(dtype)


def layout(name: str, ranks: int, kind: str) -> tuple[tuple[int, ...], tuple[Placement, ...]] | None:
    """Shape of the mesh and placements; None for a plain tensor. `kind`: 'a', 'b' are two layouts of one world."""
    if ranks == 1 or name in ("step", "sink"):
        return None
    split = (2, ranks // 2) if kind == "a" else (1, ranks)
    if name == "copies":
        return (ranks,), (Replicate(),)
    if name.startswith("experts"):
        return split, (Shard(1), Shard(0))
    if name in ("dense", "half"):  # copies of a sharded model in 'a', one sharded model in 'b'
        return (split, (Replicate(), Shard(0))) if kind == "a" else ((ranks,), (Shard(0),))
    if name == "columns":
        return (ranks,), (Shard(1) if kind == "a" else Shard(0),)
    return (ranks,), (Shard(0),)


def laid_out(value: Callable[[str], Tensor], kind: str) -> dict[str, Tensor]:
    """All tensors as this rank holds them."""
    meshes: dict[tuple[int, ...], Any] = {}
    tensors = {}
    for name in TENSORS:
        tensor, where = value(name), layout(name, dist.get_world_size() if dist.is_initialized() else 1, kind)
        if where is not None:
            if where[0] not in meshes:
                meshes[where[0]] = init_device_mesh("cpu", where[0])
            tensor = distribute_tensor(tensor, meshes[where[0]], where[1], src_data_rank=None)
        tensors[name] = tensor
    return tensors


def sentinel(name: str) -> Tensor:
    """What no saved tensor is."""
    shape, dtype = TENSORS[name]
    return torch.full(shape, True if dtype == torch.bool else 77, dtype=dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class CountedReads:
    """Counts the bytes that are read with positions: tensors, neither headers nor checksums."""

    def __init__(self) -> None:
        self.bytes = 0
        self._preadv = os.preadv

    def __enter__(self) -> "CountedReads":
        os.preadv = self._count  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._preadv

    def _count(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = self._preadv(descriptor, buffers, offset)
        self.bytes += count
        return count


def check_loads(folder: Path, kind: str) -> None:
    """Load into tensors of this world's layout: the right values in the same memory, and few bytes read."""
    expected, found = laid_out(full, kind), laid_out(sentinel, kind)
    before = {name: local(tensor).data_ptr() for name, tensor in found.items()}
    with CountedReads() as reads:
        load_tensors(read_step(folder), found)
    for name in TENSORS:
        assert torch.equal(local(found[name]), local(expected[name])), name
        assert local(found[name]).data_ptr() == before[name]
    assert reads.bytes <= 1.1 * sum(local(tensor).nbytes for tensor in found.values())


def save_and_load(rank: int, folder: Path, kinds: str) -> None:
    for step, kind in enumerate(kinds):
        saved = save_step(folder, step, laid_out(full, kind), {"rank": rank}, keep=0)
        for other in "ab":
            check_loads(saved, other)


def load_all(rank: int, folder: Path) -> None:
    for _, path in resume.step_folders(folder):
        for kind in "ab":
            check_loads(path, kind)


def check_files(folder: Path, ranks: int) -> None:
    """Every element lies in one file, and every rank wrote some."""
    names = [f"tensors-{rank:05d}.safetensors" for rank in range(ranks)]
    assert sorted(path.name for path in folder.iterdir()) == ["state.json", *names]
    sizes = dict.fromkeys(TENSORS, 0)
    for name in names:
        with safe_open(folder / name, "pt") as file:
            assert ranks == 1 or len(list(file.keys())) > 1
            for key in file.keys():  # noqa: SIM118 - it is no dict
                sizes[key.rpartition("@")[0]] += file.get_tensor(key).numel()
    assert sizes == {name: full(name).numel() for name in TENSORS}


def test_four_processes_into_four_two_and_one(tmp_path: Path) -> None:
    run_ranks(4, save_and_load, tmp_path, "ab")
    run_ranks(2, load_all, tmp_path)
    for number, path in resume.step_folders(tmp_path):
        check_files(path, 4)
        tensors, state = load_step(path)
        assert tensors.keys() == TENSORS.keys()
        assert all(torch.equal(tensors[name], full(name)) for name in TENSORS)
        assert state == {"rank": 0}
        assert number in (0, 1)


def test_one_and_two_processes_into_four_and_two(tmp_path: Path) -> None:
    save_step(tmp_path, 9, {name: full(name) for name in TENSORS}, {}, keep=0)
    check_files(tmp_path / "step-9", 1)
    run_ranks(2, save_and_load, tmp_path, "ab")
    check_files(tmp_path / "step-0", 2)
    run_ranks(4, load_all, tmp_path)


def ranks_of_their_own(rank: int, folder: Path) -> None:
    path = save_step(folder, 1, {f"rng/{rank}": torch.tensor(rank), "all": torch.ones(2)}, {}, keep=0)
    found = {f"rng/{rank}": torch.tensor(-1)} | ({"all": torch.zeros(2)} if rank else {})
    load_tensors(read_step(path), found)
    assert int(found[f"rng/{rank}"]) == rank
    assert rank == 0 or found["all"].tolist() == [1, 1]


def test_ranks_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    run_ranks(2, ranks_of_their_own, tmp_path)
    assert load_step(tmp_path / "step-1")[0].keys() == {"rng/0", "rng/1", "all"}


# Failures


def outcome(work: Callable[[], object]) -> str:
    """Kind and first line of what `work` raises."""
    started = time.monotonic()
    try:
        work()
    except (CheckpointError, DistributedError) as error:
        assert time.monotonic() - started < 30  # no collective ran into its time-out
        return f"{type(error).__name__} {str(error).splitlines()[0]}"
    return "nothing raised"


def fail_to_write(*_: object) -> None:
    raise CheckpointError("tensors.safetensors: No space left on device")


def failing_saves(rank: int, folder: Path) -> list[str]:
    good = {"w": torch.ones(4)}
    save_step(folder, 1, good, {}, keep=1)
    write = dcp_storage.write_safetensors
    seen = []

    def attempt(work: Callable[[], object]) -> None:
        seen.append(outcome(work))
        with together("looking"):  # the others wait for what rank 0 removes
            pass
        assert names_in(folder) == ["step-1"], seen

    if rank == 1:
        dcp_storage.write_safetensors = fail_to_write
    attempt(lambda: save_step(folder, 2, good, {}, keep=1))
    attempt(lambda: begin_step(folder, 2, good, {}, keep=1).publish())
    dcp_storage.write_safetensors = write
    attempt(lambda: save_step(folder, 2, good, {"x": {1}} if rank == 1 else {}, keep=1))
    attempt(
        lambda: save_step(folder, 2, {"w": torch.ones(4, dtype=torch.complex128)} if rank == 1 else good, {}, keep=1)
    )
    # Rank 0 finds in the planning that the parts do not make up the tensor.
    mesh = init_device_mesh("cpu", (2,))
    sharded = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    attempt(lambda: save_step(folder, 2, sharded if rank == 0 else {}, {}, keep=1))
    partial = {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}
    attempt(lambda: save_step(folder, 2, partial, {}, keep=1))
    save_step(folder, 2, good, {}, keep=1)
    assert names_in(folder) == ["step-2"]
    return seen


def test_a_failure_on_one_rank_raises_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(2, failing_saves, tmp_path, timeout=60)
    full_disk = "tensors.safetensors: No space left on device"
    assert second[:2] == [f"CheckpointError {full_disk}"] * 2
    assert first[:2] == [f"DistributedError saving step-2: rank 1 failed: {full_disk}"] * 2
    assert "state.x: set cannot be saved" in second[2] and second[2].startswith("CheckpointError")
    assert first[2].startswith("DistributedError saving step-2: rank 1 failed: state.x")
    assert "complex128" in first[3] and "complex128" in second[3]
    assert first[4].startswith("CheckpointError saving step-2: ") and "w" in first[4]
    assert second[4].startswith("DistributedError saving step-2: rank 0 failed: ")
    assert "placed as Partial" in first[5] and "placed as Partial" in second[5]


def failing_loads(rank: int, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(2000.0)
    tensors = {"w": distribute_tensor(value, mesh, [Shard(0)]), "b": torch.ones(3)}
    seen = []
    for step, damage in enumerate(("flip", "cut", "destination")):
        path = save_step(folder, step, tensors, {}, keep=0)
        file = path / "tensors-00001.safetensors"
        if rank == 0 and damage == "flip":
            raw = bytearray(file.read_bytes())
            raw[-5] ^= 1
            file.write_bytes(raw)
        elif rank == 0 and damage == "cut":
            os.truncate(file, 100)
        with together("damage"):
            pass
        shape = 3 if rank == 0 or damage != "destination" else 4
        seen.append(outcome(lambda: load_tensors(read_step(path), {"w": tensors["w"], "b": torch.ones(shape)})))  # noqa: B023
    return seen


def test_damage_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(2, failing_loads, tmp_path, timeout=60)
    flipped, cut, other = zip(*results, strict=True)
    assert sorted(text.split()[0] for text in flipped) == ["CheckpointError", "DistributedError"]
    assert all("tensors-00001.safetensors: checksum" in text for text in flipped)
    assert all(text.startswith("CheckpointError") and "tensors-00001.safetensors: has 100" in text for text in cut)
    assert other[0].startswith("DistributedError") and other[1].startswith("CheckpointError")
    assert all("tensor 'b'" in text for text in other)


# Kills


def killed_save(rank: int, folder: Path, victim: int, moment: str) -> None:
    value = torch.arange(4000.0)
    tensors = {"w": distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(0)]), "b": torch.ones(3)}
    save_step(folder, 1, tensors, {}, keep=1)
    if rank == victim:
        if moment in ("write", "write at once"):
            count = dcp_storage.FileJob._on_bytes
            calls = []

            def half(job: Any, chunk: Any) -> None:
                calls.append(count(job, chunk))
                if len(calls) == 2:  # the header is written, and one tensor
                    os.kill(os.getpid(), signal.SIGKILL)

            dcp_storage.FileJob._on_bytes = half  # type: ignore[method-assign]
        else:
            place = {"publish": "exchange_texts", "rename": "publish_folder", "prune": "_prune"}[moment]
            setattr(resume, place, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    if moment == "write at once":
        save_step(folder, 2, tensors, {}, keep=1)
    begin_step(folder, 2, tensors, {}, keep=1).publish()


@pytest.mark.parametrize(
    ("victim", "moment", "left"),
    [
        (0, "write", 1),
        (1, "write", 1),
        (0, "write at once", 1),
        (1, "write at once", 1),
        (1, "publish", 1),
        pytest.param(0, "publish", 1, marks=pytest.mark.slow),
        pytest.param(0, "rename", 1, marks=pytest.mark.slow),
        (0, "prune", 2),
    ],
)
def test_a_killed_rank_costs_only_the_checkpoint_that_was_being_written(
    tmp_path: Path, victim: int, moment: str, left: int
) -> None:
    with pytest.raises(RankFailedError, match=rf"rank {victim}: died without a word"):
        run_ranks(2, killed_save, tmp_path, victim, moment, timeout=60)
    newest = newest_step(tmp_path)
    assert newest == tmp_path / f"step-{left}"
    assert torch.equal(load_step(newest)[0]["w"], torch.arange(4000.0))
    assert load_step(tmp_path / "step-1")[0]["b"].tolist() == [1, 1, 1]
    save_step(tmp_path, 3, {"w": torch.ones(1)}, {}, keep=1)
    assert names_in(tmp_path) == ["step-3"]
