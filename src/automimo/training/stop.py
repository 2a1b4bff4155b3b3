"""SIGTERM and Ctrl-C: finish the step, save, end with the right exit code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by the first SIGTERM or SIGINT. A second signal acts as usual and ends the process at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 143 for SIGTERM, 130 for SIGINT; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT while this is open. Outside the main thread Python allows no handlers: then none."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for caught, handler in before.items():
            signal.signal(caught, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
