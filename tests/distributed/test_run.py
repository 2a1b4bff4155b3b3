"""Whole runs in several processes: what one process gets, whatever the layout, also where it changes on the way."""

import sys
import time
from pathlib import Path

import pytest
from run_calls import CP, EP, HSDP, Starter, reference
from run_compare import assert_equal_runs, assert_identical_runs, assert_same_metrics, last_values, rows, timeless

# A SIGTERM for the last rank alone, during step STOP: all save that step and end.
STOP_ONE = """
import os, signal
import automimo.training.loop as loop
from automimo.distributed.world import rank, world_size
step = loop._step
def stopping(state, work):
    row = step(state, work)
    if row["step"] == STOP and rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return row
loop._step = stopping
"""


def stop_after(runs: Starter, step: int, nproc: int, *overrides: str) -> None:
    job = runs.start(nproc, *overrides, patch=STOP_ONE.replace("STOP", str(step)))
    assert (job.finish(), job.err) == (143, "")
    assert f"stopped  at step {step}, saved" in job.out
    assert last_values(runs.output)["step"] == step and not (runs.output / "final").exists()


def test_nproc_with_expert_parallelism_equals_one_process(runs_folder: Path) -> None:
    """Of 5 rows, rank 0 has 3 and rank 1 has 2."""
    alone = reference(runs_folder, 1)
    both = reference(runs_folder, 2, EP, cold=True)
    assert_equal_runs(both, alone)
    printed = (both.parent / "job-0" / "stdout").read_text()
    assert "ranks    2: 1 copy of the model in 2 shards; experts over 2 ranks" in printed
    assert printed.count("done     8 steps; model in ") == 1 and printed.count("step 8/8  loss") == 1
    # More than rounding would be needed for this to hold by chance: the runs really are different ones.
    assert timeless(both) != timeless(alone)
    # What the cases below rely on.
    assert len({row["tokens"] for row in rows(alone) if "loss" in row}) > 3
    assert rows(alone)[0]["validation_loss"] - rows(alone)[-1]["validation_loss"] > 1
    assert last_values(alone)["data_position"]["epoch"] == 2


@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        pytest.param(2, ["train.async_save=true"], id="fsdp-async"),
        pytest.param(2, [CP, EP], id="cp2-ep2"),
        pytest.param(4, [CP, EP, "train.micro_batch=5"], id="cp2-fsdp2-ep2", marks=pytest.mark.slow),
        pytest.param(4, [CP, HSDP[1]], id="cp2-copies2", marks=pytest.mark.slow),
        pytest.param(2, [CP, "train.activation_checkpointing=full"], id="cp2-full", marks=pytest.mark.slow),
        pytest.param(
            4, [*HSDP, "train.activation_checkpointing=selective"], id="hsdp-ep-selective", marks=pytest.mark.slow
        ),
        pytest.param(4, [], id="fsdp4", marks=pytest.mark.slow),
        pytest.param(4, ["parallel.expert=4", "parallel.defer_sync=false"], id="ep4-sync", marks=pytest.mark.slow),
        pytest.param(4, [EP, "parallel.reshard=false", "parallel.prefetch=0"], id="ep2-fsdp2", marks=pytest.mark.slow),
        pytest.param(2, ["parallel.replicate=2"], id="copies", marks=pytest.mark.slow),
        pytest.param(3, ["train.activation_checkpointing=full"], id="fsdp3-full", marks=pytest.mark.slow),
    ],
)
def test_layouts_equal_one_process(runs: Starter, runs_folder: Path, nproc: int, overrides: list[str]) -> None:
    """Of four ranks three have an idle micro-batch, and one has no held-out row."""
    runs.run(nproc, *overrides)
    assert_equal_runs(runs.output, reference(runs_folder, 1))


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_epoch_ends_with_a_step_that_has_fewer_rows_than_ranks(runs: Starter, runs_folder: Path, nproc: int) -> None:
    epoch = ("train.steps=null", "train.epochs=1", "train.batch=6")
    alone = reference(runs_folder, 1, *epoch)
    runs.run(nproc, *epoch)
    assert_equal_runs(runs.output, alone)
    steps = [row["tokens"] for row in rows(alone) if "loss" in row]
    assert len(steps) == 4 and 0 < steps[-1] < steps[0] / 3
    printed = (alone.parent / "job-0" / "stdout").read_text()
    assert f"{sum(steps):,} of them targets" in printed  # none lost, none twice


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(4, HSDP), (2, (EP,)), (1, ())], id="4-2-1"),
        pytest.param([(4, (CP, EP)), (2, (CP,)), (1, ())], id="cp 4-2-1", marks=pytest.mark.slow),
        pytest.param([(1, ()), (2, (CP,)), (4, (CP, HSDP[1]))], id="cp 1-2-4", marks=pytest.mark.slow),
        pytest.param([(1, ()), (2, ()), (4, ("parallel.expert=4",))], id="1-2-4", marks=pytest.mark.slow),
        pytest.param([(2, (EP,)), (3, ()), (2, ())], id="2-3-2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_layout(
    runs: Starter, runs_folder: Path, layouts: list[tuple[int, tuple[str, ...]]]
) -> None:
    """Each stop is a SIGTERM for one rank alone. No sample is lost or repeated: the tokens of every step are equal."""
    for step, (nproc, overrides) in zip((3, 5), layouts, strict=False):
        stop_after(runs, step, nproc, *overrides)
    nproc, overrides = layouts[-1]
    job = runs.run(nproc, *overrides)
    assert "step-5" in next(line for line in job.out.splitlines() if line.startswith("resume"))
    assert_equal_runs(runs.output, reference(runs_folder, 1))


