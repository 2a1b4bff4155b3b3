"""`python -m automimo.compare_runs RUN RUN`: are two runs of one recipe the same training?

For the same recipe run in another number of processes: the numbers may differ by rounding only.
"""

import sys
from pathlib import Path

import torch

from automimo.checkpoint import CheckpointReader
from automimo.cli_errors import exit_code_of
from automimo.errors import TrainingError
from automimo.training.metrics import read_metrics

LOSS_LIMIT = 1e-4
"""Relative. Sums in another order differ by 1e-7; every step of training multiplies that a little."""
NORM_LIMIT = 1e-3
"""Relative. A norm follows the weights it was taken at, so it may differ as much as they do."""
WEIGHT_LIMIT = 1e-3
"""Norm of the difference of a tensor over its norm."""


def compare_runs(one: Path, other: Path) -> str:
    """One line with the largest differences of losses, gradient norms and final weights.

    Raises TrainingError when they are too large, or the runs have other steps or tensors.
    """
    rows, others = (_steps(folder) for folder in (one, other))
    if rows.keys() != others.keys():
        raise TrainingError(f"{one} has {len(rows)} steps, {other} has {len(others)}: these are other runs")
    loss = max(_relative(rows[step]["loss"], others[step]["loss"]) for step in rows)
    norm = max(_relative(rows[step]["grad_norm"], others[step]["grad_norm"]) for step in rows)
    weight, name = _weights(one / "final", other / "final")
    text = (
        f"{len(rows)} steps: losses differ by at most {loss:.1e}, gradient norms by {norm:.1e}, final weights by "
        f"{weight:.1e} of their norm ({name})"
    )
    if loss > LOSS_LIMIT or norm > NORM_LIMIT or weight > WEIGHT_LIMIT:
        raise TrainingError(f"{text}; allowed are {LOSS_LIMIT:.0e}, {NORM_LIMIT:.0e} and {WEIGHT_LIMIT:.0e}")
    return text


def _steps(folder: Path) -> dict[int, dict[str, float]]:
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row.get("loss") is not None}
    if not rows:
        raise TrainingError(f"{folder}: holds no run with steps")
    return rows


def _relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other) if other else abs(one)


def _weights(one: Path, other: Path) -> tuple[float, str]:
    with CheckpointReader(one) as reader, CheckpointReader(other) as others:
        if reader.tensors.keys() != others.tensors.keys():
            raise TrainingError(f"{one} and {other} hold different tensors")
        differences = []
        for name in reader.tensors:
            first, second = reader.read(name).double(), others.read(name).double()
            norm = torch.linalg.vector_norm(second)
            difference = torch.linalg.vector_norm(first - second)
            differences.append((float(difference / norm) if norm else float(difference), name))
    return max(differences)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m automimo.compare_runs RUN RUN\n")
        return 2

    def work() -> int:
        sys.stdout.write(compare_runs(Path(arguments[0]), Path(arguments[1])) + "\n")
        return 0

    return exit_code_of(work, debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
