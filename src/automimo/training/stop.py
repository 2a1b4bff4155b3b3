"""SIGTERM and Ctrl-C: finish the step, save, end with the right exit code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether to save and stop. True once it is everyone's: for one process with its first SIGTERM or SIGINT, for one
    of several (`shared`) only by `agree`, so that no rank leaves the loop while the others wait for it.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.signal: signal.Signals | None = None
        self._local = 0

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def local(self) -> int:
        """Number of the signal that this process got, 0 without one. The ranks exchange the largest of it."""
        return self._local

    def note(self, number: int) -> None:
        """This process got signal `number`."""
        self._local = max(self._local, number)
        if not self.shared:
            self.agree(number)

    def agree(self, number: int) -> None:
        """`number` is the largest `local` of all ranks; 0 changes nothing."""
        if number:
            self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 143 for SIGTERM, 130 for SIGINT; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals(world_size: int = 1) -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT while this is open. Outside the main thread Python allows no handlers: then none.

    One process: a second signal acts as usual and ends it at once. One of several (`world_size` above 1): SIGTERM may
    come from the scheduler, the launcher and another launcher above it, all for one wish, and must not end a rank that
    is saving. So only a second SIGINT, a user's second Ctrl-C, acts as usual; SIGTERM never does.
    """
    shared = world_size > 1
    request = StopRequest(shared=shared)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: FrameType | None) -> None:
        request.note(number)
        for caught, handler in before.items():
            if not shared or caught == number == signal.SIGINT:
                signal.signal(caught, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
