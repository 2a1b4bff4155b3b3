"""Loss on held-out data."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from automimo.data.batches import Batch
from automimo.distributed.world import exchange_texts, sum_numbers, world_size
from automimo.errors import TrainingError
from automimo.moe import reset_expert_load

SHOWN_ORIGINS = 8


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], *, loss_chunk: int, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean cross entropy (nats) over all valid targets of `batches`, each target weighing the same however the batches
    are cut and shared out: every rank brings equally many batches, idle ones included, and gets the same number back.
    The model is put into evaluation mode and back. None when `stop()`, which must be the same on all ranks, became true
    before the end.

    Raises TrainingError when the loss is not finite, naming the documents of the first such batch (of each rank).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        losses: list[float] = []
        targets = 0
        broken = ""
        for batch in batches:
            if stop():
                return None
            losses.append(batch_loss(model, batch.to(device), loss_chunk).item())
            targets += batch.valid_targets
            if not math.isfinite(losses[-1]):
                broken = broken or f"{losses[-1]} for the documents {shown_origins(batch.origins)}"
                if world_size() == 1:
                    break
        _refuse_broken(broken)
        loss, total = sum_numbers([math.fsum(losses), targets])
        return loss / total
    finally:
        model.train(was_training)
        reset_expert_load(model)


def _refuse_broken(broken: str) -> None:
    """Raise TrainingError on all ranks if any has found a loss that is not finite."""
    found = [text for text in exchange_texts(broken) if text]
    if found:
        raise TrainingError(
            f"the validation loss is {'; '.join(found)}; look at them, and whether the weights of the model are finite"
        )


def batch_loss(model: nn.Module, batch: Batch, loss_chunk: int) -> torch.Tensor:
    """fp32 sum of the cross entropy over the batch's valid targets: the one way in which the loop calls a model."""
    loss: torch.Tensor = model(
        batch.input_ids,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        padding_mask=batch.padding_mask,
        cp_size=batch.cp_size,
        cp_rank=batch.cp_rank,
        qkv_format="thd",
        targets=batch.targets,
        loss_chunk=loss_chunk,
    ).loss
    return loss


def shown_origins(origins: Sequence[str]) -> str:
    """The first documents of a batch, for a message; a packed batch can hold hundreds."""
    more = f" and {len(origins) - SHOWN_ORIGINS} more" if len(origins) > SHOWN_ORIGINS else ""
    return ", ".join(origins[:SHOWN_ORIGINS]) + more
