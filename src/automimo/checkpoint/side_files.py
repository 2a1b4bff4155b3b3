"""Carry everything of a checkpoint folder that is neither weights, index nor config: tokenizer, chat template,
generation and preprocessor configs, sub-folders such as `dflash/` and `audio_tokenizer/`, and files nobody here knows.

Files are copied byte for byte. `*.py` files that come with a checkpoint are carried like any other file; nothing here
or elsewhere in the project imports or runs them.
"""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from automimo.checkpoint.folder import check_contained, check_outside
from automimo.errors import CheckpointError

# Only at the top level: below it these are parts of another model (`dflash/model.safetensors`) and are carried.
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt")
_CONFIG = "config.json"
_CACHES = ("__pycache__",)


@dataclass(frozen=True)
class SideFiles:
    """The contents of a checkpoint folder by what becomes of them; names are relative to it, in POSIX form, sorted.

    `carried` are the side files; `weights`: weight files of the top level, which the caller replaces; `ignored`: hidden
    names and caches.
    """

    carried: tuple[str, ...]
    weights: tuple[str, ...]
    ignored: tuple[str, ...]


def list_side_files(source: str | Path, *, skip: Collection[str] = ()) -> SideFiles:
    """Find and check the side files of the checkpoint folder `source`, without copying: to be called before hours of
    writing weights, so that a file that cannot be carried is known at the start.

    `skip` names files (relative to `source`, `/` between folders) that the caller writes itself; `config.json` and the
    weights at the top level are always left to the caller. Hidden names (`.git`, `.cache`) and `__pycache__` are
    ignored.

    Raises CheckpointError for a link that leaves the folder (the Hugging Face cache layout excepted), a linked folder,
    anything that is no regular file, and what may not be read.
    """
    origin = Path(source)
    if not origin.is_dir():
        raise CheckpointError(f"{origin}: no such folder")
    carried: list[str] = []
    weights: list[str] = []
    ignored: list[str] = []
    folders = [origin]
    while folders:
        for path in _entries(folders.pop()):
            name = path.relative_to(origin).as_posix()
            if path.name.startswith(".") or path.name in _CACHES:
                ignored.append(name)
            elif path.is_symlink() and path.is_dir():
                raise CheckpointError(f"{path}: is a link to a folder, which is not followed; put the folder there")
            elif path.is_dir():
                folders.append(path)
            elif path.parent == origin and path.name.endswith(_WEIGHT_SUFFIXES):
                weights.append(name)
            elif name != _CONFIG and name not in skip:
                _check_file(origin, path)
                carried.append(name)
    return SideFiles(tuple(sorted(carried)), tuple(sorted(weights)), tuple(sorted(ignored)))


def copy_side_files(source: str | Path, target: str | Path, *, skip: Collection[str] = ()) -> SideFiles:
    """Copy the side files of the checkpoint folder `source` into `target`; all are checked before the first is copied.

    Takes, ignores and refuses what `list_side_files` does, and also raises CheckpointError for a file that `target`
    has already and for a `target` inside `source`.
    """
    origin, destination = Path(source), Path(target)
    found = list_side_files(origin, skip=skip)
    check_outside(origin, destination)
    for name in found.carried:
        _copy(origin / name, destination / name)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error


def _check_file(origin: Path, path: Path) -> None:
    check_contained(origin, path)
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path}: may not be read by this user; change its permissions or remove it")


def _copy(path: Path, target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already and would be overwritten by {path}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be copied to {target}: {error.strerror or error}") from error
