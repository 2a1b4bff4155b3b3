"""Which files of a checkpoint folder may be opened (the rule about names and links), and whether a disk has room.

A name that comes out of a file (an index) must be a plain file name. A link may point anywhere inside the folder. It
may leave the folder only in the layout of the Hugging Face cache, where `REPO/snapshots/REVISION/NAME` is a link to
`REPO/blobs/HASH` of the same REPO.
"""

import shutil
import stat
from pathlib import Path

from automimo.errors import CheckpointError


def plain_file(folder: Path, name: str) -> Path:
    """The path of the regular file `name` directly in `folder`, after checking that it does not lead out of it.

    Raises CheckpointError for a name with path separators, a missing file, a link that leads out and anything that is
    not a regular file (a pipe would block the reader for ever).
    """
    check_plain_name(folder, name)
    path = folder / name
    check_contained(folder, path)
    return path


def check_plain_name(folder: Path, name: str) -> None:
    """Refuse a name that leads out of `folder` or into a folder below it."""
    if name in ("", ".", "..") or any(char in name for char in "/\\\0") or Path(name).name != name:
        raise CheckpointError(
            f"{folder}: {name!r} is not a plain file name; files outside the folder are never read or written"
        )


def check_contained(root: Path, path: Path) -> None:
    """Refuse `path` (anything below `root`) unless it is a regular file inside `root` or in its Hugging Face cache."""
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        hint = "a link to nothing" if path.is_symlink() else str(error)
        raise CheckpointError(f"{path}: {hint}; the folder is incomplete, download or write it again") from error
    home = root.resolve()
    if not (target.is_relative_to(home) or _is_cache_blob(home, target)):
        raise CheckpointError(f"{path}: links to {target}, outside the folder; copy the file into the folder instead")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: not a regular file")


def _is_cache_blob(folder: Path, target: Path) -> bool:
    """True for REPO/blobs/HASH seen from REPO/snapshots/REVISION or a folder below it."""
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots":
            return target.parent == parent.parent.parent / "blobs"
    return False


def check_outside(source: Path, target: Path) -> None:
    """Refuse an output folder `target` that is `source` or lies inside it: it would be copied into itself."""
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target}: lies inside the source {source}; choose an output folder outside it")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; CheckpointError when the system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be made: {error.strerror or error}") from error


def check_free_space(folder: Path, needed: int) -> None:
    """Raise a CheckpointError with both numbers unless `needed` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {needed / 2**30:.3f} GiB and {free / 2**30:.3f} GiB are free on that disk"
        )
