"""The loop: steps, evaluations and checkpoints in an order that a kill at any moment cannot upset.

Every rank runs it. What decides where it goes next (a stop, an evaluation that is due) is agreed first, because a rank
that goes another way than the others would leave them waiting for ever.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automimo.data import DataStream
from automimo.distributed.watchdog import Watchdog
from automimo.distributed.world import max_numbers
from automimo.training.evaluation import evaluate
from automimo.training.metrics import Metrics
from automimo.training.optimizer import lr_factor
from automimo.training.place import Place
from automimo.training.progress import StepDisplay
from automimo.training.recipe import Recipe
from automimo.training.state import TrainingState
from automimo.training.step import train_step
from automimo.training.stop import StopRequest

# How many times parallel.timeout a save may take: nothing is heard of it before its end.
SAVE_PATIENCE = 4


@dataclass(frozen=True)
class Loop:
    """What the loop works with besides the training state. `save` begins a checkpoint of the state as it is; `publish`
    ends one that is written in the background, if all ranks are done with it."""

    recipe: Recipe
    place: Place
    total: int
    validation: DataStream | None
    metrics: Metrics
    display: StepDisplay
    stop: StopRequest
    watchdog: Watchdog
    save: Callable[[], object]
    publish: Callable[[], object]

    def stopped(self) -> bool:
        """Whether any rank has been asked to stop; the same answer on all of them, which all have to ask."""
        self.stop.agree(int(max_numbers([self.stop.local])[0]))
        return bool(self.stop)


def train_loop(state: TrainingState, loop: Loop, *, saved: bool) -> None:
    """Train until step `loop.total`, or until a stop is requested; the state is then saved. `saved`: it already is.

    At each step number, first the evaluation that is due there and not yet in metrics.jsonl, then the checkpoint: so a
    checkpoint implies its evaluation, and a run that was stopped in between makes up for it when it goes on.
    """
    train = loop.recipe.train
    while True:
        stopped = loop.stopped()
        if not stopped and _evaluation_due(state.step, loop):
            stopped = not _evaluate(state, loop)
        finished = state.step >= loop.total
        due = finished or (state.step > 0 and train.save_every > 0 and state.step % train.save_every == 0)
        if (due or stopped) and not saved:
            loop.watchdog.alive(f"saving step {state.step}", patience=SAVE_PATIENCE)
            loop.save()
        else:
            loop.publish()
        if finished or stopped:
            return
        loop.watchdog.alive(f"step {state.step + 1}")
        row = _step(state, loop)
        loop.metrics.append(row)
        loop.display.step(row)
        saved = False


def _evaluation_due(step: int, loop: Loop) -> bool:
    if loop.validation is None:
        return False
    every = loop.recipe.train.evaluate_every
    if step < loop.total and (every == 0 or step % every):
        return False
    # Only the rank that writes metrics.jsonl knows what is in it.
    return max_numbers([float(loop.metrics.missing_evaluation(step))])[0] > 0


def _evaluate(state: TrainingState, loop: Loop) -> bool:
    """False: a stop request ended it without a result; it is made up for when the run goes on."""
    assert loop.validation is not None  # as `_evaluation_due` says
    train = loop.recipe.train
    loop.validation.position = {"epoch": 0, "row": 0}
    started = time.perf_counter()

    def stopped() -> bool:
        loop.watchdog.alive(f"evaluation at step {state.step}")
        return loop.stopped()

    loss = evaluate(
        state.model,
        loop.place.batches(loop.validation, train.micro_batch),
        loss_chunk=train.loss_chunk,
        stop=stopped,
    )
    if loss is None:
        return False
    loop.metrics.append({"step": state.step, "validation_loss": loss, "seconds": time.perf_counter() - started})
    loop.display.note(f"step {state.step}/{loop.total}  held-out loss {loss:.4f}")
    return True


def _step(state: TrainingState, loop: Loop) -> dict[str, Any]:
    """One optimizer step; returns its row of metrics.jsonl."""
    recipe, train = loop.recipe, loop.recipe.train
    started = time.perf_counter()
    step = state.step + 1
    # Every rank walks the whole stream and takes its rows of the step, so the order of the data and the position in
    # them do not depend on how many ranks there are.
    rows = state.stream.next_rows(train.batch)
    micro_batches = loop.place.micro_batches(state.stream, rows, train.micro_batch)
    factor = lr_factor(step, loop.total, recipe.optim)
    result = train_step(
        state.model,
        state.masters,
        state.optimizer,
        micro_batches,
        lr_factor=factor,
        clip_norm=recipe.optim.clip_norm,
        loss_chunk=train.loss_chunk,
        update_bias=recipe.moe.bias_update_speed > 0,
        step=step,
    )
    state.step = step
    state.skipped += result.loss is None
    seconds = time.perf_counter() - started
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": recipe.optim.lr * factor,
        "tokens": result.targets,
        "processed_tokens": result.tokens,
        "tokens_per_second": result.tokens / seconds,
        "seconds": seconds,
        **result.balance,
    }
