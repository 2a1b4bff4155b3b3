"""Decode the stored tensors of a state dict, in place, into the memory that is waiting for them.

`native` maps keys of the split layout to such memory: a tensor, or a DTensor of which this rank has a part. A matrix
without an entry becomes a new tensor of `dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.tensor import DTensor

from automimo.checkpoint import TensorInfo
from automimo.distributed.local import local_tensor
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.adapter_tensors import full_key, may_share_scales, projection, renamed
from automimo.mimo_v2_flash.adapter_tp import FUSED_WEIGHT, fused_projections
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.in_memory import StateDictReader, decode_in_memory, describe_in_memory
from automimo.mimo_v2_flash.storage.matrices import FP8_SCALE, MXFP4_SCALE, StoredMatrix, fused_matrices
from automimo.mimo_v2_flash.storage.stored_checkpoint import FLOATING
from automimo.moe.split_experts import copy_whole

FP8 = torch.float8_e4m3fn
StateDict = dict[str, Any]


@dataclass
class Decoder:
    """How and where to decode: the shape of the model, the dtype of new tensors, the memory waiting for others."""

    config: MiMoV2FlashConfig
    dtype: torch.dtype
    native: dict[str, Tensor] = field(default_factory=dict)

    def fused(self, state_dict: StateDict, reader: StateDictReader, names: Mapping[str, str], tp: int) -> None:
        """Replace the fused projections of `reader` (as `fused_reader` returns it) by q, k and v.

        Memory that was waiting for them is used up. Raises CheckpointError for shapes, dtypes and scales other than
        those of `tp` shards.
        """
        for found in fused_projections(reader.tensors, self.config):
            full = f"{found.prefix}{FUSED_WEIGHT}"
            weight = reader.tensors[full]
            _check_fused_dtypes(full, reader.tensors)
            matrices = fused_matrices(
                found.prefix, found.shape, weight.shape[-1] if weight.shape else 0, tp, weight.dtype
            )
            _check_fused_shapes(matrices, reader.tensors, tp)
            for tensor in matrices[0].stored:
                del state_dict[names[tensor.key]]
            for matrix in matrices:
                key = renamed(matrix.key, names[full])
                if key in state_dict:
                    raise CheckpointError(f"{key}: is there twice: fused and under its own name")
                state_dict[key] = self._matrix(reader, matrix, key)
                self.native.pop(key, None)

    def mxfp4(self, state_dict: StateDict) -> None:
        """Replace MXFP4 matrices and remove their scales. Raises CheckpointError where one lacks the other."""
        scales = [key for key in state_dict if key.endswith(f".weight{MXFP4_SCALE}")]
        orphans = [key for key in scales if key.removesuffix(MXFP4_SCALE) not in state_dict]
        if orphans:
            raise CheckpointError(f"MXFP4 expert scales are missing weights: {_listed(orphans)}")
        known = set(scales)
        packed = [key for key, tensor in state_dict.items() if tensor.dtype == torch.uint8 and key not in known]
        bare = [key for key in packed if f"{key}{MXFP4_SCALE}" not in known]
        if bare:
            raise CheckpointError(f"packed MXFP4 expert weights (U8) are missing scales: {_listed(bare)}")
        self._pairs(state_dict, [key.removesuffix(MXFP4_SCALE) for key in scales], scales)

    def fp8(self, state_dict: StateDict) -> None:
        """Replace FP8 matrices and remove their scales. Raises CheckpointError where they do not fit each other."""
        scales = [key for key in state_dict if key.endswith(f".weight{FP8_SCALE}")]
        weights = [key for key, tensor in state_dict.items() if tensor.dtype == FP8]
        sharded = [key for key in weights if isinstance(state_dict[key], DTensor)]
        if sharded:
            raise CheckpointError(f"sharded FP8 matrices cannot be decoded, their blocks are cut: {_listed(sharded)}")
        for key in weights:
            self._check_companion(state_dict, key)
        scaled = [key for scale in scales if (key := scale.removesuffix(FP8_SCALE)) in state_dict]
        self._pairs(state_dict, list(dict.fromkeys([*weights, *scaled])), scales)

    def _check_companion(self, state_dict: StateDict, key: str) -> None:
        """Refuse a v without its k where the two may share scales: v's own also fit a grid that would be wrong."""
        found = projection(key)
        if found is None or found[1] != "v_proj" or f"{found[0]}.k_proj.weight" in state_dict:
            return
        if may_share_scales(full_key(found[0]), self.config):
            raise CheckpointError(f"{key}: cannot be decoded without {found[0]}.k_proj.weight, they may share scales")

    def _pairs(self, state_dict: StateDict, weights: Sequence[str], scales: Sequence[str]) -> None:
        if not weights and not scales:
            return
        names = {full_key(key): key for key in (*weights, *scales)}
        reader = StateDictReader({full: local_tensor(state_dict[key]) for full, key in names.items()})
        for full, matrix in describe_in_memory(reader, self.config).items():
            key = names[full]
            stored = state_dict[key]
            if isinstance(stored, DTensor):
                state_dict[key] = self._local_matrix(reader, matrix, key, stored)
            else:
                state_dict[key] = self._matrix(reader, matrix, key)
        for key in scales:
            del state_dict[key]

    def _matrix(self, reader: StateDictReader, matrix: StoredMatrix, key: str) -> Tensor:
        """A whole matrix: in the memory that waits for it (this rank's part of it), if it has that shape, or new."""
        native = self.native.get(key)
        if native is not None and tuple(native.shape) != matrix.shape:
            native = None  # who merges will say so
        if native is not None and not isinstance(native, DTensor):
            decode_in_memory(reader, matrix, native)
            return native
        device = reader.read(matrix.weight.key).device
        whole = torch.empty(matrix.shape, dtype=self.dtype if native is None else native.dtype, device=device)
        decode_in_memory(reader, matrix, whole)
        if native is None:
            return whole
        copy_whole(native, local_tensor(native), whole)
        return native

    def _local_matrix(self, reader: StateDictReader, matrix: StoredMatrix, key: str, stored: DTensor) -> Tensor:
        """This rank's part of an MXFP4 matrix; `reader` and `matrix` know that part only."""
        native = self.native.get(key)
        if native is None:
            local = torch.empty(matrix.shape, dtype=self.dtype, device=stored.device)
            shape = Size((stored.shape[0], 2 * stored.shape[1]))
            native = DTensor.from_local(
                local, stored.device_mesh, stored.placements, run_check=False, shape=shape, stride=(shape[1], 1)
            )
        decode_in_memory(reader, matrix, local_tensor(native))
        return native


