"""A tiny model and a short run, made once by the command line itself, and ways to call it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
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
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    done = run_cli("init", folder, "--preset", "tiny", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "preset tiny, seed 1, 3,2" in done.stdout
    assert "tokenizer: 4,096 tokens" in done.stdout
    assert done.stderr == ""
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    turns = [("What is 6 x 7?", "42."), ("And 6 x 8?", "It is 48, I think."), ("Name a fruit.", "A pear.")]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in turns
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, chats: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(output=folder / "run", model=tiny_model, chats=chats), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: Path) -> Path:
    """The run folder of two training steps."""
    done = run_cli("train", tiny_recipe)
    assert done.returncode == 0, done.stderr
    return tiny_recipe.parent / "run"
