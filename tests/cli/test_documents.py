"""README and docs/ are executed: every command, every Python block, every recipe of theirs and of recipes/.

A fenced block is read by its language. `bash`: one command per line, run as written in a folder that looks like the
repository root after the quickstart. `python`: executed there. `yaml`: parsed, and a whole recipe is loaded. `json`:
parsed. Anything else is not a promise and is left alone.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

from automimo.training.recipe_file import load_recipe, parse_recipe

from .conftest import REPOSITORY, Completed

DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
# Too long for a test as written: what is run instead. The quickstart itself is `make quickstart`.
# (In another folder, because the one of the recipe holds the tiny run of these tests.)
QUICKSTART = "automimo train recipes/quickstart.yaml"
ONE_STEP = "data.sequence_length=128 data.validation=[] train.evaluate_every=0 train.steps=1 optim.warmup_steps=0"
LAUNCHED = f"{QUICKSTART} --nproc 2 parallel.expert=2"
SHARED = f"{QUICKSTART} --nproc 2 parallel.context=2"
TORCHRUN = "torchrun --nproc-per-node 2 -m automimo train recipes/quickstart.yaml parallel.expert=2"
SHORTENED = {
    QUICKSTART: f"{QUICKSTART} --dry-run output=runs/new",
    LAUNCHED: f"{LAUNCHED} {ONE_STEP} output=runs/launched",
    SHARED: f"{SHARED} {ONE_STEP} output=runs/shared train.final=none",
    TORCHRUN: f"{TORCHRUN} {ONE_STEP} output=runs/torchrun train.final=none",
}


class Block(NamedTuple):
    """A fenced block: `where` is file:line of its first line."""

    where: str
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    found = []
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(f"{path.relative_to(REPOSITORY)}:{line}", match[1], match[2]))
    return found


def all_blocks(language: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in blocks(path) if block.language == language]


def commands(block: Block) -> list[list[str]]:
    """The commands of a bash block, without prompts, comments and the path of the virtual environment."""
    text = block.text.replace("\\\n", " ")
    lines = [shlex.split(line.removeprefix("$ "), comments=True) for line in text.splitlines()]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in lines if words]


def make_targets() -> set[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def make_commands(target: str) -> list[list[str]]:
    """What `make TARGET` would run once everything is installed."""
    make = ["make", "--dry-run", "--no-print-directory", target]
    done = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith(".venv/bin/")]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in lines]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, shared_run: Path, chats: Path) -> Path:
    """A folder like the repository root after the quickstart, with the user's own files of the documents in it."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    shutil.copytree(shared_run, folder / "runs" / "quickstart")
    shutil.copytree(shared_run / "final", folder / "path" / "to" / "model")
    shutil.copyfile(chats, folder / "chats.jsonl")
    (block,) = [b for b in all_blocks("yaml") if b.where.startswith("README.md") and "output: runs/mine" in b.text]
    (folder / "mine.yaml").write_text(block.text.replace("steps: 100", "steps: 2"), encoding="utf-8")
    return folder


