"""Cases that a careful reading found: values that must only move, configs that must say what the files hold, and
everything that a result lacks or takes from elsewhere is told."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from released_folders import built, config, released, write_folder
from released_oracle import FLASH, OMNI, PRO, TP2, Shape
from rich.console import Console
from test_convert import assert_same, read_json
from test_convert_like import as_flash
from tiny_folders import tensors_of
from torch import Tensor

from automimo.convert import ConvertOptions, convert_checkpoint
from automimo.convert import run as run_module
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage import SourceOptions

FP8 = torch.float8_e4m3fn
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def convert(source: Path, target: Path, options: ConvertOptions, **more: Any) -> str:
    """Convert and verify; returns what was told."""
    told = StringIO()
    console = Console(file=told, width=400)
    convert_checkpoint(source, target, options, verify=True, workers=2, console=console, **more)
    return told.getvalue()


def clamped(shape: Shape, form: str) -> dict[str, Tensor]:
    """Stored tensors whose largest FP8 code is 240, not 448 as after encoding with amax scales: a block that is decoded
    and encoded again gets another scale."""
    stored = dict(built(shape, form)[0])
    for key, tensor in stored.items():
        if tensor.dtype == FP8:
            stored[key] = tensor.float().clamp(-240, 240).to(FP8)
    return stored


@pytest.mark.parametrize(("shape", "form"), [(FLASH, "fp8-fused"), (TP2, "fp8-fused"), (FLASH, "fp8-flash")])
def test_codes_and_scales_of_whole_blocks_move_between_fused_and_v2_flash(
    tmp_path: Path, shape: Shape, form: str
) -> None:
    stored = clamped(shape, form)
    write_folder(tmp_path / "source", stored, config(shape, form))
    if form == "fp8-fused":
        as_flash(tmp_path / "source")
    there, back = ("split", "fused") if form == "fp8-fused" else ("fused", "split")
    for source, target, layout in (("source", "there", there), ("there", "back", back)):
        told = convert(tmp_path / source, tmp_path / target, ConvertOptions("fp8", layout))
        assert "quantised anew" not in told
    assert not {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"} <= (
        tensors_of(tmp_path / "there").keys()
    )
    assert_same(tensors_of(tmp_path / "back"), stored)


def test_only_blocks_that_the_new_grid_cuts_are_quantised_anew(tmp_path: Path) -> None:
    """PRO in 8 shards to 4: q moves (3072 / 8 rows are whole blocks), k and v of a shard end inside one."""
    stored = clamped(PRO, "fp8-fused")
    write_folder(tmp_path / "source", stored, config(PRO, "fp8-fused"))
    told = convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8", "fused", 4))
    assert "12 quantised anew" in told  # q, k, v of three layers and one MTP block, each group counted whole
    rows, keep = 32 * 192 // 8, 0
    new, old = (t["model.layers.0.self_attn.qkv_proj.weight"] for t in (tensors_of(tmp_path / "out"), stored))
    shards = old.view(torch.uint8).reshape(8, -1, 160)
    for t, shard in enumerate(new.view(torch.uint8).reshape(4, -1, 160)):
        assert torch.equal(shard[:rows], shards[2 * t, :rows])
        assert torch.equal(shard[rows : 2 * rows], shards[2 * t + 1, :rows])
        keep += 1
    assert keep == 4


@pytest.mark.parametrize(
    ("source_form", "form"),
    [("bf16-split", "fp8-fused"), ("bf16-split", "mxfp4-fused"), ("bf16-fused", "fp8-flash")],
)
def test_a_reference_of_another_model_type(tmp_path: Path, source_form: str, form: str) -> None:
    released(tmp_path / "source", FLASH, source_form)
    released(tmp_path / "release", FLASH, form)
    same = {key: config(FLASH, form).get(key, 1e-5) for key in ("rope_theta", "layernorm_epsilon")}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config(FLASH, source_form) | same))
    tp = FLASH.checkpoint_tp if source_form == "bf16-fused" else None
    convert(
        tmp_path / "source", tmp_path / "out", ConvertOptions(source=SourceOptions(tp=tp)), like=tmp_path / "release"
    )
    assert read_json(tmp_path / "out" / "config.json") == config(FLASH, form)


def test_a_reference_of_another_model_is_refused(tmp_path: Path) -> None:
    released(tmp_path / "source", OMNI, "bf16-split")
    released(tmp_path / "release", OMNI, "mxfp4-fused")
    with pytest.raises(CheckpointError, match="rms_norm_eps is 1e-05, in the reference 1e-06"):
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions(), like=tmp_path / "release")


@pytest.mark.parametrize("options", [SourceOptions(tp=4), SourceOptions(layout="contiguous")])
def test_a_reference_that_does_not_tell_its_row_order(tmp_path: Path, options: SourceOptions) -> None:
    form = "bf16-fused" if options.tp else "bf16-contiguous"
    released(tmp_path / "source", FLASH, "bf16-split")
    released(tmp_path / "release", FLASH, form)
    same = config(FLASH, "bf16-split") | {"rope_theta": 10000000}
    (tmp_path / "source" / "config.json").write_text(json.dumps(same))
    with pytest.raises(CheckpointError, match="for it the options are --like-tp, --like-layout"):
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions(), like=tmp_path / "release")
    convert(tmp_path / "source", tmp_path / "out", ConvertOptions(reference=options), like=tmp_path / "release")
    assert_same(tensors_of(tmp_path / "out"), built(FLASH, form)[0])
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    assert index["metadata"]["tp_size"] == (options.tp or 1)


def test_what_comes_from_the_reference_is_told(tmp_path: Path) -> None:
    released(tmp_path / "release", OMNI, "fp8-fused")
    stored = {key: t for key, t in built(OMNI, "bf16-split")[0].items() if key not in (EXPERT, "model.norm.weight")}
    write_folder(tmp_path / "source", stored, config(OMNI, "fp8-fused"))
    told = convert(tmp_path / "source", tmp_path / "out", ConvertOptions(), like=tmp_path / "release")
    assert "warning  2 tensors that only the reference has come from it: " in told
    assert EXPERT in told.split("verified")[0]
    assert "2 taken from the reference" in told


def test_missing_and_unknown_keys_are_told_and_unknown_ones_stay_as_they_are(tmp_path: Path) -> None:
    stored = dict(built(FLASH, "bf16-split")[0])
    del stored[EXPERT]
    strange = "model.layers.0.self_attn.rotary_emb.inv_freq"
    stored[strange] = torch.rand(32)
    write_folder(tmp_path / "source", stored, config(FLASH, "bf16-split"))
    told = convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8"))
    assert f"warning  1 x is missing: {EXPERT}" in told
    assert f"no tensor of a model of this config.json: {strange}" in told
    found = tensors_of(tmp_path / "out")[strange]
    assert found.dtype == torch.float32
    assert torch.equal(found, stored[strange])


def test_the_bias_of_a_fused_projection_is_refused(tmp_path: Path) -> None:
    stored = dict(built(FLASH, "fp8-fused")[0])
    key = "model.layers.0.self_attn.qkv_proj.bias"
    write_folder(tmp_path / "source", stored | {key: torch.zeros(4352)}, config(FLASH, "fp8-fused"))
    with pytest.raises(CheckpointError, match="bias of a fused projection") as error:
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions("bf16"))
    assert key in str(error.value)


@pytest.mark.parametrize("listed", [["model.layers.0.mlp", "lm_head"], [], None])
def test_ignored_layers_are_those_of_the_result(tmp_path: Path, listed: list[str] | None) -> None:
    """A source whose dense layer is plain says so; in the result it is quantised, and no list may deny it."""
    stored = dict(built(FLASH, "fp8-fused")[0])
    plain = built(FLASH, "bf16-split")[0]
    for part in ("gate", "up", "down"):
        key = f"model.layers.0.mlp.{part}_proj.weight"
        del stored[f"{key}_scale_inv"]
        stored[key] = plain[key]
    values = config(FLASH, "fp8-fused")
    outputs = values["quantization_config"]["ignored_layers"]
    values["quantization_config"] |= {"scale_fmt": "ue8m0", "ignored_layers": listed}
    write_folder(tmp_path / "source", stored, values)
    convert(tmp_path / "source", tmp_path / "out", ConvertOptions("mxfp4"))
    found = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert found["ignored_layers"] == (["lm_head", *outputs] if listed else outputs)
    assert "scale_fmt" not in found
    assert tensors_of(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"].dtype == FP8


def test_nan_codes_are_found_in_copies_too(tmp_path: Path) -> None:
    stored = dict(built(FLASH, "fp8-fused")[0])
    damaged = stored[EXPERT].clone()
    damaged.view(torch.uint8)[3, 5] = 0xFF
    write_folder(tmp_path / "source", stored | {EXPERT: damaged}, config(FLASH, "fp8-fused"))
    with pytest.raises(CheckpointError, match="NaN codes") as error:
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8"))
    assert EXPERT in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_shapes_that_are_not_those_of_the_config(tmp_path: Path) -> None:
    for key, value in (
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(768, 1)),
        ("model.layers.0.mlp.gate_proj.weight", torch.ones(384)),
    ):
        stored = dict(built(FLASH, "bf16-split")[0])
        folder = tmp_path / key
        write_folder(folder, stored | {key: value}, config(FLASH, "bf16-split"))
        with pytest.raises(CheckpointError, match="shape") as error:
            convert(folder, tmp_path / "out", ConvertOptions("fp8", "fused", 4))
        assert key in str(error.value)


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released(tmp_path / "source", FLASH, "bf16-split")
    original = run_module.copy_side_files

    def and_touch(source: Path, target: Path) -> None:
        original(source, target)
        shard = next((tmp_path / "source").glob("model_pp0*.safetensors"))
        shard.write_bytes(shard.read_bytes())

    monkeypatch.setattr(run_module, "copy_side_files", and_touch)
    with pytest.raises(CheckpointError, match="changed while they were converted"):
        convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_in_the_reference(tmp_path: Path) -> None:
    released(tmp_path / "source", FLASH, "bf16-split")
    released(tmp_path / "release", FLASH, "fp8-flash")
    with pytest.raises(CheckpointError, match="which is read"):
        convert(tmp_path / "source", tmp_path / "release" / "out", ConvertOptions(), like=tmp_path / "release")
