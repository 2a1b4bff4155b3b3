"""Whole tensors on one rank each, made of parts that lie on several: where the parts are, and how they travel.

A `Spread` says of one tensor which ranks have which part of it. Everything but the parts themselves follows from
shapes, placements and meshes, so all ranks can plan the same transfers without a word. `Transfers` is one round of
them: every rank of a group gets other tensors at the same time, through an all-to-all instead of a gather for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from automimo.distributed.local import local_tensor
from automimo.distributed.world import rank, world_size
from automimo.errors import DistributedError

# Bytes that a rank sends at once, and about as many arrive: what a transfer needs beside the tensor that it fills.
SLAB_BYTES = 64 * 2**20
# With hundreds of ranks in a group messages would otherwise become so small that only their latency counts.
_LEAST_MESSAGE = 64 * 2**10


@dataclass(frozen=True)
class Spread:
    """One tensor and where it lies.

    shape: of the whole tensor, cut along `dim` into parts of `lengths`. holders: sets of ranks; the members of each
    have the whole tensor together, in the order of the parts (every replica is a set, and so is a rank that has all of
    it). part: what this rank has; None without any. group: the process group of the set this rank is in; None where it
    is in none or alone in it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    lengths: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    part: Tensor | None
    group: ProcessGroup | None

    def holder_of(self, member: int) -> tuple[int, ...] | None:
        """The set of ranks that rank `member` is in."""
        return next((holder for holder in self.holders if member in holder), None)

    def part_bytes(self, place: int) -> int:
        """Bytes of the part of a set's member number `place`."""
        others = prod(size for dim, size in enumerate(self.shape) if dim != self.dim)
        return self.lengths[place] * others * self.dtype.itemsize

    def whole(self) -> Tensor:
        """The tensor on a rank that has all of it itself. Raises DistributedError elsewhere."""
        if self.part is None or tuple(self.part.shape) != self.shape:
            raise DistributedError(
                f"a tensor {list(self.shape)} lies on ranks {self.holders}; rank {rank()} does not have all of it"
            )
        return self.part


def spread_of(tensor: Tensor) -> Spread:
    """Where a tensor lies: a DTensor cut along at most one dimension, or a plain tensor that is equal on all ranks.

    Raises DistributedError for other placements.
    """
    if not isinstance(tensor, DTensor):
        everywhere = tuple((member,) for member in range(world_size()))
        length = (tensor.shape[0] if tensor.dim() else 1,)
        return Spread(tuple(tensor.shape), tensor.dtype, 0, length, everywhere, tensor.detach(), None)
    cuts = _cuts(tensor)
    if len(cuts) > 1:
        raise _unsupported(tensor)
    dim, mesh_dim = next(iter(cuts.items()), (0, None))
    return _spread(tensor, tuple(tensor.shape), dim, mesh_dim, tensor.device_mesh.mesh, local_tensor(tensor).detach())


def spread_items(stack: Tensor) -> list[Spread]:
    """Where every item `stack[i]` lies, for a stack that is cut along dimension 0, one other dimension, or both.

    Items that a cut along dimension 0 has put on other ranks have no part here. Raises DistributedError for other
    placements.
    """
    shape = tuple(stack.shape[1:])
    if not isinstance(stack, DTensor):
        return [spread_of(item) for item in stack.detach().unbind(0)]
    cuts = _cuts(stack)
    mesh, local = stack.device_mesh, local_tensor(stack).detach()
    mesh_dim_of_items = cuts.pop(0, None)
    if len(cuts) > 1:
        raise _unsupported(stack)
    dim, mesh_dim = next(iter(cuts.items()), (1, None))
    if mesh_dim_of_items is None:
        spread = _spread(stack, shape, dim - 1, mesh_dim, mesh.mesh, local)
        return [replace(spread, part=item) for item in local.unbind(0)]
    coordinate = mesh.get_coordinate()
    result: list[Spread] = []
    for owner, count in enumerate(_chunks(stack.shape[0], mesh.size(mesh_dim_of_items))):
        ranks = mesh.mesh.narrow(mesh_dim_of_items, owner, 1)
        mine = coordinate is not None and coordinate[mesh_dim_of_items] == owner
        spread = _spread(stack, shape, dim - 1, mesh_dim, ranks, local if mine else None)
        result += [replace(spread, part=item) for item in (local.unbind(0) if mine else [None] * count)]
    return result


