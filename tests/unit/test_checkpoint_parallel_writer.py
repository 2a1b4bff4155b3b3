"""The parallel writer writes the bytes of the plain one, in any number of threads, and goes on after any kill."""

import json
import resource
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_units import INDEX, bits, files_in, good, merged, sample, unit_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from automimo.checkpoint import (
    CheckpointReader,
    PlannedTensor,
    Progress,
    Unit,
    plan_files,
    tensor_entry,
    write_checkpoint,
    write_units,
)
from automimo.errors import CheckpointError

# Bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=9),
    shard=st.sampled_from([1, 60, 200, 10**6]),
    workers=st.sampled_from([1, 2, 4]),
    metadata=st.sampled_from([{}, {"tp_size": 4}]),
)
def test_same_bytes_as_the_plain_writer(
    tmp_path: Path, shapes: list[list[int]], shard: int, workers: int, metadata: dict[str, Any]
) -> None:
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)
    tensors = {
        f"k{i}": torch.arange(200)[: torch.Size(s).numel()].reshape(s).to(dtypes[i % 4]) for i, s in enumerate(shapes)
    }
    for name in ("plain", "parallel"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    plain = write_checkpoint(
        tmp_path / "plain", [tensor_entry(k, t) for k, t in tensors.items()], max_shard_bytes=shard, metadata=metadata
    )
    units = [unit_of({key: tensor}) for key, tensor in tensors.items()]
    files = plan_files(units, shard, index=bool(metadata))
    written = write_units(tmp_path / "parallel", units, files, workers=workers, metadata=metadata)
    assert files_in(tmp_path / "parallel") == files_in(tmp_path / "plain")
    assert (written.files, written.weight_map, written.total_bytes) == (
        plain.files,
        plain.weight_map,
        plain.total_bytes,
    )
    assert (written.index is None) == (plain.index is None)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_units_stay_together_and_open_with_the_library(tmp_path: Path, workers: int) -> None:
    groups = sample()
    units = [unit_of(group) for group in groups]
    files = plan_files(units, 900, index=False)
    assert len(files) > 4
    assert next(iter(files)) == f"model-00001-of-{len(files):05d}.safetensors"
    assert [key for keys in files.values() for key in keys] == list(merged(groups))
    for group in groups:
        assert sum(bool(group.keys() & set(keys)) for keys in files.values()) == 1
    write_units(tmp_path, units, files, workers=workers, metadata={"a": 1})
    assert sorted(files_in(tmp_path)) == sorted([*files, INDEX])
    for name, keys in files.items():
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        assert {k: bits(t) for k, t in load_file(tmp_path / name).items()} == {k: bits(merged(groups)[k]) for k in keys}
    with CheckpointReader(tmp_path) as reader:
        assert reader.metadata == {"a": 1, "total_size": sum(tensor.nbytes for tensor in merged(groups).values())}


def test_a_foreign_layout_with_units_spread_over_files(tmp_path: Path) -> None:
    groups = sample()
    tensors = merged(groups)
    files: dict[str, list[str]] = {"pytorch_b.safetensors": [], "model_mtp.safetensors": [], "a.safetensors": []}
    for i, key in enumerate(tensors):
        files[list(files)[i % 3]].append(key)
    for workers in (1, 2, 4):
        folder = tmp_path / str(workers)
        written = write_units(folder, [unit_of(g) for g in groups], files, workers=workers, metadata={})
        assert written.files == tuple(files)
        with CheckpointReader(folder) as reader:
            assert {key: info.file.name for key, info in reader.tensors.items()} == written.weight_map
            assert all(bits(reader.read(key)) == bits(tensor) for key, tensor in tensors.items())
    assert files_in(tmp_path / "1") == files_in(tmp_path / "2") == files_in(tmp_path / "4")


def test_files_get_full_one_after_the_other_whatever_the_order_of_units(tmp_path: Path) -> None:
    """Else a foreign layout would have all its files half written at a kill."""
    tensors = {f"k{i}": torch.full((4,), i) for i in range(30)}
    files = {f"{j}.safetensors": [f"k{i}" for i in range(30) if i % 10 == j] for j in range(10)}
    most = 0

    def produce(key: str) -> list[torch.Tensor]:
        nonlocal most
        most = max(most, sum(path.name.endswith(".partial") for path in tmp_path.iterdir()))
        return [tensors[key]]

    units = [unit_of({key: tensor}, lambda key=key: produce(key)) for key, tensor in tensors.items()]
    write_units(tmp_path, units, files, workers=1, metadata={})
    assert most == 1


def test_raw_copies(tmp_path: Path) -> None:
    tensors = merged(sample())
    write_checkpoint(tmp_path / "a", [tensor_entry(k, t) for k, t in tensors.items()], max_shard_bytes=500)
    with CheckpointReader(tmp_path / "a") as reader:
        units = [
            Unit(
                (PlannedTensor(f"new.{key}", info.dtype, info.shape),),
                lambda key=key: [reader.iter_bytes(key, 64)],
                info.nbytes,
            )
            for key, info in reader.tensors.items()
        ]
        write_units(tmp_path / "b", units, plan_files(units, 1000, index=True), workers=3, metadata={})
    with CheckpointReader(tmp_path / "b") as reader:
        assert {key: bits(reader.read(key)) for key in reader.tensors} == {
            f"new.{key}": bits(tensor) for key, tensor in tensors.items()
        }


def test_single_file_with_and_without_index(tmp_path: Path) -> None:
    units = [unit_of({"a": torch.ones(2)})]
    single = plan_files(units, 10**6, index=False)
    assert single == {"model.safetensors": ["a"]}
    assert write_units(tmp_path / "a", units, single, workers=1, metadata={}).index is None
    assert sorted(files_in(tmp_path / "a")) == ["model.safetensors"]
    assert write_units(tmp_path / "b", units, single, workers=1, metadata={"x": 1}).index == tmp_path / "b" / INDEX
    with CheckpointReader(tmp_path / "b") as reader:
        assert reader.metadata == {"x": 1, "total_size": 8}
    indexed = plan_files(units, 10**6, index=True)
    assert list(indexed) == ["model-00001-of-00001.safetensors"]
    write_units(tmp_path / "c", units, indexed, workers=1, metadata={})
    assert json.loads((tmp_path / "c" / INDEX).read_text())["metadata"] == {"total_size": 8}


# Threads, memory, progress


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_at_most_as_many_units_are_held_as_there_are_workers(tmp_path: Path, workers: int) -> None:
    lock = threading.Lock()
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = calls = 0

    def produce() -> list[torch.Tensor]:
        nonlocal peak, calls
        with lock:
            result = [torch.ones(1000), torch.ones(10, 100).T]
            alive.append(weakref.ref(result[0]))
            calls += 1
            peak = max(peak, sum(reference() is not None for reference in alive))
        return result

    units = [unit_of({f"{i}a": torch.ones(1000), f"{i}b": torch.ones(100, 10)}, produce) for i in range(40)]
    write_units(tmp_path, units, plan_files(units, 20_000, index=True), workers=workers, metadata={})
    assert calls == 40
    assert 1 <= peak <= workers


def test_workers_run_at_the_same_time_with_one_torch_thread_each(tmp_path: Path) -> None:
    meeting = threading.Barrier(3)
    numbers: list[int] = []

    def produce() -> list[torch.Tensor]:
        meeting.wait(60)  # returns only when three workers are here at once
        numbers.append(torch.get_num_threads())
        return [torch.ones(1)]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        units = [unit_of({f"{i}": torch.ones(1)}, produce) for i in range(6)]
        write_units(tmp_path, units, plan_files(units, 10, index=True), workers=3, metadata={})
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert numbers == [1] * 6
        assert (torch.get_num_threads(), later) == (3, [3])  # neither here nor in threads that start later
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_ends_at_the_total_and_counts_what_was_kept(tmp_path: Path, workers: int) -> None:
    groups = sample()
    units = [unit_of(group) for group in groups]
    files = plan_files(units, 900, index=True)
    seen: list[Progress] = []
    total = 2 * sum(tensor.nbytes for tensor in merged(groups).values())
    write_units(tmp_path, units, files, workers=workers, metadata={}, on_progress=seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert (seen[-1].done_bytes, seen[-1].total_bytes, seen[-1].kept_bytes) == (total, total, 0)
    last = list(files)[-1]
    (tmp_path / last).unlink()
    seen.clear()
    write_units(tmp_path, units, files, workers=workers, metadata={}, on_progress=seen.append)
    written = 2 * sum(merged(groups)[key].nbytes for key in files[last])
    assert (seen[-1].done_bytes, seen[-1].kept_bytes) == (total, total - written)


def test_the_last_progress_is_the_total_though_workers_end_between_two_calls(tmp_path: Path) -> None:
    told = threading.Event()
    seen: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        told.set()
        while any(thread.name.startswith("checkpoint-writer") for thread in threading.enumerate()):
            time.sleep(0.001)

    units = [unit_of({"a": torch.ones(4)}, lambda: told.wait(60) and [torch.ones(4)])]
    write_units(tmp_path, units, plan_files(units, 99, index=False), workers=2, metadata={}, on_progress=on_progress)
    assert (seen[0].done_bytes, seen[-1].done_bytes) == (0, 32)


def test_speed_and_time_left_do_not_count_an_earlier_run() -> None:
    progress = Progress(done_bytes=70, total_bytes=130, seconds=2.0, kept_bytes=50)
    assert (progress.bytes_per_second, progress.seconds_left) == (10.0, 6.0)
    assert Progress(50, 130, 0.0, 50).seconds_left is None


# Errors leave nothing


def fails(
    folder: Path, units: list[Unit], message: str, files: dict[str, list[str]] | None = None, **options: Any
) -> None:
    for workers in (1, 2, 4):
        with pytest.raises(CheckpointError, match=message):
            write_units(
                folder,
                units,
                plan_files(units, 40, index=True) if files is None else files,
                **{"workers": workers, "metadata": {}, **options},
            )
        assert not folder.exists() or list(folder.iterdir()) == []


def test_plans_that_contradict_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    fails(folder, [*good(), *good()], "'good0' is to be written twice")
    fails(folder, [unit_of({"__metadata__": torch.ones(1)})], "'__metadata__' cannot be the key")
    fails(folder, good(1), "'good0' is to be written twice", {"a.safetensors": ["good0"], "b.safetensors": ["good0"]})
    fails(folder, good(2), "'good1' is produced but belongs to no file", {"a.safetensors": ["good0"]})
    fails(folder, good(1), "'x' belongs to a.safetensors but nothing produces it", {"a.safetensors": ["good0", "x"]})
    for name in ("../a.safetensors", "a/b.safetensors", "", ".."):
        fails(folder, good(1), "not a plain file name", {name: ["good0"]})
    for name in ("config.json", ".a.safetensors"):
        fails(folder, good(1), "cannot be the name of a weight file", {name: ["good0"]})
    fails(folder, good(1), "workers must be at least 1", workers=0)
    with pytest.raises(CheckpointError, match="Q4 cannot be stored"):
        PlannedTensor("a", "Q4", (1,))


@pytest.mark.parametrize(
    ("dtype", "shape", "produced", "message"),
    [
        ("F32", (3,), [torch.ones(4)], r"'bad' was planned as F32 \[3\] but came as F32 \[4\]"),
        ("F32", (2, 2), [torch.ones(4)], r"\[2, 2\] but came as F32 \[4\]"),
        ("BF16", (4,), [torch.ones(4)], r"BF16 \[4\] but came as F32 \[4\]"),
        ("U8", (4,), [[b"12", b"3"]], r"'bad' was planned with 4 bytes \(U8 \[4\]\) but came with 3"),
        ("U8", (4,), [[b"12", b"345", b"6"]], r"came with 5 or more"),
        ("U8", (0,), [[b"1"]], r"came with 1 or more"),
        ("U8", (1,), [], r"1 tensors were planned but 0 came, for \['bad'\]"),
        ("U8", (1,), [[b"1"], [b"2"]], r"1 tensors were planned but 2 came, for \['bad'\]"),
    ],
)
def test_what_is_produced_must_be_as_planned(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], produced: list[Any], message: str
) -> None:
    bad = Unit((PlannedTensor("bad", dtype, shape),), lambda: produced, 1)
    fails(tmp_path / "c", [*good(), bad, *good(0)], message)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_exception_stops_the_others_and_is_raised(tmp_path: Path, workers: int) -> None:
    calls = 0
    failed = threading.Event()

    def fail() -> list[torch.Tensor]:
        failed.set()
        raise ZeroDivisionError("of the unit")

    def after() -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        failed.wait(60)
        time.sleep(0.01)  # the others hear of it meanwhile; without a stop all thousand would be produced
        return [torch.ones(4)]

    units = [*good(), unit_of({"bad": torch.ones(4)}, fail)]
    units += [unit_of({f"after{i}": torch.ones(4)}, after) for i in range(1000)]
    with pytest.raises(ZeroDivisionError, match="of the unit"):
        write_units(tmp_path, units, plan_files(units, 16, index=True), workers=workers, metadata={})
    assert calls < 1000
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-writer")]


def test_foreign_weights_and_changed_files_are_refused(tmp_path: Path) -> None:
    units = good()
    files = plan_files(units, 16, index=True)
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"already holds other\.safetensors"):
        write_units(tmp_path, units, files, workers=1, metadata={})
    (tmp_path / "other.safetensors").unlink()
    write_units(tmp_path, units, files, workers=1, metadata={})
    victim = tmp_path / list(files)[1]
    whole = victim.read_bytes()
    for content in (whole[:-1], whole + b"x", whole.replace(b"good", b"fine"), b""):
        victim.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{victim.name}: exists already and is not what would be written"):
            write_units(tmp_path, units, files, workers=1, metadata={})
        assert victim.read_bytes() == content
    victim.unlink()
    victim.symlink_to(next(iter(files)))
    with pytest.raises(CheckpointError, match="exists already and is not"):
        write_units(tmp_path, units, files, workers=1, metadata={})


def test_free_space_is_asked_for_what_is_still_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    units = [unit_of({f"{i}": torch.ones(1000)}) for i in range(4)]
    files = plan_files(units, 4000, index=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 5000, 5000))
    never = [unit_of({f"{i}": torch.ones(1000)}, lambda: pytest.fail("nothing may be produced")) for i in range(4)]
    fails(tmp_path / "c", never, "are free on that disk", files)
    monkeypatch.undo()
    write_units(tmp_path / "c", units, files, workers=1, metadata={})
    (tmp_path / "c" / list(files)[2]).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 5000, 5000))
    write_units(tmp_path / "c", units, files, workers=1, metadata={})
    assert len(files_in(tmp_path / "c")) == 5


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """A limit on the size of files gives the same kind of error from the system as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        units = [*good(), unit_of({"big": torch.zeros(2**20)})]
        fails(tmp_path / "c", units, r"model-0000.*cannot be written", plan_files(units, 40, index=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