@pytest.mark.slow
def test_the_number_of_processes_may_change_between_two_outputs(runs: Starter, runs_folder: Path) -> None:
    """`train.resume: RUN` starts from what another run of another layout has saved, history included."""
    alone = reference(runs_folder, 1)
    runs.run(2, EP, f"train.resume={alone / 'checkpoints' / 'step-6'}")
    assert_same_metrics(runs.output, alone)


@pytest.mark.slow
def test_torchrun_does_what_nproc_does(runs: Starter, runs_folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "automimo"]
    job = runs.start_command([*command, "train", str(runs.recipe), EP])
    assert job.finish() == 0, job.err
    assert job.out.count("done     8 steps") == 1
    assert_identical_runs(runs.output, reference(runs_folder, 2, EP, cold=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_end_by_themselves_soon_after_their_last_word(runs: Starter) -> None:
    """Ten in a row: a process group or a mesh that outlives its time makes some exits abort or hang."""
    for number in range(10):
        job = runs.start(2, EP, f"output={runs.folder / str(number)}", "train.steps=3", cold=True)
        assert job.wait_for_text("done  ")
        said = time.monotonic()
        assert (job.finish(), job.err) == (0, "")
        # Two interpreters clear up in 2 s of one core each.
        assert time.monotonic() - said < 10
        job.assert_gone()


def test_a_complete_run_is_left_alone(runs: Starter, runs_folder: Path) -> None:
    both = reference(runs_folder, 2, EP, cold=True)
    before = {path: path.stat().st_mtime_ns for path in both.rglob("*") if path.parent.name in ("final", "step-8")}
    metrics = (both / "metrics.jsonl").read_bytes()
    job = runs.run(2, EP, f"output={both}")
    assert "was complete already" in job.out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (both / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("selective", marks=pytest.mark.slow),
        pytest.param("false", marks=pytest.mark.slow),
    ],
)
def test_recomputation_gathers_in_one_order_on_idle_ranks_too(runs: Starter, runs_folder: Path, mode: str) -> None:
    """Of 3 ranks one has no row in every second micro-batch, and without deferred exchange each gathers and reduces. A
    rank that gathers router and experts the other way round than the others ends them all."""
    runs.run(3, f"train.activation_checkpointing={mode}", "parallel.defer_sync=false")
    assert_equal_runs(runs.output, reference(runs_folder, 1))


@pytest.mark.slow
def test_recomputation_with_sharded_experts_on_idle_ranks(runs: Starter, runs_folder: Path) -> None:
    """Here the router and the experts have groups of their own, and another order would be a deadlock."""
    runs.run(4, EP, "train.activation_checkpointing=selective", "parallel.defer_sync=false")
    assert_equal_runs(runs.output, reference(runs_folder, 1))
