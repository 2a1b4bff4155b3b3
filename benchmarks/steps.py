"""Optimizer steps with the clock running, shared by the benchmarks of several processes."""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from automimo.data.batches import Batch
from automimo.training.optimizer import make_optimizer
from automimo.training.precision import MasterWeights
from automimo.training.recipe import OptimSection
from automimo.training.step import train_step


def timed_steps(model: nn.Module, dtype: torch.dtype, steps: Iterable[Sequence[Batch]]) -> tuple[float, float | None]:
    """Best seconds of a step on this rank's micro-batches after one that warms up, and the loss of the first."""
    masters = MasterWeights(model, dtype)
    optimizer = make_optimizer(masters.trainable, OptimSection(lr=1e-4))
    seconds, losses = [], []
    for step, micro_batches in enumerate(steps, 1):
        start = time.perf_counter()
        result = train_step(
            model, masters, optimizer, micro_batches,
            lr_factor=1.0, clip_norm=1.0, loss_chunk=1024, update_bias=False, step=step,
        )  # fmt: skip
        # The gradient norm is a collective, so a step ends at about the same time on all ranks.
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
    return min(seconds[1:]), losses[0]
