"""A run that hangs tells where, and ends."""

import faulthandler
import os
import sys
import tempfile
import threading
import time
from types import TracebackType

from automimo.distributed.world import rank

FAILED = 1


class Watchdog:
    """Ends this process with exit code 1 when `alive` has not been called for `timeout_s` seconds.

    Every rank of a run has one; None watches nothing, for a process that is alone: nobody waits for it. The stacks of
    all threads of the rank go to stderr, below a headline with what it was doing and since when; `grace_s` later, when
    those of the other ranks are out too, the process ends, whatever its threads are blocked in. Where a C call holds
    the interpreter's lock, faulthandler's own thread, which needs no lock, does the same without the headline.

    The time-out of the process group must be longer, else a collective fails first and only tells that it waited. A
    process that was suspended (Ctrl-Z) for longer counts as hanging, as it does to a collective.
    """

    def __init__(self, timeout_s: float | None, grace_s: float = 5.0) -> None:
        self.watches = timeout_s is not None
        self.timeout_s = timeout_s or 0.0
        self.grace_s = grace_s
        self._heard = (time.monotonic(), "the start", 1.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def alive(self, what: str, patience: float = 1.0) -> None:
        """This rank is about to do `what` ("step 12"), which may take `patience` times the time-out. Costs 0.1 us."""
        self._heard = (time.monotonic(), what, patience)

    def __enter__(self) -> "Watchdog":
        if not self.watches:
            return self
        self._rank = rank()
        self._stderr = _stderr_descriptor()
        self._stacks = tempfile.TemporaryFile()
        self.alive("the start")
        self._arm(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.watches:
            return
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()

    def _watch(self) -> None:
        # Often enough that the timer of `_arm`, set from what was heard at the last look, cannot run out early.
        period = min(1.0, self.grace_s / 2, self.timeout_s / 4)
        while not self._closed.wait(period):
            heard, what, patience = self._heard
            silent = time.monotonic() - heard
            if silent >= self.timeout_s * patience:
                self._end(what, silent)
            self._arm(silent, patience)

    def _arm(self, silent: float, patience: float = 1.0) -> None:
        """Let faulthandler dump and exit half a grace after us, should we not get the interpreter's lock."""
        left = max(0.0, self.timeout_s * patience - silent) + self.grace_s / 2
        faulthandler.dump_traceback_later(left, exit=True, file=self._stderr)

    def _end(self, what: str, silent: float) -> None:
        faulthandler.dump_traceback_later(2 * self.grace_s + 5, exit=True, file=self._stderr)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        self._write(
            f"error: hangs since {since} in {what}: nothing heard for {silent:.0f} s; the stacks of its threads "
            "follow, then it ends"
        )
        # Not straight to stderr: faulthandler writes word by word, and the words of all ranks would mix.
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        self._stacks.seek(0)
        for stack in self._stacks.read().decode(errors="replace").split("\n\n"):
            self._write(stack)
        time.sleep(self.grace_s)
        os._exit(FAILED)

    def _write(self, text: str) -> None:
        """In one piece, every line with our rank."""
        lines = [f"rank {self._rank}: {line}\n" for line in text.strip().splitlines()]
        os.write(self._stderr, "".join(lines).encode())


def _stderr_descriptor() -> int:
    """Of sys.stderr; of the process where that is no file (tests that capture it)."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):
        return 2
