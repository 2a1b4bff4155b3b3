"""`automimo train --nproc`: what the command line does before and around the ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Completed, check_readable_failure, run_cli

RECIPE = "output: {output}\nmodel: {{path: {model}}}\ndata: {{train: [{{kind: python_docs}}]}}\ntrain: {{steps: 2}}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A good recipe of a model that is not there."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(output=tmp_path / "run", model=tmp_path / "nowhere"), encoding="utf-8")
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """The launches that the command line asks for; none takes place."""
    calls: list[tuple[int, list[str]]] = []

    def record(nproc: int, arguments: list[str]) -> int:
        calls.append((nproc, arguments))
        return 7

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("automimo.launch.launch", record)
    return calls


def test_the_ranks_get_the_command_without_nproc(
    recipe: Path, call: Callable[..., Completed], launched: list[tuple[int, list[str]]]
) -> None:
    assert call("train", recipe, "--nproc", "2", "train.steps=3", "optim.lr=1e-4").returncode == 7
    assert call("train", "--nproc", "4", recipe, "--debug").returncode == 7
    assert launched == [
        (2, ["train", "--", str(recipe), "train.steps=3", "optim.lr=1e-4"]),
        (4, ["--debug", "train", "--", str(recipe)]),
    ]


def test_a_mistake_in_the_recipe_is_told_before_any_process_starts(
    recipe: Path, call: Callable[..., Completed], launched: list[tuple[int, list[str]]]
) -> None:
    check_readable_failure(call("train", recipe, "train.stepz=3", "--nproc", "2"), "train.stepz")
    assert launched == []


def test_one_process_and_a_dry_run_stay_in_this_process(
    recipe: Path, call: Callable[..., Completed], launched: list[tuple[int, list[str]]]
) -> None:
    check_readable_failure(call("train", recipe, "--nproc", "1"), "nowhere")
    check_readable_failure(call("train", recipe, "--nproc", "2", "--dry-run"), "nowhere")
    assert launched == []


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_nproc_is_refused_where_another_launcher_has_started_us(
    recipe: Path,
    call: Callable[..., Completed],
    launched: list[tuple[int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    nproc: str,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_readable_failure(call("train", recipe, "--nproc", nproc), "RANK is '0'", "Leave --nproc out, or unset RANK")
    assert launched == []


def test_nproc_counts_from_one(recipe: Path, call: Callable[..., Completed]) -> None:
    check_readable_failure(call("train", recipe, "--nproc", "0"), "--nproc", code=2)


@pytest.mark.slow
def test_ranks_that_all_miss_the_model_say_so_once(recipe: Path) -> None:
    done = run_cli("train", recipe, "--nproc", "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rank 0: error: ") and "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
