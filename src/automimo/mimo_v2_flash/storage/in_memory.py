"""Tensors of a state dict, read like those of a checkpoint folder, so that there is one decoder for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from automimo.checkpoint import CheckpointReader, TensorInfo, dtype_name
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.decode import read_matrix
from automimo.mimo_v2_flash.storage.matrices import StoredMatrix
from automimo.mimo_v2_flash.storage.stored_checkpoint import SourceOptions, describe, problem_text

WHERE = "state dict"


class StateDictReader(CheckpointReader):
    """A `CheckpointReader` over tensors in memory. What it reads are views of them, on their device."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        TensorReader.__init__(self, tensor_infos(values), Path(WHERE))
        self.folder = Path(WHERE)
        self.files = ()
        self.metadata = {}
        self._values = values

    def read(self, key: str) -> Tensor:
        """The tensor itself."""
        self.info(key)
        return self._values[key].detach()

    def read_rows(self, key: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows `start` to `stop` (exclusive) of dimension 0: a view, or a copy in the first rows of `out`."""
        rows = self.read(key)[start:stop]
        return rows if out is None else out[: stop - start].copy_(rows)

    def read_into(self, key: str, destination: Tensor) -> None:
        """Copy the tensor into `destination` (same shape; any strides, dtype and device)."""
        value = self.read(key)
        if value.shape != destination.shape:
            raise CheckpointError(f"{key} has shape {list(value.shape)}, its destination {list(destination.shape)}")
        with torch.no_grad():
            destination.copy_(value)


def tensor_infos(values: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """What the header of a file with these tensors would say."""
    return {
        key: TensorInfo(key, dtype_name(value.dtype), tuple(value.shape), Path(WHERE), 0, value.nbytes)
        for key, value in values.items()
    }


def describe_in_memory(reader: StateDictReader, config: MiMoV2FlashConfig) -> dict[str, StoredMatrix]:
    """How the tensors of a state dict (split layout, full keys) are stored, by key.

    Raises CheckpointError, with all keys concerned, where they do not fit each other or the config.
    """
    description = describe(reader, config, SourceOptions())
    if description.problems:
        raise CheckpointError(problem_text(WHERE, description.problems))
    return description.matrices


def decode_in_memory(reader: StateDictReader, matrix: StoredMatrix, out: Tensor) -> None:
    """Decode a matrix into `out` (floating, any strides); on the meta device there is nothing to do.

    Raises CheckpointError, with the key, as `read_matrix` does.
    """
    if not (out.is_meta or reader.read(matrix.weight.key).is_meta):
        read_matrix(reader, matrix, out=out)
