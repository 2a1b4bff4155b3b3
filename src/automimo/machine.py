"""What this machine has left: memory and disk. Imports no torch."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

GIB = 2**30


class Memory(NamedTuple):
    """Bytes of this machine, or of the container it runs in."""

    total: int
    available: int


def memory_bytes() -> Memory | None:
    """Memory by /proc/meminfo and the cgroup's limit; None where neither exists (not Linux)."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    table = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    machine = Memory(table["MemTotal"], table["MemAvailable"])
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or its limit is "max"
        return machine
    return Memory(min(machine.total, limit), min(machine.available, max(0, limit - used)))


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the disk that `path`, or its nearest existing parent, lies on."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
