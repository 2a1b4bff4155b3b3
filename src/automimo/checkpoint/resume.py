"""Training checkpoints: `checkpoints/step-N/`, one format for every number of processes, without a pickle.

One folder holds a file `tensors-RANK.safetensors` of each process with its parts of the tensors (keys: see boxes.py),
and `state.json`: the files with size and CRC-32, the tensors with dtype and shape, and everything that is not a tensor.
Any number of processes loads it into tensors of any layout. All processes share one file system.

A folder named `step-N` is complete: it gets that name last and loses it first. Until then it is `.saving-RANDOM`, which
the next save or `tidy_steps` removes: one run at a time saves into a folder, so a kill has left it.
"""

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from automimo.checkpoint.folder import make_folder
from automimo.checkpoint.publish import publish_folder, remove_folder, remove_stale, write_text_atomic
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.checkpoint.saved_step import (
    STATE_FILE,
    STEP_NAME,
    SavedFile,
    check_file_sizes,
    load_tensors,
    read_step,
    step_document,
)
from automimo.distributed.world import exchange_texts, on_main, rank, together
from automimo.errors import CheckpointError

if TYPE_CHECKING:
    from automimo.checkpoint.dcp_storage import ShardWriter

_SAVING = re.compile(r"\.saving-[0-9a-f]{8}")


def save_step(
    root: str | Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, keep: int
) -> Path:
    """Save one training checkpoint as `root/step-N` and delete the oldest ones beyond `keep` (0 keeps all).

    All ranks have to call this. `tensors` maps names to tensors of any dtype, shape and device, which come back bit for
    bit: DTensors, of which every rank saves its shard, and plain tensors, which must be equal on all ranks that have
    them and are saved by one. Ranks may have different names. `state`, of which that of rank 0 counts, must be JSON:
    dicts with string keys, lists, strings, numbers (NaN and infinities included), booleans and None; tuples come back
    as lists. An existing `step-N` is replaced. Deletion comes after publication; the checkpoint just written and the
    newest one are never deleted.

    Returns the folder. When it fails on one rank (unusable arguments, a full disk) it fails on all and everything is as
    it was: CheckpointError there, DistributedError on the others.
    """
    return _prepare(Path(root), step, tensors, state, keep, staging=False).publish()


def begin_step(
    root: str | Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, keep: int
) -> "PendingStep":
    """As `save_step`, but return as soon as the shards are copied to the CPU, while a thread writes them.

    What is saved are the values of this moment, also while training goes on. Needs memory for one copy of what this
    rank saves, which shrinks as the file grows. `root/step-N` appears with `publish` of what is returned, and until
    then no other save into `root` may begin.
    """
    return _prepare(Path(root), step, tensors, state, keep, staging=True)


