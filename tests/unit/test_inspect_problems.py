"""The verb `inspect` on checkpoint folders that are wrong: every problem is found, and nothing else is called one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inspect_output import inspect, line
from released_folders import built, config, released, write_folder
from released_oracle import FLASH, OMNI, PRO, Shape
from torch import Tensor

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage import SourceOptions

Stored = dict[str, Tensor]
Config = dict[str, Any]

EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
MTP_NORM = "model.mtp.layers.0.enorm.weight"


def drop(*keys: str) -> Callable[[Stored, Config], None]:
    def change(stored: Stored, _: Config) -> None:
        for key in keys:
            del stored[key]

    return change


def put(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Callable[[Stored, Config], None]:
    def change(stored: Stored, _: Config) -> None:
        stored[key] = torch.ones(shape).to(dtype)

    return change


def set_config(**changes: Any) -> Callable[[Stored, Config], None]:
    def change(_: Stored, file: Config) -> None:
        file.update(changes)

    return change


def drop_config(key: str) -> Callable[[Stored, Config], None]:
    def change(_: Stored, file: Config) -> None:
        del file[key]

    return change


def quantisation(**changes: Any) -> Callable[[Stored, Config], None]:
    def change(_: Stored, file: Config) -> None:
        file["quantization_config"] = {**file.get("quantization_config", {}), **changes}

    return change


def ignore(*names: str) -> Callable[[Stored, Config], None]:
    def change(_: Stored, file: Config) -> None:
        file["quantization_config"]["ignored_layers"].extend(names)

    return change


def drop_prefix(*prefixes: str) -> Callable[[Stored, Config], None]:
    def change(stored: Stored, _: Config) -> None:
        for key in [key for key in stored if key.startswith(prefixes)]:
            del stored[key]

    return change


def plain_expert(stored: Stored, _: Config) -> None:
    """One expert matrix is not quantised, and nobody says so."""
    stored[EXPERT] = torch.ones(stored[EXPERT].shape).bfloat16()
    del stored[f"{EXPERT}_scale_inv"]


def split_layer(stored: Stored, _: Config) -> None:
    """Layer 1 is fused, layer 2 is split."""
    other = built(FLASH, "fp8-split-plain")[0]
    for name in [name for name in stored if name.startswith("model.layers.2.self_attn.qkv_proj")]:
        del stored[name]
    stored.update({k: v for k, v in other.items() if re.match(r"model\.layers\.2\.self_attn\.[qkv]_proj", k)})


PROBLEMS: list[tuple[str, Shape, str, Callable[[Stored, Config], None], tuple[str, ...]]] = [
    # What `describe` finds.
    ("no-weight", FLASH, "fp8-fused", drop(EXPERT), ("is a scale without its weight", EXPERT, "is missing")),
    ("no-scale", FLASH, "fp8-fused", drop(f"{EXPERT}_scale_inv"), ("F8_E4M3 without its scale", EXPERT)),
    ("no-mxfp4-scale", FLASH, "mxfp4-fused", drop(f"{EXPERT}_scale"), ("U8 without its scale", EXPERT)),
    ("dtype", FLASH, "fp8-fused", put("model.norm.weight", (160,), torch.int32), ("is stored as I32",)),
    ("tp-conflict", FLASH, "fp8-fused", set_config(checkpoint_tp_size=2), ("checkpoint_tp_size 2 disagrees",)),
    # Keys.
    ("missing", FLASH, "fp8-fused", drop(EXPERT, f"{EXPERT}_scale_inv"), ("is missing (1 tensor)", EXPERT)),
    ("missing-sink", PRO, "mxfp4-fused", drop("model.layers.1.self_attn.attention_sink_bias"), ("is missing", "sink")),
    ("missing-media", OMNI, "fp8-fused", drop("visual.blocks.1.attn.sinks"), ("is missing", "visual.blocks.1.attn")),
    (
        "missing-mtp-block", FLASH, "fp8-fused", drop_prefix("model.mtp.layers.0."),
        ("is missing (14 tensors)", MTP_NORM, "is unknown", "model.mtp.layers.1.enorm.weight"),
    ),
    ("unknown", FLASH, "fp8-fused", put("model.layers.1.mlp.extra", (3,)), ("is unknown", "model.layers.1.mlp.extra")),
    ("unknown-layer", FLASH, "fp8-fused", put("model.layers.7.input_layernorm.weight", (160,)), ("is unknown",)),
    ("unknown-part", FLASH, "fp8-fused", put("value_head.weight", (3,)), ("is unknown", "value_head.weight")),
    ("shape", FLASH, "fp8-fused", put("model.norm.weight", (8,)), ("has shape [8], config.json asks for [160]",)),
    (
        "media-shape", OMNI, "fp8-fused", put("speech_embeddings.3.weight", (8, 32)),
        ("has shape [8, 32], config.json asks for [40, 32]", "speech_embeddings.3"),
    ),
    (
        "no-vision", OMNI, "fp8-fused", drop_prefix("visual."),
        ("vision: there are no visual.* tensors but a vision_config",),
    ),
    (
        "no-audio-config", OMNI, "fp8-fused", drop_config("audio_config"),
        ("audio: there are tensors but no audio_config",),
    ),
    (
        "bad-vision-config", OMNI, "fp8-fused", set_config(vision_config={"depth": 4}),
        ("config.json: vision_config.hidden_size", "got None"),
    ),
    # The layout.
    (
        "layout-split", FLASH, "fp8-fused", set_config(attention_projection_layout="split"),
        ("attention_projection_layout is 'split' but the projections are fused",),
    ),
    (
        "layout-absent", FLASH, "fp8-fused", drop_config("attention_projection_layout"),
        ("attention_projection_layout is absent, which readers take for split",),
    ),
    (
        "layout-fused", PRO, "bf16-split", set_config(attention_projection_layout="fused_qkv"),
        ("attention_projection_layout is 'fused_qkv' but the projections are split",),
    ),
    ("layout-mixed", FLASH, "fp8-fused", split_layer, ("is split while other layers are fused",)),
    # The quantisation.
    ("no-config", FLASH, "fp8-fused", drop_config("quantization_config"), ("has no quantization_config, but",)),
    ("null-config", FLASH, "fp8-fused", set_config(quantization_config=None), ("has no quantization_config, but",)),
    (
        "config-only", FLASH, "bf16-split", quantisation(quant_method="fp8"),
        ("has a quantization_config, but no tensor is quantised",),
    ),
    (
        "store-fp8", FLASH, "mxfp4-fused", quantisation(store_dtype="fp8"),
        ("store_dtype is 'fp8', but experts are stored in MXFP4",),
    ),
    (
        "store-mxfp4", FLASH, "fp8-fused", quantisation(store_dtype="mxfp4"),
        ("store_dtype is 'mxfp4', but no expert is stored in MXFP4",),
    ),
    ("group", FLASH, "mxfp4-fused", quantisation(mxfp4_block_size=16), ("mxfp4_block_size is 16; MXFP4 has 32",)),
    (
        "blocks", FLASH, "fp8-fused", quantisation(weight_block_size=[64, 64]),
        ("weight_block_size is [64, 64]; FP8 blocks are [128, 128]",),
    ),
    (
        "ignored", FLASH, "fp8-fused", ignore("model.layers.0.mlp.up_proj"),
        ("is quantised, but config.json lists it", "model.layers.0.mlp.up_proj.weight"),
    ),
    (
        "ignored-parent", FLASH, "fp8-fused", ignore("model.layers.0.mlp"),
        ("is quantised, but config.json lists it", "(3 tensors)"),
    ),
    (
        "ignored-fused", FLASH, "fp8-fused", ignore("model.layers.0.self_attn.qkv_proj"),
        ("is quantised, but config.json lists it", "model.layers.0.self_attn.qkv_proj.weight"),
    ),
    ("not-ignored", FLASH, "fp8-fused", plain_expert, ("is stored as BF16, but config.json does not list", EXPERT)),
    # The rest.
    ("bias", FLASH, "fp8-fused", put(BIAS, (12,)), ("is stored as BF16; correction biases are F32", BIAS)),
    (
        "mtp-number", FLASH, "fp8-fused", set_config(num_nextn_predict_layers=3),
        ("num_nextn_predict_layers is 3, but there are tensors of 2 MTP layers",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "form", "change", "parts"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
def test_a_problem_is_found_and_nothing_else(
    shape: Shape, form: str, change: Callable[[Stored, Config], None], parts: tuple[str, ...], tmp_path: Path
) -> None:
    stored, file = dict(built(shape, form)[0]), config(shape, form)
    change(stored, file)
    write_folder(tmp_path / "m", stored, file, side_files=False)
    code, text = inspect(tmp_path / "m")
    assert code == 1, text
    _, count, problems = re.split(r"\n(\d+) problems? \(exit code 1\)\n", text)
    for part in parts:
        assert part in problems, text
    # A weight that is gone is missing as well as missed by its scale; of two MTP blocks the first is number 0.
    assert int(count) == max(1, sum(part.startswith(("is missing", "is unknown", "is a scale")) for part in parts)), (
        text
    )
    for label in ("parameters", "attention", "stored as", "modalities", "layers", "router", "side files"):
        line(text, label)


def test_a_file_that_nothing_mentions(tmp_path: Path) -> None:
    released(tmp_path / "m", FLASH, "bf16-split", shards=2)
    other = tmp_path / "m" / "model_pp0_ep0_shard0.safetensors"
    (tmp_path / "m" / "left-over.safetensors").write_bytes(other.read_bytes())
    code, text = inspect(tmp_path / "m")
    assert code == 1
    assert "  left-over.safetensors: the index does not mention this file" in text


def test_an_ignored_layer_that_is_plain_is_no_problem(tmp_path: Path) -> None:
    stored, file = dict(built(FLASH, "fp8-fused")[0]), config(FLASH, "fp8-fused")
    plain_expert(stored, file)
    file["quantization_config"]["ignored_layers"].append(EXPERT.removesuffix(".weight"))
    write_folder(tmp_path / "m", stored, file, side_files=False)
    assert inspect(tmp_path / "m")[0] == 0


def test_many_keys_are_folded(tmp_path: Path) -> None:
    stored, file = dict(built(FLASH, "fp8-fused")[0]), config(FLASH, "fp8-fused")
    drop_prefix(*(f"model.layers.{layer}.mlp.experts." for layer in (1, 2)))(stored, file)
    write_folder(tmp_path / "m", stored, file, side_files=False)
    code, text = inspect(tmp_path / "m")
    assert code == 1
    assert "  is missing (72 tensors):" in text
    assert "    model.layers.{1..2}.mlp.experts.{0..11}.down_proj.weight (24)" in text


def test_options_that_contradict_the_files(tmp_path: Path) -> None:
    released(tmp_path / "m", FLASH, "fp8-fused", side_files=False)
    code, text = inspect(tmp_path / "m", SourceOptions(tp=2))
    assert code == 1
    assert "--source-tp 2 disagrees with" in text
    assert inspect(tmp_path / "m", SourceOptions(layout="split"))[0] == 1


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(folder)
    released(folder, FLASH, "fp8-fused", shards=2, side_files=False)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        inspect(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        inspect(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        inspect(folder)
    (folder / "config.json").write_text(text)
    shard = folder / "model_pp0_ep0_shard1.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        inspect(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match="shard1"):
        inspect(folder)


def test_a_hub_id_is_looked_up_in_the_cache_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network is used")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="hf download owner/name"):
        inspect("owner/name")
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    released(snapshot, FLASH, "fp8-fused")
    refs = tmp_path / "cache" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert inspect("owner/name")[0] == 0
