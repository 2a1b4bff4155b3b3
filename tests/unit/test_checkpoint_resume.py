"""Training checkpoints come back bit for bit, survive kills at any moment, and say so when they are damaged."""

import math
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from automimo.checkpoint import dcp_storage, load_step, newest_step, save_step
from automimo.checkpoint.resume import begin_step, step_folders, tidy_steps
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.checkpoint.saved_step import load_tensors, read_step
from automimo.errors import CheckpointError

TENSORS = "tensors-00000.safetensors"

KILLER = r"""
import os, random, signal, sys, time
from pathlib import Path
import torch
from automimo.checkpoint.resume import begin_step, save_step
from kill_calls import killed_at
torch.set_num_threads(1)

background = sys.argv[2] == "background"

def save(root, step, keep=2):
    tensors = {"w": torch.full((1000,), float(step)), "b": torch.arange(step)}
    if background:
        pending = begin_step(root, step, tensors, {"step": step}, keep=keep)
        pending.publish()
    else:
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
    print(each_call(Path(sys.argv[3])))
else:
    any_moment(Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
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
    tensors, state = load_step(path)
    step = state["step"]
    assert path.name == f"step-{step}"
    assert tensors.keys() == {"w", "b"}
    assert torch.equal(tensors["w"], torch.full((1000,), float(step)))
    assert torch.equal(tensors["b"], torch.arange(step))
    return int(step)


def save_one(root: Path, step: int, keep: int = 0) -> Path:
    tensors = {"w": torch.full((1000,), float(step)), "b": torch.arange(step)}
    return save_step(root, step, tensors, {"step": step}, keep=keep)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Kills


@pytest.mark.parametrize("way", ["", pytest.param("background", marks=pytest.mark.slow)])
def test_killed_before_every_file_system_call(tmp_path: Path, way: str) -> None:
    (kills,) = killer("each", way, str(tmp_path))
    assert kills > 20
    seen = set()
    for k in range(1, kills + 1):
        root = tmp_path / str(k)
        steps = [check_complete(path) for _, path in step_folders(root)]
        newest = newest_step(root)
        assert newest is not None
        assert newest.name == f"step-{steps[-1]}"
        seen.add(tuple(steps))
        if k % 2:
            save_one(root, 3, keep=2)
            assert names_in(root) == ["step-2", "step-3"]
        else:
            tidy_steps(root, keep=2)
            assert names_in(root) == [f"step-{step}" for step in steps[-2:]]
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def kill_at_random(root: Path, kills: int, seed: int) -> None:
    reached = killer("random", "", str(root), str(kills), str(seed))
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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (48,), generator=generator, dtype=torch.uint8)
    tensors = {
        f"model/{name}": (raw % 2 if name == "BOOL" else raw).view(dtype) for name, dtype in TORCH_DTYPES.items()
    }
    tensors |= {
        "optimizer/0.exp_avg": torch.randn(5, 7, generator=generator).T,
        "optimizer/0.step": torch.tensor(3.0),
        "rng/torch": torch.get_rng_state(),
        "empty": torch.empty(0, 2),
        "one of many": torch.arange(4.0)[::3][1:],
        "a@3,1": torch.arange(3),
        "a": torch.arange(4),
        "": torch.arange(5),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }
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
    saved = read_step(path)
    assert (saved.step, saved.tensors.keys()) == (5, tensors.keys())
    back, loaded = load_step(path)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (back[key].dtype, back[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(back[key]), bits(tensor)), key
    assert math.isnan(loaded.pop("nan"))
    assert math.copysign(1, loaded["floats"][2]) == -1
    assert loaded == {**{k: v for k, v in state.items() if k != "nan"}, "tuple": [1, [2, 3]]}
    assert names_in(path) == ["state.json", "tensors-00000.safetensors"]


def test_saved_tensors_are_copies(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    path = save_step(tmp_path, 1, {"w": weight}, {}, keep=0)
    weight += 1
    assert load_step(path)[0]["w"].tolist() == [0, 0, 0, 0]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1, {"w": torch.zeros(2), "extra": torch.zeros(1)}, {"n": 1}, keep=0)
    path = save_step(tmp_path, 1, {"w": torch.ones(2)}, {"n": 2}, keep=0)
    tensors, state = load_step(path)
    assert (tensors["w"].tolist(), state) == ([1, 1], {"n": 2})
    assert tensors.keys() == {"w"}


def test_destinations_are_filled_in_place_whatever_their_strides(tmp_path: Path) -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    path = save_step(tmp_path, 1, {"a": value, "b": value, "other": torch.ones(1)}, {}, keep=0)
    transposed = torch.full((4, 3, 2), math.nan)
    parameter = torch.nn.Parameter(torch.full((2, 3, 4), math.nan))
    load_tensors(read_step(path), {"a": transposed.permute(2, 1, 0), "b": parameter})
    assert torch.equal(transposed.permute(2, 1, 0), value)
    assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (torch.empty(4), r"'w'.*shape=\(1000,\)\) cannot be loaded into .*\(4,\)"),
        (torch.empty(1000, dtype=torch.bfloat16), r"'w'.*F32.* cannot be loaded into .*BF16"),
        (torch.empty(1000, device="meta"), r"'w'.*meta device"),
    ],
)
def test_destinations_that_do_not_fit(tmp_path: Path, destination: torch.Tensor, message: str) -> None:
    saved = read_step(save_one(tmp_path, 1))
    with pytest.raises(CheckpointError, match=message):
        load_tensors(saved, {"w": destination})
    with pytest.raises(CheckpointError, match=r"'x': absent"):
        load_tensors(saved, {"x": torch.empty(1)})


# In the background


def test_the_background_saves_the_values_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = dcp_storage.write_safetensors

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(dcp_storage, "write_safetensors", slow)
    weight, position = torch.zeros(1000), {"row": 1}
    pending = begin_step(tmp_path, 1, {"w": weight}, {"position": position}, keep=1)
    weight += 1
    position["row"] = 2
    assert not pending.finished
    assert newest_step(tmp_path) is None
    go_on.set()
    assert pending.publish() == tmp_path / "step-1"
    assert pending.finished
    tensors, state = load_step(tmp_path / "step-1")
    assert (tensors["w"].abs().sum(), state) == (0, {"position": {"row": 1}})
    assert names_in(tmp_path) == ["step-1"]


def test_a_failure_in_the_background_surfaces_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(tmp_path, 1)

    def full(*_: Any) -> None:
        raise CheckpointError("no space left on the disk")

    monkeypatch.setattr(dcp_storage, "write_safetensors", full)
    pending = begin_step(tmp_path, 2, {"w": torch.zeros(3)}, {}, keep=1)
    with pytest.raises(CheckpointError, match="no space left"):
        pending.publish()
    assert names_in(tmp_path) == ["step-1"]
    assert check_complete(tmp_path / "step-1") == 1


def test_a_pending_checkpoint_can_be_given_up(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    pending = begin_step(tmp_path, 2, {str(i): torch.zeros(1000) for i in range(50)}, {}, keep=1)
    pending.discard()
    assert pending.finished
    assert names_in(tmp_path) == ["step-1"]


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
    unsaveable = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.complex128)}
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


def test_tidying_after_a_kill_that_followed_the_last_save(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    half_deleted = tmp_path / f".step-0.del-{socket.gethostname().replace('-', '_')}-{2**22 + 1}-0123abcd"
    half_deleted.mkdir()
    (tmp_path / ".saving-0123abcd").mkdir()
    (tmp_path / ".saving-0123abcd" / "tensors-00001.safetensors").write_text("half")
    (tmp_path / ".saving-other").mkdir()
    tidy_steps(tmp_path / "absent", keep=2)
    tidy_steps(tmp_path, keep=2)
    assert names_in(tmp_path) == [".saving-other", "step-2", "step-3"]
