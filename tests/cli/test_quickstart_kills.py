"""The quickstart itself under kill -9, at random moments of every stage: new model, data, steps, saves, export."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import REPOSITORY

# The recipe as shipped but for its length. With a save every third step and moments drawn over a whole run, kills
# fall into saves, evaluations and the export as well.
SHORTER = ("train.steps=12", "train.save_every=3", "train.evaluate_every=6", "optim.warmup_steps=2")


def start(output: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "automimo",
        "train",
        str(REPOSITORY / "recipes/quickstart.yaml"),
        f"output={output}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *SHORTER], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def outcome(output: Path) -> tuple[dict[str, str], list[tuple[int, object]]]:
    """Hash of every file of `final/` that a reader sees and the losses by step (without times)."""
    names = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")
    files = {name: hashlib.sha256((output / "final" / name).read_bytes()).hexdigest() for name in names}
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return files, [(row["step"], row.get("loss", row.get("validation_loss"))) for row in rows]


@pytest.mark.parametrize(
    "kills",
    [pytest.param(20, marks=pytest.mark.slow), pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
)
def test_killed_anywhere_and_run_again_ends_with_the_same_weights(tmp_path: Path, kills: int) -> None:
    undisturbed = start(tmp_path / "whole")
    assert undisturbed.wait(600) == 0
    expected = outcome(tmp_path / "whole")
    generator = random.Random(kills)
    killed, runs = 0, 0
    while killed < kills:
        output = tmp_path / f"killed-{runs}"
        process = start(output)
        try:
            # A whole run takes 10-60 s here; most moments lie where progress from earlier tries is met again.
            code = process.wait(generator.uniform(0.5, 15))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            code = process.wait(60)
        if code == 0:  # it got to its end before the kill: the next ones hit a new run
            assert outcome(output) == expected
            runs += 1
        else:
            assert code == -signal.SIGKILL
            killed += 1
    last = start(output)
    _, errors = last.communicate(timeout=600)
    assert last.returncode == 0, errors.decode()
    assert outcome(output) == expected
    leftovers = [path.name for path in output.rglob(".*") if ".tmp-" in path.name]
    assert not leftovers
    print(f"{killed} kills over {runs + 1} runs")
