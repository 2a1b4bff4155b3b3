"""What a run shows while it works: a live bar on a terminal, plain lines anywhere else."""

import time
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

PLAIN_LINES = 25
"""About so many step lines in a whole run, evaluations apart ..."""
PLAIN_SECONDS = 30.0
"""... and one at least this often, so that a log of a long run shows life."""


class StepDisplay(Protocol):
    """Shows steps as they are done. `row` is the object that goes into metrics.jsonl."""

    def step(self, row: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def step_display(console: Console, first: int, total: int) -> StepDisplay:
    """The display for steps `first` + 1 to `total`."""
    return LiveDisplay(console, first, total) if console.is_terminal else PlainDisplay(console, first, total)


class PlainDisplay:
    """One line per so many steps; always the first and the last."""

    def __init__(self, console: Console, first: int, total: int) -> None:
        self._console, self._total = console, total
        self._every = max(1, total // PLAIN_LINES)
        self._first = first + 1
        self._started = self._shown = time.monotonic()

    def step(self, row: dict[str, Any]) -> None:
        step, now = row["step"], time.monotonic()
        due = step % self._every == 0 or step in (self._first, self._total) or now - self._shown > PLAIN_SECONDS
        if not due:
            return
        self._shown = now
        left = (now - self._started) / (step - self._first + 1) * (self._total - step)
        self.note(f"step {step}/{self._total}  {_numbers(row)}  ETA {_duration(left)}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return


class LiveDisplay:
    """A bar with loss, learning rate, tokens per second and time left; notes scroll above it."""

    def __init__(self, console: Console, first: int, total: int) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}", markup=False),
            _TimeLeft(),
        )
        self._progress = Progress(*columns, console=console, expand=True)
        self._task = self._progress.add_task("train", total=total, completed=first, numbers="")
        self._started, self._first, self._total = time.monotonic(), first, total
        self._progress.start()

    def step(self, row: dict[str, Any]) -> None:
        done = row["step"] - self._first
        left = (time.monotonic() - self._started) / done * (self._total - row["step"])
        self._progress.update(self._task, completed=row["step"], numbers=_numbers(row), left=left)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


class _TimeLeft(ProgressColumn):
    """Mean time per step so far times the steps left; rich's own estimate looks at the last 30 s only."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text("ETA " + (_duration(left) if left is not None else "-:--:--"))


def _numbers(row: dict[str, Any]) -> str:
    if row["loss"] is None:
        return "skipped: no targets"
    return f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tokens/s"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
