"""Runs in several processes that are killed or stopped at any moment, and end as if nothing had happened."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_calls import CP, EP, HSDP, Job, Starter, reference
from run_compare import assert_identical_runs, last_values, rows, timeless

# Saves take longer here, before and after the files are written, so that kills land in them. Whatever the timing is,
# what is asserted stays true.
SLOW_SAVES = """
import time
import automimo.checkpoint.resume as resume
make, publish = resume._make_staging, resume.PendingStep._publish
def slow_make(root):
    folder = make(root)
    time.sleep(0.1)
    return folder
def slow_publish(self, texts):
    time.sleep(0.1)
    return publish(self, texts)
resume._make_staging, resume.PendingStep._publish = slow_make, slow_publish
"""
Victim = Callable[[Job], None]


def kill_rank(number: int) -> Victim:
    def kill(job: Job) -> None:
        ranks = job.ranks()
        if number < len(ranks):
            os.kill(ranks[number], signal.SIGKILL)

    return kill


def kill_launcher(job: Job) -> None:
    job.ranks()
    job.signal(signal.SIGKILL)


def in_a_save(runs: Starter) -> Callable[[], bool]:
    return lambda: any(runs.output.glob("checkpoints/.saving-*"))


def killed(runs: Starter, job: Job, moment: Callable[[], bool], delay: float, victim: Victim) -> bool:
    """Kill at that moment; False if the run was over before. Nothing of it outlives it for long."""
    if job.wait_for(moment):
        time.sleep(delay)
        victim(job)
    code = job.finish()
    job.assert_gone()
    assert code in (0, 137, -signal.SIGKILL), job.err
    if code == 137:
        assert "was killed by SIGKILL" in job.err and job.err.count("\n") == 1
    return code != 0


def text_of(job: Job, text: str) -> Callable[[], bool]:
    return lambda: text in job.out


def test_three_kills_change_nothing(runs: Starter, runs_folder: Path) -> None:
    """A rank inside a save, another one in a step, and the launcher in the last evaluation or the export."""
    undisturbed = reference(runs_folder, 2, EP, cold=True)
    job = runs.start(2, EP, patch=SLOW_SAVES)
    ends = [killed(runs, job, in_a_save(runs), 0.02, kill_rank(0))]
    assert not (runs.output / "checkpoints" / "step-2").exists()
    job = runs.start(2, EP, patch=SLOW_SAVES)
    ends.append(killed(runs, job, text_of(job, "step 5/8  loss"), 0.0, kill_rank(1)))
    assert last_values(runs.output)["step"] == 4
    job = runs.start(2, EP, patch=SLOW_SAVES)
    ends.append(killed(runs, job, text_of(job, "step 8/8  loss"), 0.0, kill_launcher))
    assert ends == [True, True, True]
    job = runs.run(2, EP)
    assert "resume   from " in job.out
    assert_identical_runs(runs.output, undisturbed)


LAYOUTS = {
    "ep2": (2, (EP,)),
    "fsdp2-async": (2, ("train.async_save=true",)),
    "hsdp-ep": (4, HSDP),
    "cp2-ep2": (2, (CP, EP)),
    "ep4-async": (4, ("parallel.expert=4", "train.async_save=true")),
}


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        pytest.param("ep2", 6, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param("cp2-ep2", 4, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param("fsdp2-async", 6, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        *(pytest.param(name, 20, marks=[pytest.mark.soak, pytest.mark.timeout(0)]) for name in LAYOUTS),
    ],
)
def test_killed_at_random_moments(runs: Starter, runs_folder: Path, layout: str, kills: int) -> None:
    """That many kills in a row: of a rank, of the launcher or of all; between steps, in saves, in the export."""
    nproc, overrides = LAYOUTS[layout]
    undisturbed = reference(runs_folder, nproc, *overrides)
    generator = random.Random(f"{layout} {kills}")
    done = 0
    for number in range(kills):
        job = runs.start(nproc, *overrides, patch=SLOW_SAVES)
        texts = ["model ", "held-out loss", *(f"step {step}/8  loss" for step in range(1, 9))]
        moments = [in_a_save(runs), in_a_save(runs), *(text_of(job, text) for text in generator.sample(texts, 3))]
        victims = [*(kill_rank(rank) for rank in range(nproc)), kill_launcher, Job.kill]
        hit = killed(runs, job, generator.choice(moments), generator.random() * 0.25, generator.choice(victims))
        if not hit:  # it got to its end before: the next kills hit a new run
            assert_identical_runs(runs.output, undisturbed)
            runs.output.rename(runs.folder / f"done-{number}")
        done += hit
    assert done > kills / 2
    runs.run(nproc, *overrides)
    assert_identical_runs(runs.output, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_for_the_launcher_saves_and_the_run_goes_on(
    runs: Starter, runs_folder: Path, number: signal.Signals, code: int
) -> None:
    """To its process group, as Ctrl-C and most schedulers do it."""
    job = runs.start(2, EP)
    assert job.wait_for_text("step 2/8  loss")
    job.ranks()
    os.killpg(job.pid, number)
    assert (job.finish(), job.err) == (code, "")
    job.assert_gone()
    stopped = last_values(runs.output)["step"]
    assert 2 <= stopped < 8 and stopped == rows(runs.output)[-1]["step"]
    assert f"stopped  at step {stopped}, saved; run the same command to go on" in job.out
    runs.run(2, EP)
    assert_identical_runs(runs.output, reference(runs_folder, 2, EP, cold=True))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_that_hangs(runs: Starter) -> None:
    hang = """
import time
import automimo.training.loop as loop
def sleep(state, work):
    print("sleeps", flush=True)
    time.sleep(1000)
if RANK == 0:
    loop._step = sleep
"""
    job = runs.start(2, EP, patch=hang)
    assert job.wait_for_text("sleeps")
    job.ranks()
    for _ in range(2):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.5)  # two keys, not one signal
    assert job.finish(30) == 130
    job.assert_gone()
    runs.run(2, EP)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_restarts_a_killed_rank_from_the_newest_checkpoint(runs: Starter, runs_folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    job = runs.start_command([*command, "-m", "automimo", "train", str(runs.recipe), EP])
    assert job.wait_for_text("step 3/8  loss")
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.finish() == 0, job.err
    job.assert_gone()
    assert job.out.count("resume   from ") == 1 and job.out.count("done     8 steps") == 1
    undisturbed = reference(runs_folder, 2, EP, cold=True)
    assert timeless(runs.output) == timeless(undisturbed)
    assert_identical_runs(runs.output, undisturbed)
