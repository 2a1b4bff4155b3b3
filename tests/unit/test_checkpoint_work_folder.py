"""A work folder survives kills and interrupts, is gone after an error, and becomes the final folder by one rename."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pytest
from checkpoint_units import ENV, content, finish_file, inodes, names_in, write_folder

from automimo.checkpoint import work_folder
from automimo.checkpoint.work_folder import work_path
from automimo.errors import CheckpointError


@contextmanager
def interrupted(
    final: Path, fingerprint: str = "from x", error: type[BaseException] = KeyboardInterrupt
) -> Iterator[Path]:
    """Leave what the block wrote in a work folder, as an interrupt does."""
    with pytest.raises(error, match="stop"), work_folder(final, fingerprint) as folder:
        yield folder
        raise error("stop")


# The normal way


def test_publishes_only_what_is_complete_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "final"
    with work_folder(str(final), "x") as folder:
        assert names_in(folder) == []
        assert not final.exists()
        assert folder.is_relative_to(final.parent / ".final.work")
        (folder / "file").write_text("x")
    assert names_in(final) == ["file"]
    assert names_in(final.parent) == ["final"]
    (tmp_path / "empty").mkdir()
    assert write_folder(tmp_path / "empty") == []
    assert content(tmp_path / "empty") == "new"
    assert names_in(tmp_path) == ["deep", "empty"]


def test_relative_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with work_folder("final", "x") as folder:
        monkeypatch.chdir("/")
        (folder / "file").write_text("x")
    assert names_in(tmp_path / "final") == ["file"]


def test_everything_is_on_disk_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int | str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        if target == tmp_path / "final":
            events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    write_folder(tmp_path / "final")
    final = tmp_path / "final"
    at = events.index("rename")
    assert {path.stat().st_ino for path in (final, *final.rglob("*"))} <= set(events[:at])
    assert events[at + 1 :] == [tmp_path.stat().st_ino]


# Refusals


def test_refuses_to_overwrite_before_the_block(tmp_path: Path) -> None:
    write_folder(tmp_path / "final", text="old")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("final")
    for name, message in [
        ("final", "exists already"),
        ("file", "is a file or a link"),
        ("link", "is a file or a link"),
        ("file/final", "cannot be made"),
    ]:
        with pytest.raises(CheckpointError, match=message), work_folder(tmp_path / name, "x"):
            pytest.fail("the block must not run")
    assert content(tmp_path / "final") == "old"
    assert names_in(tmp_path) == ["file", "final", "link"]


@pytest.mark.parametrize("final", ["/", "//", "/.."])
def test_the_root_is_no_output_folder(final: str) -> None:
    with pytest.raises(CheckpointError, match="is the root of the file system"), work_folder(final, "x"):
        pytest.fail("the block must not run")
    with pytest.raises(CheckpointError, match="is the root of the file system"):
        work_path(final)


def test_the_work_folder_of_dots_and_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "final" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "final" / "below")
    for final in ("..", "../", "../../final", tmp_path / "final"):
        assert work_path(final) == tmp_path / ".final.work"
    assert work_path(".") == tmp_path / "final" / ".below.work"


def test_a_mount_point_is_refused_before_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "final").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "final")
    with pytest.raises(CheckpointError, match="is a mount point"), work_folder(tmp_path / "final", "x"):
        pytest.fail("the block must not run")
    assert names_in(tmp_path) == ["final"]


def test_refuses_a_target_that_appears_during_the_block(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"), work_folder(tmp_path / "final", "x") as folder:
        (folder / "mine").write_text("x")
        (tmp_path / "final").mkdir()
        (tmp_path / "final" / "theirs").write_text("x")
    assert names_in(tmp_path / "final") == ["theirs"]
    assert names_in(tmp_path) == ["final"]


def test_a_link_in_the_place_of_the_work_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".final.work").symlink_to("elsewhere")
    with (
        pytest.raises(CheckpointError, match=r"\.final\.work: is a file or a link"),
        work_folder(tmp_path / "final", "x"),
    ):
        pytest.fail("the block must not run")
    (tmp_path / ".final.work").unlink()
    (tmp_path / ".final.work").mkdir()
    (tmp_path / "elsewhere" / "owner").write_text("precious")
    (tmp_path / ".final.work" / "owner").symlink_to("../elsewhere/owner")
    with pytest.raises(CheckpointError, match="cannot be used"), work_folder(tmp_path / "final", "x"):
        pytest.fail("the block must not run")
    assert (tmp_path / "elsewhere" / "owner").read_text() == "precious"


def test_a_second_process_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    second = "import sys; from automimo.checkpoint import work_folder\nwith work_folder(sys.argv[1], sys.argv[2]): pass"
    final = tmp_path / "final"
    with work_folder(final, "from x") as folder:
        finish_file(folder, "a.safetensors", "new")
        for fingerprint in ("from x", "from y"):
            child = subprocess.run(
                [sys.executable, "-c", second, str(final), fingerprint],
                env=ENV,
                capture_output=True,
                text=True,
                check=False,
            )
            assert child.returncode == 1
            assert "CheckpointError" in child.stderr
            assert "another conversion to final is running" in child.stderr
        with pytest.raises(CheckpointError, match="another conversion"), work_folder(final, "from x"):
            pytest.fail("the block must not run")  # nor in a thread of the same process
        assert names_in(folder) == ["a.safetensors"]
        with work_folder(tmp_path / "other", "from x") as other:
            (other / "file").write_text("x")
    assert names_in(final) == ["a.safetensors"]


def test_a_process_that_waited_for_a_removed_owner_file_makes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock on a file that its owner has removed in the meantime protects nothing."""
    import fcntl

    flock, owner, turns = fcntl.flock, tmp_path / ".final.work" / "owner", []

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        turns.append(os.fstat(descriptor).st_ino)
        if len(turns) == 1:
            owner.unlink()
        if len(turns) == 2:
            owner.unlink()
            owner.write_text("of a third process")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with work_folder(tmp_path / "final", "x") as folder:
        assert len(turns) == 3
        assert owner.stat().st_ino == turns[-1]
        (folder / "file").write_text("x")
    assert names_in(tmp_path) == ["final"]


