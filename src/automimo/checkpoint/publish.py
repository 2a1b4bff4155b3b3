"""Folders and files that appear complete or not at all.

A folder is written under a hidden sibling name, synchronised to disk and renamed into place; a rename within one file
system is atomic. Sibling names have the form `.NAME.KIND-HOST-PID-RANDOM` with KIND

- `tmp`: being written. Left behind by a killed process; never read; removed by the next publisher of that name.
- `old`: the former content while a replacement is renamed into place. If a kill hits between the two renames, NAME is
  absent and `old` is complete: the next publisher of NAME puts it back, and `interrupted_replacement` finds it.
- `del`: a folder on its way out. Renamed first, so that a half deleted folder never carries a name that looks complete.

Text files use the same `tmp` names. A sibling is stale when it comes from this host, its process is gone and nobody
holds the lock on it. Siblings from other hosts that share the disk are left alone: whether their writer lives cannot be
known here.
"""

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from automimo.checkpoint.folder import make_folder
from automimo.distributed.world import on_main, rank, together
from automimo.errors import CheckpointError

_SIBLING = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<host>[A-Za-z0-9_]+)-(?P<pid>\d+)-[0-9a-f]{8}")


def publish_folder(final: str | Path, write: Callable[[Path], None], *, replace: bool = False) -> None:
    """Make the folder `final` from what `write(temporary_folder)` writes: complete, or not at all.

    An existing `final` is refused unless it is an empty folder or `replace` is set; then the old content stays in place
    until the new one is complete on disk. When `write` raises, nothing is left and the old content is untouched.

    Raises CheckpointError when `final` exists and may not be replaced, or is not a folder.
    """
    with _new_folder(final, replace) as temporary:
        write(temporary)


def publish_together(final: str | Path, write: Callable[[Path], None], *, replace: bool = False) -> None:
    """As `publish_folder`, by all ranks: each calls `write` with the same temporary folder, on a disk that all see.

    `write` has to raise on all ranks or on none (see `together`). Raises on all ranks what fails on any, which
    includes a folder that rank 0 has made and another rank does not see.
    """
    what = f"writing {final}"
    with ExitStack() as stack:  # of rank 0
        temporary = Path(on_main(what, lambda: str(stack.enter_context(_new_folder(final, replace)))))
        with together(what):
            if not temporary.is_dir():
                raise CheckpointError(
                    f"{temporary}: made by rank 0, but not there for rank {rank()}: all processes need one shared disk"
                )
        write(temporary)

        def publish() -> str:
            stack.close()
            return ""

        on_main(what, publish)


@contextmanager
def _new_folder(final: str | Path, replace: bool) -> Iterator[Path]:
    """A new temporary folder that becomes `final` when the block ends, and is gone when it fails."""
    target = output_path(final)
    check_target(target, replace)
    make_folder(target.parent)
    recover_folder(target)
    check_target(target, replace)  # again: there may be a recovered one now
    temporary = _sibling(target, "tmp")
    make_folder(temporary)
    try:
        with _locked(temporary):
            yield temporary
            fsync_tree(temporary)
            check_target(target, replace)  # again: writing may have taken hours
            _rename_into_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def output_path(final: str | Path) -> Path:
    """The absolute path of an output folder; `.` and `..` are gone from it, links are not followed.

    Raises CheckpointError for the root of the file system, which has no name to put hidden siblings beside.
    """
    target = Path(os.path.abspath(final))  # noqa: PTH100 -- resolve() would follow a link at the last step
    if not target.name:
        raise CheckpointError(f"{target}: is the root of the file system; choose a folder below it")
    return target


def recover_folder(final: str | Path) -> None:
    """Undo what killed publishers of `final` left: put an interrupted replacement back, remove stale siblings."""
    target = output_path(final)
    if not target.parent.is_dir():
        return
    for path, name, kind in _siblings(target.parent):
        if name != target.name or not _is_stale(path):
            continue
        if kind == "old" and not (target.exists() and any(target.iterdir())):
            path.rename(target)
            fsync_folder(target.parent)
        else:
            _remove(path)


def interrupted_replacement(final: Path) -> Path | None:
    """The former content of a `final` that is absent because its replacement was killed between two renames."""
    if final.exists() or not final.parent.is_dir():
        return None
    return next((path for path, name, kind in _siblings(final.parent) if (name, kind) == (final.name, "old")), None)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a kill never leaves a part of it under its name."""
    doomed = folder
    match = _SIBLING.fullmatch(folder.name)
    if match is None or match["kind"] == "old":
        doomed = _sibling(folder.with_name(match["name"] if match else folder.name), "del")
        folder.rename(doomed)
        fsync_folder(folder.parent)
    shutil.rmtree(doomed)


def remove_stale(parent: Path) -> None:
    """Remove what killed processes left in `parent`, whatever its name was to be; `old` folders are kept."""
    for path, _, kind in _siblings(parent):
        if kind != "old" and _is_stale(path):
            _remove(path)


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file so that readers see the old or the new content, never a part, even after a power cut."""
    target = Path(path)
    temporary = _sibling(target, "tmp")
    try:
        for leftover, name, kind in _siblings(target.parent):
            if (name, kind) == (target.name, "tmp") and _is_stale(leftover):
                _remove(leftover)
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            _lock(file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error
        raise
    fsync_folder(target.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_into_place(temporary: Path, target: Path) -> None:
    # rename() replaces an empty folder by itself, but not one with files in it.
    if target.exists() and any(target.iterdir()):
        aside = _sibling(target, "old")
        target.rename(aside)
        try:
            temporary.rename(target)
        except BaseException:
            if not target.exists():
                aside.rename(target)
            raise
        fsync_folder(target.parent)
        remove_folder(aside)
        return
    temporary.rename(target)
    fsync_folder(target.parent)


def check_target(target: Path, replace: bool) -> None:
    """Refuse what cannot become an output folder: a file, a link, a mount point, a filled one unless `replace`."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target}: is a file or a link, not a folder; choose another output folder")
    if target.is_mount():
        raise CheckpointError(f"{target}: is a mount point, which cannot be renamed; choose a folder below it")
    if not replace and target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists already and is not empty; remove it or choose another folder")


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname()) or "host"


def _siblings(parent: Path) -> list[tuple[Path, str, str]]:
    found = []
    for path in sorted(parent.iterdir()):
        match = _SIBLING.fullmatch(path.name)
        if match and not path.is_symlink():
            found.append((path, match["name"], match["kind"]))
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    match = _SIBLING.fullmatch(path.name)
    if match is None or match["host"] != _host():
        return False
    pid = int(match["pid"])
    # Process numbers repeat in containers, so our own number says nothing about a folder: there the lock decides alone.
    if _process_exists(pid) and not (pid == os.getpid() and path.is_dir()):
        return False
    return not _is_locked(path)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lock(descriptor: int) -> None:
    """Take a lock that the kernel drops with the process. Some network disks have none: then without."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder while it is written."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # somebody else is removing it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a disk without locks
    finally:
        os.close(descriptor)
    return False


def fsync_tree(root: Path) -> None:
    """Make a folder with all that is in it durable."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(Path(folder))