def run_command(words: list[str], root: Path, call: Callable[..., Completed]) -> None:
    short = shlex.split(SHORTENED.get(shlex.join(words), "")) or words
    if short[0] == "make":
        assert short[1] in make_targets(), f"the Makefile has no target {short[1]}"
        return
    if short[0] == "python" and short[1].startswith("benchmarks/"):
        script = [sys.executable, str(REPOSITORY / short[1]), *short[2:]]
        subprocess.run(script, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return
    if short[0] == "torchrun":
        script = [sys.executable, "-m", "torch.distributed.run", *short[1:]]
        subprocess.run(script, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=170)
        return
    assert short[0] == "automimo", f"{shlex.join(words)}: no test knows how to run this"
    if short[1] in ("init", "convert"):
        shutil.rmtree(root / short[2 if short[1] == "init" else 3], ignore_errors=True)
    done = call(*short[1:])
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


# The benchmarks take a minute even with --quick, and the quickstart's data are read by every process.
LONG = ("benchmarks.md", "distributed.md")
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("path", [pytest.param(p, marks=SLOW if p.name in LONG else [], id=p.name) for p in DOCUMENTS])
def test_every_command_runs(
    path: Path, root: Path, call: Callable[..., Completed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    for block in blocks(path):
        if block.language in ("bash", "sh", "console", "shell"):
            for words in commands(block):
                run_command(words, root, call)


def test_the_readme_has_commands() -> None:
    found = [
        words for block in blocks(REPOSITORY / "README.md") if block.language == "bash" for words in commands(block)
    ]
    assert ["make", "quickstart"] in found
    assert {words[1] for words in found if words[0] == "automimo"} >= {
        *("init", "train", "generate", "evaluate", "inspect", "convert", "report", "doctor"),
    }


def test_the_quickstart_target_runs_what_the_readme_says(
    root: Path, call: Callable[..., Completed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make quickstart` does after the training, on the tiny run. (The recipe itself is dry-run below.)"""
    found = [words for words in make_commands("quickstart") if "pip" not in words]
    assert found[0] == shlex.split(QUICKSTART)
    assert [words[:2] for words in found[1:]] == [["automimo", "generate"], ["python", "-m"]]
    monkeypatch.chdir(root)
    run_command(found[1], root, call)
    from automimo import compare

    assert found[2][2] == "automimo.compare"
    assert compare.main(found[2][3:]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_distributed_target_compares_two_runs(
    root: Path, call: Callable[..., Completed], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What `make quickstart-distributed` does, with two steps of short rows."""
    from automimo import compare_runs

    found = [words for words in make_commands("quickstart-distributed") if "pip" not in words]
    assert [words[:2] for words in found] == [["automimo", "train"]] * 2 + [["python", "-m"]]
    assert "--nproc" not in found[0] and found[1][found[1].index("--nproc") + 1] == "2"
    monkeypatch.chdir(root)
    for words in found[:2]:
        done = call(*words[1:], *ONE_STEP.split(), "train.steps=2")
        assert done.returncode == 0, done.stdout + done.stderr
    assert found[2][2] == "automimo.compare_runs"
    assert compare_runs.main(found[2][3:]) == 0
    assert "2 steps: losses differ by at most" in capfd.readouterr().out
    assert compare_runs.main([found[2][3], str(root / "runs" / "quickstart")]) == 1


@pytest.mark.parametrize("block", all_blocks("python"), ids=lambda block: block.where)
def test_every_python_block_runs(
    block: Block, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    exec(compile(block.text, block.where, "exec"), {"__name__": "__documents__"})
    if "logits.shape" in block.text:
        assert "torch.Size([1, 5, 4096])" in capsys.readouterr().out


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=lambda block: block.where)
def test_every_yaml_block_is_valid(block: Block) -> None:
    """A whole recipe loads. A part of one loads once what is missing is added."""
    values = YAML(typ="safe").load(block.text)
    assert isinstance(values, dict)
    rest = {
        "output": "output: runs/x",
        "model": "model: {preset: tiny}",
        "data": "data: {train: [{kind: python_docs}]}",
        "train": "train: {steps: 10}",
    }
    added = [line for key, line in rest.items() if key not in values]
    recipe = parse_recipe("\n".join([block.text, *added]), name=block.where)
    assert recipe.output


@pytest.mark.parametrize("block", all_blocks("json"), ids=lambda block: block.where)
def test_every_json_block_is_valid(block: Block) -> None:
    assert json.loads(block.text)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_dry_runs(
    path: Path, call: Callable[..., Completed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path).folder.parts[0] == "runs"
    done = call("train", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "nothing written" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_there_are_recipes() -> None:
    assert "quickstart.yaml" in {path.name for path in RECIPES}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths of the repository in backquotes, such as `tests/unit/test_import_rule.py`."""
    for name in re.findall(r"`((?:src|tests|docs|recipes|benchmarks)/[\w./-]+)`", path.read_text(encoding="utf-8")):
        assert (REPOSITORY / name).exists(), f"{path.name} names {name}"
