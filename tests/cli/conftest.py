"""A tiny model and a short run, made once by the command line itself, and ways to call it."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from automimo.cli import main

REPOSITORY = Path(__file__).parents[2]
Completed = subprocess.CompletedProcess[str]

RECIPE = """\
output: {output}
model:
  path: {model}
data:
  train:
    - kind: chat
      path: {chats}
  validation:
    - kind: chat
      path: {chats}
  sequence_length: 128
optim:
  lr: 1.0e-3
train:
  steps: 2
  batch: 2
  evaluate_every: 1
  final: fp32
"""


def run_cli(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Completed:
    """`automimo ARGUMENTS` in a process of its own, with pipes for stdout and stderr."""
    command = [sys.executable, "-m", "automimo", *map(str, arguments)]
    # UTF-8 whatever the locale of the machine is; one thread, since the tests run side by side.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", **(env or {})}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., Completed]:
    """`automimo ARGUMENTS` inside this process: saves the import of torch where only the outcome counts."""

    def call_main(*arguments: str | Path) -> Completed:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return subprocess.CompletedProcess(list(map(str, arguments)), code or 0, out, err)

    return call_main


def check_readable_failure(done: Completed, *parts: str, code: int = 1) -> None:
    """One message on stderr with all `parts`, nothing on stdout that looks like success, no traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith(("error: ", "Usage: ", "internal error: ", "interrupted"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test session share; what is slow to make is made there once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cli"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """One worker at a time."""
    with (folder / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def tiny_model(shared: Path) -> Path:
    folder = shared / "tiny"
    with only_one(shared, "tiny"):
        if not folder.exists():
            done = run_cli("init", folder, "--preset", "tiny", "--seed", "1")
            assert done.returncode == 0, done.stderr
            assert "preset tiny, seed 1, 3,2" in done.stdout
            assert "tokenizer: 4,096 tokens" in done.stdout
            assert done.stderr == ""
    return folder


@pytest.fixture(scope="session")
def chats(shared: Path) -> Path:
    path = shared / "chats.jsonl"
    turns = [("What is 6 x 7?", "42."), ("And 6 x 8?", "It is 48, I think."), ("Name a fruit.", "A pear.")]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in turns
    ]
    with only_one(shared, "chats"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_recipe(shared: Path, tiny_model: Path, chats: Path) -> Path:
    path = shared / "tiny.yaml"
    with only_one(shared, "recipe"):
        path.write_text(RECIPE.format(output=shared / "run", model=tiny_model, chats=chats), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shared_run(shared: Path, tiny_recipe: Path) -> Path:
    """The run folder of two training steps. Tests read it; `tiny_run` is a copy to write to."""
    folder = shared / "run"
    with only_one(shared, "run"):
        if not folder.exists():
            done = run_cli("train", tiny_recipe)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def tiny_run(shared_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_run, tmp_path / "tiny-run"))
