"""Whole runs in several processes, for the tests of them: start, watch, kill, compare.

A command is started as a user does, or from a process that has imported everything already and forks (see
forked_runs.py): the same launcher, sessions and signals, without the 5 s per process that imports take.
"""

import fcntl
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TIMEOUT_S = 150.0
# A step has 5 rows: 3 and 2 of them on two ranks; 2, 1, 1, 1 on four, of which three then have an idle micro-batch. The
# held-out data are 3 rows, so that one of four ranks has none.
RECIPE = """
output: OUT
model: {path: BASE/model}
moe: {bias_update_speed: 0.01}
data:
  train:
    - {kind: text, path: BASE/train.jsonl}
  validation:
    - {kind: text, path: BASE/held.jsonl}
  sequence_length: 48
optim: {lr: 0.01, warmup_steps: 2}
train: {steps: 8, batch: 5, micro_batch: 1, evaluate_every: 4, save_every: 2, final: fp32}
"""
EP = "parallel.expert=2"
CP = "parallel.context=2"
HSDP = ("parallel.expert=2", "parallel.replicate=2")
WORDS = ["gate", "expert", "window", "sink", "router", "token", "value", "norm", "query", "key", "layer", "stream"]
RARE = "zebra"  # in one document alone


# --- processes -------------------------------------------------------------------------------------------------------


class Job:
    """A started command: `pid` is its launcher, or the process itself where there is one alone."""

    def __init__(self, folder: Path, pid: int, wait: Callable[[float], int | None]) -> None:
        self.folder = folder
        self.pid = pid
        self._wait = wait
        self.code: int | None = None
        self.sessions = {pid}

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.code is None:
            self.code = self._wait(seconds)
        return self.code

    def finish(self, seconds: float = TIMEOUT_S) -> int:
        """Wait for the end; returns the exit code, as subprocess has it. Kills what does not end in time."""
        self.ranks()
        if self.poll(seconds) is None:
            self.kill()
            raise AssertionError(f"no end within {seconds:.0f} s\n{self.out}\n{self.err}")
        assert self.code is not None
        return self.code

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Until `condition()`; False where the job ended before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited in vain\n{self.out}\n{self.err}")
            time.sleep(0.005)
        return True

    def wait_for_text(self, text: str) -> bool:
        return self.wait_for(lambda: text in self.out)

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def ranks(self) -> list[int]:
        """Pids of the processes that the launcher has started and that live, oldest first."""
        found = sorted(pid for pid, (parent, _) in processes().items() if parent == self.pid)
        self.sessions |= set(found)
        return found

    def kill(self) -> None:
        """kill -9 of all at once."""
        for pid in [*self.ranks(), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.poll(30)

    def assert_gone(self) -> None:
        """No process of its sessions is left, or comes to its end soon: the kernel kills the ranks of a dead launcher.
        Those that stay are killed here, whatever becomes of the test."""
        deadline = time.monotonic() + 20
        while left := [pid for pid, (_, session) in processes().items() if session in self.sessions]:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"processes {left} outlived the run")
            time.sleep(0.02)


