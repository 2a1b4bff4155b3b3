"""metrics.jsonl and what a run shows."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from automimo.errors import TrainingError
from automimo.training.metrics import MetricsFile, read_metrics
from automimo.training.progress import PLAIN_LINES, step_display


def row(step: int, **more: object) -> dict:
    values = {"step": step, "loss": 1.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 5}
    return {**values, "tokens_per_second": 10.0, "seconds": 0.5, **more}


def write(path: Path, *rows_: dict, tail: str = "") -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows_) + tail)


def test_a_new_run_empties_an_old_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, row(1))
    MetricsFile(path, None).close()
    assert path.read_bytes() == b""


def test_lines_behind_the_resumed_step_go_and_a_torn_one_is_mended(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    kept = [{"step": 0, "validation_loss": 3.0}, row(1), row(2), {"step": 2, "validation_loss": 2.5}]
    write(path, *kept, row(3), {"step": 3, "validation_loss": 2.0}, tail='{"step": 4, "lo')
    metrics = MetricsFile(path, 2)
    assert [metrics.missing_evaluation(step) for step in range(4)] == [False, True, False, True]
    assert read_metrics(path) == kept == metrics.rows
    metrics.append(row(3))
    metrics.append({"step": 3, "validation_loss": 1.0})
    assert not metrics.missing_evaluation(3)
    metrics.close()
    assert read_metrics(path) == [*kept, row(3), {"step": 3, "validation_loss": 1.0}]
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("cut", range(1, 60))
def test_any_cut_of_the_last_line_is_harmless(tmp_path: Path, cut: int):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(row(2)) + "\n"
    write(path, row(1), tail=line[: min(cut * 2, len(line) - 2)])
    assert read_metrics(path) == [row(1)]
    MetricsFile(path, 1).close()
    assert path.read_text() == json.dumps(row(1)) + "\n"


def test_a_complete_line_without_its_newline_counts(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, row(1), tail=json.dumps(row(2)))
    MetricsFile(path, 2).close()
    assert read_metrics(path) == [row(1), row(2)] and path.read_bytes().endswith(b"\n")


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1)) + "\nnonsense\n" + json.dumps(row(2)) + "\n")
    with pytest.raises(TrainingError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)


def test_numbers_that_json_lacks_are_refused(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", None)
    with pytest.raises(ValueError, match="JSON"):
        metrics.append(row(1, loss=float("nan")))
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_no_file_has_no_rows(tmp_path: Path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def shown(total: int, first: int = 0, *, terminal: bool) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=120)
    display = step_display(console, first, total)
    for step in range(first + 1, total + 1):
        display.step(row(step, loss=None if step == 2 else 1 / step))
    display.note("held-out loss 1.5 [not markup]")
    display.close()
    return console.file.getvalue()


def test_plain_lines():
    lines = shown(1000, terminal=False).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    assert steps[0] == 1 and steps[-1] == 1000 and PLAIN_LINES <= len(steps) <= PLAIN_LINES + 2
    assert lines[-1] == "held-out loss 1.5 [not markup]"
    first = lines[0]
    assert "loss 1.0000" in first and "lr 1.00e-03" in first and "10 tokens/s" in first and "ETA " in first
    assert "\x1b" not in "".join(lines)
    assert "skipped: no targets" in shown(3, terminal=False)
    assert shown(20, 15, terminal=False).startswith("step 16/20")


def test_a_live_bar_on_a_terminal():
    text = shown(40, terminal=True)
    assert "40/40" in text and "loss 0.0250" in text and "tokens/s" in text and "ETA 0:00:00" in text
    assert "held-out loss 1.5 [not markup]" in text
