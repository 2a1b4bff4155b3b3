"""The launcher of ranks, with real processes: what they are told, how they end, that none is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automimo.errors import ConfigError
from automimo.launch import _reserved_port, refuse_second_launch

LAUNCHER = """
import sys
from automimo import launch
launch.GRACE_S = 1.0  # tests of ranks that ignore SIGTERM wait for it
raise SystemExit(launch.launch_command(int(sys.argv[1]), [sys.executable, *sys.argv[2:]]))
"""
# What the ranks of most tests start with. `note` leaves a file that the test waits for.
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def note(name, text=""):
    part = Path(f"{name}-{rank}.part")
    part.write_text(text)
    part.rename(f"{name}-{rank}")
"""
DEADLINE_S = 60.0


def start(nproc: int, script: str, tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    """The launcher, in a process and session of its own, with `nproc` ranks that run `script` in `tmp_path`."""
    (tmp_path / "script.py").write_text(HEAD + script, encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "OMP_NUM_THREADS")}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(nproc), str(tmp_path / "script.py")],
        cwd=tmp_path,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} did not appear"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie of a container without an init has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(folder: Path, pattern: str) -> None:
    """The processes whose ids the files `pattern` hold end; whatever becomes of this test, they do not stay."""
    pids = [int(path.read_text()) for path in folder.glob(pattern)]
    assert pids
    deadline = time.monotonic() + DEADLINE_S
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    survivors = [pid for pid in pids if alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert survivors == []


def test_each_rank_knows_its_place_and_only_rank_0_writes_to_stdout(tmp_path: Path) -> None:
    script = """
import json
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
note("env", json.dumps({name: os.environ[name] for name in names}))
print("out", rank)
print("err", rank, file=sys.stderr)
"""
    code, out, err = finish(start(3, script, tmp_path))
    assert (code, out, sorted(err.splitlines())) == (0, "out 0\n", ["err 0", "err 1", "err 2"])
    found = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    assert {seen["MASTER_PORT"] for seen in found} == {found[0]["MASTER_PORT"]}
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, seen in enumerate(found):
        assert 1024 <= int(seen.pop("MASTER_PORT")) < 65536
        assert seen == {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
            **{"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": threads},
        }


def test_threads_that_the_user_set_stay(tmp_path: Path) -> None:
    script = 'note("threads", os.environ["OMP_NUM_THREADS"])'
    assert finish(start(2, script, tmp_path, OMP_NUM_THREADS="7"))[0] == 0
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)] == ["7", "7"]


def test_a_failing_rank_ends_the_job_with_its_code_and_its_words(tmp_path: Path) -> None:
    script = """
note("pid", str(os.getpid()))
if rank == 1:
    sys.exit("no disk")
time.sleep(600)
"""
    code, out, err = finish(start(3, script, tmp_path))
    assert (code, out, err) == (1, "", "no disk\n")
    assert_gone(tmp_path, "pid-*")


def test_a_killed_rank_is_named_and_ranks_that_ignore_sigterm_end_all_the_same(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
note("pid", str(os.getpid()))
if rank == 2:
    while not all(Path(f"pid-{other}").exists() for other in range(3)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
"""
    code, out, err = finish(start(3, script, tmp_path))
    assert (code, out) == (137, "")
    assert err.startswith("error: rank 2 was killed by SIGKILL") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.glob("asked-*")) == ["asked-0", "asked-1"]
    assert_gone(tmp_path, "pid-*")


STOPPING = """
asked = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
note("ready")
while not asked:
    time.sleep(0.01)
time.sleep(0.5 * rank)  # a slow save; and time for a signal too many to arrive
note("asked", str(asked))
sys.exit(128 + asked[0])
"""


@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)]
)
def test_a_signal_reaches_each_rank_once_and_their_code_is_that_of_the_job(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    """`to_group` is what Ctrl-C in a terminal does."""
    process = start(2, STOPPING, tmp_path)
    wait_for(tmp_path, "ready-0", "ready-1")
    if to_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert finish(process) == (128 + number, "", "")
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == [f"[{int(number)}]"] * 2


def test_ranks_that_have_no_handler_yet_end_by_the_signal_itself(tmp_path: Path) -> None:
    process = start(2, 'note("ready"); time.sleep(600)', tmp_path)
    wait_for(tmp_path, "ready-0", "ready-1")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "", "")


def test_a_rank_that_fails_while_the_others_stop_decides_the_code(tmp_path: Path) -> None:
    script = """
note("ready")
if rank == 0:
    sys.exit(143)
time.sleep(1)
sys.exit(1)
"""
    assert finish(start(2, script, tmp_path)) == (1, "", "")


def test_a_second_ctrl_c_ends_ranks_that_do_not_react(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: note("asked"))
note("pid", str(os.getpid()))
while True:
    time.sleep(1)
"""
    process = start(2, script, tmp_path)
    wait_for(tmp_path, "pid-0", "pid-1")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path, "asked-0", "asked-1")
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")
    assert_gone(tmp_path, "pid-*")


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("pid", str(os.getpid()))
while True:
    time.sleep(1)
"""
    process = start(3, script, tmp_path)
    wait_for(tmp_path, *(f"pid-{rank}" for rank in range(3)))
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert_gone(tmp_path, "pid-*")


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    script = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
note("child", str(child.pid))
os._exit(rank)
"""
    assert finish(start(2, script, tmp_path))[0] == 1
    assert_gone(tmp_path, "child-*")


def test_nobody_else_gets_the_port_but_a_socket_that_reuses_addresses_may_listen_on_it() -> None:
    with _reserved_port() as port, _reserved_port() as other:
        assert port != other
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "")):
            with socket.socket(family) as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((host, port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass


def test_a_rank_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    refuse_second_launch()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match=r"RANK is '3': torchrun .* Leave --nproc out"):
        refuse_second_launch()
