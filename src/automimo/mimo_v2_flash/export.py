"""What a folder with a trained model holds: its own tensors, and those it only carries from where it came from.

In the `split` layout everything is plain, so that every trainer reads it; in the `source` layout everything is stored
as the source stores it, quantised again where it changed and copied where it did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from automimo.checkpoint import FolderContents, PlannedTensor, SpreadUnit, TensorEntry, Unit, dtype_name
from automimo.checkpoint.writer import Produced
from automimo.distributed.gather import Spread, spread_items, spread_of
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage import StoredCheckpoint, StoredMatrix, stored_tensors, stored_together
from automimo.mimo_v2_flash.storage.encode import cast, row_major
from automimo.mimo_v2_flash.storage.matrices import plain_matrix
from automimo.mimo_v2_flash.storage.target import KEPT_SUFFIXES, ROUTER_SUFFIXES
from automimo.mimo_v2_flash.storage.transfer import (
    Tally,
    encode_unless_unchanged,
    planned,
    raw_unit,
    tensor_unit,
    transfer_units,
)
from automimo.mimo_v2_flash.weights import checkpoint_places
from automimo.moe.split_experts import expert_view


def own_entries(
    state: Mapping[str, Tensor], dtype: torch.dtype, source: StoredCheckpoint | None = None
) -> list[TensorEntry]:
    """The tensors of a model with this state dict in the split layout, stored in `dtype`, on one process.

    Router weights, correction biases and sinks keep the dtype they have in `source`; without one, the router is fp32
    (as in the V2.5 files) and sinks follow `dtype`. Nothing is copied until an entry is written, which raises
    CheckpointError for a value that overflows.
    """
    entries = []
    for key, spread in checkpoint_spreads(state).items():
        stored = _stored_dtype(key, dtype, source)
        entries.append(TensorEntry(key, stored, spread.shape, partial(_cast_whole, key, spread, stored)))
    return entries


def split_contents(state: Mapping[str, Tensor], dtype: torch.dtype, source: StoredCheckpoint | None) -> FolderContents:
    """A folder in the split layout: the model's tensors as in `own_entries`, and what `source` carries beside them.

    Carried parts that nobody interprets (vision, audio) are copied byte for byte. The MTP blocks are, too, as far as
    they are plain and under split names; quantised matrices are decoded to `dtype` and fused ones split, since the
    folder declares neither. The parameters may be DTensors.
    """
    units: list[Unit | SpreadUnit] = []
    for key, spread in checkpoint_spreads(state).items():
        stored = _stored_dtype(key, dtype, source)
        tensor = PlannedTensor(key, dtype_name(stored), spread.shape)
        units.append(SpreadUnit((tensor,), (spread,), partial(_cast_one, key, stored)))
    if source is not None:
        targets = {
            key: plain_matrix(
                key, matrix.weight.dtype if matrix.encoding == "plain" else dtype_name(dtype), matrix.shape
            )
            for key, matrix in _carried(state, source).items()
        }
        units += transfer_units(source, targets, Tally())
        units += _raw_units(source)
    return FolderContents(units, {})


def source_contents(state: Mapping[str, Tensor], source: StoredCheckpoint) -> FolderContents:
    """A folder in the layout, quantisation and dtypes of `source`. The parameters may be DTensors.

    What still has the values of the source, and what the model does not hold, is copied byte for byte; the rest is
    encoded anew.

    Raises CheckpointError when the source does not have every tensor of the model.
    """
    spreads = checkpoint_spreads(state)
    absent = next((key for key in spreads if key not in source.matrices), None)
    if absent is not None:
        raise CheckpointError(f"{source.reader.folder}: has no {absent}, so the model cannot be stored in its layout")
    tally = Tally()
    units: list[Unit | SpreadUnit] = []
    for group in stored_together(source.matrices[key] for key in spreads):
        tensors = tuple(planned(tensor) for tensor in stored_tensors(group))
        inputs = tuple(spreads[matrix.key] for matrix in group)
        units.append(SpreadUnit(tensors, inputs, partial(_encode, group, source, tally)))
    carried = stored_together(_carried(state, source).values())
    units += [raw_unit(source.reader, group, tally) for group in carried]
    units += _raw_units(source)
    return FolderContents(units, source_metadata(source))


def source_metadata(source: StoredCheckpoint) -> dict[str, Any]:
    """Metadata of the index of a folder in the source's layout: that of the source, and the shards of a fused attention
    that nothing in the folder would tell otherwise."""
    metadata = {key: value for key, value in source.reader.metadata.items() if key != "total_size"}
    tp = source.description.tp
    if tp is not None:
        metadata["tp_size"] = tp.size
    return metadata


def checkpoint_spreads(state: Mapping[str, Tensor]) -> dict[str, Spread]:
    """Key of the split layout -> where that tensor lies, its parts being views of the parameter that holds it."""
    spreads: dict[str, Spread] = {}
    experts: dict[str, list[Spread]] = {}
    for key, place in checkpoint_places(state).items():
        tensor = state[place.parameter]
        if place.expert is None or place.part is None:
            spreads[key] = spread_of(tensor)
            continue
        if place.parameter not in experts:
            experts[place.parameter] = spread_items(tensor)
        spreads[key] = _expert_spread(key, experts[place.parameter][place.expert], place.part)
    return spreads


def _expert_spread(key: str, matrix: Spread, part: str) -> Spread:
    """The `part` of an expert [in, out], as a checkpoint has it: [out, in]. Its rows are then columns."""
    if matrix.dim != 0:
        raise CheckpointError(f"{key}: the columns of an expert lie on different ranks; shard its rows instead")
    whole = expert_view(torch.empty(matrix.shape, device="meta"), part)
    view = None if matrix.part is None else expert_view(matrix.part, part)
    return replace(matrix, shape=tuple(whole.shape), dim=1, part=view)


def _carried(state: Mapping[str, Tensor], source: StoredCheckpoint) -> dict[str, StoredMatrix]:
    own = checkpoint_places(state).keys()
    return {key: matrix for key, matrix in source.matrices.items() if key not in own}


def _raw_units(source: StoredCheckpoint) -> list[Unit]:
    return [tensor_unit(source.reader, key, Tally()) for key in source.raw]


def _encode(
    group: tuple[StoredMatrix, ...], source: StoredCheckpoint, tally: Tally, values: Sequence[Tensor]
) -> Sequence[Produced]:
    return encode_unless_unchanged(group, values, source, tally)


def _cast_whole(key: str, spread: Spread, dtype: torch.dtype) -> Tensor:
    return _cast(key, spread.whole(), dtype)


def _cast_one(key: str, dtype: torch.dtype, values: Sequence[Tensor]) -> list[Produced]:
    return [_cast(key, values[0], dtype)]


def _cast(key: str, view: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        return row_major(cast(view, dtype, key))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; export in float32") from error


def _stored_dtype(key: str, dtype: torch.dtype, source: StoredCheckpoint | None) -> torch.dtype:
    kept = key.endswith(KEPT_SUFFIXES)
    if kept and source is not None and key in source.reader.tensors:
        return source.reader.tensors[key].torch_dtype
    return torch.float32 if key.endswith(ROUTER_SUFFIXES) else dtype
