"""Training checkpoints come back bit for bit, survive kills at any moment, and say so when they are damaged."""

import json
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automimo.checkpoint import load_step, newest_step, save_step
from automimo.checkpoint.resume import step_folders, tidy_steps
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.errors import CheckpointError

KILLER = r"""
import os, random, signal, sys, time
from pathlib import Path
import torch
from automimo.checkpoint import save_step
from kill_calls import killed_at
torch.set_num_threads(1)

def save(root, step, keep=2):
    tensors = {"model": {"w": torch.full((1000,), float(step)), "b": torch.arange(step)}, "rng": {}}
    save_step(root, step, tensors, {"step": step}, keep=keep)

def fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def each_call(root):
    # One child for every file-system call of save_step(3), killed before that call.
    for k in range(1, 1000):
        here = root / str(k)
        for step in (1, 2):
            save(here, step)
        if not killed_at(k, lambda: save(here, 3)):
            return k - 1

def any_moment(root, kills, seed):
    # Children that save without end, each continuing in the folder that the one before was killed in.
    moments = random.Random(seed)
    save(root, 0)
    step = 1
    for _ in range(kills):
        def work():
            for number in range(step, step + 10**6):
                save(root, number)
        pid = fork(work)
        time.sleep(moments.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        step = max(int(path.name[5:]) for path in root.glob("step-*")) + 1
        print(step - 1, flush=True)

if sys.argv[1] == "each":
    print(each_call(Path(sys.argv[2])))
else:
    any_moment(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""


def killer(*arguments: str) -> list[int]:
    child = subprocess.run(
        [sys.executable, "-c", KILLER, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return [int(line) for line in child.stdout.split()]


def check_complete(path: Path) -> int:
    groups, state = load_step(path)
    step = state["step"]
    assert path.name == f"step-{step}"
    assert groups.keys() == {"model", "rng"}
    assert torch.equal(groups["model"]["w"], torch.full((1000,), float(step)))
    assert torch.equal(groups["model"]["b"], torch.arange(step))
    return int(step)


def save_one(root: Path, step: int, keep: int = 0) -> Path:
    tensors = {"model": {"w": torch.full((1000,), float(step)), "b": torch.arange(step)}, "rng": {}}
    return save_step(root, step, tensors, {"step": step}, keep=keep)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Kills


def test_killed_before_every_file_system_call(tmp_path: Path) -> None:
    (kills,) = killer("each", str(tmp_path))
    assert kills > 20
    seen = set()
    for k in range(1, kills + 1):
        root = tmp_path / str(k)
        steps = [check_complete(path) for _, path in step_folders(root)]
        newest = newest_step(root)
        assert newest is not None
        assert newest.name == f"step-{steps[-1]}"
        seen.add(tuple(steps))
        save_one(root, 3, keep=2)
        assert names_in(root) == ["step-2", "step-3"]
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def kill_at_random(root: Path, kills: int, seed: int) -> None:
    reached = killer("random", str(root), str(kills), str(seed))
    assert len(reached) == kills
    steps = [check_complete(path) for _, path in step_folders(root)]
    assert max(steps) == reached[-1]
    save_one(root, max(steps) + 1, keep=2)
    assert names_in(root) == sorted([f"step-{max(steps)}", f"step-{max(steps) + 1}"])


def test_killed_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "checkpoints", 6, seed=random.randrange(10**6))


@pytest.mark.slow
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "checkpoints", 300, seed=random.randrange(10**6))


# Saving and loading


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (48,), generator=generator, dtype=torch.uint8)
    tensors = {
        "model": {name: (raw % 2 if name == "BOOL" else raw).view(dtype) for name, dtype in TORCH_DTYPES.items()},
        "optimizer": {"0.exp_avg": torch.randn(5, 7, generator=generator).T, "0.step": torch.tensor(3.0)},
        "rng": {"torch": torch.get_rng_state(), "empty": torch.empty(0, 2)},
        "none": {},
    }
    parameter = torch.nn.Parameter(torch.randn(3, generator=generator))
    tensors["model"]["parameter"] = parameter
    state = {
        "step": 5,
        "text": 'é "✓"\n',
        "floats": [0.1, 1e-310, -0.0, math.inf, -math.inf, 1.7976931348623157e308],
        "nan": math.nan,
        "big": 2**80,
        "deep": {"list": [[], {}, None, True, False]},
        "tuple": (1, (2, 3)),
    }
    path = save_step(tmp_path, 5, tensors, state, keep=1)
    assert path == tmp_path / "step-5"
    groups, loaded = load_step(path)
    assert groups.keys() == tensors.keys()
    for name, group in tensors.items():
        assert groups[name].keys() == group.keys()
        for key, tensor in group.items():
            back = groups[name][key]
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(back.reshape(-1).view(torch.uint8), expected)
    assert math.isnan(loaded.pop("nan"))
    assert math.copysign(1, loaded["floats"][2]) == -1
    assert loaded == {**{k: v for k, v in state.items() if k != "nan"}, "tuple": [1, [2, 3]]}
    assert names_in(path) == [*(f"{name}.safetensors" for name in sorted(tensors)), "state.json"]


def test_saved_tensors_are_copies(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    path = save_step(tmp_path, 1, {"model": {"w": weight}}, {}, keep=0)
    weight += 1
    assert load_step(path)[0]["model"]["w"].tolist() == [0, 0, 0, 0]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1, {"model": {"w": torch.zeros(2)}, "extra": {}}, {"n": 1}, keep=0)
    path = save_step(tmp_path, 1, {"model": {"w": torch.ones(2)}}, {"n": 2}, keep=0)
    groups, state = load_step(path)
    assert (groups["model"]["w"].tolist(), state) == ([1, 1], {"n": 2})
    assert names_in(path) == ["model.safetensors", "state.json"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1: 2}}, r"state\.a: the key 1 is int"),
        ({"a": [0, torch.ones(1)]}, r"state\.a\[1\]: Tensor cannot be saved"),
        ({"a": {"b": {2}}}, r"state\.a\.b: set cannot be saved"),
        ({"a": b"x"}, r"state\.a: bytes"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_step(tmp_path, 1, {}, state, keep=0)
    assert newest_step(tmp_path) is None


@pytest.mark.parametrize("group", ["", "A", "a/b", "..", "a.b", "1"])
def test_group_names_that_are_no_file_names(tmp_path: Path, group: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a group"):
        save_step(tmp_path, 1, {group: {}}, {}, keep=0)


def test_bad_numbers_and_unusable_roots(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 0"):
        save_step(tmp_path, -1, {}, {}, keep=0)
    with pytest.raises(CheckpointError, match="at least 0"):
        save_step(tmp_path, 1, {}, {}, keep=-1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be made"):
        save_step(tmp_path / "file", 1, {}, {}, keep=0)


def test_a_failed_save_leaves_the_old_checkpoints(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    unsaveable = {"model": {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.complex128)}}
    with pytest.raises(CheckpointError, match="complex128"):
        save_step(tmp_path, 2, unsaveable, {}, keep=1)
    assert names_in(tmp_path) == ["step-1"]
    assert check_complete(tmp_path / "step-1") == 1


# Retention and finding


def test_retention_counts_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save_one(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["step-10", "step-11"]
    for step in (99, 100):
        save_one(tmp_path, step, keep=0)
    assert names_in(tmp_path) == ["step-10", "step-100", "step-11", "step-99"]
    save_one(tmp_path, 101, keep=1)
    assert names_in(tmp_path) == ["step-101"]


def test_retention_keeps_the_one_just_written_and_the_newest(tmp_path: Path) -> None:
    for step in (10, 11, 12):
        save_one(tmp_path, step)
    save_one(tmp_path, 5, keep=1)  # a run that was sent back to an earlier step
    assert names_in(tmp_path) == ["step-12", "step-5"]


def test_newest_step_is_numeric_and_ignores_everything_else(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "absent") is None
    assert newest_step(tmp_path) is None
    for step in (0, 9, 10):
        save_one(tmp_path, step)
    for name in (
        "step-011",
        "step-12-copy",
        "step-x",
        "step-",
        "step--13",
        "best",
        ".step-14.tmp-h-1-0123abcd",
        "step-15",
    ):
        (tmp_path / name).mkdir()
        if name != "step-15":  # an empty folder of that name is not one of ours either
            (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step-16").write_text("a file")
    (tmp_path / "step-17").symlink_to("step-9")
    assert [number for number, _ in step_folders(tmp_path)] == [0, 9, 10]
    assert newest_step(str(tmp_path)) == tmp_path / "step-10"
    save_one(tmp_path, 18, keep=1)
    assert [number for number, _ in step_folders(tmp_path)] == [18]
    assert {"best", "step-12-copy", "step-15", "step-16", "step-17"} <= set(names_in(tmp_path))


# Damage


def edit_state(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads((path / "state.json").read_text())
    change(document)
    (path / "state.json").write_text(json.dumps(document))


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "file cut": (
        lambda p: os.truncate(p / "model.safetensors", 100),
        r"model\.safetensors: has 100 bytes, state\.json",
    ),
    "file longer": (lambda p: (p / "rng.safetensors").write_bytes(b"x" * 500), r"rng\.safetensors: has 500 bytes"),
    "bit in the data": (lambda p: flip(p / "model.safetensors", -5), r"model\.safetensors: checksum"),
    "bit in the header": (lambda p: flip(p / "model.safetensors", 20), r"model\.safetensors: checksum"),
    "file gone": (lambda p: (p / "model.safetensors").unlink(), r"model\.safetensors: .*incomplete"),
    "file is a link out": (
        lambda p: [
            (p / "model.safetensors").rename(p.parent / "w"),
            (p / "model.safetensors").symlink_to(p.parent / "w"),
        ],
        r"model\.safetensors: links to",
    ),
    "state gone": (lambda p: (p / "state.json").unlink(), r"state\.json"),
    "state cut": (lambda p: os.truncate(p / "state.json", 30), r"state\.json: not valid JSON"),
    "state of another kind": (lambda p: (p / "state.json").write_text("[]"), r"not a training state"),
    "newer format": (lambda p: edit_state(p, lambda d: d.update(format=2)), r"format 2, this version reads 1"),
    "renamed": (lambda p: edit_state(p, lambda d: d.update(step=8)), r"holds step 8, but its folder is step-7"),
    "groups broken": (lambda p: edit_state(p, lambda d: d.update(groups=[])), r"groups and state must be"),
    "hostile group": (
        lambda p: edit_state(p, lambda d: d.update(groups={"../x": {"tensors": 0, "bytes": 0, "crc32": 0}})),
        r"group '\.\./x'",
    ),
    "group without size": (lambda p: edit_state(p, lambda d: d.update(groups={"model": {}})), r"group 'model'"),
    "count differs": (lambda p: edit_state(p, lambda d: d["groups"]["model"].update(tensors=9)), r"2 tensors.*says 9"),  # type: ignore[index]
}


@pytest.mark.parametrize("case", DAMAGE, ids=[name.replace(" ", "_") for name in DAMAGE])
def test_damage_names_the_file_and_the_way_out(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    path = save_one(tmp_path, 7)
    check_complete(path)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_step(path)
    assert f"The training checkpoint {path} cannot be resumed. Delete that folder" in str(caught.value)


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-1: no such folder"):
        load_step(tmp_path / "step-1")


def test_tidying_after_a_kill_that_followed_the_last_save(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    half_deleted = tmp_path / f".step-0.del-{socket.gethostname().replace('-', '_')}-{2**22 + 1}-0123abcd"
    half_deleted.mkdir()
    tidy_steps(tmp_path / "absent", keep=2)
    tidy_steps(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
