"""Matrices of a checkpoint into the shards of a parallelized model: what is on this rank, and how columns get there.

Where dimension 0 of a parameter is sharded, a rank keeps rows of the checkpoint's matrix, or whole experts: bytes that
lie together in the file. A stack of experts that is sharded along dimension 1 keeps *columns* of each of its matrices,
because a stack has them transposed: 2048 reads of a few hundred bytes for one of V2-Flash's 36,096 matrices. So the
ranks that share experts each read an equal range of rows, as many bytes as they keep, and exchange columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.distributed.local import local_tensor
from automimo.errors import AutoMiMoError, CheckpointError, DistributedError
from automimo.mimo_v2_flash.storage import StoredCheckpoint
from automimo.quantization.chunks import store

EXCHANGE_BYTES = 16 * 2**20
"""What a rank reads, sends and receives at a time: three buffers of this size, whatever the size of the matrices."""
NOTE_BYTES = 1024
"""Length of a rank's word on its failure (UTF-8, cut)."""


@dataclass(frozen=True)
class Cut:
    """How dimension 1 of a stack is shared: by the ranks of `group`, each with its range (first, stop) of `columns`.

    The exchange happens on `device`: where the group's backend wants it, not where the parameter lies (offloading).
    """

    group: ProcessGroup
    columns: tuple[tuple[int, int], ...]
    device: torch.device


@dataclass(frozen=True)
class LocalPart:
    """This rank's part of a parameter: `memory` has its rows (or experts) `first` to `stop` of dimension 0, and all of
    dimension 1 or, with a `cut`, this rank's columns."""

    memory: Tensor
    first: int
    stop: int
    cut: Cut | None = None


def local_part(name: str, tensor: Tensor) -> LocalPart:
    """What this rank has of the parameter or buffer `name`; a plain tensor is all there. No communication.

    Raises CheckpointError for a DTensor of another layout than `parallelize` makes, and for one without memory.
    """
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: materialise the model first, with to_empty")
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor, 0, tensor.shape[0] if tensor.dim() else 1)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"{name}: this rank is not in its mesh {mesh}")
    first, stop = 0, tensor.shape[0]
    cut: Cut | None = None
    for dim, placement in enumerate(tensor.placements):
        ranks = mesh.size(dim)
        if ranks == 1 or placement.is_replicate():
            continue
        if type(placement) is Shard and placement.dim == 0:
            begin, end = _share(stop - first, ranks, coordinate[dim])
            first, stop = first + begin, first + end
        elif type(placement) is Shard and placement.dim == 1 and tensor.dim() == 3 and cut is None:
            columns = tuple(_share(tensor.shape[1], ranks, rank) for rank in range(ranks))
            cut = Cut(mesh.get_group(dim), columns, _device(mesh.device_type))
        else:
            raise CheckpointError(
                f"{name} is sharded as {tensor.placements}; weights are loaded into shards of dimension 0, and of "
                "dimension 1 for stacks of experts"
            )
    return LocalPart(local_tensor(tensor), first, stop, cut)


