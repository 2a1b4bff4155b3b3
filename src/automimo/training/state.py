"""What a training checkpoint holds, and how a run gets it back bit for bit."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automimo import __version__
from automimo.checkpoint.resume import load_step, save_step
from automimo.data import DataStream
from automimo.errors import TrainingError
from automimo.training.precision import MasterWeights
from automimo.training.recipe import Recipe, differences

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class TrainingState:
    """Everything that a step changes. `step` optimizer steps are done, `skipped` of them had no target."""

    model: nn.Module
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    stream: DataStream
    step: int = 0
    skipped: int = 0

    @cached_property
    def data_fingerprint(self) -> str:
        return self.stream.fingerprint()


def save(state: TrainingState, recipe: Recipe, checkpoints: Path) -> Path:
    """Write `checkpoints/step-N`. Raises TrainingError, before anything is written, when a weight is not finite."""
    model = model_tensors(state)
    for name, tensor in model.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise TrainingError(
                f"step {state.step} left values that are not finite in {name}; not saved, so the last checkpoint is "
                "good. Lower optim.lr or optim.clip_norm"
            )
    tensors = {"model": model, "optimizer": _optimizer_tensors(state), "rng": _rng_tensors()}
    values = {
        "step": state.step,
        "skipped_steps": state.skipped,
        "data_position": state.stream.position,
        "data_fingerprint": state.data_fingerprint,
        "rng": _rng_values(),
        "recipe": recipe.model_dump(mode="json"),
        "versions": {"automimo": __version__, "torch": str(torch.__version__)},
    }
    return save_step(checkpoints, state.step, tensors, values, keep=recipe.train.keep)


def check_recipe(saved: Mapping[str, Any], recipe: Recipe, checkpoint: Path) -> None:
    """Raise TrainingError that lists `key: old -> new` if the run of `saved` cannot go on as `recipe`."""
    try:
        old = Recipe.model_validate(saved["recipe"]).model_dump(mode="json")  # keys added since then get defaults
    except ValueError:
        old = saved["recipe"]
    changed = differences(old, recipe.model_dump(mode="json"))
    if changed:
        raise TrainingError(
            f"the recipe no longer fits the checkpoint {checkpoint}:\n  "
            + "\n  ".join(changed)
            + "\nUndo these changes to go on, or choose another output to start anew."
        )


def check_steps(saved: Mapping[str, Any], total: int, checkpoint: Path) -> None:
    """Raise TrainingError if the checkpoint lies behind the end of the run."""
    if saved["step"] > total:
        raise TrainingError(
            f"the checkpoint {checkpoint} is at step {saved['step']}, but the recipe ends at step {total}: raise "
            "train.steps or train.epochs, or choose another output to start anew"
        )


def restore(
    state: TrainingState, tensors: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Any], path: Path
) -> None:
    """Put a loaded checkpoint into `state` and the random generators.

    Raises TrainingError when the data are not those of the checkpoint, or names or shapes of tensors differ.
    """
    if saved["data_fingerprint"] != state.data_fingerprint:
        raise TrainingError(
            f"the training data are not those of the checkpoint {path}: the same settings now give other tokens (a "
            "changed file or tokenizer). Restore them to go on, or choose another output to start anew"
        )
    mine = model_tensors(state)
    _check_names(mine, tensors["model"], path)
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors["model"][name])
    state.masters.publish()
    _restore_optimizer(state, tensors["optimizer"], path)
    state.stream.position = saved["data_position"]
    state.step, state.skipped = saved["step"], saved["skipped_steps"]
    _restore_rng(tensors["rng"], saved["rng"])


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and values of a checkpoint; checksums are verified."""
    return load_step(path)


def model_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Master weights and saved buffers by name (the live tensors, not copies)."""
    tensors: dict[str, Tensor] = dict(state.model.state_dict())
    tensors.update({name: master.detach() for name, master in state.masters.by_name.items()})
    return tensors


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    found = {}
    for name, parameter in state.masters.trainable.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return found


def _restore_optimizer(state: TrainingState, tensors: Mapping[str, Tensor], path: Path) -> None:
    left = set(tensors)
    for name, parameter in state.masters.trainable.items():
        entry = {key: tensors[f"{name}.{key}"] for key in ADAM_STATE if f"{name}.{key}" in tensors}
        if not entry:
            continue  # a parameter that no step has used has no moments
        if len(entry) != len(ADAM_STATE) or entry["exp_avg"].shape != parameter.shape:
            raise TrainingError(f"{path}: the optimizer state of {name} is incomplete or of another shape")
        state.optimizer.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in entry.items()}
        left -= {f"{name}.{key}" for key in ADAM_STATE}
    if left:
        raise TrainingError(f"{path}: holds optimizer state of parameters that are not trained: {sorted(left)[:5]}")


def _check_names(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    other = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if shapes != other:
        wrong = sorted(name for name in shapes.keys() | other.keys() if shapes.get(name) != other.get(name))
        shown = "; ".join(f"{n}: {other.get(n, 'absent')} -> {shapes.get(n, 'absent')}" for n in wrong[:5])
        raise TrainingError(f"{path}: {len(wrong)} tensors do not fit the model ({shown})")


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _rng_tensors() -> dict[str, Tensor]:
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def _rng_values() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def _restore_rng(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
