"""One optimizer step: gradients of all micro-batches, a check, clipping, the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from automimo.data.batches import Batch
from automimo.errors import TrainingError
from automimo.moe import expert_load, load_metrics, reset_expert_load, set_aux_loss_scale, update_router_biases
from automimo.training.evaluation import batch_loss, shown_origins
from automimo.training.optimizer import clip_gradients, gradient_norm, set_learning_rate
from automimo.training.precision import MasterWeights


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's valid targets. grad_norm: before clipping. balance: of the experts, see moe.

    Both numbers are None for a step that was skipped because none of its tokens has a target.
    """

    loss: float | None
    grad_norm: float | None
    balance: dict[str, float]


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
    """One step on `micro_batches`, which may differ in everything.

    The loss is the sum over the valid targets of all micro-batches divided by their number, so how the rows are cut
    into micro-batches changes nothing but rounding; the balance loss is likewise divided by all tokens of the step.
    Raises TrainingError before anything is updated when a loss or the gradient is not finite, naming the documents.
    """
    targets = sum(batch.valid_targets for batch in micro_batches)
    if targets == 0:
        return StepResult(None, None, {})
    device = next(model.parameters()).device
    set_aux_loss_scale(model, 1 / sum(batch.tokens for batch in micro_batches))
    reset_expert_load(model)
    masters.zero_grad()
    sums = [_backward(model, batch.to(device), targets, loss_chunk) for batch in micro_batches]
    trainable = list(masters.trainable.values())
    norm = gradient_norm(trainable)
    losses = torch.stack(sums).tolist()
    if not (math.isfinite(norm.item()) and all(map(math.isfinite, losses))):
        raise TrainingError(_blame(model, masters, micro_batches, targets, loss_chunk, step))
    if clip_norm is not None:
        clip_gradients(trainable, clip_norm, norm)
    set_learning_rate(optimizer, lr_factor)
    optimizer.step()
    masters.publish()
    balance = load_metrics(expert_load(model))
    if update_bias:
        update_router_biases(model)
    return StepResult(math.fsum(losses) / targets, norm.item(), balance)


def _backward(model: nn.Module, batch: Batch, targets: int, loss_chunk: int) -> torch.Tensor:
    loss = batch_loss(model, batch, loss_chunk)
    (loss / targets).backward()
    return loss.detach()


def _blame(
    model: nn.Module,
    masters: MasterWeights,
    micro_batches: Sequence[Batch],
    targets: int,
    loss_chunk: int,
    step: int,
) -> str:
    """Run the micro-batches again, one at a time, to find those that are not finite by themselves."""
    device = next(model.parameters()).device
    lines = []
    for number, batch in enumerate(micro_batches, 1):
        masters.zero_grad()
        loss = _backward(model, batch.to(device), targets, loss_chunk).item()
        norm = gradient_norm(masters.trainable.values()).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            mean = loss / batch.valid_targets if batch.valid_targets else loss
            lines.append(
                f"micro-batch {number} of {len(micro_batches)}: loss {mean:g}, gradient norm {norm:g}, documents "
                + shown_origins(batch.origins)
            )
    masters.zero_grad()
    reset_expert_load(model)
    if not lines:
        origins = [origin for batch in micro_batches for origin in batch.origins]
        lines = [f"every micro-batch is finite by itself, their sum is not; documents {shown_origins(origins)}"]
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
