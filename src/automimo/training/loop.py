"""The loop: steps, evaluations and checkpoints in an order that a kill at any moment cannot upset."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automimo.data import DataStream
from automimo.training.evaluation import evaluate
from automimo.training.metrics import MetricsFile
from automimo.training.optimizer import lr_factor
from automimo.training.progress import StepDisplay
from automimo.training.recipe import Recipe
from automimo.training.state import TrainingState
from automimo.training.step import train_step
from automimo.training.stop import StopRequest


@dataclass(frozen=True)
class Loop:
    """What the loop works with besides the training state. `save` writes a checkpoint of the state as it is."""

    recipe: Recipe
    total: int
    validation: DataStream | None
    metrics: MetricsFile
    display: StepDisplay
    stop: StopRequest
    save: Callable[[], object]


def train_loop(state: TrainingState, loop: Loop, *, saved: bool) -> None:
    """Train until step `loop.total`, or until a stop is requested; the state is then saved. `saved`: it already is.

    At each step number, first the evaluation that is due there and not yet in metrics.jsonl, then the checkpoint: so a
    checkpoint implies its evaluation, and a run that was stopped in between makes up for it when it goes on.
    """
    train = loop.recipe.train
    while True:
        if _evaluation_due(state.step, loop):
            _evaluate(state, loop)
        finished = state.step >= loop.total
        due = finished or (state.step > 0 and train.save_every > 0 and state.step % train.save_every == 0)
        if (due or loop.stop) and not saved:
            loop.save()
        if finished or loop.stop:
            return
        row = _step(state, loop)
        loop.metrics.append(row)
        loop.display.step(row)
        saved = False


def _evaluation_due(step: int, loop: Loop) -> bool:
    if loop.validation is None or loop.stop or loop.metrics.evaluated(step):
        return False
    every = loop.recipe.train.evaluate_every
    return step >= loop.total or (every > 0 and step % every == 0)


def _evaluate(state: TrainingState, loop: Loop) -> None:
    """A stop request ends it without a result; the evaluation is made up for when the run goes on."""
    assert loop.validation is not None  # as `_evaluation_due` says
    train = loop.recipe.train
    loop.validation.position = {"epoch": 0, "row": 0}
    started = time.perf_counter()
    loss = evaluate(
        state.model,
        loop.validation.batches(train.micro_batch),
        loss_chunk=train.loss_chunk,
        stop=lambda: bool(loop.stop),
    )
    if loss is None:
        return
    loop.metrics.append({"step": state.step, "validation_loss": loss, "seconds": time.perf_counter() - started})
    loop.display.note(f"step {state.step}/{loop.total}  held-out loss {loss:.4f}")


def _step(state: TrainingState, loop: Loop) -> dict[str, Any]:
    """One optimizer step; returns its row of metrics.jsonl."""
    recipe, train = loop.recipe, loop.recipe.train
    started = time.perf_counter()
    step = state.step + 1
    rows = state.stream.next_rows(train.batch)
    micro_batches = [
        state.stream.batch(rows[i : i + train.micro_batch]) for i in range(0, len(rows), train.micro_batch)
    ]
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
    processed = sum(batch.tokens for batch in micro_batches)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": recipe.optim.lr * factor,
        "tokens": sum(batch.valid_targets for batch in micro_batches),
        "processed_tokens": processed,
        "tokens_per_second": processed / seconds,
        "seconds": seconds,
        **result.balance,
    }
