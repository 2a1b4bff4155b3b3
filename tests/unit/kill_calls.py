"""For the child processes of tests: kill a copy of this process before its k-th call to the file system."""

import os
import signal
import sys
from collections.abc import Callable

# Audit events of Python; "produce" is raised by the tests themselves where a tensor is made.
CALLS = {
    *("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir"),
    *("os.truncate", "fcntl.flock", "produce"),
}


def killed_at(k: int, work: Callable[[], object]) -> bool:
    """Do `work` in a fork that is killed (SIGKILL) before its k-th call; False if it ended before that."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, _: tuple[object, ...]) -> None:
            nonlocal count
            if event in CALLS:
                count += 1
                if count == k:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the work failed by itself: exit code {status}"
    return status == -signal.SIGKILL
