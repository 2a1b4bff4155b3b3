"""A folder that is written over hours, goes on after a kill, and appears complete or not at all.

Beside the folder NAME that is to be made lies, while it is being made, the hidden folder `.NAME.work` with

- `owner`: the fingerprint of what is being written. The process that writes holds the lock on this file; the kernel
  drops the lock with the process.
- `content`: what becomes NAME by one rename.

The fingerprint lies beside the content, not in it, so that the rename needs no cleaning before and leaves none to do
in NAME: a kill before the rename leaves everything for going on, a kill after it leaves NAME complete.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from automimo.checkpoint.folder import make_folder
from automimo.checkpoint.publish import check_target, fsync_folder, fsync_tree, output_path, recover_folder
from automimo.errors import CheckpointError

_OWNER = "owner"
_CONTENT = "content"


@contextmanager
def work_folder(final: str | Path, fingerprint: str) -> Iterator[Path]:
    """A context manager for the folder in which `final` is written: renamed to `final` when the block ends normally.

    `fingerprint` says what is written from what. When a killed or interrupted run with the same fingerprint left its
    folder, the block starts with the weight files (`*.safetensors` directly in the folder) that it had finished, see
    `write_units`; everything else in it is removed, since nobody knows whether it is complete. With another fingerprint
    the block starts empty.

    An Exception in the block removes the folder. KeyboardInterrupt and SystemExit leave it, so that the same call can
    go on. `final` is absent, or as it was, until it is complete; an existing one is refused, unless it is an empty
    folder, before the block and again after it.

    Raises CheckpointError when `final` exists or cannot be made, or while another process writes the same `final`.
    """
    target = output_path(final)
    work = work_path(target)
    content = work / _CONTENT
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        raise CheckpointError(f"{work}: is a file or a link, not the folder of an interrupted run; remove it")
    if not work.exists():
        check_target(target, False)  # before anything is made
    make_folder(target.parent)
    recover_folder(target)
    descriptor = _lock_owner(work, target)
    try:
        try:
            check_target(target, False)
        except CheckpointError:
            if not content.exists():
                _remove_work(work)  # nothing to go on with: left by a run that was killed after its rename
            raise
        try:
            _prepare(descriptor, work, content, fingerprint)
            yield content
            fsync_tree(content)
            check_target(target, False)  # again: writing may have taken hours
            content.rename(target)
            fsync_folder(target.parent)
        except Exception:
            _remove_work(work)
            raise
        _remove_work(work)
    finally:
        os.close(descriptor)


def work_path(final: str | Path) -> Path:
    """The hidden folder in which `final` is made; what is left of an interrupted run."""
    target = output_path(final)
    return target.with_name(f".{target.name}.work")


def _remove_work(work: Path) -> None:
    """Remove the work folder while its lock is held. The owner file goes last: once it is gone another process may
    make a new one, and from then on nothing but an empty folder may be removed."""
    with suppress(OSError):
        for path in work.iterdir():
            if path.name != _OWNER:
                _remove(path)
        (work / _OWNER).unlink()
        work.rmdir()


def _lock_owner(work: Path, target: Path) -> int:
    """Make the work folder if there is none and hold it alone. Returns the descriptor that holds the lock.

    A file, not the folder, is locked: network disks lock only what is open for writing.
    """
    owner = work / _OWNER
    while True:
        make_folder(work)
        try:
            descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # its owner removed the folder just now
        except OSError as error:
            raise CheckpointError(f"{work}: cannot be used: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{target}: another conversion to {target.name} is running; wait for it or choose another folder"
            ) from error
        except OSError:
            return descriptor  # a disk without locks
        try:
            if os.path.samestat(os.fstat(descriptor), owner.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # locked after its owner had removed it


def _prepare(descriptor: int, work: Path, content: Path, fingerprint: str) -> None:
    """Leave in `content` what may be kept, and the fingerprint in the owner file."""
    expected = fingerprint.encode("utf-8")
    if os.pread(descriptor, len(expected) + 1, 0) == expected and content.is_dir() and not content.is_symlink():
        for path in content.iterdir():
            hidden = path.name.startswith(".")
            if hidden or path.suffix != ".safetensors" or path.is_symlink() or not path.is_file():
                _remove(path)
        return
    for path in work.iterdir():
        if path.name != _OWNER:
            _remove(path)
    # The old content is gone from the disk before the new fingerprint is on it, so that no kill and no power cut
    # leaves files under a fingerprint that is not theirs; half a fingerprint stands beside an empty folder.
    fsync_folder(work)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, expected, 0)
    os.fsync(descriptor)
    content.mkdir()
    fsync_folder(work)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
