"""Conversions between all forms, against folders that an independent oracle wrote."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from released_folders import built, config, released
from released_forms import CASES, options_of
from released_oracle import FLASH, FLASH_FORMS, OMNI, PRO, TP2, Shape
from rich.console import Console
from tiny_folders import tensors_of
from torch import Tensor

from automimo.checkpoint import Progress
from automimo.convert import ConvertOptions, convert_checkpoint
from automimo.convert.progress import ByteProgress

MEDIA = ("visual.", "audio_encoder.", "speech_embeddings.")
KEPT = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias", ".attention_sink_bias")


def convert(source: Path, target: Path, options: ConvertOptions, **more: Any) -> dict[str, Tensor]:
    convert_checkpoint(source, target, options, workers=2, verify=True, console=Console(quiet=True), **more)
    return tensors_of(target)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(bits(found[key]), bits(tensor)), key


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_to_bf16(tmp_path: Path, shape: Shape, form: str) -> None:
    decoded = released(tmp_path / "source", shape, form, shards=2)
    source = tensors_of(tmp_path / "source")
    found = convert(tmp_path / "source", tmp_path / "out", ConvertOptions("bf16", source=options_of(shape, form)))
    expected = {
        key: source[key] if key.startswith(MEDIA) or key.endswith(KEPT) else value.to(torch.bfloat16)
        for key, value in decoded.items()
    }
    assert_same(found, expected)
    values = read_json(tmp_path / "out" / "config.json")
    assert "quantization_config" not in values
    assert values.get("attention_projection_layout", "split") == "split"
    assert ("attention_projection_layout" in values) == (values["model_type"] == "mimo_v2")


@pytest.mark.parametrize("shape", [FLASH, TP2, PRO, OMNI], ids=["flash", "tp2", "pro", "omni"])
def test_fused_bf16_has_the_released_row_order(tmp_path: Path, shape: Shape) -> None:
    released(tmp_path / "source", shape, "bf16-split")
    found = convert(tmp_path / "source", tmp_path / "out", ConvertOptions("bf16", layout="fused"))
    assert_same(found, built(shape, "bf16-fused")[0])
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    assert index["metadata"] == {"tp_size": shape.checkpoint_tp, "total_size": sum(t.nbytes for t in found.values())}
    # and back again, without being told anything
    assert_same(convert(tmp_path / "out", tmp_path / "back", ConvertOptions("bf16")), built(shape, "bf16-split")[0])


@pytest.mark.parametrize("source_form", ["bf16-split", "bf16-fused", "bf16-contiguous"])
@pytest.mark.parametrize(
    ("shape", "form"),
    [(FLASH, "fp8-flash"), (TP2, "fp8-flash"), (FLASH, "fp8-fused"), (PRO, "fp8-fused"), (OMNI, "fp8-fused")],
)
def test_to_fp8_gives_the_bytes_of_the_oracle(tmp_path: Path, shape: Shape, source_form: str, form: str) -> None:
    released(tmp_path / "source", shape, source_form)
    options = options_of(shape, source_form)
    layout, tp = ("split", None) if form in FLASH_FORMS else ("fused", shape.checkpoint_tp)
    values = read_json(tmp_path / "source" / "config.json")
    values["model_type"] = config(shape, form)["model_type"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(values))
    found = convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8", layout, tp, options))
    assert_same(found, built(shape, form)[0])
    written = read_json(tmp_path / "out" / "config.json")
    expected = config(shape, form)["quantization_config"]
    if values["model_type"] == "mimo_v2" and shape is FLASH:
        expected.pop("store_dtype")  # without towers a mimo_v2 is taken for V2.5-Pro, whose file has no such key
    assert written["quantization_config"] == expected


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    released(tmp_path / "source", OMNI, "mxfp4-fused", shards=3)
    contents = []
    for workers in (1, 3):
        target = tmp_path / str(workers)
        options = ConvertOptions("fp8", max_shard_bytes=2**20)
        convert_checkpoint(tmp_path / "source", target, options, workers=workers, console=Console(quiet=True))
        contents.append({path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()})
    assert contents[0] == contents[1]
    assert len([name for name in contents[0] if name.suffix == ".safetensors" and len(name.parts) == 1]) > 2


def test_a_foreign_quantisation_leaves_nothing_in_the_config(tmp_path: Path) -> None:
    """A BF16 copy whose config still speaks of another tool's format: the result says what it holds."""
    released(tmp_path / "source", OMNI, "bf16-split")
    values = read_json(tmp_path / "source" / "config.json")
    foreign = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (tmp_path / "source" / "config.json").write_text(json.dumps(values | {"quantization_config": foreign}))
    convert(tmp_path / "source", tmp_path / "out", ConvertOptions("fp8"))
    found = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert found == config(OMNI, "fp8-fused")["quantization_config"]
    keys = {*values, "quantization_config", "attention_projection_layout"}
    assert read_json(tmp_path / "out" / "config.json").keys() == keys


def test_progress_tells_speed_and_time_left() -> None:
    lines = StringIO()
    with ByteProgress(Console(file=lines, width=120), "convert") as display:
        for seconds in (1.0, 11.0, 12.0, 22.0):
            display.show(Progress(int(seconds * 1e9), 44 * 10**9, seconds))
    assert lines.getvalue() == "convert 25%, 1.00 GB/s, ETA 0:00:33\nconvert 50%, 1.00 GB/s, ETA 0:00:22\n"
    screen = StringIO()
    with ByteProgress(Console(file=screen, width=120, force_terminal=True), "convert") as display:
        display.show(Progress(2 * 10**9, 4 * 10**9, 1.0))
    assert "convert" in screen.getvalue()
    assert "50 %" in screen.getvalue()
    assert "2.00 GB/s" in screen.getvalue()
