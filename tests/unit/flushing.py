"""A process that flushes subnormal numbers to zero, as some inference servers do."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Subnormals are zero inside; skips the test on a CPU that cannot do it (x86 and recent ARM can)."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
