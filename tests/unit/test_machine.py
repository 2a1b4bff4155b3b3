"""Memory and disk that are left."""

import shutil
from pathlib import Path

from automimo.machine import free_disk_bytes, memory_bytes


def test_memory_is_that_of_the_machine() -> None:
    memory = memory_bytes()
    assert memory is not None
    assert 2**27 < memory.available <= memory.total < 2**50


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    free = free_disk_bytes(tmp_path / "a" / "b" / "c")
    total = shutil.disk_usage(tmp_path).total
    assert 0 < free <= total
    assert not (tmp_path / "a").exists()
