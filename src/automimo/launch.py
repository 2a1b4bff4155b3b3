"""`automimo train --nproc N`: N copies of the command on this machine, watched as one job. Imports no torch."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from automimo.errors import ConfigError

POLL_S = 0.05
# Between SIGTERM and SIGKILL for the ranks that are left when one has failed: they have nothing to finish, since a step
# or a save needs all of them.
GRACE_S = 5.0
# For the others after the first rank has saved and stopped: they saved the same state and are closing their files.
STOPPING_S = 60.0
# What a rank returns that was asked to stop and has saved (training/stop.py).
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
_PR_SET_PDEATHSIG = 1

_Rank = subprocess.Popen[bytes]


def refuse_second_launch() -> None:
    """Raise ConfigError in a process that is already one of several, which must not start others."""
    if "RANK" in os.environ:
        raise ConfigError(
            f"--nproc starts the processes itself, but RANK is {os.environ['RANK']!r}: torchrun or another launcher "
            "has started this one. Leave --nproc out, or unset RANK"
        )


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run `automimo ARGUMENTS` in `nproc` processes of this machine; returns the exit code of the job.

    See `launch_command`.
    """
    return launch_command(nproc, [sys.executable, "-m", "automimo", *arguments])


def launch_command(nproc: int, command: Sequence[str]) -> int:
    """Run `command` in `nproc` processes with the environment that torchrun would give them.

    Call it in the main thread of a process without other threads. Rank 0 has our stdout, all have our stderr. The first
    rank that fails ends the job: the others get SIGTERM, and SIGKILL 5 s later. SIGTERM and SIGINT that we get are
    passed on to every rank, each once: the ranks are sessions of their own, so that a terminal's Ctrl-C reaches only
    us. No rank outlives us, however we end (where the kernel is not Linux: unless SIGKILL ends us).

    Returns 0; or the code of the first rank that failed, 128 + n if signal n killed it; or 143 or 130 when the ranks
    have saved and stopped.
    """
    ranks: list[_Rank] = []
    with _noted_signals() as received, _reserved_port() as port:
        try:
            for rank in range(nproc):
                ranks.append(_start(rank, nproc, port, command))
            return _watch(ranks, received)
        finally:
            _end(ranks)


def _start(rank: int, nproc: int, port: int, command: Sequence[str]) -> _Rank:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_bound_to(os.getpid()),  # noqa: PLW1509 - unsafe with threads; we have none
    )


def _bound_to(launcher: int) -> Callable[[], None] | None:
    """What a new process does before its program starts so that it dies with the launcher; None where it cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # found here: a forked child should do as little as possible

    def bind() -> None:
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != launcher:
            os._exit(1)

    return bind


def _watch(ranks: Sequence[_Rank], received: list[int]) -> int:
    """Wait until all ranks have ended or the job has failed; `received` are the signals to pass on."""
    left = dict(enumerate(ranks))
    passed_on: list[int] = []
    stopped = 0
    deadline = float("inf")
    while left:
        while received:
            passed_on.append(received.pop(0))
            for process in left.values():
                _send(process, passed_on[-1])
            if passed_on.count(signal.SIGINT) == 2:  # the ranks do not save any more, and a collective may hold them
                return 128 + signal.SIGINT
        for rank, process in list(left.items()):
            code = _poll(process)
            if code is None:
                continue
            del left[rank]
            if code in STOPPED:
                stopped = stopped or code
                deadline = min(deadline, time.monotonic() + STOPPING_S)
            elif code != 0:
                if code < 0 and -code not in passed_on:
                    _say(_last_word(rank, -code))
                return 128 - code if code < 0 else code
        if time.monotonic() > deadline:
            _say(f"{_names(left)} did not end in time and will be killed")
            return stopped
        time.sleep(POLL_S)
    return stopped


def _poll(process: _Rank) -> int | None:
    """Exit code if the rank has ended; what it had started itself then ends too."""
    if process.returncode is None and process.poll() is not None:
        _kill_session(process)
    return process.returncode


def _send(process: _Rank, number: int) -> None:
    """Not Popen.send_signal, which may reap the process behind the back of `_poll`."""
    if process.returncode is None:
        os.kill(process.pid, number)


def _end(ranks: Sequence[_Rank]) -> None:
    """End the ranks that still live, first by SIGTERM."""
    for process in ranks:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(_poll(process) is None for process in ranks):
        time.sleep(POLL_S)
    for process in ranks:
        if process.returncode is None:
            _kill_session(process)
            process.wait()


def _kill_session(process: _Rank) -> None:
    # Mostly it is empty by then; of a session of zombies macOS says that it is not permitted.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT go to the end of a list while this is open, so that none is lost while ranks are started."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free TCP port that no other program gets while this is open, but rank 0 can listen on.

    The socket is bound and does not listen. The kernel then gives its port to nobody who asks for any free one, and
    lets a socket with SO_REUSEADDR, which torch's store sets, listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def _last_word(rank: int, number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = " (if nobody did it by hand, the machine is out of memory)" if number == signal.SIGKILL else ""
    return f"error: rank {rank} was killed by {name}{cause}; the same command goes on from the last checkpoint"


def _names(ranks: dict[int, _Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
