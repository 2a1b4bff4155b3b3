"""Reading and writing hold one tensor, not the checkpoint: the peak resident memory of a child process is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = r"""
import json, sys
from pathlib import Path
import torch
from automimo.checkpoint import CheckpointReader, TensorEntry, raw_entry, write_checkpoint
torch.set_num_threads(1)
folder, count, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def make(i):
    return lambda: torch.full((rows, 1024), float(i))

# Warm up what is loaded on first use.
write_checkpoint(folder / "warm", [TensorEntry("w", torch.float32, (2, 2), lambda: torch.ones(2, 2).T)])
with CheckpointReader(folder / "warm") as reader:
    reader.read_into("w", torch.zeros(2, 2, dtype=torch.bfloat16).T)
start = peak()
tensor = rows * 1024 * 4
entries = [TensorEntry(f"w{i}", torch.float32, (rows, 1024), make(i)) for i in range(count)]
write_checkpoint(folder / "a", entries, max_shard_bytes=5 * tensor)
written = peak()
with CheckpointReader(folder / "a") as reader:
    write_checkpoint(folder / "b", [raw_entry(reader, key) for key in reader.tensors], max_shard_bytes=3 * tensor)
copied = peak()
with CheckpointReader(folder / "b") as reader:
    assert len(reader.files) >= count // 3
    for i in range(count):
        assert reader.read(f"w{i}")[-1, -1] == i
    read = peak()
    destination = torch.zeros(1024, rows, dtype=torch.bfloat16).T
    for i in range(count):
        reader.read_into(f"w{i}", destination)
        assert destination[-1, -1] == i
print(json.dumps({"tensor": tensor, "growth": [written - start, copied - start, read - start, peak() - start]}))
"""


def measure(folder: Path, count: int, rows: int) -> tuple[int, list[int]]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(count), str(rows)],
        # glibc keeps freed blocks for reuse, up to a few tensors and differently in each run. With this, blocks of
        # 1 MiB and more go back at once, so that the peak is what was really held.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    return result["tensor"], result["growth"]


def check(tensor: int, growth: list[int]) -> None:
    """4 MiB for everything small. A conversion holds its destination (half a tensor), the 16 MiB that it reads at a
    time, and their bfloat16 copy, which torch makes on the way to a transposed destination."""
    written, copied, read, converted = growth
    assert max(written, copied, read) < tensor + 4 * 2**20, growth
    assert converted < max(tensor, tensor // 2 + 24 * 2**20) + 4 * 2**20, growth


def test_peak_memory_small(tmp_path: Path) -> None:
    tensor, growth = measure(tmp_path, count=20, rows=2048)
    assert tensor == 8 * 2**20
    check(tensor, growth)


@pytest.mark.slow
def test_peak_memory_of_600_megabytes(tmp_path: Path) -> None:
    tensor, growth = measure(tmp_path, count=25, rows=6144)
    assert 25 * tensor > 600_000_000
    check(tensor, growth)
