"""What a verb raises becomes one readable message on stderr and an exit code. Imports nothing heavy."""

import os
import sys
import traceback
from collections.abc import Callable

from automimo.errors import AutoMiMoError

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for a program that Ctrl-C ended


def exit_code_of(work: Callable[[], int | None], *, debug: bool) -> int:
    """Run `work` and return the exit code: its own (None is 0), or that of what it raised.

    With `debug` the traceback comes before the message; without it there is none, whatever was raised.
    """
    try:
        return work() or 0
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nobody is left to tell. Python would complain once more when it
        # flushes stdout at exit, so it gets somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last place where it can become a message
        if debug:
            traceback.print_exc()
        print(_message(error, debug), file=sys.stderr, flush=True)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def _message(error: BaseException, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, AutoMiMoError):
        return f"error: {error}"
    if isinstance(error, OSError):
        return f"error: {describe_os_error(error)}"
    if isinstance(error, MemoryError):
        return "error: out of memory; use a smaller model, data.sequence_length or train.micro_batch"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error: {text}" + ("" if debug else " (rerun with --debug for the traceback)")


def describe_os_error(error: OSError) -> str:
    """`No space left on device: /path` instead of `[Errno 28] No space left on device: '/path'`."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([error.strerror or str(error) or type(error).__name__, *names])