def _share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The range of one rank as DTensor shares out a dimension: equal chunks, the last ones shorter or empty."""
    chunk = -(-size // ranks)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


def _device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


class Exchanges:
    """The groups of ranks that exchange columns while a model is loaded; a context manager around the loading.

    A rank that fails says so to the ranks of its groups, which would wait for it forever, and raises its own error;
    they raise DistributedError with its words. Ranks of other groups learn it when all are to agree at the end.
    """

    def __init__(self, parts: Sequence[LocalPart]) -> None:
        cuts = {part.cut.group.group_name: part.cut for part in parts if part.cut is not None}
        self._exchanges = {name: ColumnExchange(cut.group, cut.device) for name, cut in cuts.items()}

    def of(self, cut: Cut) -> ColumnExchange:
        """The exchange of the group of `cut`."""
        return self._exchanges[cut.group.group_name]

    def __enter__(self) -> Exchanges:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None:
            try:
                for exchange in self._exchanges.values():
                    exchange.finish()
            except Exception as failure:
                self._give_up(failure)
                raise
        elif isinstance(error, Exception):
            self._give_up(error)

    def _give_up(self, failure: Exception) -> None:
        for exchange in self._exchanges.values():
            exchange.give_up(failure)


class ColumnExchange:
    """Fills columns of matrices with the ranks of one group, all of which make the same calls in the same order."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(3)]
        # Whether the others expect a word from us: neither after the last one, nor inside of a collective that failed.
        self._open = True

    def fill(
        self,
        source: StoredCheckpoint,
        targets: Sequence[tuple[str, Tensor]],
        columns: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        """Read matrices and fill `targets`: (key, [rows, our columns], any strides), all of one shape, of which
        `columns` are the ranges of all ranks; `dtype` is what values travel in, see `exchange_dtype`.

        The rows of all matrices, one after the other, are worked off in runs of which every rank reads an equal,
        contiguous part. Raises CheckpointError as reading does, DistributedError when another rank has failed.
        """
        rows = targets[0][1].shape[0]
        row_bytes = columns[-1][1] * dtype.itemsize
        step = self._ranks * max(1, EXCHANGE_BYTES // max(1, row_bytes))
        for start in range(0, rows * len(targets), step):
            run = min(step, rows * len(targets) - start)
            cuts = [start + run * rank // self._ranks for rank in range(self._ranks + 1)]
            self._read_and_exchange(source, targets, cuts, columns, dtype)

    def _read_and_exchange(
        self,
        source: StoredCheckpoint,
        targets: Sequence[tuple[str, Tensor]],
        cuts: Sequence[int],
        columns: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        """One run; rank r reads its rows `cuts[r]` to `cuts[r + 1]`."""
        rows, width = targets[0][1].shape[0], columns[-1][1]
        counts = [last - first for first, last in pairwise(cuts)]
        begin, end = columns[self._rank]
        ours = self._buffer(0, counts[self._rank] * width, dtype).view(-1, width)
        for number, first, last, at in _matrices(cuts[self._rank], cuts[self._rank + 1], rows):
            source.read_into(targets[number][0], ours[at : at + last - first], start=first, stop=last)
        sent_sizes = [counts[self._rank] * (last - first) for first, last in columns]
        sent = self._buffer(1, sum(sent_sizes), dtype)
        for block, (first, last) in zip(sent.split(sent_sizes), columns, strict=True):
            block.view(counts[self._rank], last - first).copy_(ours[:, first:last])
        received_sizes = [count * (end - begin) for count in counts]
        received = self._buffer(2, sum(received_sizes), dtype)
        self._exchange_notes("")
        self._all_to_all(sent, sent_sizes, received, received_sizes)
        for rank, block in enumerate(received.split(received_sizes)):
            theirs = block.view(counts[rank], end - begin)
            for number, first, last, at in _matrices(cuts[rank], cuts[rank + 1], rows):
                store(targets[number][1][first:last], theirs[at : at + last - first])

    def _all_to_all(self, sent: Tensor, sent_sizes: list[int], received: Tensor, received_sizes: list[int]) -> None:
        size = sent.element_size()
        self._open = False
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * number for number in received_sizes],
            [size * number for number in sent_sizes],
            group=self._group,
        )
        self._open = True

    def _buffer(self, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """The first `elements` of one of the three buffers; the same memory in every run, touched for the first time
        only once."""
        needed = elements * dtype.itemsize
        if self._buffers[number].numel() < needed:
            self._buffers[number] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._buffers[number][:needed].view(dtype)

    def finish(self) -> None:
        """The last word: nothing failed here. Raises DistributedError when something did elsewhere."""
        self._exchange_notes("", last=True)

    def give_up(self, failure: Exception) -> None:
        """Tell the others of our failure, once, unless it was one of talking to them."""
        if self._open:
            text = str(failure) if isinstance(failure, AutoMiMoError) else f"{type(failure).__name__}: {failure}"
            # What counts is the failure itself; the others' own was on its way to us if this raises.
            with suppress(RuntimeError):
                self._exchange_notes(text, last=True)

    def _exchange_notes(self, note: str, last: bool = False) -> None:
        """Tell all ranks how it went here, nothing where nothing failed: 1 KiB each, before each run of MiBs. Raises
        DistributedError with the words of the first rank that failed."""
        content = bytearray(note.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0"))
        ours = torch.frombuffer(content, dtype=torch.uint8).to(self._device)
        notes = torch.zeros(self._ranks * NOTE_BYTES, dtype=torch.uint8, device=self._device)
        self._open = False
        dist.all_gather(list(notes.split(NOTE_BYTES)), ours, group=self._group)
        self._open = not last
        if not bool(notes.any()):
            return
        self._open = False
        for rank, text in enumerate(notes.cpu().view(self._ranks, NOTE_BYTES)):
            if bool(text.any()):
                words = bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
                failed = dist.get_global_rank(self._group, rank)
                raise DistributedError(f"reading the weights: rank {failed} failed: {words}")


def _matrices(start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows `start` to `stop` of equal matrices of `rows` rows on top of each other: (number of the matrix, its first
    row, its last row, exclusive, place among the rows from `start` on)."""
    row = start
    while row < stop:
        number, first = divmod(row, rows)
        last = min(rows, first + stop - row)
        yield number, first, last, row - start
        row += last - first


def exchange_dtype(source: StoredCheckpoint, keys: Sequence[str], target: torch.dtype) -> torch.dtype:
    """The narrowest dtype in which matrices can travel to a parameter of dtype `target` and arrive with the bits of a
    direct read: the one they are stored in, bf16 for MXFP4 (exact), but `target` itself for FP8, whose values are
    products of an fp32 scale and have no narrow form."""
    widest: torch.dtype | None = None
    for key in keys:
        matrix = source.matrices[key]
        if matrix.encoding == "fp8" or (matrix.encoding == "mxfp4" and target == torch.float16):
            return target
        stored = torch.bfloat16 if matrix.encoding == "mxfp4" else TORCH_DTYPES[matrix.weight.dtype]
        widest = stored if widest is None else torch.promote_types(widest, stored)
    return target if widest is None or widest.itemsize > target.itemsize else widest
