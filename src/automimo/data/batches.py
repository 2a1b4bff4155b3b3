"""Rows of the packing plan -> batches, and the stream of rows that a run can leave and take up again.

Letters: T tokens of a batch, D documents in it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from automimo.data.packing import Overflow, PackingPlan, Piece, plan_epoch, shuffled
from automimo.data.render import Example
from automimo.errors import DataError

NO_TARGET = -100
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """A stream of packed documents.

    input_ids: int64 [T].
    targets: int64 [T], the token that follows in the same example, -100 where that one is not supervised.
    position_ids: int64 [T], 0 at the start of each document.
    cu_seqlens: int32 [D + 1], document boundaries, 0 first.
    valid_targets: targets that are not -100. tokens: T without padding. origins: where each of the D documents is from.
    padding_mask: bool [T], True at places that are no tokens: they are routed to no expert and counted nowhere; None
        where there are none.
    cp_size, cp_rank: of a batch of which several ranks have a share, T and the counts are those of this rank's share,
        and cu_seqlens are those of the whole stream.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    valid_targets: int
    tokens: int
    origins: tuple[str, ...]
    padding_mask: torch.Tensor | None = None
    cp_size: int = 1
    cp_rank: int = 0

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            padding_mask=None if self.padding_mask is None else self.padding_mask.to(device, non_blocking=True),
        )


def shifted_targets(example: Example, start: int, stop: int) -> np.ndarray:
    """Targets of places `start` to `stop`, int64: at i the token i + 1 where that one is supervised, else -100.

    The last place of the example has none.
    """
    targets = np.full(stop - start, NO_TARGET, np.int64)
    following = slice(start + 1, stop + 1)
    tokens = np.where(example.target_mask[following], example.input_ids[following], NO_TARGET)
    targets[: len(tokens)] = tokens
    return targets


def collate(examples: Sequence[Example], rows: Sequence[Sequence[Piece]]) -> Batch:
    """One batch from rows of pieces; `Piece.example` counts in `examples`. Nothing is padded.

    The shift happens inside each example before anything is cut or joined. So no target crosses documents, and a piece
    that was cut off still ends with the target that the next piece begins with: each supervised token is a target
    exactly once (except the first of an example, which nothing predicts).
    Raises ValueError without rows.
    """
    pieces = [piece for row in rows for piece in row]
    if not pieces:
        raise ValueError("a batch needs at least one row with a document")
    ids, targets, positions, origins = [], [], [], []
    for index, start, stop in pieces:
        example = examples[index]
        ids.append(example.input_ids[start:stop])
        targets.append(shifted_targets(example, start, stop))
        positions.append(np.arange(stop - start))
        cut = stop - start < len(example.input_ids)
        origins.append(f"{example.origin} tokens {start}:{stop}" if cut else example.origin)
    lengths = [stop - start for _, start, stop in pieces]
    targets_T = np.concatenate(targets)
    return Batch(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        targets=torch.from_numpy(targets_T),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        valid_targets=int((targets_T != NO_TARGET).sum()),
        tokens=sum(lengths),
        origins=tuple(origins),
    )


