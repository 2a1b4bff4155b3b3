"""A killed or interrupted parallel writer goes on to the same bytes, and writes no finished file a second time.

Kills are real: SIGKILL before every file-system call in turn, and at moments that nobody chose. The killed processes
are forks of one helper process that has imported the package.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_units import files_in, good, inodes, sample, unit_of

from automimo.checkpoint import Progress, Unit, plan_files, write_units
from automimo.errors import CheckpointError


def test_an_interrupt_keeps_finished_files_and_the_next_run_writes_the_rest(tmp_path: Path) -> None:
    groups = sample()
    files = plan_files([unit_of(group) for group in groups], 900, index=True)
    whole = tmp_path / "whole"
    write_units(whole, [unit_of(group) for group in groups], files, workers=1, metadata={"a": 1})
    most = 0
    for at in range(len(groups)):
        folder = tmp_path / f"{at}"
        calls: list[int] = []

        def produce(i: int, at: int | None) -> list[torch.Tensor]:
            calls.append(i)  # noqa: B023 -- used within this turn
            if i == at:
                raise KeyboardInterrupt
            return list(groups[i].values())

        def units(at: int | None) -> list[Unit]:
            return [unit_of(group, lambda i=i: produce(i, at)) for i, group in enumerate(groups)]

        with pytest.raises(KeyboardInterrupt):
            write_units(folder, units(at), files, workers=1, metadata={"a": 1})
        kept = inodes(folder)
        most = max(most, len(kept))
        finished = {key for name in kept for key in files[name]}
        assert sorted(files_in(folder)) == sorted(kept)  # neither partial files nor an index
        calls.clear()
        write_units(folder, units(None), files, workers=1, metadata={"a": 1})
        assert calls == [i for i, group in enumerate(groups) if not group.keys() <= finished]
        assert files_in(folder) == files_in(whole)
        assert kept.items() <= inodes(folder).items()
    assert most == len(files) - 1


def test_an_interrupt_of_the_calling_thread_stops_the_workers(tmp_path: Path) -> None:
    told = threading.Event()
    units = [unit_of({"first": torch.ones(4)})]
    units += [unit_of({f"{i}": torch.ones(4)}, lambda: told.wait(60) and [torch.ones(4)]) for i in range(500)]

    def on_progress(progress: Progress) -> None:
        told.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_units(tmp_path, units, plan_files(units, 16, index=True), workers=3, metadata={}, on_progress=on_progress)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-writer")]
    assert not [name for name in files_in(tmp_path) if name.endswith(".partial")]


def test_an_error_removes_only_what_this_run_wrote(tmp_path: Path) -> None:
    units = good()
    files = plan_files(units, 16, index=True)
    write_units(tmp_path, units, files, workers=1, metadata={})
    kept = inodes(tmp_path)
    for name in list(files)[2:]:
        (tmp_path / name).unlink()
        del kept[name]
    units[-1] = unit_of({"good4": torch.ones(4)}, lambda: [torch.ones(3)])
    with pytest.raises(CheckpointError, match="good4"):
        write_units(tmp_path, units, files, workers=1, metadata={})
    assert inodes(tmp_path) == kept


def test_tensors_of_a_unit_that_lie_in_a_finished_file_are_not_written_again(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(3)}
    files = {"x.safetensors": ["a"], "y.safetensors": ["b"]}
    write_units(tmp_path, [unit_of(tensors)], files, workers=1, metadata={})
    before, kept = files_in(tmp_path), inodes(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    (tmp_path / ".y.safetensors.partial").write_bytes(b"half")
    (tmp_path / ".old-plan.safetensors.partial").write_bytes(b"half")
    write_units(tmp_path, [unit_of(tensors)], files, workers=1, metadata={})
    assert files_in(tmp_path) == before
    assert inodes(tmp_path)["x.safetensors"] == kept["x.safetensors"]


def test_files_are_on_disk_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may undo what was not synchronised: then a name would promise what is not there."""
    events: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def recording_fsync(descriptor: int) -> None:
        events.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recording_replace(path: Path, target: Path) -> Path:
        events.append(("name", path.stat().st_ino))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "replace", recording_replace)
    units = good()
    write_units(tmp_path, units, plan_files(units, 16, index=True), workers=1, metadata={})
    for path in tmp_path.iterdir():
        inode = path.stat().st_ino
        assert events.index(("sync", inode)) < events.index(("name", inode))
    assert events[-1] == ("sync", tmp_path.stat().st_ino)


KILLER = r"""
import os, random, signal, sys, time
from pathlib import Path
import torch
from automimo.checkpoint import PlannedTensor, Unit, plan_files, write_units
from kill_calls import killed_at

torch.set_num_threads(1)

def units(seconds):
    def produce(i):
        sys.audit("produce")
        time.sleep(seconds)
        return [torch.full((50,), i), torch.full((i,), float(i))]
    return [
        Unit((PlannedTensor(f"{i}a", "I64", (50,)), PlannedTensor(f"{i}b", "F32", (i,))), lambda i=i: produce(i), 1)
        for i in range(6)
    ]

def write(folder, workers, seconds=0.0):
    plan = units(seconds)
    write_units(folder, plan, plan_files(plan, 900, index=True), workers=workers, metadata={"a": 1})

def inodes(folder):
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("*.safetensors")}

root = Path(sys.argv[1])
write(root / "whole", 1)
whole = {p.name: p.read_bytes() for p in (root / "whole").iterdir()}
kills, finished = 0, set()
for workers in (1, 2):
    for k in range(1, 1000):
        folder = root / f"{workers}-{k}"
        folder.mkdir()
        if not killed_at(k, lambda: write(folder, workers)):
            break
        kills += 1
        kept = inodes(folder)
        finished.add(len(kept))
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:
            assert path.read_bytes() == whole[path.name], (k, path)
        write(folder, 3 - workers)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole, k
        assert kept.items() <= inodes(folder).items(), k

# At moments that nobody chose, also inside of calls, and again and again in one folder.
rng = random.Random(0)
for turn in range(10):
    folder = root / f"random-{turn}"
    folder.mkdir()
    kept, longest = {}, 0.0
    while not (folder / "model.safetensors.index.json").exists():
        pid = os.fork()
        if pid == 0:
            write(folder, 1 + turn % 3, 0.001)
            os._exit(0)
        longest += 0.004  # so that it ends on the slowest machine as well
        time.sleep(rng.random() * longest)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert kept.items() <= inodes(folder).items(), turn
        kept = inodes(folder)
        for name in kept:
            assert (folder / name).read_bytes() == whole[name], (turn, name)
    write(folder, 1)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole, turn
    assert kept.items() <= inodes(folder).items(), turn
print(kills, sorted(finished))
"""


def test_killed_before_every_call_and_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    kills, finished = child.stdout.split(" ", 1)
    assert int(kills) > 40
    assert json.loads(finished) == [0, 1, 2, 3]  # kills with none, some and all of the three files finished
