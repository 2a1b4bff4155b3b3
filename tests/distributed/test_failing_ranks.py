"""What a user sees when one of several ranks fails: its message alone, soon, and the exit code of a failure."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from automimo.cli_errors import lost_contact
from automimo.errors import DistributedError, TrainingError

COMMAND = """
import sys
from automimo.launch import launch_command
raise SystemExit(launch_command(int(sys.argv[1]), [sys.executable, *sys.argv[2:]]))
"""
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from automimo.cli_errors import exit_code_of
from automimo.distributed.world import open_world, together
from automimo.errors import TrainingError

torch.set_num_threads(1)

def part(world):
{part}

def work():
    with open_world(timeout_s={timeout}) as world:
        dist.all_reduce(torch.ones(3))  # all have met
        part(world)
        for _ in range(1000):
            dist.all_reduce(torch.ones(3))
            time.sleep(0.01)
    return 0

raise SystemExit(exit_code_of(work, debug="--debug" in sys.argv))
"""


def run(
    tmp_path: Path, size: int, part: str, *arguments: str, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    indented = "".join(f"    {line}\n" for line in part.strip().splitlines())
    path.write_text(SCRIPT.format(part=indented, timeout=timeout), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, str(size), str(path), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_only_the_rank_that_failed_speaks(tmp_path: Path, size: int) -> None:
    done = run(tmp_path, size, "if world.rank == 1: raise TrainingError('step 3: the loss is nan; lower optim.lr')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "rank 1: error: step 3: the loss is nan; lower optim.lr\n"


@pytest.mark.slow
def test_a_failure_that_all_learn_of_is_told_once(tmp_path: Path) -> None:
    part = """
with together("saving step 3"):
    if world.rank == 1:
        raise OSError(28, "No space left on device")
"""
    done = run(tmp_path, 2, part)
    assert (done.returncode, done.stderr) == (1, "rank 1: error: No space left on device\n")


@pytest.mark.slow
def test_ranks_that_fail_alike_speak_once(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "raise TrainingError('no data')")
    assert (done.returncode, done.stderr) == (1, "rank 0: error: no data\n")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_by_the_launcher_alone(tmp_path: Path, victim: int) -> None:
    done = run(tmp_path, 2, f"if world.rank == {victim}: os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 137
    assert done.stderr.startswith(f"error: rank {victim} was killed by SIGKILL") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_killed_while_the_others_make_a_group(tmp_path: Path) -> None:
    """The store is gone with rank 0; torch warns of it with a page of C++ frames where TORCH_CPP_LOG_LEVEL lets it."""
    part = """
if world.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.new_group([0, 1])
"""
    done = run(tmp_path, 2, part)
    assert done.returncode == 137
    assert done.stderr.startswith("error: rank 0 was killed by SIGKILL") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_ranks_that_only_lost_contact_say_so_in_the_end(tmp_path: Path) -> None:
    """A rank that sleeps, no watchdog: the collective's own time-out is all there is to tell."""
    done = run(tmp_path, 2, "if world.rank == 1: time.sleep(100)", timeout=3)
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0: error: lost contact with another rank: Timed out waiting 3000ms")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_torchrun_shows_the_message_of_the_rank_alone(tmp_path: Path) -> None:
    """Apart from what torchrun says itself."""
    run(tmp_path, 1, "raise TrainingError('writes the script')")
    script = tmp_path / "script.py"
    script.write_text(script.read_text().replace("writes the script'", "x' * (world.rank == 1 or time.sleep(60))"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("rank ")] == ["rank 1: error: x"]


# Word for word from ranks whose peer was killed, hung or had left.
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:1195. This is typically caused"),
            "Connection closed by peer [127.0.0.1]:1195",
        ),
        (
            RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
            "Timed out waiting 3000ms for recv operation to complete",
        ),
        (dist.DistStoreError("wait timeout after 5000ms, keys: /a"), "wait timeout after 5000ms, keys: /a"),
        (
            dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
            "Failed to recv, got 0 b",
        ),
        (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed"), "NCCL error: ncclRemoteError: A call"),
    ],
)
def test_texts_of_a_lost_contact(error: Exception, words: str) -> None:
    found = lost_contact(error)
    assert found is not None and found.startswith(words)
    outer = ValueError("while writing")
    outer.__cause__ = error
    assert lost_contact(outer) == found


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("a download timed out"),
        TimeoutError("timed out"),
        dist.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"),
        dist.DistNetworkError("The server socket has failed to listen on any local network address. EADDRINUSE"),
        DistributedError("saving: rank 1 failed: timed out"),
        TrainingError("timeout"),
    ],
)
def test_texts_of_a_rank_that_failed_itself(error: Exception) -> None:
    assert lost_contact(error) is None


def test_a_rank_that_ctrl_c_ends_dies_of_it(tmp_path: Path) -> None:
    """So that a launcher can tell it from one that saved and stopped, which returns 130; only rank 0 says so."""
    script = tmp_path / "script.py"
    script.write_text(
        "from automimo.cli_errors import exit_code_of\n"
        "def work():\n    raise KeyboardInterrupt\n"
        "exit_code_of(work, debug=False)\n",
        encoding="utf-8",
    )
    for rank, said in ((0, "interrupted\n"), (1, "")):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (-signal.SIGINT, said)