def idle_batch() -> Batch:
    """A batch without a token: one place of padding. A rank that has no rows takes part in the pass of the others with
    it and adds nothing to any sum."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return Batch(
        input_ids=nothing,
        targets=torch.full_like(nothing, NO_TARGET),
        position_ids=nothing,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        valid_targets=0,
        tokens=0,
        origins=(),
        padding_mask=torch.ones(1, dtype=torch.bool),
    )


def pad_documents(batch: Batch, multiple: int) -> Batch:
    """The batch with padding behind every document whose length is not a multiple of `multiple`.

    Padding comes last in its document, so causal attention shows it to no token; it has no target, and counts of
    tokens stay what they are. The rows of a plan are not planned with it: which documents share a row, and so the
    order of the data, is the same for every number of ranks.
    """
    lengths = batch.cu_seqlens.diff().long()
    padded = (lengths + multiple - 1) // multiple * multiple
    if torch.equal(lengths, padded):
        return batch
    ends = padded.cumsum(0)
    shifts = (ends - padded) - batch.cu_seqlens[:-1]  # of the tokens of each document, by the padding before it
    places = torch.arange(len(batch.input_ids)) + shifts.repeat_interleave(lengths)
    total = int(ends[-1])
    starts = (ends - padded).repeat_interleave(padded, output_size=total)

    def spread(values: torch.Tensor, fill: int) -> torch.Tensor:
        return values.new_full((total,), fill).index_copy_(0, places, values)

    old = torch.zeros(len(places), dtype=torch.bool) if batch.padding_mask is None else batch.padding_mask
    return replace(
        batch,
        input_ids=spread(batch.input_ids, 0),
        targets=spread(batch.targets, NO_TARGET),
        position_ids=torch.arange(total) - starts,
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        padding_mask=spread(old, True),
    )


def share_rows(rows: Sequence[T], micro_batch: int, rank: int, ranks: int) -> list[list[T]]:
    """The micro-batches of one of `ranks` ranks, from the rows of a step: as many as every other rank has, though the
    last ones may be short or empty.

    Rank r takes rows r, r + ranks, ...: whatever their number, no rank has more than one row more than another.
    """
    mine = list(rows[rank::ranks])
    count = -(-len(rows[::ranks]) // micro_batch)  # rank 0 has the most
    return [mine[i * micro_batch : (i + 1) * micro_batch] for i in range(count)]


class DataStream:
    """All rows of all epochs, in one fixed order, from a position that can be saved.

    The order follows from the examples and the arguments alone. A source of n examples and weight w deals round(w * n)
    (at least one) of them per epoch from a pack that is shuffled anew each time it is used up, so every example is met
    equally often in the long run whatever w is.

    epochs: end after so many; None = never. `next_rows` gives the rest, and then nothing.
    Raises DataError when there is nothing to learn, or for an example that is too long under `overflow="error"`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        sequence_length: int,
        packing: bool = True,
        overflow: Overflow = "error",
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.examples = [example for example in examples if example.has_target]
        if not self.examples:
            raise DataError(f"nothing to learn from: none of the {len(examples)} examples has a target")
        self.sequence_length = sequence_length
        self.packing = packing
        self.overflow: Overflow = overflow
        self.seed = seed
        self.epochs = epochs
        self._lengths = np.array([len(example.input_ids) for example in self.examples], np.int64)
        self._sources = [np.flatnonzero(self._source_numbers() == s) for s in np.unique(self._source_numbers())]
        self._plans: dict[int, PackingPlan] = {}
        self._row_counts: dict[int, int] = {}
        self._epoch = self._row = 0
        if not self.plan(0).rows:
            raise DataError(
                f"nothing to learn from: all {len(self.examples)} examples are longer than data.sequence_length "
                f"{sequence_length} and data.overflow is drop"
            )

    @property
    def position(self) -> dict[str, int]:
        """Where the next row is: `{"epoch": ..., "row": ...}`, plain JSON."""
        return {"epoch": self._epoch, "row": self._row}

    @position.setter
    def position(self, position: Mapping[str, int]) -> None:
        epoch, row = position["epoch"], position["row"]
        if epoch < 0 or not 0 <= row <= self.rows_in_epoch(epoch):
            raise DataError(
                f"data position epoch {epoch} row {row} does not exist (rows of that epoch: "
                f"{self.rows_in_epoch(max(epoch, 0))}). The data or its settings are not those of the checkpoint"
            )
        self._epoch, self._row = epoch, row
        self._turn_page()

    @property
    def exhausted(self) -> bool:
        """Whether all `epochs` are over."""
        return self.epochs is not None and self._epoch >= self.epochs

    def next_rows(self, n: int) -> list[list[Piece]]:
        """The next `n` rows, over the ends of epochs; fewer when the last epoch ends, none after it."""
        rows: list[list[Piece]] = []
        while len(rows) < n and not self.exhausted:
            new = self.plan(self._epoch).rows[self._row : self._row + n - len(rows)]
            rows += new
            self._row += len(new)
            self._turn_page()
        return rows

    def batch(self, rows: Sequence[Sequence[Piece]]) -> Batch:
        """Rows of this stream as one batch; without rows an idle one."""
        return collate(self.examples, rows) if rows else idle_batch()

    def batches(self, rows_per_batch: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """All batches from here on that fall to one of `ranks` ranks; the last one may have fewer rows or be idle.
        Every rank gets equally many. Endless without `epochs`.
        """
        while rows := self.next_rows(rows_per_batch * ranks):
            for mine in share_rows(rows, rows_per_batch, rank, ranks):
                yield self.batch(mine)

    def rows_in_epoch(self, epoch: int) -> int:
        """Rows of one epoch."""
        epoch = 0 if self._epochs_are_alike else epoch
        if epoch not in self._row_counts:
            self._row_counts[epoch] = len(self.plan(epoch).rows)
        return self._row_counts[epoch]

    def total_rows(self) -> int | None:
        """Rows of all epochs; None when the stream never ends."""
        return None if self.epochs is None else sum(self.rows_in_epoch(epoch) for epoch in range(self.epochs))

    def plan(self, epoch: int) -> PackingPlan:
        """Packing plan of one epoch; its pieces count in `self.examples`."""
        if epoch not in self._plans:
            dealt = np.concatenate([self._deal(members, epoch) for members in self._sources])
            plan = plan_epoch(
                self._lengths[dealt],
                sequence_length=self.sequence_length,
                overflow=self.overflow,
                packing=self.packing,
                seed=self.seed,
                epoch=epoch,
                has_target=lambda piece: self._has_target(piece._replace(example=int(dealt[piece.example]))),
                name=lambda i: self.examples[dealt[i]].origin,
            )
            for row in plan.rows:
                row[:] = [Piece(int(dealt[i]), start, stop) for i, start, stop in row]
            # A plan is big: keep that of the current epoch and the one asked for.
            self._plans = {e: p for e, p in self._plans.items() if e == self._epoch} | {epoch: plan}
        return self._plans[epoch]

    def fingerprint(self) -> str:
        """Hash of the examples and of all settings that the order of rows follows from (hex, SHA-256)."""
        settings = [self.sequence_length, self.packing, self.overflow, self.seed]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for example in self.examples:
            digest.update(json.dumps([len(example.input_ids), example.source, example.weight]).encode())
            digest.update(example.input_ids.astype("<i4").tobytes())
            digest.update(example.target_mask.tobytes())
        return digest.hexdigest()

    def _source_numbers(self) -> np.ndarray:
        return np.array([example.source for example in self.examples], np.int64)

    def _dealt_per_epoch(self, members: np.ndarray) -> int:
        return max(1, round(self.examples[members[0]].weight * len(members)))

    def _deal(self, members: np.ndarray, epoch: int) -> np.ndarray:
        """Examples that one source gives to an epoch: its part of the endless row of shuffled packs."""
        n, count = len(members), self._dealt_per_epoch(members)
        first = epoch * count
        passes = range(first // n, (first + count - 1) // n + 1)
        source = self.examples[members[0]].source
        packs = np.concatenate([members[shuffled(n, self.seed, 3, source, turn)] for turn in passes])
        return packs[first - passes[0] * n :][:count]

    def _has_target(self, piece: Piece) -> bool:
        """Whether a place of the piece has a target: one of the tokens after its places is supervised."""
        return bool(self.examples[piece.example].target_mask[piece.start + 1 : piece.stop + 1].any())

    @property
    def _epochs_are_alike(self) -> bool:
        """Whether every epoch shows the same examples. First-fit-decreasing then always needs as many rows."""
        return all(self._dealt_per_epoch(members) % len(members) == 0 for members in self._sources)

    def _turn_page(self) -> None:
        if self._row >= self.rows_in_epoch(self._epoch):
            self._epoch, self._row = self._epoch + 1, 0
