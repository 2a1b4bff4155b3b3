"""Sources that are damaged, ambiguous or hostile, targets that exist, and runs that are killed: a clear error or the
same bytes, and never a part of an output."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from released_folders import built, config, released, write_folder
from released_oracle import FLASH, PRO
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_folders import tensors_of
from torch import Tensor

from automimo.convert import ConvertOptions, convert_checkpoint
from automimo.convert import run as run_module
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage import SourceOptions

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
BF16 = ConvertOptions("bf16")


def convert(source: Path, target: Path, options: ConvertOptions = BF16, **more) -> None:
    convert_checkpoint(source, target, options, workers=2, console=Console(quiet=True), **more)


def refused(tmp_path: Path, *words: str, options: ConvertOptions = BF16) -> None:
    """Converting tmp_path/source fails with these words and leaves nothing behind."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "source", tmp_path / "out", options)
    for word in words:
        assert word in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def changed(tmp_path: Path, form: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    stored = dict(built(FLASH, form)[0])
    change(stored)
    write_folder(tmp_path / "source", {key: t.contiguous() for key, t in stored.items()}, config(FLASH, form))


def put(key: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: make(tensors[key])})


def drop(key: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(key)


def with_value(value: float | int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result.view(torch.uint8).reshape(-1).view(dtype)[-1] = value
        return result

    return make


FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], list[str]]] = {
    "scale without weight": ("fp8-fused", drop(EXPERT), [f"{EXPERT}_scale_inv", "scale without its weight"]),
    "weight without scale": ("fp8-fused", drop(f"{EXPERT}_scale_inv"), [EXPERT, "without its scale"]),
    "fused weight without scale": ("fp8-fused", drop(f"{QKV}_scale_inv"), [QKV, "without its scale"]),
    "MXFP4 scale without weight": ("mxfp4-fused", drop(EXPERT), [f"{EXPERT}_scale", "scale without its weight"]),
    "MXFP4 weight without scale": ("mxfp4-fused", drop(f"{EXPERT}_scale"), [EXPERT, "without its scale"]),
    "NaN scale": (
        "fp8-fused",
        put(f"{EXPERT}_scale_inv", with_value(float("nan"), torch.float32)),
        [f"{EXPERT}_scale_inv"],
    ),
    "infinite scale": ("fp8-fused", put(f"{QKV}_scale_inv", with_value(float("inf"), torch.float32)), [QKV]),
    "NaN code": ("fp8-fused", put(EXPERT, with_value(0x7F, torch.uint8)), [EXPERT, "NaN"]),
    "NaN E8M0 scale": ("mxfp4-fused", put(f"{EXPERT}_scale", with_value(255, torch.uint8)), [EXPERT, "NaN"]),
    "scale beyond BF16": ("fp8-fused", put(f"{EXPERT}_scale_inv", with_value(3e38, torch.float32)), [EXPERT]),
    "E8M0 scale beyond BF16": ("mxfp4-fused", put(f"{EXPERT}_scale", with_value(254, torch.uint8)), [EXPERT]),
    "FP32 value beyond BF16": (
        "bf16-split",
        put("model.norm.weight", lambda t: with_value(3.4e38, torch.float32)(t.float())),
        ["model.norm.weight", "overflows"],
    ),
    "BF16 scale": ("fp8-fused", put(f"{EXPERT}_scale_inv", lambda t: t.bfloat16()), [EXPERT, "BF16", "are F32"]),
    "scale grid of another shape": (
        "fp8-fused",
        put(f"{EXPERT}_scale_inv", lambda t: t.repeat(2, 1)),
        [EXPERT, "no grid of 128 x 128 blocks"],
    ),
    "scale grid that no layout of k has": (
        "fp8-flash",
        put("model.layers.0.self_attn.k_proj.weight_scale_inv", lambda t: t[:7]),
        ["model.layers.0.self_attn.k_proj.weight", "[7, 2]"],
    ),
    "unknown dtype": ("bf16-split", put(EXPERT, lambda t: t.to(torch.int8)), [EXPERT, "I8"]),
    "scaled plain weight": ("fp8-fused", put(EXPERT, lambda t: t.float()), [EXPERT, "stored as F32"]),
    "rows of another model": ("fp8-fused", put(QKV, lambda t: t[:-64]), [QKV, "config.json asks for 4352 rows"]),
    "grid of no TP": ("fp8-fused", put(f"{QKV}_scale_inv", lambda t: t[:-1]), ["35 rows for 4352 rows"]),
    "fused and split": (
        "fp8-fused",
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(3072, 160)}),
        ["twice", "q_proj"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_sources(tmp_path: Path, name: str) -> None:
    form, change, words = FAULTS[name]
    changed(tmp_path, form, change)
    refused(tmp_path, *words)


def test_nan_scales_are_found_in_copies_too(tmp_path: Path) -> None:
    changed(tmp_path, "fp8-fused", put(f"{EXPERT}_scale_inv", with_value(float("nan"), torch.float32)))
    refused(tmp_path, f"{EXPERT}_scale_inv", options=ConvertOptions("fp8"))
    shutil.rmtree(tmp_path / "source")
    changed(tmp_path, "mxfp4-fused", put(f"{EXPERT}_scale", with_value(255, torch.uint8)))
    refused(tmp_path, f"{EXPERT}_scale", "NaN", options=ConvertOptions("mxfp4"))


def test_damaged_files(tmp_path: Path) -> None:
    released(tmp_path / "source", FLASH, "fp8-fused", shards=2)
    shard = tmp_path / "source" / "model_pp0_ep0_shard1.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    refused(tmp_path, shard.name, "truncated, 100 bytes are missing")
    shard.unlink()
    refused(tmp_path, shard.name)
    shard.write_bytes(whole)
    index = tmp_path / "source" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(whole)
    for name in ("../outside.safetensors", str(outside), "sub/../x.safetensors"):
        hostile = {key: name if value == shard.name else value for key, value in content["weight_map"].items()}
        index.write_text(json.dumps({**content, "weight_map": hostile}))
        refused(tmp_path, "not a plain file name")
    index.write_text("{}")
    refused(tmp_path, "weight_map")
    (tmp_path / "source" / "config.json").unlink()
    refused(tmp_path, "config.json")


AMBIGUOUS = [
    ("bf16-fused", SourceOptions(), ["not quantised", "--source-tp N", "--source-layout contiguous"]),
    ("fp8-contiguous", SourceOptions(), ["34 scale rows fit 1 or 2 shards", "--source-layout contiguous"]),
    ("fp8-fused", SourceOptions(tp=2), ["--source-tp 2 disagrees", "fit 4 shards"]),
    ("fp8-fused", SourceOptions(layout="contiguous"), ["1 disagrees", "fit 4 shards"]),
    ("bf16-fused", SourceOptions(tp=3), ["not divisible by 3"]),
    ("bf16-fused", SourceOptions(layout="split"), ["said to be split", "qkv_proj"]),
    ("bf16-split", SourceOptions(layout="fused"), ["said to be fused", "no qkv_proj"]),
    ("bf16-split", SourceOptions(tp=4), ["said to be fused", "no qkv_proj"]),
]


@pytest.mark.parametrize(("form", "options", "words"), AMBIGUOUS)
def test_what_cannot_be_told_is_not_guessed(
    tmp_path: Path, form: str, options: SourceOptions, words: list[str]
) -> None:
    released(tmp_path / "source", FLASH, form)
    refused(tmp_path, *words, options=ConvertOptions("bf16", source=options))


def test_statements_that_disagree(tmp_path: Path) -> None:
    released(tmp_path / "source", FLASH, "bf16-fused", metadata={"tp_size": 4})
    refused(
        tmp_path,
        "--source-tp is 2, which disagrees with metadata.tp_size 4",
        options=ConvertOptions("bf16", source=SourceOptions(tp=2)),
    )
    values = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(values | {"checkpoint_tp_size": 8}))
    refused(tmp_path, "metadata.tp_size is 4, which disagrees with config.json checkpoint_tp_size 8")
    index = tmp_path / "source" / "model.safetensors.index.json"
    for wrong in (True, "4", 0, 4.0):
        content = json.loads(index.read_text())
        content["metadata"]["tp_size"] = wrong
        index.write_text(json.dumps(content))
        refused(tmp_path, "invalid metadata.tp_size")


