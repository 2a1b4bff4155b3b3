"""How far a conversion is: a live bar on a terminal, a few plain lines anywhere else."""

from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from automimo.checkpoint import parallel_writer

PLAIN_SECONDS = 10.0
"""A plain line at most this often."""


class ByteProgress:
    """Shows bytes done, GB/s and time left. A context manager; `show` takes the writer's reports."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._shown = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %  {task.fields[speed]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(title, total=None, speed="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: parallel_writer.Progress) -> None:
        """Take a report; on no terminal one is printed every ten seconds."""
        speed = f"{progress.bytes_per_second / 1e9:.2f} GB/s"
        if self._bar is not None:
            self._bar.update(self._task, total=progress.total_bytes, completed=progress.done_bytes, speed=speed)
        elif progress.seconds - self._shown >= PLAIN_SECONDS:
            self._shown = progress.seconds
            share = progress.done_bytes / max(1, progress.total_bytes)
            left = progress.seconds_left
            eta = "" if left is None else f", ETA {timedelta(seconds=round(left))}"
            self._console.print(f"{self._title} {share:.0%}, {speed}{eta}", markup=False, highlight=False)
