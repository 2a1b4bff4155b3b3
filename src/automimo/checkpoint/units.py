"""What a folder is made of before anything is written: units of tensors that are produced together, and their files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from automimo.checkpoint.reader import SINGLE_FILE
from automimo.checkpoint.writer import PlannedTensor, Produced, plan_shards, shard_names
from automimo.distributed.gather import Spread


@dataclass(frozen=True)
class Unit:
    """Tensors that are produced together (a weight and its scales; q, k and v of one attention).

    `produce` is called once, in a worker thread. It returns one result for each of `tensors`, in their order: a tensor
    (any device, any strides) or its bytes in chunks, of the planned dtype and shape. `source_bytes` is what it reads.
    """

    tensors: tuple[PlannedTensor, ...]
    produce: Callable[[], Sequence[Produced]]
    source_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class SpreadUnit:
    """Tensors that are made of tensors of the model, whose parts may lie on several ranks.

    `make` gets `inputs`, each whole and in its shape, and returns one result for each of `tensors`, as `Unit.produce`.
    It may be called in a worker thread, and only on the rank that writes the unit.
    """

    tensors: tuple[PlannedTensor, ...]
    inputs: tuple[Spread, ...]
    make: Callable[[list[Tensor]], Sequence[Produced]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def alone(self) -> Unit:
        """As a unit of a rank that has all inputs itself."""
        return Unit(self.tensors, lambda: self.make([spread.whole() for spread in self.inputs]), 0)


@dataclass(frozen=True)
class FolderContents:
    """The tensors of a folder to write, and what its index says besides."""

    units: Sequence[Unit | SpreadUnit]
    metadata: Mapping[str, Any]


def plan_files(units: Sequence[Unit], max_shard_bytes: int, *, index: bool) -> dict[str, list[str]]:
    """Which file gets which keys: files are filled in the order of the units, and a unit is never cut.

    One `model.safetensors` when everything fits into `max_shard_bytes` and no `index` is asked for; otherwise
    `model-00001-of-000NN.safetensors`. A unit larger than that gets a file of its own.
    """
    shards = plan_shards(units, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 and not index else shard_names(len(shards))
    return {
        name: [tensor.key for unit in shard for tensor in unit.tensors]
        for name, shard in zip(names, shards, strict=True)
    }