@pytest.mark.parametrize("key", ["tp_size", "checkpoint_tp_size"])
def test_a_statement_in_the_folder_is_enough(tmp_path: Path, key: str) -> None:
    metadata = {"tp_size": 4} if key == "tp_size" else None
    decoded = released(tmp_path / "source", FLASH, "bf16-fused", metadata=metadata)
    if key == "checkpoint_tp_size":
        values = json.loads((tmp_path / "source" / "config.json").read_text())
        (tmp_path / "source" / "config.json").write_text(json.dumps(values | {key: 4}))
    convert(tmp_path / "source", tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert torch.equal(found[name].float(), decoded[name])
    assert "checkpoint_tp_size" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    released(tmp_path / "source", FLASH, "bf16-split")
    refused(tmp_path, "either --to", options=ConvertOptions())
    refused(tmp_path, "--checkpoint-tp 4", "--layout fused", options=ConvertOptions("bf16", tp=4))
    refused(tmp_path, "not divisible by 3", options=ConvertOptions("bf16", "fused", 3))
    with pytest.raises(CheckpointError, match="belong to --to"):
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions(layout="split"), like=tmp_path / "source")


def test_targets_that_exist_or_lie_in_the_source(tmp_path: Path) -> None:
    released(tmp_path / "source", FLASH, "bf16-split")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refused(tmp_path, "exists already")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    with pytest.raises(CheckpointError, match="which is read"):
        convert(tmp_path / "source", tmp_path / "source" / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "source", tmp_path / "source")


