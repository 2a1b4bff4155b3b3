"""Everything beside weights, index and config is carried byte for byte, and nothing from outside the folder is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from automimo.checkpoint import copy_side_files, list_side_files
from automimo.checkpoint.folder import check_outside
from automimo.errors import CheckpointError

CARRIED = {
    "tokenizer.json": b'{"a": "\xc3\xa9"}\r\n',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ x }}\n\n",
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "modeling_remote.py": b"raise SystemExit('never run')\n",
    "notes.unknown": bytes(range(256)),
    "empty": b"",
    "dflash/config.json": b'{"draft": 1}',
    "dflash/model.safetensors": b"weights of another model",
    "audio_tokenizer/deep/er/table.bin": b"\x00\x01",
}
WEIGHTS = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model_mtp.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "old.pt",
    "consolidated.00.pth",
    "x.ckpt",
]
IGNORED = [".gitattributes", ".git", ".cache", "__pycache__", "dflash/.hidden"]


def fill(folder: Path) -> Path:
    for name, content in CARRIED.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in [*WEIGHTS, "config.json", ".gitattributes", "dflash/.hidden"]:
        (folder / name).write_bytes(b"x")
    for name in (".git", ".cache", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "inside").write_bytes(b"x")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_carries_everything_else_byte_for_byte(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    listed = list_side_files(source)
    assert names(tmp_path) == ["source"]  # listing writes nothing
    report = copy_side_files(source, tmp_path / "target")
    assert report == listed
    assert content(tmp_path / "target") == CARRIED
    assert report.carried == tuple(sorted(CARRIED))
    assert report.weights == tuple(sorted(WEIGHTS))
    assert report.ignored == tuple(sorted(IGNORED))
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))


def test_skip_leaves_files_to_the_caller(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "tokenizer.json").write_bytes(b"mine")
    skipped = {"tokenizer.json", "dflash/config.json"}
    source = fill(tmp_path / "source")
    report = copy_side_files(source, tmp_path / "target", skip=skipped)
    assert report == list_side_files(source, skip=skipped)
    assert report.carried == tuple(sorted(CARRIED.keys() - skipped))
    expected = {name: data for name, data in CARRIED.items() if name not in skipped}
    assert content(tmp_path / "target") == {**expected, "tokenizer.json": b"mine"}


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "tokenizer.json").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: exists already"):
        copy_side_files(fill(tmp_path / "source"), tmp_path / "target")
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == b"mine"


@pytest.mark.parametrize("place", ["leak.txt", "dflash/leak.txt"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, place: str) -> None:
    source = fill(tmp_path / "source")
    (tmp_path / "secret").write_text("secret")
    (source / place).symlink_to(tmp_path / "secret")
    check_refused(source, r"leak\.txt: links to .*secret, outside the folder")
    assert list_side_files(source, skip=[place]).carried == tuple(sorted(CARRIED))


def test_linked_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    (source / "loop").symlink_to(".")
    check_refused(source, r"loop: is a link to a folder")
    (source / "loop").unlink()
    os.mkfifo(source / "pipe")
    check_refused(source, r"pipe: not a regular file")
    (source / "pipe").unlink()
    (source / "zzz").symlink_to("absent")
    check_refused(source, r"zzz: a link to nothing")


def test_what_may_not_be_read_is_known_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions mean nothing to root, so the answers of the system are replaced."""
    source = fill(tmp_path / "source")
    access, iterdir = os.access, Path.iterdir
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "tokenizer.json" and access(path, mode))
    check_refused(source, r"tokenizer\.json: may not be read")
    monkeypatch.setattr(os, "access", access)

    def closed(path: Path) -> Iterator[Path]:
        if path.name == "dflash":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    check_refused(source, r"dflash: cannot be read: Permission denied")


def test_hidden_links_and_pipes_are_ignored(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    (source / ".link").symlink_to("/")
    (source / ".gone").symlink_to("absent")
    os.mkfifo(source / ".pipe")
    found = list_side_files(source)
    assert found.carried == tuple(sorted(CARRIED))
    assert found.ignored == tuple(sorted([*IGNORED, ".link", ".gone", ".pipe"]))


def check_refused(source: Path, message: str) -> None:
    """By the check, and by the copy before it copies anything."""
    target = source.parent / "target"
    with pytest.raises(CheckpointError, match=message):
        list_side_files(source)
    with pytest.raises(CheckpointError, match=message):
        copy_side_files(source, target)
    assert not target.exists()


def test_links_within_the_folder_and_in_the_hub_cache_become_files(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "rev"
    (snapshot / "dflash").mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    (blobs / "h0").write_bytes(b"tok")
    (blobs / "h1").write_bytes(b"draft")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/h0")
    (snapshot / "dflash" / "model.safetensors").symlink_to("../../../blobs/h1")
    (snapshot / "same.json").symlink_to("tokenizer.json")
    copy_side_files(snapshot, tmp_path / "target")
    assert content(tmp_path / "target") == {
        "tokenizer.json": b"tok",
        "same.json": b"tok",
        "dflash/model.safetensors": b"draft",
    }


def test_target_inside_the_source_and_absent_source(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    for target in (source, source / "out"):
        with pytest.raises(CheckpointError, match=f"{target}: lies inside the source {source}; choose"):
            copy_side_files(source, target)
        with pytest.raises(CheckpointError, match=f"{target}: lies inside the source"):
            check_outside(source, target)
    (tmp_path / "link").symlink_to("source")
    with pytest.raises(CheckpointError, match="lies inside the source"):
        check_outside(source, tmp_path / "link" / "out")
    check_outside(source, tmp_path / "source2")
    with pytest.raises(CheckpointError, match="no such folder"):
        copy_side_files(tmp_path / "absent", tmp_path / "target")
    with pytest.raises(CheckpointError, match="no such folder"):
        list_side_files(tmp_path / "absent")
