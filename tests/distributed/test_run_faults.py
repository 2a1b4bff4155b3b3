"""Runs in several processes in which something fails: they end soon, with one message, and leave what was good."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from run_calls import EP, RARE, Starter, reference
from run_compare import assert_identical_runs, rows
from safetensors.torch import load_file, save_file

from automimo.checkpoint.resume import load_step
from automimo.mimo_v2_flash.tokenizer import load_tokenizer


def assert_only_step_2(runs: Starter) -> None:
    """The checkpoint of before the failure is there and whole, and nothing else."""
    assert [path.name for path in (runs.output / "checkpoints").iterdir()] == ["step-2"]
    assert load_step(runs.output / "checkpoints" / "step-2")[1]["step"] == 2


# --- refused before anything happens ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (EP.replace("2", "3"), "parallel.expert 3 does not divide the 2 ranks"),
        ("parallel.replicate=3", "parallel.replicate 3 does not divide the 2 data ranks"),
        ("parallel.data=3", "parallel.data is 3, but 2 processes"),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers(runs: Starter, override: str, words: str) -> None:
    message = runs.refused(2, override)
    assert message.startswith("rank 0: error: ") and words in message
    assert not runs.output.exists()


def test_one_process_refuses_a_layout_of_several(runs: Starter) -> None:
    assert "this is one process, but the recipe shares the work" in runs.refused(1, EP)
    assert not runs.output.exists()


def test_a_rank_that_cannot_read_the_data_ends_all(runs: Starter) -> None:
    patch = """
import automimo.training.run as run
from automimo.errors import DataError
def unreadable(*_):
    raise DataError("train.jsonl: Input/output error")
if RANK == 1:
    run.load_data = unreadable
"""
    assert runs.refused(2, patch=patch) == "rank 1: error: train.jsonl: Input/output error\n"
    assert not runs.output.exists()


def test_ranks_with_other_data_are_refused(runs: Starter, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "train.jsonl"
    other.write_text((base / "train.jsonl").read_text().replace("sink", "gate", 1))
    patch = f"""
import automimo.training.run as run
load = run.load_data
def elsewhere(recipe, tokenizer):
    document = recipe.model_dump()
    document["data"]["train"][0]["path"] = {str(other)!r}
    return load(type(recipe).model_validate(document), tokenizer)
if RANK == 1:
    run.load_data = elsewhere
"""
    message = runs.refused(2, patch=patch)
    assert message.startswith("rank 0: error: the training data of rank 1 are not those of rank 0 (1 of 2 ranks ")
    assert not runs.output.exists()


# --- in a step -------------------------------------------------------------------------------------------------------


def poisoned(base: Path, folder: Path) -> Path:
    """The model with NaN in the embedding of tokens that one training document alone has."""
    shutil.copytree(base / "model", folder)
    tokenizer = load_tokenizer(folder)
    texts = [json.loads(line)["text"] for line in (base / "train.jsonl").read_text().splitlines()]
    tokens = [set(tokenizer(text)["input_ids"]) for text in texts]
    (rare,) = [number for number, text in enumerate(texts) if RARE in text]
    only = tokens[rare].difference(*(ids for number, ids in enumerate(tokens) if number != rare))
    assert only and rare == 16
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][sorted(only)] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_loss_that_is_not_finite_names_the_documents_of_its_rank_once(
    runs: Starter, base: Path, tmp_path: Path
) -> None:
    folder = poisoned(base, tmp_path / "nan")
    job = runs.start(2, EP, f"model.path={folder}", "train.save_every=0", "train.evaluate_every=0")
    assert job.finish() == 1
    job.assert_gone()
    broken = [line for line in job.err.splitlines() if "micro-batch" in line]
    assert len(broken) == 1 and "loss nan" in broken[0] and "train.jsonl" in broken[0] and "17" in broken[0]
    assert job.err.count("rank 0: error: step ") == 1 and job.err.count("error") == 1
    assert f"step {len(rows(runs.output)) + 1}: the loss" in job.err  # the steps before it are in metrics.jsonl
    assert not (runs.output / "checkpoints").exists() and not (runs.output / "final").exists()


@pytest.mark.slow
def test_a_rank_that_fails_in_a_step_ends_all_and_the_run_goes_on(runs: Starter, runs_folder: Path) -> None:
    patch = """