@pytest.mark.parametrize("error", [None, ValueError("stop")])
def test_the_lock_is_held_until_everything_else_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Else the removal would hit what the next process writes."""
    module = import_module("automimo.checkpoint.work_folder")  # the package has the function of this name
    remove, removed = module._remove, []

    def checked_remove(path: Path) -> None:
        with pytest.raises(CheckpointError, match="another conversion"), work_folder(tmp_path / "new", "x"):
            pytest.fail("the block must not run")
        removed.append(path.name)
        remove(path)

    with suppress(ValueError), work_folder(tmp_path / "new", "x") as folder:
        (folder / "file").write_text("x")
        (folder.parent / "anything").write_text("x")
        monkeypatch.setattr(module, "_remove", checked_remove)
        if error is not None:
            raise error
        (tmp_path / "new").mkdir()
    assert sorted(removed) == (["anything"] if error is None else ["anything", "content"])
    assert names_in(tmp_path) == ([] if error else ["new"])


# Errors and interrupts


@pytest.mark.parametrize("error", [ValueError, CheckpointError, OSError])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[Exception]) -> None:
    with interrupted(tmp_path / "final") as folder:
        finish_file(folder, "a.safetensors", "new")
    with interrupted(tmp_path / "final", error=error) as folder:
        assert names_in(folder) == ["a.safetensors"]
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("x")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_the_finished_files_for_the_same_fingerprint(
    tmp_path: Path, error: type[BaseException]
) -> None:
    final = tmp_path / "final"
    with interrupted(final, error=error) as folder:
        finish_file(folder, "a.safetensors", "new")
        finish_file(folder, "b.safetensors", "new")
        # All of these could be half written.
        (folder / "sub").mkdir()
        for name in ("config.json", "sub/d.safetensors", "sub/e", ".c.safetensors.partial", ".x.safetensors", "x.tmp"):
            (folder / name).write_text("half")
        (folder / "l.safetensors").symlink_to("a.safetensors")
        (folder / "f.safetensors").mkdir()
        before = inodes(folder)
    assert not final.exists()
    assert write_folder(final) == ["a.safetensors", "b.safetensors"]
    assert content(final) == "new"
    assert {name: inodes(final)[name] for name in ("a.safetensors", "b.safetensors")}.items() <= before.items()
    assert names_in(tmp_path) == ["final"]


@pytest.mark.parametrize("other", ["from y", "from", "from x and more", "", "frøm x"])
def test_another_fingerprint_starts_anew(tmp_path: Path, other: str) -> None:
    final = tmp_path / "final"
    with interrupted(final, "from x") as folder:
        finish_file(folder, "a.safetensors", "old")
    with interrupted(final, other) as folder:
        assert names_in(folder) == []
        finish_file(folder, "b.safetensors", "new")
    assert write_folder(final, other) == ["b.safetensors"]
    assert content(final) == "new"


def test_an_interrupted_run_beside_an_existing_target_stays(tmp_path: Path) -> None:
    """The target may be moved away; then the run goes on."""
    final = tmp_path / "final"
    with interrupted(final) as folder:
        finish_file(folder, "a.safetensors", "new")
    final.mkdir()
    (final / "theirs").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"), work_folder(final, "from x"):
        pytest.fail("the block must not run")
    final.rename(tmp_path / "moved")
    assert write_folder(final) == ["a.safetensors"]
