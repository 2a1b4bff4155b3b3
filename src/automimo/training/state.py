"""What a training checkpoint holds, and how a run gets it back bit for bit.

Names: `model/PARAMETER`, `optimizer/PARAMETER.MOMENT`, `rng/RANK/GENERATOR`; everything else is in the JSON state.
"""

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
from automimo.checkpoint.boxes import SavedTensor
from automimo.checkpoint.resume import PendingStep, begin_step, save_step
from automimo.checkpoint.safetensors_file import TORCH_DTYPES, dtype_name
from automimo.checkpoint.saved_step import SavedStep, check_file_sizes, load_tensors, read_step
from automimo.data import DataStream
from automimo.distributed.local import local_tensor
from automimo.distributed.world import max_numbers, rank, together
from automimo.errors import TrainingError
from automimo.mimo_v2_flash.weights import released_name
from automimo.training.precision import MasterWeights
from automimo.training.recipe import Recipe, differences

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM_STATE = (*ADAM_MOMENTS, "step")


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


class Saver:
    """Writes the checkpoints of a run: at once or, with `train.async_save`, in the background while training goes on.

    In the background `save` returns when the shards are copied to the CPU, and the folder appears with `publish`, the
    next `save` or `finish`. All ranks have to call each of these; what fails on one raises there, and DistributedError
    on the others. A run that ends with an error calls `discard`, which asks no other rank.
    """

    def __init__(self, state: TrainingState, recipe: Recipe, checkpoints: Path) -> None:
        self._state = state
        self._recipe = recipe
        self._checkpoints = checkpoints
        self._pending: PendingStep | None = None

    def save(self) -> Path:
        """Write `checkpoints/step-N`, after what is pending is published. Returns the folder.

        Raises TrainingError, before anything is written, when a weight is not finite.
        """
        self.finish()
        state, keep = self._state, self._recipe.train.keep
        model = model_tensors(state)
        with together(f"saving step-{state.step}"):
            _check_finite(model, state.step)
        tensors = {f"model/{name}": tensor for name, tensor in model.items()}
        tensors |= _optimizer_tensors(state) | _rng_tensors()
        values = {
            "step": state.step,
            "skipped_steps": state.skipped,
            "data_position": state.stream.position,
            "data_fingerprint": state.data_fingerprint,
            "recipe": self._recipe.model_dump(mode="json"),
            "versions": {"automimo": __version__, "torch": str(torch.__version__)},
        }
        if not self._recipe.train.async_save:
            return save_step(self._checkpoints, state.step, tensors, values, keep=keep)
        self._pending = begin_step(self._checkpoints, state.step, tensors, values, keep=keep)
        return self._pending.final

    def publish(self) -> None:
        """Publish what is pending if all ranks have written it; otherwise go on."""
        if self._pending is not None and not max_numbers([float(not self._pending.finished)])[0]:
            self.finish()

    def finish(self) -> None:
        """Wait until all ranks have written what is pending, and publish it. It is gone when that fails."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.publish()

    def discard(self) -> None:
        """Give up what is pending."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()


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


