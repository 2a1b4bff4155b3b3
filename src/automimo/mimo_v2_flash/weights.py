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
from torch.distributed.tensor import DTensor

from automimo.checkpoint import Ledger
from automimo.distributed.world import agree, together
from automimo.mimo_v2_flash.sharded_weights import Exchanges, LocalPart, exchange_dtype, local_part
from automimo.mimo_v2_flash.storage import StoredCheckpoint
from automimo.moe.split_experts import expert_view

# Parts of a release that a text run does not train. They go from the source to the export byte for byte.
CARRIED_PREFIXES = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.")

# A layer whose attention is that of Transformer Engine holds its sinks there.
SINK, SINK_OF_TE = "self_attn.attention_sink_bias", "self_attn.attn_module.softmax_offset"

_STACKED = re.compile(r"(?P<prefix>.*\.experts)\.(?P<stack>gate_and_up_projs|down_projs)$")


@dataclass(frozen=True)
class Place:
    """Where the tensor of a checkpoint key lives: our parameter, and for an expert which matrix of the stack."""

    parameter: str
    expert: int | None = None
    part: str | None = None

    def view(self, tensor: Tensor, first: int = 0) -> Tensor:
        """The checkpoint's tensor as a view of our parameter, in the checkpoint's orientation [out, in]; `first` is the
        first expert in `tensor`, where it is a part of the stack."""
        if self.expert is None or self.part is None:
            return tensor
        return expert_view(tensor[self.expert - first], self.part)


def released_name(parameter: str) -> str:
    """The name that releases have for one of our parameters or buffers that is one of theirs as a whole."""
    return parameter.removesuffix(SINK_OF_TE) + SINK if parameter.endswith("." + SINK_OF_TE) else parameter


def places_of(parameter: str, num_experts: int) -> dict[str, Place]:
    """Checkpoint keys of one of our parameters. `num_experts` is only read for the stacks of experts."""
    match = _STACKED.match(parameter)
    if match is None:
        return {released_name(parameter): Place(parameter)}
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
    but those that a text run carries. Reads headers only and talks to no other rank; the model may be on the meta
    device or parallelized."""
    # Without memory: of a DTensor a view would be an operation of all its ranks.
    state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
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
    """Fill every parameter of `model` from a checkpoint in any layout, a bounded number of bytes at a time.

    `check_weights` comes before the first byte is read, so that a folder that does not fit changes nothing. Of a
    parallelized model every rank fills what it keeps, bit for bit as in a whole model, and reads no more bytes than
    that takes; all ranks have to call. Which bytes those are depends on nothing but the layout, and ranks that share
    experts exchange columns (see sharded_weights.py), while replicas read for themselves.

    Raises CheckpointError; on the other ranks DistributedError, or what torch.distributed raises when contact is lost,
    since a rank that failed does not wait until the others are done. Then the job has to end.
    """
    state = model.state_dict()
    sharded = any(isinstance(tensor, DTensor) for tensor in state.values())
    if not sharded:
        check_weights(model, source)
        _fill({name: local_part(name, tensor) for name, tensor in state.items()}, checkpoint_places(state), source)
        return
    with together("checking the weights"):
        parts = {name: local_part(name, tensor) for name, tensor in state.items()}
        check_weights(model, source)
    _fill(parts, checkpoint_places(state), source)
    agree("reading the weights", None)


@torch.no_grad()
def _fill(parts: Mapping[str, LocalPart], places: Mapping[str, Place], source: StoredCheckpoint) -> None:
    # In the order of the files, so that a disk reads forward.
    local = [key for key in source.matrices if not is_carried(key) and _is_here(places[key], parts)]
    shared: dict[str, list[str]] = {}
    for key in local:
        if parts[places[key].parameter].cut is not None:
            shared.setdefault(places[key].parameter, []).append(key)
    with Exchanges(list(parts.values())) as exchanges:
        for key in local:
            place = places[key]
            part = parts[place.parameter]
            if part.cut is not None:
                # Each stack as a whole, at its first matrix: ranks that share it have the same list of keys.
                keys = shared.pop(place.parameter, [])
                if keys:
                    targets = [(key, places[key].view(part.memory, part.first)) for key in keys]
                    dtype = exchange_dtype(source, keys, part.memory.dtype)
                    exchanges.of(part.cut).fill(source, targets, part.cut.columns, dtype)
            elif place.expert is not None:
                source.read_into(key, place.view(part.memory, part.first))
            else:
                source.read_into(key, part.memory, start=part.first, stop=part.stop)


def _is_here(place: Place, parts: Mapping[str, LocalPart]) -> bool:
    """Whether this rank has any of the tensor that lies at `place`."""
    part = parts[place.parameter]
    if place.expert is None:
        return part.first < part.stop
    return part.first <= place.expert < part.stop
