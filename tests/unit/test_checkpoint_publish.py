"""Folders appear complete or not at all. Kills are real: SIGKILL before every single file-system call in turn.

The killed processes are forks of one helper process that has imported the package, so that hundreds of kills take
seconds. The helper arms an audit hook that counts file-system calls and kills at the k-th; no test waits for a moment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from automimo.checkpoint import publish_folder, recover_folder, write_text_atomic
from automimo.checkpoint.publish import interrupted_replacement, remove_folder, remove_stale
from automimo.errors import CheckpointError

KILLER = r"""
import json, os, signal, sys
from pathlib import Path
from automimo.checkpoint import publish_folder, recover_folder, write_text_atomic
from automimo.checkpoint.publish import remove_folder
from kill_calls import killed_at

def fill(folder, text):
    (folder / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (folder / name).write_text(text)

def prepare(scenario, here):
    final = here / "final"
    if scenario == "new":
        return lambda: publish_folder(final, lambda folder: fill(folder, "new"))
    if scenario == "text":
        write_text_atomic(final, "old")
        return lambda: write_text_atomic(final, "new")
    publish_folder(final, lambda folder: fill(folder, "old"))
    if scenario == "replace":
        return lambda: publish_folder(final, lambda folder: fill(folder, "new"), replace=True)
    if scenario == "remove":
        return lambda: remove_folder(final)
    final.rename(here / (".final.old-" + os.environ["DEAD"]))
    (here / (".final.tmp-" + os.environ["DEAD"])).mkdir()
    return lambda: recover_folder(final)

kills = {}
for scenario in ("new", "replace", "recover", "remove", "text"):
    for k in range(1, 1000):
        here = Path(sys.argv[1]) / scenario / str(k)
        here.mkdir(parents=True)
        if not killed_at(k, prepare(scenario, here)):
            break
    kills[scenario] = k - 1
print(json.dumps(kills))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """For each scenario one folder for every file-system call it makes, left by a process killed before that call."""
    root = tmp_path_factory.mktemp("killed")
    child = subprocess.run(
        [sys.executable, "-c", KILLER, str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DEAD": dead_suffix(), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    kills = json.loads(child.stdout)
    assert min(kills.values()) >= 3
    return {scenario: [root / scenario / str(k) for k in range(1, count + 1)] for scenario, count in kills.items()}


def dead_suffix() -> str:
    """HOST-PID-RANDOM of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    host = "".join(char if char.isalnum() and char.isascii() else "_" for char in os.uname().nodename)
    return f"{host}-{child.pid}-0123abcd"


def fill(folder: Path, text: str) -> None:
    (folder / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (folder / name).write_text(text)


def content(folder: Path) -> str:
    """The text that all three files hold: fails when the folder is incomplete or mixed."""
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) == ["a", "b", "sub", "sub/c"]
    texts = {(folder / name).read_text() for name in ("a", "b", "sub/c")}
    assert len(texts) == 1
    return texts.pop()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Kills


def test_killed_publication_leaves_all_or_nothing(killed: dict[str, list[Path]]) -> None:
    seen = set()
    for folder in killed["new"]:
        final = folder / "final"
        seen.add(content(final) if final.exists() else None)
        publish_folder(final, lambda folder: fill(folder, "again"), replace=True)
        assert content(final) == "again"
        assert names_in(folder) == ["final"]  # what the killed process left is gone
    assert seen == {None, "new"}


def test_killed_replacement_leaves_old_or_new(killed: dict[str, list[Path]]) -> None:
    seen = set()
    for folder in killed["replace"]:
        final = folder / "final"
        aside = interrupted_replacement(final)
        assert final.exists() != (aside is not None)
        seen.add((final.exists(), content(aside or final)))
        assert all(content(path) == "old" for path in folder.glob(".final.old-*"))  # never a half deleted one
        recover_folder(final)
        assert content(final) in ("old", "new")
        assert names_in(folder) == ["final"]
    assert seen == {(True, "old"), (False, "old"), (True, "new")}


def test_killed_recovery_can_be_repeated(killed: dict[str, list[Path]]) -> None:
    for folder in killed["recover"]:
        recover_folder(folder / "final")
        assert content(folder / "final") == "old"
        assert names_in(folder) == ["final"]


def test_killed_removal_never_leaves_a_part_under_the_name(killed: dict[str, list[Path]]) -> None:
    seen = set()
    for folder in killed["remove"]:
        final = folder / "final"
        seen.add(final.exists())
        if final.exists():
            assert content(final) == "old"
        remove_stale(folder)
        assert names_in(folder) == (["final"] if final.exists() else [])
    assert seen == {True, False}


def test_killed_text_file_is_old_or_new(killed: dict[str, list[Path]]) -> None:
    texts = set()
    for folder in killed["text"]:
        texts.add((folder / "final").read_text())
        write_text_atomic(folder / "final", "again")
        assert names_in(folder) == ["final"]
    assert texts == {"old", "new"}


def test_an_interrupted_replacement_is_not_replaced_unasked(tmp_path: Path) -> None:
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "old"))
    (tmp_path / "final").rename(tmp_path / f".final.old-{dead_suffix()}")
    with pytest.raises(CheckpointError, match="exists already"):
        publish_folder(tmp_path / "final", lambda folder: pytest.fail("must not write"))
    assert content(tmp_path / "final") == "old"
    assert names_in(tmp_path) == ["final"]


# Publication


def test_publishes_and_returns_only_when_complete(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "final"

    def write(folder: Path) -> None:
        assert folder.parent == final.parent
        assert not final.exists()
        fill(folder, "x")
        assert not final.exists()

    publish_folder(str(final), write)
    assert content(final) == "x"
    assert names_in(final.parent) == ["final"]


def test_everything_is_on_disk_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may undo whatever was not synchronised, so the order of the calls is what protects."""
    events: list[int | str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "x"))
    final = tmp_path / "final"
    at = events.index("rename")
    assert set(events[:at]) == {path.stat().st_ino for path in (final, *final.rglob("*"))}
    assert events[at + 1 :] == [tmp_path.stat().st_ino]


def test_relative_and_empty_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish_folder("final", lambda folder: fill(folder, "x"))
    assert content(tmp_path / "final") == "x"
    (tmp_path / "empty").mkdir()
    publish_folder("empty", lambda folder: fill(folder, "y"))
    assert content(tmp_path / "empty") == "y"


def test_refuses_to_overwrite_before_writing(tmp_path: Path) -> None:
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "old"))
    with pytest.raises(CheckpointError, match="exists already"):
        publish_folder(tmp_path / "final", lambda folder: pytest.fail("must not write"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("final")
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="is a file or a link"):
            publish_folder(tmp_path / name, lambda folder: pytest.fail("must not write"), replace=True)
    with pytest.raises(CheckpointError, match="cannot be made"):
        publish_folder(tmp_path / "file" / "final", lambda folder: pytest.fail("must not write"))
    assert content(tmp_path / "final") == "old"
    assert names_in(tmp_path) == ["file", "final", "link"]


def test_the_root_is_no_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it one where it is no mount point."""
    monkeypatch.setattr(Path, "is_mount", lambda self: False)
    for final in ("/", "//", "/..", str(tmp_path) + "/.." * 40):
        with pytest.raises(CheckpointError, match="is the root of the file system; choose a folder below it"):
            publish_folder(final, lambda folder: pytest.fail("must not write"), replace=True)
        with pytest.raises(CheckpointError, match="is the root"):
            recover_folder(final)


def test_the_remedy_for_a_filled_target_is_always_possible(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "x").write_text("x")
    with pytest.raises(CheckpointError) as error:
        publish_folder(tmp_path / "final", lambda folder: pytest.fail("must not write"))
    wanted = "exists already and is not empty; remove it or choose another folder"
    assert str(error.value) == f"{tmp_path / 'final'}: {wanted}"


def test_refuses_a_target_that_appears_while_writing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        publish_folder(tmp_path / "final", lambda folder: fill_both(folder, tmp_path / "final"))
    assert content(tmp_path / "final") == "theirs"
    assert names_in(tmp_path) == ["final"]


def fill_both(mine: Path, theirs: Path) -> None:
    fill(mine, "mine")
    theirs.mkdir()
    fill(theirs, "theirs")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("replace", [False, True])
def test_an_exception_leaves_nothing_and_keeps_the_old(
    tmp_path: Path, error: type[BaseException], replace: bool
) -> None:
    if replace:
        publish_folder(tmp_path / "final", lambda folder: fill(folder, "old"))

    def write(folder: Path) -> None:
        fill(folder, "new")
        raise error("stop")

    with pytest.raises(error, match="stop"):
        publish_folder(tmp_path / "final", write, replace=replace)
    assert names_in(tmp_path) == (["final"] if replace else [])
    assert not replace or content(tmp_path / "final") == "old"


def test_mount_point_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "final").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "final")
    with pytest.raises(CheckpointError, match="is a mount point"):
        publish_folder(tmp_path / "final", lambda folder: pytest.fail("must not write"))


def test_siblings_of_living_processes_other_hosts_and_other_names_stay(tmp_path: Path) -> None:
    dead = dead_suffix()
    host, _, _ = dead.partition("-")
    kept = [
        f".final.tmp-{host}-{os.getppid()}-0123abcd",  # a living process
        f".final.tmp-{host}x-{dead.split('-')[1]}-0123abcd",  # another host
        f".other.tmp-{dead}",  # another target
        ".final.tmp-mine",  # not our pattern
        ".final",
    ]
    for name in [*kept, f".final.tmp-{dead}", f".final.del-{dead}"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "x"))
    assert names_in(tmp_path) == sorted([*kept, "final"])


def test_a_publication_under_way_in_this_process_is_not_stale(tmp_path: Path) -> None:
    """The process number is our own, so only the lock tells that somebody is still writing."""

    def write(folder: Path) -> None:
        recover_folder(tmp_path / "final")
        remove_stale(tmp_path)
        fill(folder, "x")

    publish_folder(tmp_path / "final", write)
    assert content(tmp_path / "final") == "x"


def test_left_by_an_earlier_process_with_our_number(tmp_path: Path) -> None:
    host = dead_suffix().partition("-")[0]
    (tmp_path / f".final.tmp-{host}-{os.getpid()}-0123abcd").mkdir()
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "x"))
    assert names_in(tmp_path) == ["final"]


# Text files


def test_write_text_atomic(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_text_atomic(path, json.dumps({"a": "é"}, ensure_ascii=False) + "\n")
    write_text_atomic(str(path), "zwei\nZeilen ✓\n")
    assert path.read_bytes() == "zwei\nZeilen ✓\n".encode()
    assert names_in(tmp_path) == ["x.json"]
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "half\ud800")
    assert path.read_text(encoding="utf-8").startswith("zwei")
    assert names_in(tmp_path) == ["x.json"]
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_text_atomic(tmp_path / "absent" / "x", "text")


def test_remove_folder(tmp_path: Path) -> None:
    publish_folder(tmp_path / "final", lambda folder: fill(folder, "x"))
    remove_folder(tmp_path / "final")
    assert names_in(tmp_path) == []