def fused_reader(state_dict: StateDict) -> tuple[StateDictReader, dict[str, str]] | None:
    """The fused projections of a state dict with their scales, and its names of them by full key; None without any.

    Raises CheckpointError for a scale without its weight and for sharded projections.
    """
    weights = [key for key in state_dict if key.endswith(FUSED_WEIGHT)]
    scales = [key for key in state_dict if key.endswith(f"{FUSED_WEIGHT}{FP8_SCALE}")]
    orphans = [key for key in scales if key.removesuffix(FP8_SCALE) not in state_dict]
    if orphans:
        raise CheckpointError(f"scales of fused projections are missing weights: {_listed(orphans)}")
    sharded = [key for key in (*weights, *scales) if isinstance(state_dict[key], DTensor)]
    if sharded:
        raise CheckpointError(f"sharded fused projections cannot be split: {_listed(sharded)}")
    names = {full_key(key): key for key in (*weights, *scales)}
    return (StateDictReader({full: state_dict[key] for full, key in names.items()}), names) if names else None


def check_decoded(state_dict: Mapping[str, Tensor], where: str = "state dict") -> None:
    """Raise CheckpointError for a tensor that is in no floating dtype once all stored forms were decoded."""
    for key, info in StateDictReader({key: local_tensor(t) for key, t in state_dict.items()}).tensors.items():
        if info.dtype not in FLOATING:
            raise CheckpointError(f"{where}: {key} is stored as {info.dtype}, which no MiMo-V2 text tensor is")


def _check_fused_dtypes(key: str, tensors: Mapping[str, TensorInfo]) -> None:
    weight, scaled = tensors[key].dtype, f"{key}{FP8_SCALE}" in tensors
    if weight == "F8_E4M3" and not scaled:
        raise CheckpointError(f"{key}: is stored as F8_E4M3 without its scale ({key}{FP8_SCALE})")
    if weight != "F8_E4M3" and (scaled or weight not in FLOATING):
        raise CheckpointError(
            f"{key}: is stored as {weight}{' with a scale' if scaled else ''}; a fused projection is plain floating "
            "or F8_E4M3 with a scale"
        )


def _check_fused_shapes(matrices: Sequence[StoredMatrix], tensors: Mapping[str, TensorInfo], tp: int) -> None:
    for stored in matrices[0].stored:
        info = tensors[stored.key]
        if (info.dtype, info.shape) != (stored.dtype, stored.shape):
            raise CheckpointError(
                f"{stored.key}: is {info.dtype} {list(info.shape)}; config.json and checkpoint_tp_size {tp} ask for "
                f"{stored.dtype} {list(stored.shape)}"
            )


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