def test_too_little_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released(tmp_path / "source", FLASH, "bf16-split")
    usage = type("usage", (), {"free": 1000})()
    monkeypatch.setattr("automimo.checkpoint.folder.shutil.disk_usage", lambda path: usage)
    refused(tmp_path, "GiB are free on that disk")


def test_verify_finds_a_byte_that_changed_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released(tmp_path / "source", FLASH, "fp8-fused")
    original = run_module.copy_side_files

    def and_damage(source: Path, target: Path) -> None:
        """The last step before the verification: one bit of one weight flips."""
        original(source, target)
        tensors = load_file(target / "model.safetensors")
        tensors[EXPERT].view(torch.int16)[0, 0] ^= 1
        save_file(tensors, target / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(run_module, "copy_side_files", and_damage)
    with pytest.raises(CheckpointError, match="verification failed") as error:
        convert(tmp_path / "source", tmp_path / "out", verify=True)
    assert EXPERT in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# -- kills ------------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from rich.console import Console
from automimo.convert import ConvertOptions, convert_checkpoint
source, target = sys.argv[1:]
print("ready", flush=True)
convert_checkpoint(source, target, ConvertOptions("fp8", max_shard_bytes=600_000), workers=2, verify=True,
                   console=Console(quiet=True))
"""


def test_killed_conversions_go_on_and_give_the_same_bytes(tmp_path: Path) -> None:
    released(tmp_path / "source", PRO, "bf16-split", shards=2)
    whole = tmp_path / "whole"
    convert(tmp_path / "source", whole, ConvertOptions("fp8", max_shard_bytes=600_000))
    target = tmp_path / "target"
    kills = 0
    for attempt in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "source"), str(target)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            process.wait(0.1 + 0.15 * attempt)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        status = process.wait(60)
        process.stdout.close()
        assert status in (0, -signal.SIGKILL)
        if target.exists():
            break
        kills += 1
    assert kills >= 1
    assert target.exists()
    names = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()} == names
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "source", target, ConvertOptions("fp8", max_shard_bytes=600_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", "whole"]
