"""Training checkpoints: `checkpoints/step-N/`, published by rename, deleted by rename, without a pickle.

One folder holds `GROUP.safetensors` for each named group of tensors (model, optimizer, rng, ...) and `state.json`,
which lists the groups with size and CRC-32 and carries everything that is not a tensor. A folder named `step-N` is
complete: it gets that name last and loses it first.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from automimo.checkpoint.folder import check_free_space, make_folder, plain_file
from automimo.checkpoint.publish import publish_folder, remove_folder, remove_stale, write_text_atomic
from automimo.checkpoint.safetensors_file import parse_json, read_header
from automimo.checkpoint.tensor_reader import CHUNK_BYTES, TensorReader
from automimo.checkpoint.writer import Chunk, tensor_entry, write_safetensors
from automimo.errors import CheckpointError

STATE_FILE = "state.json"
FORMAT = 1
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")

TensorGroups = Mapping[str, Mapping[str, torch.Tensor]]


def save_step(root: str | Path, step: int, tensors: TensorGroups, state: Mapping[str, Any], *, keep: int) -> Path:
    """Save one training checkpoint as `root/step-N` and delete the oldest ones beyond `keep` (0 keeps all).

    `tensors` maps group names (lower-case identifiers; each becomes one file) to named tensors of any dtype, shape and
    device, which come back bit for bit. `state` must be JSON: dicts with string keys, lists, strings, numbers (NaN and
    infinities included), booleans and None; tuples come back as lists. An existing `step-N` is replaced. Deletion
    comes after publication; the checkpoint just written and the newest one are never deleted.

    Returns the folder. Raises CheckpointError, leaving everything as it was, for unusable arguments or a full disk.
    """
    if step < 0 or keep < 0:
        raise CheckpointError(f"step and keep must be at least 0, got step {step} and keep {keep}")
    bad = [name for name in tensors if not _GROUP.fullmatch(name)]
    if bad:
        raise CheckpointError(f"{bad[0]!r} cannot name a group of tensors; use lower-case letters, digits and _")
    _check_json(state, "state")
    folder = Path(root)
    make_folder(folder)
    remove_stale(folder)
    check_free_space(folder, sum(tensor.nbytes for group in tensors.values() for tensor in group.values()))
    final = folder / f"step-{step}"
    publish_folder(final, lambda temporary: _write(temporary, step, tensors, state), replace=True)
    _prune(folder, keep, step)
    return final


def tidy_steps(root: str | Path, *, keep: int) -> None:
    """Delete what a kill after the last save left: half deleted checkpoints, and the oldest ones beyond `keep`."""
    folder = Path(root)
    if folder.is_dir():
        remove_stale(folder)
        _prune(folder, keep, None)


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
        match = _STEP.fullmatch(path.name)
        if match and not path.is_symlink() and (path / STATE_FILE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def newest_step(root: str | Path) -> Path | None:
    """The checkpoint with the highest step in `root`, or None. It is complete: see the module's first lines."""
    folders = step_folders(root)
    return folders[-1][1] if folders else None


def load_step(path: str | Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Load a folder written by `save_step`: the groups of tensors (on the CPU) and the state.

    Every file is compared with the size and checksum in `state.json` first. Raises CheckpointError that names the file
    and the way out when anything is missing or damaged.
    """
    folder = Path(path)
    try:
        listed, state = _read_state(folder)
        return {name: _read_group(folder, name, entry) for name, entry in listed.items()}, state
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nThe training checkpoint {folder} cannot be resumed. Delete that folder to continue from the one "
            "before it, or restore it from a copy."
        ) from error


def _write(folder: Path, step: int, tensors: TensorGroups, state: Mapping[str, Any]) -> None:
    listed = {}
    for name, group in tensors.items():
        checksum = _Checksum()
        path = folder / f"{name}.safetensors"
        write_safetensors(path, [tensor_entry(key, tensor) for key, tensor in group.items()], checksum.update)
        listed[name] = {"tensors": len(group), "bytes": path.stat().st_size, "crc32": checksum.value}
    document = {"format": FORMAT, "step": step, "groups": listed, "state": state}
    write_text_atomic(folder / STATE_FILE, json.dumps(document, indent=1) + "\n")


def _read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = plain_file(folder, STATE_FILE)
    document = parse_json(path.read_bytes(), str(path), non_finite=True)  # a loss may be NaN
    if not isinstance(document, dict) or document.keys() != {"format", "step", "groups", "state"}:
        raise CheckpointError(f"{path}: not a training state (expected format, step, groups and state)")
    if document["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {document['format']!r}, this version reads {FORMAT}")
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != document["step"]:
        raise CheckpointError(f"{path}: holds step {document['step']}, but its folder is {folder.name}")
    groups, state = document["groups"], document["state"]
    fields = {"tensors", "bytes", "crc32"}
    if not isinstance(state, dict) or not isinstance(groups, dict):
        raise CheckpointError(f"{path}: groups and state must be JSON objects")
    for name, entry in groups.items():
        if not _GROUP.fullmatch(name) or not isinstance(entry, dict) or entry.keys() != fields:
            raise CheckpointError(f"{path}: group {name!r} is not described by {', '.join(sorted(fields))}")
    return groups, state


def _read_group(folder: Path, name: str, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = plain_file(folder, f"{name}.safetensors")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: has {size} bytes, {STATE_FILE} says {entry['bytes']}")
    checksum = _Checksum()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum.update(chunk)
    if checksum.value != entry["crc32"]:
        raise CheckpointError(f"{path}: checksum {checksum.value:#010x} differs from the one in {STATE_FILE}")
    infos, _ = read_header(path)
    if len(infos) != entry["tensors"]:
        raise CheckpointError(f"{path}: holds {len(infos)} tensors, {STATE_FILE} says {entry['tensors']}")
    with TensorReader(infos, path) as reader:
        return {key: reader.read(key) for key in infos}


class _Checksum:
    def __init__(self) -> None:
        self.value = 0

    def update(self, chunk: Chunk) -> None:
        self.value = zlib.crc32(chunk, self.value)


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
        raise CheckpointError(f"{where}: {type(value).__name__} cannot be saved in JSON; tensors belong into a group")
