"""metrics.jsonl: one JSON object per optimizer step and one per evaluation, whatever happens to the process.

A step has `step`, `loss` (per valid target; null when skipped), `grad_norm`, `lr`, `tokens` (valid targets),
`tokens_per_second`, `seconds` and, with experts, their balance; an evaluation has `step` and `validation_loss`.
"""

import json
from pathlib import Path
from typing import Any, Protocol, TextIO

from automimo.checkpoint import write_text_atomic
from automimo.errors import TrainingError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of the file, in order; a torn last line (a killed writer) is left out. [] without a file.

    Raises TrainingError for a broken line in the middle, which no kill can cause.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # b"" when the file ends with a newline
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None:
            raise TrainingError(f"{path}, line {number}: not a metrics object; move the file away to go on without it")
        rows.append(row)
    row = _parse(torn)
    return rows if row is None else [*rows, row]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def inherit_metrics(checkpoint: Path, target: Path) -> None:
    """Begin `target` with the history of the run that `checkpoint` (RUN/checkpoints/step-N) belongs to, if both the
    history exists and `target` does not."""
    source = checkpoint.parent.parent / target.name
    if source.is_file() and not target.exists():
        write_text_atomic(target, "".join(_line(row) for row in read_metrics(source)))


class Metrics(Protocol):
    """Where rows go. `missing_evaluation`: whether the evaluation of a step is known to be still to do."""

    def append(self, row: dict[str, Any]) -> None: ...

    def missing_evaluation(self, step: int) -> bool: ...

    def close(self) -> None: ...


class NoMetrics:
    """For the ranks that do not write: the same rows reach the file through rank 0."""

    def append(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def missing_evaluation(self, step: int) -> bool:  # noqa: ARG002
        """Not known here."""
        return False

    def close(self) -> None:
        """Nothing."""


class MetricsFile:
    """Appends to metrics.jsonl. Each line reaches the operating system before the next step starts."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """Open the file of a run that goes on after `resumed_step`; None is a new run and empties it.

        Lines of later steps (of a process that was killed after its last checkpoint) are dropped and a torn line is
        repaired, in one atomic rewrite: the run repeats those steps and writes them again.
        """
        rows = [] if resumed_step is None else [row for row in read_metrics(path) if row["step"] <= resumed_step]
        write_text_atomic(path, "".join(_line(row) for row in rows))
        self._evaluated = {row["step"] for row in rows if "validation_loss" in row}
        self.rows = rows
        self._file: TextIO = path.open("a", encoding="utf-8", newline="\n")

    def append(self, row: dict[str, Any]) -> None:
        """Write one object; numbers that JSON lacks (inf, nan) are refused, as the loop stops before logging them."""
        self._file.write(_line(row))
        self._file.flush()
        self.rows.append(row)
        if "validation_loss" in row:
            self._evaluated.add(row["step"])

    def missing_evaluation(self, step: int) -> bool:
        """Whether the file has no evaluation of `step`."""
        return step not in self._evaluated

    def close(self) -> None:
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
