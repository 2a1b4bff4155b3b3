"""Models read straight from every released form, and runs that start from one and end in its layout."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from released_folders import config, released
from released_forms import CASES, open_stored, options_of
from released_oracle import FLASH, OMNI, PRO, Shape
from rich.console import Console
from test_convert import assert_same
from tiny_folders import tensors_of

from automimo.checkpoint import CheckpointReader
from automimo.checkpoint.resume import load_step
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, model_class_of
from automimo.mimo_v2_flash.storage.steps import LARGEST_STEPS, rounding_steps
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, save_tokenizer
from automimo.mimo_v2_flash.weights import checkpoint_places, is_carried
from automimo.training import parse_recipe, run_training

SOURCE_KEYS = {"bf16-fused": "source_tp: 4", "fp8-flash-own": "flash_v_scales: own"}


def load(folder: Path, shape: Shape, form: str, dtype: torch.dtype) -> MiMoV2FlashForCausalLM:
    options = options_of(shape, form)
    return model_class_of(folder).from_pretrained(str(folder), dtype=dtype, source_options=options)


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_every_parameter_is_what_the_file_means(tmp_path: Path, shape: Shape, form: str) -> None:
    decoded = released(tmp_path / "model", shape, form, shards=2)
    model = load(tmp_path / "model", shape, form, torch.float32)
    state = model.state_dict()
    places = checkpoint_places(state)
    assert places.keys() == {key for key in decoded if not is_carried(key)}
    for key, place in places.items():
        assert torch.equal(place.view(state[place.parameter]), decoded[key]), key


@pytest.mark.parametrize(("shape", "form"), [(OMNI, "mxfp4-fused"), (PRO, "fp8-fused"), (FLASH, "fp8-flash")])
def test_an_untrained_model_goes_back_byte_for_byte(tmp_path: Path, shape: Shape, form: str) -> None:
    released(tmp_path / "model", shape, form, shards=2)
    model = load(tmp_path / "model", shape, form, torch.float32)
    model.save_pretrained(tmp_path / "out", layout="source")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "model"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config(shape, form)
    assert (tmp_path / "out" / "dflash" / "config.json").is_file()


def test_a_plain_export_declares_and_holds_nothing_quantised(tmp_path: Path) -> None:
    decoded = released(tmp_path / "model", OMNI, "mxfp4-fused")
    source = tensors_of(tmp_path / "model")
    model = load(tmp_path / "model", OMNI, "mxfp4-fused", torch.bfloat16)
    model.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == decoded.keys()
    for key, value in decoded.items():
        same_dtype = key in source and source[key].dtype not in (torch.uint8, torch.float8_e4m3fn)
        expected = value.to(source[key].dtype if same_dtype else torch.bfloat16)
        assert found[key].dtype == expected.dtype, key
        assert torch.equal(found[key], expected), key
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["attention_projection_layout"] == "split"


RECIPE = """
output: OUT
model: {path: MODEL, train: ["*self_attn*", "*norm*", "*mlp.gate.weight"], EXTRA}
data:
  train:
    - {kind: text, path: DATA}
  sequence_length: 32
optim: {lr: 0.01}
train: {steps: 2, batch: 2, micro_batch: 1, evaluate_every: 0, save_every: 0, final: source}
"""


def trainable_folder(tmp_path: Path, shape: Shape, form: str) -> Path:
    folder = tmp_path / "model"
    released(folder, shape, form, shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    words = ["gate", "expert", "window", "sink", "router", "token"]
    save_tokenizer(build_tokenizer([" ".join(words)], 300), folder)
    lines = [json.dumps({"text": " ".join(words[i:] + words[:i])}) for i in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("form", ["fp8-flash", "fp8-flash-own", "fp8-fused", "mxfp4-fused", "bf16-fused"])
def test_a_run_ends_in_the_layout_it_started_from(tmp_path: Path, form: str) -> None:
    folder = trainable_folder(tmp_path, FLASH, form)
    extra = SOURCE_KEYS.get(form, "dtype: float32")
    text = RECIPE.replace("OUT", str(tmp_path / "run")).replace("MODEL", str(folder))
    recipe = parse_recipe(text.replace("DATA", str(tmp_path / "train.jsonl")).replace("EXTRA", extra))
    assert run_training(recipe, dry_run=True, console=Console(file=StringIO())) == 0
    assert run_training(recipe, console=Console(file=StringIO())) == 0
    before, after = tensors_of(folder), tensors_of(tmp_path / "run" / "final")
    assert after.keys() == before.keys()
    trained = {
        key
        for key in before
        if key.startswith(("model.layers", "model.norm")) and any(w in key for w in ("attn", "norm"))
    }
    trained |= {key for key in before if key.endswith("mlp.gate.weight")}
    trained -= {key for key in before if key.endswith("attention_sink_bias")}
    assert_same(
        {k: t for k, t in after.items() if k not in trained}, {k: t for k, t in before.items() if k not in trained}
    )
    assert all((after[key].dtype, after[key].shape) == (before[key].dtype, before[key].shape) for key in trained)
    saved = load_step(tmp_path / "run" / "checkpoints" / "step-2")[0]
    masters = {name.removeprefix("model/"): value for name, value in saved.items() if name.startswith("model/")}
    with CheckpointReader(tmp_path / "run" / "final") as reader:
        options = options_of(FLASH, form) if form != "bf16-fused" else None  # the index says it now
        stored = open_stored(reader, options)
        for key in (key for key in masters if "self_attn" in key and "sink" not in key):
            matrix, value = stored.matrices[key], masters[key]
            assert not torch.equal(value, load(folder, FLASH, form, torch.float32).state_dict()[key])
            if matrix.encoding == "plain":
                assert torch.equal(stored.read(key), value.to(stored.read(key).dtype))
            else:
                assert rounding_steps(reader, matrix, value, 0, matrix.shape[0]) <= LARGEST_STEPS["fp8"]


def test_a_recipe_that_does_not_tell_the_row_order_fails_in_the_dry_run(tmp_path: Path) -> None:
    folder = trainable_folder(tmp_path, FLASH, "bf16-fused")
    text = RECIPE.replace("OUT", str(tmp_path / "run")).replace("MODEL", str(folder)).replace("EXTRA", "")
    recipe = parse_recipe(text.replace("DATA", str(tmp_path / "train.jsonl")))
    with pytest.raises(CheckpointError, match=r"model\.source_tp"):
        run_training(recipe, dry_run=True, console=Console(file=StringIO()))
