"""The process behind `Starter.start`: it has imported everything that a run needs, and forks launchers and ranks.

One order per line of stdin, as JSON; answered by the pid and, at its end, the exit code of the launcher.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# What a run imports, where it starts and on its way (the optimizer, the report).
PRELOAD = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "matplotlib.figure"),
    *("automimo.training.run", "automimo.parallelize", "automimo.report", "automimo.checkpoint.dcp_storage"),
)


class _ForkedRank:
    """What `automimo.launch` uses of subprocess.Popen, by a fork of this process in place of a new interpreter."""

    patch = ""
    DEVNULL = subprocess.DEVNULL

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdin: int,
        stdout: int | None,
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert list(command[1:3]) == ["-m", "automimo"] and start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            for number in (signal.SIGTERM, signal.SIGINT):  # a new interpreter knows nothing of our handlers
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            os.environ.clear()
            os.environ.update(env)
            _main(command[3:], self.patch)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _main(arguments: Sequence[str], patch: str) -> NoReturn:
    """The command. What the interpreter does at its end is left out, since it takes a second of clearing what was
    imported."""
    from automimo.cli import main

    code: object = 1
    try:
        if patch:
            exec(compile(patch, "patch", "exec"), {"RANK": int(os.environ.get("RANK", "0"))})
        main(list(arguments))
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _die_with(parent: int) -> None:
    from automimo import launch

    bind = launch._bound_to(parent)
    if bind is not None:
        bind()


def _serve() -> None:
    import types

    import torch

    from automimo import launch

    for name in PRELOAD:
        importlib.import_module(name)
    torch.set_num_threads(1)
    # Whatever ends the tests, a time-out that exits at once included, ends all that they have started.
    server = os.getpid()
    _die_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _die_with(server)
            os.setsid()
            os.close(answers.fileno())
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(Path(order["folder"], name), os.O_WRONLY | os.O_APPEND), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _ForkedRank.patch = order["patch"]
            vars(launch)["subprocess"] = types.SimpleNamespace(Popen=_ForkedRank, DEVNULL=subprocess.DEVNULL)
            _main(order["arguments"], "" if "--nproc" in order["arguments"] else order["patch"])
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
