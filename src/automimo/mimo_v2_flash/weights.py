"""Checkpoint keys <-> places in our parameters, for the plain split layout.

Every key of a Hugging Face folder is a *view* of one of our parameters: the parameter itself, or one matrix of a stack
of experts, transposed. Loading copies into the view, exporting copies out of it, so the two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from automimo.checkpoint import CheckpointReader, Ledger, TensorEntry, raw_entry
from automimo.errors import CheckpointError

# Parts of a release that a text run does not train. They go from the source to the export byte for byte.
CARRIED_PREFIXES = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.")
# Read and written in the dtype they were released in: rounding them changes which experts a token goes to.
ROUTER_SUFFIXES = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
SINK_SUFFIX = ".attention_sink_bias"
FLOATING = ("F64", "F32", "BF16", "F16")

_STACKED = re.compile(r"(?P<prefix>.*\.experts)\.(?P<stack>gate_and_up_projs|down_projs)$")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.\d+\.(?P<part>gate|up|down)_proj\.weight$")


@dataclass(frozen=True)
class Place:
    """Where the tensor of a checkpoint key lives: our parameter, and for an expert which matrix of the stack."""

    parameter: str
    expert: int | None = None
    part: str | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor as a view of our parameter, in the checkpoint's orientation [out, in]."""
        if self.expert is None:
            return tensor
        matrix = tensor[self.expert]
        if self.part == "down":
            return matrix.t()
        half = matrix.shape[1] // 2
        return (matrix[:, :half] if self.part == "gate" else matrix[:, half:]).t()


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


def parameter_of(key: str) -> str:
    """Our parameter that a checkpoint key belongs to: the inverse of `places_of`."""
    match = _EXPERT.match(key)
    if match is None:
        return key
    return f"{match['prefix']}.{'down_projs' if match['part'] == 'down' else 'gate_and_up_projs'}"


def checkpoint_places(state: Mapping[str, Tensor]) -> dict[str, Place]:
    """Every checkpoint key of a model with this state dict, in the order of the parameters."""
    places: dict[str, Place] = {}
    for name, tensor in state.items():
        places.update(places_of(name, tensor.shape[0] if tensor.dim() else 0))
    return places


def is_carried(key: str) -> bool:
    """Whether a checkpoint key belongs to a part that a text run copies untouched (MTP, vision, audio)."""
    return key.startswith(CARRIED_PREFIXES)


def load_weights(model: nn.Module, reader: CheckpointReader) -> None:
    """Fill every parameter of `model` from a folder, one tensor at a time.

    The keys are checked before the first byte is read. Raises CheckpointError for missing, unexpected, doubled or
    wrongly shaped keys (naming them) and for layouts other than plain split BF16 / FP32.
    """
    state = model.state_dict()
    places = checkpoint_places(state)
    check_layout(str(reader.folder), {key: info.dtype for key, info in reader.tensors.items()})
    ledger = Ledger({key: tuple(place.view(state[place.parameter]).shape) for key, place in places.items()})
    for key, info in reader.tensors.items():
        if not is_carried(key):
            ledger.consume(key, info.shape)
    ledger.check(str(reader.folder), "the folder does not fit its config.json, or is not a MiMo-V2 text checkpoint")
    with torch.no_grad():
        for key in reader.tensors:
            if not is_carried(key):
                place = places[key]
                reader.read_into(key, place.view(state[place.parameter]))


def check_layout(where: str, dtypes: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the text keys (key -> safetensors dtype) are of the plain split layout."""
    text = {key: dtype for key, dtype in dtypes.items() if not is_carried(key)}
    fused = next((key for key in text if key.endswith(".qkv_proj.weight")), None)
    if fused is not None:
        raise CheckpointError(
            f"{where}: {fused} is a fused projection; this version reads the split layout (q_proj, k_proj, v_proj)"
        )
    quantised = next((key for key, dtype in text.items() if dtype not in FLOATING), None)
    if quantised is not None:
        raise CheckpointError(
            f"{where}: {quantised} is stored as {text[quantised]}; this version reads checkpoints in "
            f"{', '.join(FLOATING)}, not quantised ones"
        )


def checkpoint_entries(
    state: Mapping[str, Tensor], dtype: torch.dtype, source: CheckpointReader | None
) -> list[TensorEntry]:
    """What to write for a model with this state dict: our tensors in `dtype`, then what `source` carries.

    Router weights, correction biases and sinks keep the dtype they have in `source`; without one, the router is fp32
    (as in the V2.5 files) and sinks follow `dtype`. Nothing is copied until an entry is written.
    """
    entries = []
    for key, place in checkpoint_places(state).items():
        view = place.view(state[place.parameter])
        stored = _stored_dtype(key, dtype, source)
        entries.append(TensorEntry(key, stored, tuple(view.shape), partial(_cast, key, view, stored)))
    if source is not None:
        entries += [raw_entry(source, key) for key in source.tensors if is_carried(key)]
    return entries


def _cast(key: str, view: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = view.detach().to(dtype)
    if dtype != view.dtype and not bool(torch.isfinite(tensor).all()) and bool(torch.isfinite(view).all()):
        largest = float(view.detach().abs().max())
        raise CheckpointError(f"{key} overflows {dtype} (largest magnitude {largest:.3g}); export in float32")
    return tensor


def _stored_dtype(key: str, dtype: torch.dtype, source: CheckpointReader | None) -> torch.dtype:
    kept = key.endswith((*ROUTER_SUFFIXES, SINK_SUFFIX))
    if kept and source is not None and key in source.tensors:
        return source.tensors[key].torch_dtype
    return torch.float32 if key.endswith(ROUTER_SUFFIXES) else dtype


def carried_keys(keys: Iterable[str]) -> list[str]:
    """The keys that are copied untouched, in order."""
    return [key for key in keys if is_carried(key)]
