"""The attention benchmark runs and prints one line per case."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


def test_quick_benchmark_prints_every_case():
    # One thread: two that share a busy core with other tests wait for each other.
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--heads", "2", "--kv-heads", "1", "--threads", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "2 query heads, 1 key/value heads, 1 threads" in lines[0]
    cases = [line.split("|")[0].split() for line in lines[2:]]
    kinds = [(kind, dtype) for dtype in ("float32", "bfloat16") for kind in ("sliding", "full")]
    assert cases == [[kind, dtype, "128", documents] for kind, dtype in kinds for documents in ("one", "~1k", "~32")]
    for line in lines[2:]:
        ours, reference = line.split("|")[1:3]
        assert ours.count("ms") == 1
        assert reference.count("x") == 2
