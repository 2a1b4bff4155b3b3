"""What a verb raises becomes one readable message on stderr and an exit code. Imports nothing heavy.

Of several processes (WORLD_SIZE > 1) one failure is the failure of all: whoever waits for the one that failed fails as
well, with nothing to say but that. The user should read the cause alone. So a rank that only lost contact keeps quiet
for a few seconds, in which the launcher (ours or torchrun) sees the one that failed and ends the others; and of ranks
that fail alike rank 0 speaks first.
"""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from automimo.errors import AutoMiMoError, DistributedError

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for a program that Ctrl-C ended
# Rank 0 needs milliseconds from its message to its end, a launcher 0.1 s to see it.
TURN_OF_OTHERS_S = 2.0
# Longer than that turn, so that on one machine only the cause is printed. Elsewhere it is printed nowhere: ranks on
# other machines say in the end what they know.
LOST_CONTACT_S = 8.0

# Texts of gloo, nccl and torch's store when another process has died, hangs or has left, as seen after kill -9 and
# time-outs in every collective that we use, and as they stand in torch's binaries.
_LOST = (
    *("closed by peer", "reset by peer", "timed out", "timeout", "socket closed", "broken pipe", "connection refused"),
    *("connection was likely closed", "connectfullmesh failed", "failed to connect", "waiting for clients"),
    *("ncclremoteerror", "communicator was aborted"),
)
_PORT_TAKEN = "failed to listen"


def exit_code_of(work: Callable[[], int | None], *, debug: bool) -> int:
    """Run `work` and return the exit code: its own (None is 0), or that of what it raised.

    With `debug` the traceback comes before the message; without it there is none, whatever was raised. A process that
    is one of several ends here, whether it fails (see `_end_rank`) or not.
    """
    try:
        code = work() or 0
        if _is_rank():
            # Without the interpreter's clean-up, like a rank that failed: it takes a second, and threads of a
            # communication library that meet it abort the process now and then, after all work is done.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nobody is left to tell. Python would complain once more when it
        # flushes stdout at exit, so it gets somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last place where it can become a message
        if _is_rank():
            _end_rank(os.environ["RANK"], error, debug)
        if debug:
            traceback.print_exc()
        print(_message(error, debug), file=sys.stderr, flush=True)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def _is_rank() -> bool:
    """Whether this process is one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def _end_rank(rank: str, error: BaseException, debug: bool) -> NoReturn:
    """Say what failed, when it is our turn, and end this process.

    At once and without the interpreter's clean-up: the launcher should end the others before it is their turn, and
    threads of a communication library whose peers are gone may hang or abort that clean-up.
    """
    try:
        if isinstance(error, KeyboardInterrupt):
            if rank == "0":  # the Ctrl-C of all
                print(_message(error, debug), file=sys.stderr, flush=True)
            # Told from a rank that saved and stopped, which returns 130: this one leaves the others waiting for it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if isinstance(error, DistributedError) or lost_contact(error) is not None:
            time.sleep(LOST_CONTACT_S)
        elif rank != "0":
            time.sleep(TURN_OF_OTHERS_S)
        if debug:
            traceback.print_exception(error)
        print(f"rank {rank}: {_message(error, debug)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(FAILED)


def lost_contact(error: BaseException) -> str | None:
    """The words of `error`, or of what it was raised from, if they only say that another process does not answer."""
    if isinstance(error, AutoMiMoError):
        return None
    found: BaseException | None = error
    while found is not None:
        text = " ".join(str(found).split())
        # By name, since torch may not be imported: DistError is the base of torch.distributed's own errors. Those of
        # gloo are plain RuntimeErrors that name a file of gloo.
        known = "gloo" in text.lower() or any(base.__name__ == "DistError" for base in type(found).__mro__)
        if known and _PORT_TAKEN not in text and any(lost in text.lower() for lost in _LOST):
            return re.sub(r"^\[[^]]*\] ", "", text).split(". ")[0][:200]
        found = found.__cause__ or found.__context__
    return None


def _message(error: BaseException, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, AutoMiMoError):
        return f"error: {error}"
    if isinstance(error, OSError):
        return f"error: {describe_os_error(error)}"
    if isinstance(error, MemoryError):
        return "error: out of memory; use a smaller model, data.sequence_length or train.micro_batch"
    lost = lost_contact(error)
    if lost is not None:
        return f"error: lost contact with another rank: {lost}"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error: {text}" + ("" if debug else " (rerun with --debug for the traceback)")


def describe_os_error(error: OSError) -> str:
    """`No space left on device: /path` instead of `[Errno 28] No space left on device: '/path'`."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([error.strerror or str(error) or type(error).__name__, *names])
