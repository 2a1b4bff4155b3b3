"""A conversion that is stopped by a signal, or killed before any file-system call, goes on to the same folder.

The killed processes are forks of one helper process that has imported the package.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_units import ENV, content, files_in, inodes, names_in, sample, unit_of, write_folder

from automimo.checkpoint import plan_files, work_folder, write_units
from automimo.errors import CheckpointError

CONVERT = r"""
import signal, sys, threading
from pathlib import Path
import torch
from automimo.checkpoint import plan_files, work_folder, write_units
sys.path.insert(0, sys.argv[2])
from checkpoint_units import sample, unit_of

# The handlers are those that a command line has; the event keeps the run from ending before the signal is there.
told = threading.Event()
def interrupt(number, frame):
    told.set()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)
signal.signal(signal.SIGINT, interrupt)
signal.signal(signal.SIGTERM, interrupt)

def produce(i, group):
    if i == 15:
        print("half", flush=True)
    if i >= 15:
        told.wait(60)
    return list(group.values())

units = [unit_of(group, lambda i=i, group=group: produce(i, group)) for i, group in enumerate(sample())]
with work_folder(sys.argv[1], "from x") as folder:
    write_units(folder, units, plan_files(units, 900, index=True), workers=2, metadata={})
    (folder / "config.json").write_text("{}")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_conversion_goes_on_to_the_same_bytes(tmp_path: Path, number: signal.Signals) -> None:
    final = tmp_path / "final"
    with subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(final), str(Path(__file__).parent)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.send_signal(number)
        _, errors = child.communicate(timeout=100)
    expected = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert child.returncode == expected[number], errors
    assert names_in(tmp_path) == [".final.work"]
    units = [unit_of(group) for group in sample()]
    files = plan_files(units, 900, index=True)
    with work_folder(final, "from x") as folder:
        kept = inodes(folder)
        assert kept
        write_units(folder, units, files, workers=1, metadata={})
        (folder / "config.json").write_text("{}")
    write_units(tmp_path / "whole", units, files, workers=1, metadata={})
    assert files_in(final) == {**files_in(tmp_path / "whole"), "config.json": b"{}"}
    assert kept.items() <= inodes(final).items()
    assert names_in(tmp_path) == ["final", "whole"]


def test_a_failing_unit_leaves_nothing(tmp_path: Path) -> None:
    units = [unit_of({f"{i}": torch.ones(4)}) for i in range(8)]
    units.append(unit_of({"bad": torch.ones(4)}, lambda: [torch.ones(5)]))
    with pytest.raises(CheckpointError, match="'bad'"), work_folder(tmp_path / "final", "x") as folder:
        write_units(folder, units, plan_files(units, 32, index=True), workers=2, metadata={})
    assert names_in(tmp_path) == []


KILLER = r"""
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from checkpoint_units import finish_file, write_folder
from kill_calls import killed_at
from automimo.checkpoint import work_folder

def leave(final, fingerprint, text):
    try:
        with work_folder(final, fingerprint) as folder:
            finish_file(folder, "b.safetensors", text)
            (folder / "config.json").write_text("half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass

def fail(final):
    try:
        with work_folder(final, "from x") as folder:
            finish_file(folder, "a.safetensors", "new")
            1 / 0
    except ZeroDivisionError:
        pass

def prepare(scenario, final):
    if scenario == "resumed":
        leave(final, "from x", "new")
    if scenario == "restarted":
        leave(final, "from y", "old")
    if scenario == "failing":
        return lambda: fail(final)
    return lambda: write_folder(final)

kills = {}
for scenario in ("new", "resumed", "restarted", "failing"):
    for k in range(1, 1000):
        here = Path(sys.argv[1]) / scenario / str(k)
        here.mkdir(parents=True)
        if not killed_at(k, prepare(scenario, here / "final")):
            break
    kills[scenario] = k - 1
print(json.dumps(kills))
"""


def test_killed_before_every_call_it_goes_on_to_the_same_folder(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), str(Path(__file__).parent)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    for scenario, kills in json.loads(child.stdout).items():
        assert kills >= 10
        seen = set()
        for k in range(1, kills + 1):
            final = tmp_path / scenario / str(k) / "final"
            seen.add(final.exists())
            if final.exists():
                assert content(final) == "new"
                with pytest.raises(CheckpointError, match="exists already"):
                    write_folder(final)
            else:
                write_folder(final)
            assert content(final) == "new"
            assert names_in(final.parent) == ["final"]
        assert seen == ({False} if scenario == "failing" else {True, False})
