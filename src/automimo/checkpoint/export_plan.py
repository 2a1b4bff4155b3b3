"""Who writes what, into which file, and when it is gathered: one plan on all ranks, from shapes and meshes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automimo.checkpoint.reader import SINGLE_FILE
from automimo.checkpoint.units import FolderContents, SpreadUnit, Unit
from automimo.checkpoint.writer import check_keys, plan_shards, shard_names
from automimo.errors import CheckpointError

Holder = tuple[int, ...]
AnyUnit = Unit | SpreadUnit


@dataclass(frozen=True)
class Round:
    """One transfer in a set of ranks: the unit that each member gets (None: nothing), in the order of `holder`."""

    holder: Holder
    units: tuple[SpreadUnit | None, ...]


@dataclass(frozen=True)
class ExportPlan:
    """shares: units by rank, in the order in which it writes them. gathered: how many of them, from the start, come
    through rounds. files: name -> keys, by rank. rounds: by step, those that happen at the same time in different sets.
    """

    shares: list[list[AnyUnit]]
    gathered: list[int]
    files: list[dict[str, list[str]]]
    rounds: list[list[Round]]

    def round_of(self, step: int, member: int) -> Round | None:
        """What rank `member` takes part in at `step`."""
        return next((entry for entry in self.rounds[step] if member in entry.holder), None)


def plan_export(contents: FolderContents, ranks: int, max_shard_bytes: int) -> ExportPlan:
    """Share the units out by bytes and put the transfers that they need in order.

    A unit goes to a rank that already has a part of every input: experts to a rank that has the expert, so that only
    the ranks that share it talk. Raises CheckpointError for doubled keys and for units that no rank can make.
    """
    check_keys(tensor.key for unit in contents.units for tensor in unit.tensors)
    writers = assign_writers(contents.units, ranks)
    queues: dict[Holder, dict[int, list[SpreadUnit]]] = {}
    local: list[list[AnyUnit]] = [[] for _ in range(ranks)]
    for unit, writer in zip(contents.units, writers, strict=True):
        holder = _transfer_holder(unit, writer)
        if holder is None:
            local[writer].append(unit)
        else:
            assert isinstance(unit, SpreadUnit)
            queues.setdefault(holder, {member: [] for member in holder})[writer].append(unit)
    for queue in queues.values():
        for waiting in queue.values():
            waiting.sort(key=lambda unit: -unit.nbytes)  # units of about the same size meet in a round
    through: list[list[AnyUnit]] = [[] for _ in range(ranks)]
    for queue in queues.values():
        for member, waiting in queue.items():
            through[member] += waiting
    gathered = [len(units) for units in through]
    shares = [units + rest for units, rest in zip(through, local, strict=True)]
    files = _plan_files(shares, max_shard_bytes, index=bool(contents.metadata))
    return ExportPlan(shares, gathered, files, _plan_rounds(queues, ranks))


def assign_writers(units: Sequence[AnyUnit], ranks: int) -> list[int]:
    """The rank that writes each unit: the largest first, each to whoever has the least so far among those that can.

    Units with little choice come before those that every rank can write, which then even out the rest.
    """
    everybody = tuple(range(ranks))
    choices = [_candidates(unit) or everybody if isinstance(unit, SpreadUnit) else everybody for unit in units]
    load = [0] * ranks
    writers = [0] * len(units)
    for number in sorted(range(len(units)), key=lambda i: (len(choices[i]), -units[i].nbytes)):
        writer = min(choices[number], key=load.__getitem__)
        writers[number] = writer
        load[writer] += units[number].nbytes
    return writers


def _candidates(unit: SpreadUnit) -> tuple[int, ...]:
    """Ranks that have a part of every input, ascending; empty for a unit without inputs."""
    distinct = {spread.holders for spread in unit.inputs}
    sets = [{member for holder in holders for member in holder} for holders in distinct]
    if not sets:
        return ()
    common = set.intersection(*sets)
    if not common:
        keys = [tensor.key for tensor in unit.tensors]
        raise CheckpointError(f"{keys}: no rank has a part of every tensor that is needed for them")
    return tuple(sorted(common))


def _transfer_holder(unit: AnyUnit, writer: int) -> Holder | None:
    """The ranks that send `writer` what it needs for the unit; None when it has everything."""
    if not isinstance(unit, SpreadUnit):
        return None
    holders = {spread.holder_of(writer) for spread in unit.inputs}
    several = {holder for holder in holders if holder is not None and len(holder) > 1}
    if len(several) > 1 or (several and len(holders) > 1):
        keys = [tensor.key for tensor in unit.tensors]
        raise CheckpointError(f"{keys}: are stored together but lie on different sets of ranks: {sorted(several)}")
    return next(iter(several), None)


def _plan_rounds(queues: dict[Holder, dict[int, list[SpreadUnit]]], ranks: int) -> list[list[Round]]:
    """In every round each member of a set gets its next unit. A set starts when all its members are free, so sets
    without a common rank work at the same time, and all ranks agree on the step of every round."""
    free = [0] * ranks
    steps: list[list[Round]] = []
    for holder, queue in queues.items():
        start = max(free[member] for member in holder)
        count = max(len(waiting) for waiting in queue.values())
        steps += [[] for _ in range(start + count - len(steps))]
        for number in range(count):
            units = [queue[member][number] if number < len(queue[member]) else None for member in holder]
            steps[start + number].append(Round(holder, tuple(units)))
        for member in holder:
            free[member] = start + count
    return steps


def _plan_files(
    shares: Sequence[Sequence[AnyUnit]], max_shard_bytes: int, *, index: bool
) -> list[dict[str, list[str]]]:
    """The files of every rank; they are numbered through, those of rank 0 first."""
    shards = [plan_shards(share, max_shard_bytes) if share else [] for share in shares]
    count = sum(map(len, shards))
    names = iter([SINGLE_FILE] if count == 1 and not index else shard_names(count))
    return [
        {next(names): [tensor.key for unit in shard for tensor in unit.tensors] for shard in parts} for parts in shards
    ]