import automimo.training.step as step
norm, calls = step.gradient_norm, []
def failing(gradients):
    calls.append(1)
    if len(calls) == 3:
        raise RuntimeError("no such kernel")
    return norm(gradients)
if RANK == 1:
    step.gradient_norm = failing
"""
    message = runs.refused(2, EP, patch=patch)
    assert message.startswith("rank 1: internal error: RuntimeError: no such kernel") and message.count("\n") == 1
    assert_only_step_2(runs)
    runs.run(2, EP)
    assert_identical_runs(runs.output, reference(runs_folder, 2, EP, cold=True))


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_with_the_stacks_of_all(runs: Starter) -> None:
    """Neither rank can know which of them hangs: each shows where it stands, and the job ends."""
    patch = """
import time
import automimo.training.loop as loop
step = loop._step
def a_long_sleep(state, work):
    if state.step == 2:
        print("sleeps", flush=True)
        time.sleep(1000)
    return step(state, work)
if RANK == 1:
    loop._step = a_long_sleep
"""
    job = runs.start(2, EP, "parallel.timeout=5", "train.evaluate_every=0", patch=patch)
    assert job.wait_for_text("step 2/8  loss")
    started = time.monotonic()
    assert job.finish() == 1
    assert time.monotonic() - started < 60  # 5 s of silence and 5 s to speak; the machine may be busy
    job.assert_gone()
    for rank in range(2):
        lines = [line for line in job.err.splitlines() if line.startswith(f"rank {rank}: ")]
        assert "error: hangs since" in lines[0] and "in step 3" in lines[0]
        assert any("in train_loop" in line for line in lines)
    assert any(line.startswith("rank 1: ") and "a_long_sleep" in line for line in job.err.splitlines())
    assert_only_step_2(runs)


# --- in a save -------------------------------------------------------------------------------------------------------

FULL_DISK = """
import automimo.checkpoint.dcp_storage as storage
write, calls = storage.write_safetensors, []
def full(path, entries, on_bytes):
    calls.append(1)
    if len(calls) == 2:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))
    return write(path, entries, on_bytes)
if RANK == 1:
    storage.write_safetensors = full
"""


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_on_one_rank_ends_all_and_spoils_nothing(
    runs: Starter, runs_folder: Path, background: bool
) -> None:
    message = runs.refused(2, EP, f"train.async_save={str(background).lower()}", patch=FULL_DISK)
    assert message.startswith("rank 1: error: ") and "No space left on device" in message
    assert message.count("\n") == 1
    assert_only_step_2(runs)
    if not background:
        runs.run(2, EP)
        assert_identical_runs(runs.output, reference(runs_folder, 2, EP, cold=True))


@pytest.mark.slow
def test_a_file_in_place_of_the_checkpoints_is_told_once(runs: Starter) -> None:
    runs.output.mkdir()
    (runs.output / "checkpoints").write_text("mine")
    message = runs.refused(2, EP)
    assert message.startswith("rank 0: error: ") and "checkpoints" in message
    assert (runs.output / "checkpoints").read_text() == "mine"


@pytest.mark.slow
def test_a_failure_in_the_export_keeps_the_checkpoint_and_the_next_run_exports(
    runs: Starter, runs_folder: Path
) -> None:
    patch = """
import automimo.training.export as export
def full(*_):
    raise OSError(28, "No space left on device")
if RANK == 0:
    export.write_text_atomic = full
"""
    assert "No space left on device" in runs.refused(2, EP, patch=patch)
    assert not (runs.output / "final").exists()
    assert [path.name for path in runs.output.iterdir() if path.name.startswith(".")] == []
    runs.run(2, EP)
    assert_identical_runs(runs.output, reference(runs_folder, 2, EP, cold=True))


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(runs: Starter) -> None:
    job = runs.start(2, EP, cold=True)
    assert job.wait_for_text("step 1/8  loss")
    assert "another process is training in this folder" in runs.refused(2, EP)
    assert job.finish() == 0
