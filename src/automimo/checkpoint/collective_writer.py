"""Write the tensors of a folder by all ranks at once, each into files of its own, without gathering the model.

Every rank runs through the same steps. In a step it sends its parts of one unit to each rank that is to get one, and
gets the unit that it writes next, while a thread writes the one before: besides its shards a rank holds the whole
tensors of two units, and of the second the parts that are under way. Before each step the ranks tell each other whether
anything has failed, so that all stop at the same step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Condition

import torch.distributed as dist
from torch import Tensor

from automimo.checkpoint.export_plan import ExportPlan, Round, plan_export
from automimo.checkpoint.folder import check_free_space
from automimo.checkpoint.parallel_writer import BackgroundWriter, write_units
from automimo.checkpoint.publish import write_text_atomic
from automimo.checkpoint.reader import INDEX_FILE, SINGLE_FILE, index_text
from automimo.checkpoint.units import FolderContents, SpreadUnit, Unit, plan_files
from automimo.checkpoint.writer import Produced, check_no_other_weights
from automimo.distributed.gather import Transfers
from automimo.distributed.world import max_numbers, on_main, rank, together, world_size

# How often ranks that only write look whether another one has failed.
_WATCH_SECONDS = 0.2


def write_contents(folder: Path, contents: FolderContents, max_shard_bytes: int) -> None:
    """Write all tensors and the index into the new, empty `folder`; all ranks have to call this.

    One process writes the files that `plan_files` names. Several each write files of their own, numbered through.
    Raises on all ranks what fails on any; files may be left then.
    """
    if world_size() == 1:
        units = [_alone(unit) for unit in contents.units]
        files = plan_files(units, max_shard_bytes, index=bool(contents.metadata))
        write_units(folder, units, files, workers=1, metadata=contents.metadata)
        return
    what = f"writing the tensors of {folder}"
    with together(what):
        plan = plan_export(contents, world_size(), max_shard_bytes)
        if rank() == 0:
            check_no_other_weights(folder, ())
            check_free_space(folder, sum(unit.nbytes for unit in contents.units))
        handover = _Handover()
        share, gathered = plan.shares[rank()], plan.gathered[rank()]
        units = [_waiting(unit, handover) if i < gathered else _alone(unit) for i, unit in enumerate(share)]
        writer = BackgroundWriter(folder, units, plan.files[rank()])
    failure: Exception | None = None
    try:
        failure = _gather_and_write(plan, writer, handover)
    finally:
        handover.close()
        writer.stop()
    with together(what):
        if failure is not None:
            raise failure
        if writer.error is not None and not isinstance(writer.error, _StoppedError):
            raise writer.error
    on_main(what, lambda: _write_index(folder, contents, plan))


def _alone(unit: Unit | SpreadUnit) -> Unit:
    return unit.alone() if isinstance(unit, SpreadUnit) else unit


def _waiting(unit: Unit | SpreadUnit, handover: "_Handover") -> Unit:
    """A unit that is made of what the calling thread hands over."""
    assert isinstance(unit, SpreadUnit)
    return Unit(unit.tensors, partial(_take_and_make, unit.make, handover), 0)


def _take_and_make(make: Callable[[list[Tensor]], Sequence[Produced]], handover: "_Handover") -> Sequence[Produced]:
    return make(handover.take())


def _gather_and_write(plan: ExportPlan, writer: BackgroundWriter, handover: "_Handover") -> Exception | None:
    """All steps, and the wait for the writers of all ranks; ends early on all ranks when one has failed. Returns what
    failed here outside of the writer."""
    me = rank()
    writer.start()
    for step in range(len(plan.rounds)):
        failure: Exception | None = None
        transfers = None
        entry = plan.round_of(step, me)
        try:
            transfers = None if entry is None else _transfers(entry)
        except Exception as error:  # noqa: BLE001 - the others have to hear of it first
            failure = error
        if _any_failed(failure is not None or writer.error is not None):
            return failure
        if entry is not None and transfers is not None:
            values = transfers.run()
            del transfers  # frees the parts that were sent
            if entry.units[entry.holder.index(me)] is not None:
                handover.give(values, writer)
            del values
    while True:
        ended = writer.wait(_WATCH_SECONDS)
        failed, busy = max_numbers([float(writer.error is not None), float(not ended)])
        if failed or not busy:
            return None


def _any_failed(here: bool) -> bool:
    return bool(max_numbers([float(here)])[0])


def _transfers(entry: Round) -> Transfers:
    """Our side of a round. All inputs of its units lie on the same set of ranks, so any of them knows the group."""
    wanted = [() if unit is None else unit.inputs for unit in entry.units]
    group = next(spread.group for spreads in wanted for spread in spreads)
    assert group is not None and dist.get_process_group_ranks(group) == list(entry.holder)
    return Transfers(wanted, group)


def _write_index(folder: Path, contents: FolderContents, plan: ExportPlan) -> str:
    weight_map = {key: name for files in plan.files for name, keys in files.items() for key in keys}
    if contents.metadata or set(weight_map.values()) != {SINGLE_FILE}:
        total = sum(unit.nbytes for unit in contents.units)
        write_text_atomic(folder / INDEX_FILE, index_text(weight_map, {**contents.metadata, "total_size": total}))
    return ""


class _StoppedError(Exception):
    """The writer was waiting for a unit that will not come."""


class _Handover:
    """Hands whole tensors from the thread that gathers to the one that writes, which takes the next ones when it has
    written the last: so never more than two units are held."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._wanted = False
        self._closed = False
        self._values: list[Tensor] | None = None

    def take(self) -> list[Tensor]:
        """Wait for the next values. Raises _StoppedError when there will be none."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._values is not None or self._closed)
            values, self._values, self._wanted = self._values, None, False
            if values is None:
                raise _StoppedError
            return values

    def give(self, values: list[Tensor], writer: BackgroundWriter) -> None:
        """Wait until the writer wants values and leave these; drop them when it has ended."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._wanted, timeout=0.05):
                if writer.ended:
                    return
            self._values, self._wanted = values, False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
