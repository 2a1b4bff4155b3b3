"""Time and peak memory of a piece of work, shared by the benchmarks. Linux only (reads /proc)."""

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path


def reset_peak() -> None:
    """Give freed memory back to the system and start a new peak of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak resident memory of this process since `reset_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def measure(work: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Best seconds of `repeats` runs after one that warms up, and peak MiB above where they started."""
    work()
    reset_peak()
    before = peak_mib()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), peak_mib() - before
