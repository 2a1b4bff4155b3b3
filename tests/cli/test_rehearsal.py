"""`automimo train RECIPE --dry-run --world-size N`: one of N ranks in one process, from a config alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Completed, check_readable_failure, run_cli

RECIPE = """\
output: {output}
model: {{{model}, dtype: bfloat16}}
data: {{train: [{{kind: python_docs}}], sequence_length: 4096}}
parallel: {{expert: 8}}
train: {{steps: 10, batch: 128}}
"""


def recipe(folder: Path, model: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(output=folder / "run", model=model), encoding="utf-8")
    return path


def test_full_v2_flash_on_128_ranks(tmp_path: Path) -> None:
    done = run_cli("train", recipe(tmp_path, "preset: flash"), "--dry-run", "--world-size", "128")
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    assert "309 B parameters" in out
    assert "ranks    128: 1 copy of the model in 128 shards; experts over 8 ranks, each part in 16 shards" in out
    # 47 layers of 256 experts of three matrices of 4,096 x 2,048; a 128th of them, 4 bytes each, is 8.81 GiB.
    assert 47 * 256 * 3 * 4096 * 2048 // 128 == 2_365_587_456 and "2.37 B of experts" in out
    # One micro-batch: experts, router and block of every layer are gathered twice and reduced once; the head, which is
    # kept for backward, is gathered once. The embedding is gathered again only where `parallelize` leaves that to FSDP.
    once, twice = (f"{2 * (47 * 2 + 48) + n + 1} all-gathers of parameters" for n in (1, 2))
    assert once in out or twice in out
    assert f"{47 * 2 + 48 + 2} reduce-scatters of gradients" in out
    # Numbers of rows, rows, results, and the gradients of both.
    assert f"{47 * 5} all-to-alls of tokens" in out
    rows = 4096 * 8 * 4096 * 2 * 7 / 8  # tokens, chosen experts, width, bf16; an eighth of them stays here
    sent = 47 * (4 * rows + 256 * 8 * 7 / 8) / 2**30
    assert f"{sent:.2f} GiB per step (235 among 8 ranks)" in out
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_config_is_enough_and_nothing_is_written(tmp_path: Path, call: Callable[..., Completed]) -> None:
    from automimo.mimo_v2_flash.presets import preset_config

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(preset_config("tiny").to_diff_dict()), encoding="utf-8")
    done = call("train", recipe(tmp_path, f"path: {folder}"), "--dry-run", "--world-size", "16")
    assert done.returncode == 0, done.stderr
    assert "experts over 8 ranks, each part in 2 shards" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "recipe.yaml"]
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("preset", ["tiny-omni", "v2.5", "v2.6-pro"])
def test_every_family_of_presets(tmp_path: Path, call: Callable[..., Completed], preset: str) -> None:
    done = call("train", recipe(tmp_path, f"preset: {preset}"), "--dry-run", "--world-size", "64")
    assert done.returncode == 0, done.stderr
    assert f"preset {preset}: " in done.stdout


def test_replicas_and_what_is_kept_on_the_cpu(tmp_path: Path, call: Callable[..., Completed]) -> None:
    path = recipe(tmp_path, "preset: tiny")
    arguments = ("parallel.replicate=4", "parallel.offload=true", "parallel.expert=1", "model.train_sinks=true")
    done = call("train", path, *arguments, "--dry-run", "--world-size", "8")
    assert done.returncode == 0, done.stderr
    assert "ranks    8: 4 copies of the model in 2 shards; experts in the same shards" in done.stdout
    assert "weights, gradients and AdamW on the CPU" in done.stdout
    # 5 layers with experts, 6 blocks, embedding, head: over the replicas; and the sinks once over all.
    assert re.search(r"19 all-reduces of gradients: .* \(18 among 4 ranks, 1 among 8 ranks\)", done.stdout)


def test_impossible_layouts_are_refused_with_the_numbers(tmp_path: Path, call: Callable[..., Completed]) -> None:
    path = recipe(tmp_path, "preset: flash")
    check_readable_failure(call("train", path, "--dry-run", "--world-size", "100"), "parallel.expert 8", "100 ranks")
    check_readable_failure(
        call("train", path, "parallel.replicate=3", "--dry-run", "--world-size", "128"), "parallel.replicate 3", "128"
    )
    # Experts are cut inside their 128 rows, here by the 24 / 8 ranks that have the same ones.
    path = recipe(tmp_path, "preset: tiny")
    check_readable_failure(call("train", path, "--dry-run", "--world-size", "24"), "128 rows", "3 ranks", "expert 8")


def test_world_size_alone_is_refused(tmp_path: Path, call: Callable[..., Completed]) -> None:
    path = recipe(tmp_path, "preset: tiny")
    check_readable_failure(call("train", path, "--world-size", "4"), "--world-size 4", "add --dry-run")
    check_readable_failure(call("train", path, "--dry-run", "--world-size", "1"), "--world-size", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


LEAKS = """
import gc, sys
import torch
import torch.distributed as dist
from automimo.training import load_recipe
from automimo.training.rehearsal import rehearse

hook, state = sys.excepthook, torch.get_rng_state()
recipe = load_recipe(sys.argv[1], ())
parts = [rehearse(recipe, world).part for world in (16, 64, 16)]
assert parts[0] == parts[2] != parts[1]
assert sys.excepthook is hook and torch.equal(torch.get_rng_state(), state) and not dist.is_initialized()
kinds = (type(thing) for thing in gc.get_objects())
left = [kind.__name__ for kind in kinds if issubclass(kind, torch.nn.Module)]
print(len(left), set(left))
"""


@pytest.mark.slow
def test_the_process_is_afterwards_as_it_was(tmp_path: Path) -> None:
    path = recipe(tmp_path, "preset: tiny")
    command = [sys.executable, "-c", LEAKS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 set()\n"


@pytest.mark.slow
def test_the_parts_of_all_ranks_make_the_model(tmp_path: Path) -> None:
    from automimo.training import load_recipe
    from automimo.training.rehearsal import rehearse

    loaded = load_recipe(recipe(tmp_path, "preset: tiny"), ())
    rehearsals = [rehearse(loaded, 16, rank) for rank in range(16)]
    parts, size = [rehearsal.part for rehearsal in rehearsals], rehearsals[0].size
    hidden, experts, width = 128, 8, 96
    assert sum(part.experts for part in parts) == 5 * experts * 3 * hidden * width
    assert len({part.whole for part in parts}) == 1
    sinks = 4 * 8  # 4 sliding layers of 8 heads; the rest of `whole` are buffers
    assert sum(part.dense + part.experts for part in parts) + sinks == size.total
    assert sum(part.trained for part in parts) == size.trainable
