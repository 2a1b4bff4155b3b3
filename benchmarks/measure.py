"""Time and peak memory of a piece of work, and processes that work together, shared by the benchmarks. Linux only
(reads /proc)."""

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType


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


def spawn_ranks(script: str, request: dict, ranks: int, variables: Mapping[str, str] = MappingProxyType({})) -> list:
    """Run `script --measure REQUEST` in `ranks` processes of one thread; the JSON object in the last line of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, script, "--measure", json.dumps(request)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{request}: failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]