def read_values(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides the tensors, which `restore` reads. Needs no model and no other rank."""
    return read_step(path).state


def restore(state: TrainingState, path: Path) -> None:
    """Put a checkpoint into `state` and the random generators, on all ranks and in whatever layout the model now has.

    Checksums are verified. The data position counts rows of all ranks, so it is exact for any number of them. Each rank
    gets its random state back, if the saved run had that rank; otherwise it keeps its own.

    Raises TrainingError when the data are not those of the checkpoint, or names, shapes or dtypes of tensors differ;
    CheckpointError when the checkpoint is damaged; DistributedError on the ranks where nothing was wrong.
    """
    with together(f"loading {path}"):
        saved = read_step(path)
        if saved.state["data_fingerprint"] != state.data_fingerprint:
            raise TrainingError(
                f"the training data are not those of the checkpoint {path}: the same settings now give other tokens (a "
                "changed file or tokenizer). Restore them to go on, or choose another output to start anew"
            )
        check_file_sizes(saved)  # before memory is taken for what the state only claims
        model = {f"model/{name}": tensor for name, tensor in model_tensors(state).items()}
        _check_names(model, _of_kind(saved, "model/"), path)
        moments = _empty_moments(state, saved)
        generators = {
            name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
            for name, tensor in _of_kind(saved, f"rng/{rank()}/").items()
        }
    optimizer = {f"optimizer/{name}.{key}": tensor for name, kept in moments.items() for key, tensor in kept.items()}
    load_tensors(saved, model | optimizer | generators)
    state.masters.publish()
    for name, parameter in state.masters.trainable.items():
        state.optimizer.state.pop(parameter, None)
        if name in moments:
            state.optimizer.state[parameter] = moments[name]
    state.stream.position = saved.state["data_position"]
    state.step, state.skipped = saved.state["step"], saved.state["skipped_steps"]
    _restore_rng({name.rpartition("/")[2]: tensor for name, tensor in generators.items()})


def model_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Master weights and saved buffers by released name, the same for every attention: live tensors, not copies."""
    tensors: dict[str, Tensor] = {released_name(name): tensor for name, tensor in state.model.state_dict().items()}
    tensors.update({released_name(name): master.detach() for name, master in state.masters.by_name.items()})
    return tensors


def _check_finite(model: Mapping[str, Tensor], step: int) -> None:
    for name, tensor in model.items():
        local = local_tensor(tensor)
        if not local.is_floating_point() or not local.numel():
            continue
        # Smallest and largest value tell all, NaN included, and need no second tensor as isfinite does.
        if not torch.isfinite(torch.stack(torch.aminmax(local.detach()))).all():
            raise TrainingError(
                f"step {step} left values that are not finite in {name}; not saved, so the last checkpoint is good. "
                "Lower optim.lr or optim.clip_norm"
            )


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    found = {}
    for name, parameter in state.masters.trainable.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{name}.{key}"] = value
    return found


def _empty_moments(state: TrainingState, saved: SavedStep) -> dict[str, dict[str, Tensor]]:
    """What to load AdamW's state into, by parameter, laid out as it is; a parameter that no step has used has none."""
    left = set(_of_kind(saved, "optimizer/"))
    moments = {}
    for name, parameter in state.masters.trainable.items():
        names = {key: f"optimizer/{name}.{key}" for key in ADAM_STATE}
        if left.isdisjoint(names.values()):
            continue
        fits = all(saved.tensors.get(names[key]) == _describe(parameter) for key in ADAM_MOMENTS)
        if not fits or saved.tensors.get(names["step"]) != SavedTensor("F32", ()):
            raise TrainingError(f"{saved.folder}: the optimizer state of {name} is incomplete or of another shape")
        moments[name] = {key: torch.zeros_like(parameter, requires_grad=False) for key in ADAM_MOMENTS}
        # Fused AdamW counts where the parameter is, in a plain tensor also for a DTensor.
        moments[name]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        left -= set(names.values())
    if left:
        raise TrainingError(
            f"{saved.folder}: holds optimizer state of parameters that are not trained: {sorted(left)[:5]}"
        )
    return moments


def _of_kind(saved: SavedStep, prefix: str) -> dict[str, SavedTensor]:
    return {name: tensor for name, tensor in saved.tensors.items() if name.startswith(prefix)}


def _describe(tensor: Tensor) -> SavedTensor:
    return SavedTensor(dtype_name(tensor.dtype), tuple(tensor.shape))


def _check_names(mine: Mapping[str, Tensor], saved: Mapping[str, SavedTensor], path: Path) -> None:
    described = {name: _describe(tensor) for name, tensor in mine.items()}
    if described == saved:
        return
    wrong = sorted(name for name in described.keys() | saved.keys() if described.get(name) != saved.get(name))
    shown = "; ".join(f"{name}: {_text(saved.get(name))} -> {_text(described.get(name))}" for name in wrong[:5])
    raise TrainingError(f"{path}: {len(wrong)} tensors do not fit the model ({shown})")


def _text(tensor: SavedTensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _rng_tensors() -> dict[str, Tensor]:
    """The random generators of this rank. As tensors, because the numbers of Python and numpy fill 12 kB of JSON."""
    _, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(key) for key in keys), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return {f"rng/{rank()}/{name}": tensor for name, tensor in found.items()}


def _restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Nothing for a rank that the saved run did not have."""
    if not tensors:
        return
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))  # 3 since Python 3.2
    *keys, position, has_gauss = tensors["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, tensors["numpy_gauss"].item()))
