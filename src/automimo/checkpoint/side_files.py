"""Carry everything of a checkpoint folder that is neither weights, index nor config: tokenizer, chat template,
generation and preprocessor configs, sub-folders such as `dflash/` and `audio_tokenizer/`, and files nobody here knows.

Files are copied byte for byte. `*.py` files that come with a checkpoint are carried like any other file; nothing here
or elsewhere in the project imports or runs them.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from automimo.checkpoint.folder import check_contained
from automimo.errors import CheckpointError

# Only at the top level: below it these are parts of another model (`dflash/model.safetensors`) and are carried.
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt")
_CONFIG = "config.json"
_CACHES = ("__pycache__",)


@dataclass(frozen=True)
class SideFiles:
    """What `copy_side_files` did with a folder; names are relative to it, in POSIX form, sorted.

    `copied`; `weights`: weight files of the top level, which the caller replaces; `ignored`: hidden names and caches.
    """

    copied: tuple[str, ...]
    weights: tuple[str, ...]
    ignored: tuple[str, ...]


def copy_side_files(source: str | Path, target: str | Path, *, skip: Collection[str] = ()) -> SideFiles:
    """Copy the side files of the checkpoint folder `source` into `target`.

    `skip` names files (relative to `source`, `/` between folders) that the caller writes itself; `config.json` and the
    weights at the top level are always left to the caller. Hidden names (`.git`, `.cache`) and `__pycache__` are
    ignored.

    Raises CheckpointError for a link that leaves the folder (the Hugging Face cache layout excepted), a linked folder,
    anything that is no regular file, a file that `target` has already, and a `target` inside `source`.
    """
    origin, destination = Path(source), Path(target)
    if not origin.is_dir():
        raise CheckpointError(f"{origin}: no such folder")
    if destination.resolve().is_relative_to(origin.resolve()):
        raise CheckpointError(f"{destination}: lies inside the source {origin}; choose an output folder outside it")
    copied: list[str] = []
    weights: list[str] = []
    ignored: list[str] = []
    folders = [origin]
    while folders:
        for path in sorted(folders.pop().iterdir()):
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
                _copy(origin, path, destination / name)
                copied.append(name)
    return SideFiles(tuple(sorted(copied)), tuple(sorted(weights)), tuple(sorted(ignored)))


def _copy(origin: Path, path: Path, target: Path) -> None:
    check_contained(origin, path)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already and would be overwritten by {path}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(path, target)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be copied to {target}: {error.strerror or error}") from error
