"""Damaged, truncated and hostile training checkpoints: one error that names the file and the way out."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automimo.checkpoint import load_step, save_step
from automimo.errors import CheckpointError

TENSORS = "tensors-00000.safetensors"


def edit_state(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads((path / "state.json").read_text())
    change(document)
    (path / "state.json").write_text(json.dumps(document))


def edit_tensor(path: Path, **described: object) -> None:
    edit_state(path, lambda d: d["tensors"].update(w=described))  # type: ignore[attr-defined]


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put other parts into the file, with the size and the checksum that the state then says: only the content lies."""
    file = path / "tensors-00000.safetensors"
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file)
    entry = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
    edit_state(path, lambda d: d["files"].update({file.name: entry}))  # type: ignore[attr-defined]


W, B = torch.full((1000,), 7.0), torch.arange(7)
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "file cut": (lambda p: os.truncate(p / TENSORS, 100), r"tensors-00000\.safetensors: has 100 bytes, state\.json"),
    "file longer": (lambda p: (p / TENSORS).write_bytes(b"x" * 9000), r"tensors-00000\.safetensors: has 9000 bytes"),
    "bit in the data": (lambda p: flip(p / TENSORS, -5), r"tensors-00000\.safetensors: checksum"),
    "bit in the header": (lambda p: flip(p / TENSORS, 20), r"tensors-00000\.safetensors: checksum"),
    "file gone": (lambda p: (p / TENSORS).unlink(), r"tensors-00000\.safetensors: .*incomplete"),
    "file is a link out": (
        lambda p: [(p / TENSORS).rename(p.parent / "w"), (p / TENSORS).symlink_to(p.parent / "w")],
        r"tensors-00000\.safetensors: links to",
    ),
    "state gone": (lambda p: (p / "state.json").unlink(), r"state\.json"),
    "state cut": (lambda p: os.truncate(p / "state.json", 30), r"state\.json: not valid JSON"),
    "state of another kind": (lambda p: (p / "state.json").write_text("[]"), r"not a training state"),
    "older format": (
        lambda p: (p / "state.json").write_text('{"format": 1, "step": 7, "groups": {}, "state": {}}'),
        r"format 1, this version reads 2",
    ),
    "newer format": (lambda p: edit_state(p, lambda d: d.update(format=3)), r"format 3, this version reads 2"),
    "renamed": (lambda p: edit_state(p, lambda d: d.update(step=8)), r"holds step 8, but its folder is step-7"),
    "files broken": (lambda p: edit_state(p, lambda d: d.update(files=[])), r"files, tensors and state must be"),
    "field missing": (lambda p: edit_state(p, lambda d: d.pop("files")), r"not a training state"),
    "hostile file": (
        lambda p: edit_state(p, lambda d: d["files"].update({"../x.safetensors": {"bytes": 0, "crc32": 0}})),  # type: ignore[attr-defined]
        r"file '\.\./x\.safetensors'",
    ),
    "file without size": (lambda p: edit_state(p, lambda d: d.update(files={TENSORS: {}})), rf"file '{TENSORS}'"),
    "no file": (lambda p: edit_state(p, lambda d: d.update(files={})), r"tensors of 4056 bytes, but the files have 0"),
    "huge tensor": (lambda p: edit_tensor(p, dtype="F32", shape=[2**40]), r"tensors of \d+ bytes, but the files have"),
    "tensor without end": (lambda p: edit_tensor(p, dtype="F32", shape=[2**40, 2**40]), r"tensor 'w' is not described"),
    "unknown dtype": (lambda p: edit_tensor(p, dtype="F31", shape=[1]), r"tensor 'w' is not described"),
    "dtype of another type": (lambda p: edit_tensor(p, dtype=["F32"], shape=[1]), r"tensor 'w' is not described"),
    "negative size": (lambda p: edit_tensor(p, dtype="F32", shape=[-1]), r"tensor 'w' is not described"),
    "other dtype": (lambda p: edit_tensor(p, dtype="I32", shape=[1000]), r"'w@0' is F32, state\.json says I32"),
    "part missing": (
        lambda p: rewrite(p, {"w@0": W[:900], "w@901": W[:99], "b@0": B}),
        r"tensor 'w' \[1000\] in tensors-00000\.safetensors: its parts hold 999 of its 1000 elements",
    ),
    "all parts missing": (lambda p: rewrite(p, {"w@0": W}), r"tensor 'b' \[7\] in no file: its parts hold 0 of its 7"),
    "parts overlap": (
        lambda p: rewrite(p, {"w@0": W[:600], "w@500": W[:400], "w@900": W[:100], "b@0": B}),
        r"tensor 'w' .* overlaps",
    ),
    "part outside": (lambda p: rewrite(p, {"w@1": W, "b@0": B}), r"tensor 'w' .* lies outside"),
    "part too large": (lambda p: rewrite(p, {"w@0": torch.zeros(1001), "b@0": B}), r"tensor 'w' .* lies outside"),
    "part of another rank": (
        lambda p: rewrite(p, {"w@0,0": W[None], "b@0": B}),
        r"tensor 'w' .* another number of dimensions",
    ),
    "unknown part": (lambda p: rewrite(p, {"w@0": W, "b@0": B, "c@0": B}), r"holds 'c@0', which is no part"),
    "no part at all": (lambda p: rewrite(p, {"w@0": W, "b@0": B, "c": B}), r"holds 'c', which is no part"),
    "bad offset": (lambda p: rewrite(p, {"w@-1": W, "b@0": B}), r"holds 'w@-1', which is no part"),
    "part twice": (
        lambda p: [
            (p / "tensors-00001.safetensors").write_bytes((p / TENSORS).read_bytes()),
            edit_state(p, lambda d: d["files"].update({"tensors-00001.safetensors": d["files"][TENSORS]})),  # type: ignore[index]
        ],
        r"tensors-00001\.safetensors: '[wb]@0' is in tensors-00000\.safetensors as well",
    ),
}


@pytest.mark.parametrize("case", DAMAGE, ids=[name.replace(" ", "_") for name in DAMAGE])
def test_damage_names_the_file_and_the_way_out(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    path = save_step(tmp_path, 7, {"w": W, "b": B}, {}, keep=0)
    assert torch.equal(load_step(path)[0]["w"], W)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_step(path)
    assert f"The training checkpoint {path} cannot be resumed. Delete that folder" in str(caught.value)


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-1: no such folder"):
        load_step(tmp_path / "step-1")