class Transfers:
    """One round in a group: `wanted[i]` are the tensors that its member number i gets, in this call.

    All members make it with the same `wanted` (their parts differ) and then `run` it. The tensors that are filled are
    allocated here, so that a rank that has no memory for them can say so before the others wait for it.
    """

    def __init__(self, wanted: Sequence[Sequence[Spread]], group: ProcessGroup) -> None:
        self._group = group
        self._members = range(dist.get_world_size(group))
        me = dist.get_rank(group)
        self._outgoing = [[_bytes(spread) for spread in spreads] for spreads in wanted]
        self._sent = [sum(part.numel() for part in parts) for parts in self._outgoing]
        mine = wanted[me]
        self._whole = [torch.empty(_cut_first(spread), dtype=spread.dtype) for spread in mine]
        flat = [whole.view(-1).view(torch.uint8) for whole in self._whole]
        self._dims = [spread.dim for spread in mine]
        self._incoming: list[list[Tensor]] = [[] for _ in self._members]
        for spread, data in zip(mine, flat, strict=True):
            parts = data.split([spread.part_bytes(place) for place in self._members])
            for place, part in enumerate(parts):
                self._incoming[place].append(part)
        self._received = [sum(part.numel() for part in parts) for parts in self._incoming]
        self._longest = max(
            sum(spread.part_bytes(place) for spread in spreads) for spreads in wanted for place in self._members
        )

    def run(self) -> list[Tensor]:
        """Carry it out; a collective of the group. Returns this rank's tensors, whole and on the CPU."""
        device = next((part.device for parts in self._outgoing for part in parts), torch.device("cpu"))
        step = max(_LEAST_MESSAGE, SLAB_BYTES // len(self._members))
        for start in range(0, self._longest, step):
            pieces = [piece for parts in self._outgoing for piece in _between(parts, start, start + step)]
            send = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)
            counts = [min(max(size - start, 0), step) for size in self._received]
            receive = torch.empty(sum(counts), dtype=torch.uint8, device=device)
            splits = [min(max(size - start, 0), step) for size in self._sent]
            dist.all_to_all_single(receive, send, counts, splits, group=self._group)
            targets = [piece for parts in self._incoming for piece in _between(parts, start, start + step)]
            for target, piece in zip(targets, receive.split([t.numel() for t in targets]), strict=True):
                target.copy_(piece)
        return [whole.movedim(0, dim) for whole, dim in zip(self._whole, self._dims, strict=True)]


def _cut_first(spread: Spread) -> tuple[int, ...]:
    """The whole shape with the dimension that is cut in front: there every part is one run of bytes."""
    rest = tuple(size for dim, size in enumerate(spread.shape) if dim != spread.dim)
    return (spread.shape[spread.dim], *rest)


def _bytes(spread: Spread) -> Tensor:
    assert spread.part is not None  # members of a holder have a part
    if spread.part.numel() == 0:  # FSDP gives those one dimension
        return spread.part.new_empty(0, dtype=torch.uint8)
    return spread.part.movedim(spread.dim, 0).contiguous().view(-1).view(torch.uint8)


def _between(parts: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Bytes `start` to `stop` of `parts`, taken as one sequence."""
    offset = 0
    for part in parts:
        first, last = max(start - offset, 0), min(stop - offset, part.numel())
        if first < last:
            yield part[first:last]
        offset += part.numel()


def _cuts(tensor: DTensor) -> dict[int, int]:
    """Dimension of the tensor -> dimension of the mesh that it is cut over."""
    cuts: dict[int, int] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(mesh_dim) == 1:
            continue
        if type(placement) is not Shard or placement.dim in cuts:
            raise _unsupported(tensor)
        cuts[placement.dim] = mesh_dim
    return cuts


def _spread(
    tensor: DTensor, shape: tuple[int, ...], dim: int, mesh_dim: int | None, ranks: Tensor, part: Tensor | None
) -> Spread:
    """`ranks`: those of the mesh that have parts, in its form; `mesh_dim`: the one along which the parts lie."""
    if mesh_dim is None:
        alone = tuple((member,) for member in ranks.flatten().tolist())
        return Spread(shape, tensor.dtype, dim, (shape[dim] if shape else 1,), alone, part, None)
    mesh = tensor.device_mesh
    size = mesh.size(mesh_dim)
    holders = tuple(map(tuple, ranks.movedim(mesh_dim, -1).reshape(-1, size).tolist()))
    group = None if part is None else mesh.get_group(mesh_dim)
    if group is not None and tuple(dist.get_process_group_ranks(group)) not in holders:
        raise DistributedError(f"the process group of dimension {mesh_dim} of {mesh} has other ranks than the mesh")
    return Spread(shape, tensor.dtype, dim, _chunks(shape[dim], size), holders, part, group)


def _chunks(length: int, count: int) -> tuple[int, ...]:
    """How DTensor and FSDP cut a dimension: as torch.chunk, with empty parts where it gives fewer."""
    size = -(-length // count)
    return tuple(min(max(length - place * size, 0), size) for place in range(count))


def _unsupported(tensor: DTensor) -> DistributedError:
    return DistributedError(
        f"a tensor {list(tensor.shape)} that lies as {tensor.placements} on {tensor.device_mesh} cannot be gathered: "
        "it may be cut along one dimension, a stack of experts along its first and one more"
    )
