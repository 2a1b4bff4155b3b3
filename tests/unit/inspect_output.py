"""Run `inspect` on a checkpoint folder and look something up in what it prints."""

import io
import re
from pathlib import Path

from rich.console import Console

from automimo.inspect_checkpoint import run_inspect_checkpoint
from automimo.mimo_v2_flash.storage import SourceOptions


def inspect(folder: str | Path, options: SourceOptions | None = None) -> tuple[int, str]:
    """Exit code and output."""
    out = io.StringIO()
    return run_inspect_checkpoint(folder, options, Console(file=out, width=80)), out.getvalue()


def line(text: str, label: str) -> str:
    """What the report says behind a label."""
    found = [row for row in text.splitlines() if re.match(rf"{re.escape(label)}(\s|$)", row)]
    assert len(found) == 1, f"{label!r} in:\n{text}"
    return found[0].removeprefix(label).strip()