class PendingStep:
    """A checkpoint that is being written and has to be published, or discarded. Made by `begin_step`."""

    def __init__(self, final: Path, staging: Path, keep: int, state: Mapping[str, Any], writer: "ShardWriter") -> None:
        self.final = final
        self._staging = staging
        self._keep = keep
        self._state = json.loads(json.dumps(state))  # a copy: a data position lives on while we wait
        self._writer = writer

    @property
    def finished(self) -> bool:
        """Whether this rank has written its file or failed; says nothing about the others."""
        return self._writer.job.finished

    def publish(self) -> Path:
        """Wait for the files of all ranks and make them `root/step-N`. All ranks have to call this.

        Returns the folder. Raises what failed on any rank since the save began, on all of them; then nothing is left.
        """
        what = f"saving {self.final.name}"
        try:
            with together(what):
                size, crc32 = self._writer.job.wait()
                text = json.dumps({self._writer.job.path.name: asdict(SavedFile(size, crc32))})
            texts = exchange_texts(text)
            return Path(on_main(what, lambda: self._publish(texts)))
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give it up, without a word to the other ranks, and wait for our own thread; nothing of it will appear."""
        self._writer.job.cancel()
        if rank() == 0:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _publish(self, texts: list[str]) -> str:
        files = {name: SavedFile(**entry) for text in texts for name, entry in json.loads(text).items()}
        step = int(self.final.name.removeprefix("step-"))
        document = step_document(step, self._state, self._writer.tensors, files)
        write_text_atomic(self._staging / STATE_FILE, json.dumps(document, indent=1) + "\n")
        publish_folder(self.final, self._move, replace=True)
        _prune(self.final.parent, self._keep, step)
        return str(self.final)

    def _move(self, temporary: Path) -> None:
        self._staging.replace(temporary)  # an empty folder until now


def _prepare(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep: int,
    *,
    staging: bool,
) -> PendingStep:
    from automimo.checkpoint import dcp_storage  # here, for DCP takes 0.6 s to import

    what = f"saving step-{step}"
    with together(what):
        if step < 0 or keep < 0:
            raise CheckpointError(f"step and keep must be at least 0, got step {step} and keep {keep}")
        _check_json(state, "state")
        dcp_storage.check_saveable(tensors)
    folder = Path(on_main(what, lambda: _make_staging(root)))
    try:
        with together(what):
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder}: made by rank 0, but not there for rank {rank()}: all processes need one shared disk"
                )
        writer = dcp_storage.ShardWriter(folder, staging=staging)
        dcp_storage.save_tensors(what, tensors, writer)
        if staging:
            writer.job.start()  # only now, so that nobody writes when this has failed on another rank
    except BaseException:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return PendingStep(root / f"step-{step}", folder, keep, state, writer)


def _make_staging(root: Path) -> str:
    make_folder(root)
    _remove_left(root)
    folder = root / f".saving-{secrets.token_hex(4)}"
    make_folder(folder)
    return str(folder.absolute())


def tidy_steps(root: str | Path, *, keep: int) -> None:
    """Delete what a kill after the last save left: half saved and half deleted checkpoints, and the oldest ones beyond
    `keep`. For one process, while none saves."""
    folder = Path(root)
    if folder.is_dir():
        _remove_left(folder)
        _prune(folder, keep, None)


def _remove_left(folder: Path) -> None:
    remove_stale(folder)
    for path in folder.iterdir():
        if _SAVING.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path)


def _prune(folder: Path, keep: int, just_written: int | None) -> None:
    if keep:
        for number, path in step_folders(folder)[:-keep]:
            if number != just_written:
                remove_folder(path)


def step_folders(root: str | Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in `root`, oldest first by step number. Other names, links and files are ignored."""
    folder = Path(root)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = STEP_NAME.fullmatch(path.name)
        if match and not path.is_symlink() and (path / STATE_FILE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def newest_step(root: str | Path) -> Path | None:
    """The checkpoint with the highest step in `root`, or None. It is complete: see the module's first lines."""
    folders = step_folders(root)
    return folders[-1][1] if folders else None


def load_step(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load a folder written by `save_step`: all tensors by name, whole and on the CPU, and the state.

    For looking into a checkpoint; a run reads its shards alone, see `load_tensors`. Every file is compared with the
    size and checksum in `state.json` first. Raises CheckpointError that names the file and the way out when anything is
    missing or damaged.
    """
    saved = read_step(path)
    check_file_sizes(saved)  # before memory is taken for sizes that the state only claims
    tensors = {
        name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for name, tensor in saved.tensors.items()
    }
    load_tensors(saved, tensors)
    return tensors, saved.state


def _check_json(value: Any, where: str) -> None:
    """Refuse what `json` would change or cannot write, naming its place: a resume must see what was saved."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: the key {key!r} is {type(key).__name__}; JSON keys are strings")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_json(item, f"{where}[{number}]")
    elif value is not None and type(value) not in (str, bool, int, float):
        raise CheckpointError(f"{where}: {type(value).__name__} cannot be saved in JSON; tensors are saved by name")