def processes() -> dict[int, tuple[int, int]]:
    """(parent, session) of all processes that have not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in ("Z", "X"):
                found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


class Starter:
    """Starts jobs in `folder` and ends what is left of them when it is closed. `recipe` is the file they train."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self.output = folder / "run"
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE.replace("OUT", str(self.output)).replace("BASE", str(base)), encoding="utf-8")
        self._jobs: list[Job] = []

    def start(self, nproc: int, *overrides: str, patch: str = "", cold: bool = False) -> Job:
        """`automimo train RECIPE --nproc NPROC OVERRIDES`; `patch` is Python that a rank runs first."""
        arguments = ["train", str(self.recipe), *overrides, *(["--nproc", str(nproc)] if nproc > 1 else [])]
        if cold:
            return self.start_command([sys.executable, "-m", "automimo", *arguments])
        job = _Warm.get().start(self._next_folder(), arguments, patch)
        self._jobs.append(job)
        return job

    def start_command(self, command: Sequence[str], **environment: str) -> Job:
        folder = self._next_folder()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command,
                env=clean_environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

        def wait(seconds: float) -> int | None:
            try:
                return process.wait(seconds) if seconds else process.poll()
            except subprocess.TimeoutExpired:
                return None

        self._jobs.append(Job(folder, process.pid, wait))
        return self._jobs[-1]

    def run(self, nproc: int, *overrides: str, patch: str = "", cold: bool = False) -> Job:
        """Start and wait; it has to succeed, without a word on stderr."""
        job = self.start(nproc, *overrides, patch=patch, cold=cold)
        assert job.finish() == 0, job.out + job.err
        assert job.err == ""
        return job

    def refused(self, nproc: int, *overrides: str, patch: str = "") -> str:
        """Start and wait; it has to fail by itself, with one message. Returns that."""
        job = self.start(nproc, *overrides, patch=patch)
        assert job.finish() == 1, job.out + job.err
        job.assert_gone()
        assert job.err.count("error: ") == 1 and "Traceback" not in job.err, job.err
        return job.err

    def close(self) -> None:
        for job in self._jobs:
            if job.poll() is None:
                job.kill()

    def _next_folder(self) -> Path:
        folder = self.folder / f"job-{len(self._jobs)}"
        folder.mkdir()
        return folder


def clean_environment() -> dict[str, str]:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Warm:
    """The process that has imported everything; one for all tests of this one."""

    _only: "_Warm | None" = None

    @classmethod
    def get(cls) -> "_Warm":
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def __init__(self) -> None:
        # It ends when our end of its stdin closes, that is with us.
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_runs.py"))],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, folder: Path, arguments: Sequence[str], patch: str) -> Job:
        assert self._process.stdin is not None
        (folder / "stdout").touch()
        (folder / "stderr").touch()
        order = {"folder": str(folder), "arguments": list(arguments), "patch": patch}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._answer(TIMEOUT_S)
        assert pid is not None, "the process that starts others does not answer"
        return Job(folder, pid, self._answer)

    def _answer(self, seconds: float) -> int | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        return int(self._process.stdout.readline())


# --- what the runs start from, and what they are compared with -------------------------------------------------------


def shared(temporary: Path) -> Path:
    """A folder of this test session for all its workers; `temporary` is that of this one (`getbasetemp`)."""
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """True for the one who has to make `folder`; the others wait until it is there."""
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = folder.with_suffix(".made")
        if made.exists():
            yield False
            return
        yield True
        made.touch()


def make_base(folder: Path) -> Path:
    """A model of three layers with 8 experts and data that give some 20 rows per epoch."""
    base = folder / "base"
    with made_once(base) as mine:
        if mine:
            _write_base(base)
    return base


def _write_base(base: Path) -> None:
    import torch

    from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
    from automimo.mimo_v2_flash.presets import preset_config
    from automimo.mimo_v2_flash.tokenizer import build_tokenizer

    base.mkdir()
    rng = random.Random(0)
    for name, count in (("train", 30), ("held", 6)):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(count)]
        if name == "train":
            texts[16] += f" {RARE}"
        (base / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = preset_config(
        "tiny",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        hybrid_layer_pattern=[0, 1, 1],
        moe_layer_freq=[0, 1, 1],
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM.from_config(config)
    model.initialize_weights(dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(10)  # choices of experts that rounding cannot turn
    model.save_pretrained(base / "model", tokenizer=build_tokenizer([" ".join(rng.choices(WORDS, k=200))], 300))


def reference(folder: Path, nproc: int, *overrides: str, cold: bool = False) -> Path:
    """The run folder of an undisturbed run of `nproc` processes, made once."""
    name = re.sub(r"[^\w]+", "_", "-".join([f"whole{nproc}", *overrides]))
    root = folder / name
    with made_once(root) as mine:
        if mine:
            root.mkdir()
            starter = Starter(root, make_base(folder))
            try:
                starter.run(nproc, *overrides, cold=cold)
            finally:
                starter.close()
    return root / "run"
