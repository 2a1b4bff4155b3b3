"""Checkpoint keys of the split layout <-> places in our parameters.

Every such key is a *view* of one of our parameters: the parameter itself, or one matrix of a stack
of experts, transposed. Loading copies into the view, exporting copies out of it, so the two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automimo.checkpoint import Ledger
from automimo.mimo_v2_flash.storage import StoredCheckpoint
from automimo.moe.split_experts import expert_view

# Parts of a release that a text run does not train. They go from the source to the export byte for byte.
CARRIED_PREFIXES = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.")

_STACKED = re.compile(r"(?P<prefix>.*\.experts)\.(?P<stack>gate_and_up_projs|down_projs)$")


@dataclass(frozen=True)
class Place:
    """Where the tensor of a checkpoint key lives: our parameter, and for an expert which matrix of the stack."""

    parameter: str
    expert: int | None = None
    part: str | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor as a view of our parameter, in the checkpoint's orientation [out, in]."""
        if self.expert is None or self.part is None:
            return tensor
        return expert_view(tensor[self.expert], self.part)


def places_of(parameter: str, num_experts: int) -> dict[str, Place]:
    """Checkpoint keys of one of our parameters. `num_experts` is only read for the stacks of experts."""
    match = _STACKED.match(parameter)
    if match is None:
        return {parameter: Place(parameter)}
    parts = ("down",) if match["stack"] == "down_projs" else ("gate", "up")
    return {
        f"{match['prefix']}.{expert}.{part}_proj.weight": Place(parameter, expert, part)
        for expert in range(num_experts)
        for part in parts
    }


def checkpoint_places(state: Mapping[str, Tensor]) -> dict[str, Place]:
    """Every checkpoint key of a model with this state dict, in the order of the parameters."""
    places: dict[str, Place] = {}
    for name, tensor in state.items():
        places.update(places_of(name, tensor.shape[0] if tensor.dim() else 0))
    return places


def is_carried(key: str) -> bool:
    """Whether a checkpoint key belongs to a part that a text run copies untouched (MTP, vision, audio)."""
    return key.startswith(CARRIED_PREFIXES)


def check_weights(model: nn.Module, source: StoredCheckpoint) -> None:
    """Raise CheckpointError, with the keys, unless a checkpoint has every tensor of `model` in its shape and no other
    but those that a text run carries. Reads headers only; the model may be on the meta device."""
    state = model.state_dict()
    places = checkpoint_places(state)
    ledger = Ledger({key: tuple(place.view(state[place.parameter]).shape) for key, place in places.items()})
    shapes = {key: matrix.shape for key, matrix in source.matrices.items()}
    shapes.update((key, source.reader.tensors[key].shape) for key in source.raw)
    for key, shape in shapes.items():
        if not is_carried(key):
            ledger.consume(key, shape)
    folder = str(source.reader.folder)
    ledger.check(folder, "the folder does not fit its config.json, or is not a MiMo-V2 text checkpoint")


def load_weights(model: nn.Module, source: StoredCheckpoint) -> None:
    """Fill every parameter of `model` from a checkpoint in any layout, one tensor at a time.

    `check_weights` comes before the first byte is read, so a model is filled whole or not at all.
    """
    check_weights(model, source)
    state = model.state_dict()
    places = checkpoint_places(state)
    with torch.no_grad():
        # In the order of the files, so that a disk reads forward.
        for key in source.matrices:
            if not is_carried(key):
                place = places[key]
                source.read_into(key, place.view(state[place.parameter]))
