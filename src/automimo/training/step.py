"""One optimizer step: gradients of all micro-batches of all ranks, a check, clipping, the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from automimo.data.batches import Batch
from automimo.distributed.gradients import clip_gradients, gradient_norm, sum_replicated_gradients
from automimo.distributed.world import exchange_texts, sum_numbers, world_size
from automimo.errors import TrainingError
from automimo.moe import (
    MoEFSDPSyncMixin,
    expert_load,
    load_metrics,
    reset_expert_load,
    set_aux_loss_scale,
    sum_expert_load,
    update_router_biases,
)
from automimo.training.evaluation import batch_loss, shown_origins
from automimo.training.optimizer import set_learning_rate
from automimo.training.precision import MasterWeights


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's valid targets. grad_norm: before clipping. balance: of the experts, see moe.

    targets, tokens: of the whole step. All numbers are the same on every rank. loss and grad_norm are None for a step
    that was skipped because none of its tokens has a target.
    """

    loss: float | None
    grad_norm: float | None
    balance: dict[str, float]
    targets: int
    tokens: int


def train_step(
    model: nn.Module,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    lr_factor: float,
    clip_norm: float | None,
    loss_chunk: int,
    update_bias: bool,
    step: int,
) -> StepResult:
    """One step on `micro_batches`, which may differ in everything; every rank brings equally many of its own.

    The loss is the sum over the valid targets of all micro-batches of all ranks divided by their number, so how the
    rows are cut into micro-batches and shared out changes nothing but rounding; the balance loss is likewise divided by
    all tokens of the step. Raises TrainingError, on all ranks and before anything is updated, when a loss or the
    gradient is not finite, naming the documents.
    """
    own = (sum(batch.valid_targets for batch in micro_batches), sum(batch.tokens for batch in micro_batches))
    targets, tokens = map(int, sum_numbers(own))
    if targets == 0:
        return StepResult(None, None, {}, targets, tokens)
    set_aux_loss_scale(model, 1 / tokens)
    reset_expert_load(model)
    masters.zero_grad()
    losses = _accumulate(model, micro_batches, targets, loss_chunk)
    trainable = list(masters.trainable.values())
    sum_replicated_gradients(trainable)
    norm = gradient_norm(trainable)
    loss = sum_numbers([math.fsum(losses)])[0]
    if not (math.isfinite(norm) and math.isfinite(loss)):
        raise TrainingError(_blame(model, masters, micro_batches, targets, loss_chunk, step))
    if clip_norm is not None:
        clip_gradients(trainable, clip_norm, norm)
    set_learning_rate(optimizer, lr_factor)
    optimizer.step()
    masters.publish()
    sum_expert_load(model)
    balance = load_metrics(expert_load(model))
    if update_bias:
        update_router_biases(model)
    return StepResult(loss / targets, norm, balance, targets, tokens)


def _accumulate(model: nn.Module, micro_batches: Sequence[Batch], targets: int, loss_chunk: int) -> list[float]:
    """Sum the gradients of the micro-batches; the loss of each."""
    device = next(model.parameters()).device
    assert isinstance(model, MoEFSDPSyncMixin)
    sums = []
    for number, batch in enumerate(micro_batches, 1):
        if number < len(micro_batches):
            model.prepare_for_grad_accumulation()
        else:
            model.prepare_for_final_backward()
        loss = batch_loss(model, batch.to(device), loss_chunk)
        (loss / targets).backward()
        sums.append(loss.detach())
    return torch.stack(sums).tolist()


def _blame(
    model: nn.Module,
    masters: MasterWeights,
    micro_batches: Sequence[Batch],
    targets: int,
    loss_chunk: int,
    step: int,
) -> str:
    """Run the micro-batches again, one at a time, to find those that are not finite by themselves.

    With several ranks the n-th micro-batches of all run together, and so does their gradient: a rank whose own loss is
    finite names its documents only where no other's loss explains the gradient.
    """
    lines = []
    for number, batch in enumerate(micro_batches, 1):
        masters.zero_grad()
        loss = _accumulate(model, [batch], targets, loss_chunk)[0]
        sum_replicated_gradients(masters.trainable.values())
        norm = gradient_norm(masters.trainable.values())
        explained = sum_numbers([float(not math.isfinite(loss))])[0] > 0
        if not math.isfinite(loss) or (not explained and not math.isfinite(norm)):
            mean = loss / batch.valid_targets if batch.valid_targets else loss
            lines.append(
                f"micro-batch {number} of {len(micro_batches)}: loss {mean:g}, gradient norm {norm:g}, documents "
                + shown_origins(batch.origins)
            )
    masters.zero_grad()
    reset_expert_load(model)
    lines = _of_all_ranks(lines)
    if not lines:
        origins = [origin for batch in micro_batches for origin in batch.origins]
        lines = _of_all_ranks(
            [f"every micro-batch is finite by itself, their sum is not; documents {shown_origins(origins)}"]
        )
    if step == 1:
        weights = "those that it started from"
        remedy = "Check that the weights of the model are finite, look at these documents"
    else:
        weights = f"those of step {step - 1} and the last checkpoint is good"
        remedy = "Look at these documents"
    return (
        f"step {step}: the loss or the gradient is not finite; stopped before the update, so the weights are {weights}."
        + "\n  "
        + "\n  ".join(lines)
        + f"\n{remedy} (automimo inspect RECIPE), or lower optim.lr, and run again."
    )


def _of_all_ranks(lines: list[str]) -> list[str]:
    if world_size() == 1:
        return lines
    texts = exchange_texts("\n".join(lines))
    return [f"rank {rank}, {line}" for rank, text in enumerate(texts) for line in text.splitlines()]
