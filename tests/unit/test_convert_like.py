"""Round trips: back to the form of a reference, and from one quantised form to another."""

import json
from pathlib import Path

import pytest
import torch
from released_folders import built, config, released, values, write_folder
from released_oracle import FLASH, OMNI, PRO, TP2, Shape, store
from safetensors.torch import load_file, save_file
from test_convert import assert_same, convert, read_json
from tiny_folders import tensors_of
from torch import Tensor

from automimo.convert import ConvertOptions
from automimo.errors import CheckpointError

LIKE = ConvertOptions()
BF16 = ConvertOptions("bf16")


def side_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not (path.parent == folder and path.suffix == ".safetensors")
    }


@pytest.mark.parametrize(
    ("shape", "form"),
    [(OMNI, "mxfp4-fused"), (PRO, "mxfp4-fused"), (OMNI, "fp8-fused"), (PRO, "fp8-fused"), (FLASH, "fp8-flash")],
)
def test_an_untouched_bf16_copy_goes_back_to_exactly_the_released_form(tmp_path: Path, shape: Shape, form: str) -> None:
    released(tmp_path / "release", shape, form, shards=3)
    convert(tmp_path / "release", tmp_path / "bf16", BF16)
    convert(tmp_path / "bf16", tmp_path / "back", LIKE, like=tmp_path / "release")
    for path in (tmp_path / "release").glob("*.safetensors"):
        assert_same(load_file(tmp_path / "back" / path.name), load_file(path))
    before, after = side_files(tmp_path / "release"), side_files(tmp_path / "back")
    for name in ("config.json", "model.safetensors.index.json"):
        assert json.loads(after.pop(name)) == json.loads(before.pop(name))
    assert after == before


def fine_tuned(folder: Path, changed: dict[str, Tensor]) -> None:
    """Change tensors of a BF16 copy and drop all that a text-only trainer loses: MTP, towers, side files."""
    tensors = tensors_of(folder)
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "config.json":
            path.unlink()
    kept = {
        key: t for key, t in tensors.items() if key.startswith(("model.layers.", "model.embed", "model.norm", "lm_"))
    }
    save_file(kept | {key: t.to(kept[key].dtype) for key, t in changed.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("form", ["fp8-fused", "mxfp4-fused"])
def test_a_fine_tune_takes_everything_else_from_the_reference(tmp_path: Path, form: str) -> None:
    released(tmp_path / "release", OMNI, form, shards=2)
    convert(tmp_path / "release", tmp_path / "tuned", BF16)
    new = values(OMNI, seed=1)
    attention = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    expert = "model.layers.1.mlp.experts.11.up_proj.weight"
    others = ["model.layers.1.mlp.gate.weight", "model.norm.weight"]
    again, means = store(new, OMNI, form)
    new[expert] = means[expert]  # in MXFP4 the oracle's experts are random blocks
    fine_tuned(tmp_path / "tuned", {key: new[key] for key in (*attention, expert, *others)})
    found = convert(tmp_path / "tuned", tmp_path / "back", LIKE, like=tmp_path / "release")
    expected = dict(built(OMNI, form)[0])
    for key in list(expected):
        if key.startswith(("model.layers.0.self_attn.qkv_proj", expert)) or key in others:
            expected[key] = again[key]
    assert_same(found, expected)
    before, after = side_files(tmp_path / "release"), side_files(tmp_path / "back")
    assert after.keys() == before.keys()
    assert read_json(tmp_path / "back" / "config.json") == config(OMNI, form)


def drop_k(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def add_key(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.12.up_proj.weight"] = torch.ones(96, 160)


def add_tower(tensors: dict[str, Tensor]) -> None:
    tensors["visual.merger.mlp.0.weight"] = torch.ones(4, 4)


def other_shape(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = torch.ones(321, 160)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_k, ["model.layers.1.self_attn.q_proj.weight", "not model.layers.1.self_attn.k_proj.weight"]),
        (add_key, ["1 tensors", "would be lost", "experts.12.up_proj"]),
        (add_tower, ["1 tensors", "would be lost", "visual.merger.mlp.0.weight"]),
        (other_shape, ["lm_head.weight is [321, 160], in the reference [320, 160]"]),
    ],
)
def test_a_source_that_does_not_fit_the_reference(tmp_path: Path, change, words: list[str]) -> None:
    released(tmp_path / "release", FLASH, "mxfp4-fused")
    stored = dict(built(FLASH, "bf16-split")[0])
    change(stored)
    write_folder(tmp_path / "tuned", stored, config(FLASH, "mxfp4-fused"))
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "tuned", tmp_path / "back", LIKE, like=tmp_path / "release")
    for word in words:
        assert word in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release", "tuned"]


# -- from one quantised form to another -------------------------------------------------------------------------------


def as_flash(folder: Path) -> None:
    """Make config.json say that this is a V2-Flash."""
    changed = read_json(folder / "config.json") | {"model_type": "mimo_v2_flash", "architectures": ["x"]}
    del changed["rope_scaling"]
    (folder / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize("shape", [FLASH, TP2], ids=["flash", "tp2"])
def test_fused_fp8_to_the_v2_flash_form_and_back_keeps_every_value(tmp_path: Path, shape: Shape) -> None:
    """The 320-row strip of k and v of V2-Flash is the end of a shard of V2.5: the codes and scales only move."""
    decoded = released(tmp_path / "source", shape, "fp8-fused")
    as_flash(tmp_path / "source")
    found = convert(tmp_path / "source", tmp_path / "split", ConvertOptions("fp8", layout="split"))
    assert "model.layers.0.self_attn.qkv_proj.weight" not in found
    assert found["model.layers.0.self_attn.k_proj.weight_scale_inv"].shape[0] == 2 * shape.checkpoint_tp
    exact = convert(tmp_path / "split", tmp_path / "bf16", BF16)
    for key, value in decoded.items():
        if key.endswith("_proj.weight"):
            assert torch.equal(exact[key], value.to(torch.bfloat16)), key
    back = convert(tmp_path / "split", tmp_path / "fused", ConvertOptions("fp8", layout="fused"))
    assert_same(back, built(shape, "fp8-fused")[0])


@pytest.mark.parametrize(("shape", "form"), [(FLASH, "fp8-fused"), (PRO, "fp8-fused"), (TP2, "fp8-flash")])
def test_fp8_through_bf16_stays_within_a_step(tmp_path: Path, shape: Shape, form: str) -> None:
    decoded = released(tmp_path / "source", shape, form)
    convert(tmp_path / "source", tmp_path / "bf16", BF16)
    layout = "split" if form == "fp8-flash" else "fused"
    convert(tmp_path / "bf16", tmp_path / "fp8", ConvertOptions("fp8", layout=layout))
    again = convert(tmp_path / "fp8", tmp_path / "again", BF16)
    quantised = [key for key in decoded if key.endswith("_proj.weight") and "o_proj" not in key and key[:3] == "mod"]
    assert len(quantised) > 60
    for key in quantised:
        before, after = decoded[key], again[key].float()
        # A step of e4m3 is an eighth of the power of two below a value; below 2^-6 of the code range the grid is even,
        # and no scale here is above twice the largest value of the whole matrix / 448.
        even = 2 * before.abs().max() / 448 * 2**-9
        step = torch.exp2(torch.floor(torch.log2(before.abs().clamp(min=1e-30)))) / 8
        assert bool(((after - before).abs() <= torch.maximum(step, even)).all()), key


@pytest.mark.parametrize("shape", [OMNI, PRO, TP2], ids=["omni", "pro", "tp2"])
def test_mxfp4_through_bf16_and_back_gives_the_released_bytes(tmp_path: Path, shape: Shape) -> None:
    released(tmp_path / "source", shape, "mxfp4-fused")
    convert(tmp_path / "source", tmp_path / "bf16", BF16)
    back = convert(tmp_path / "bf16", tmp_path / "back", ConvertOptions("mxfp4"))
    expected = built(shape, "mxfp4-fused")[0]
    experts = {key: t for key, t in expected.items() if ".experts." in key}
    assert len(experts) == 2 * 3 * 12 * 2
    assert_same({key: back[key] for key in experts}, experts)
    assert back.keys() == expected.keys()
    written = read_json(tmp_path / "back" / "config.json")["quantization_config"]
    assert (written["store_dtype"], written["mxfp4_block_size"]) == ("mxfp4", 32)


@pytest.mark.parametrize(("form", "to"), [("fp8-fused", "mxfp4"), ("mxfp4-fused", "fp8"), ("fp8-flash", "mxfp4")])
def test_between_the_two_quantisations(tmp_path: Path, form: str, to: str) -> None:
    """`convert` verifies that every value is within its rounding; the config must say what the files hold."""
    released(tmp_path / "source", FLASH, form)
    found = convert(tmp_path / "source", tmp_path / "out", ConvertOptions(to))
    quantisation = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    expert = "model.layers.1.mlp.experts.0.up_proj.weight"
    if to == "mxfp4":
        assert found[expert].dtype == torch.uint8
        assert quantisation["mxfp4_block_size"] == 32
    else:
        assert found[expert].dtype == torch.float8_e4m3fn
        assert "mxfp4_block_size" not in quantisation
        assert quantisation["store_dtype"] == "fp8"
    untouched = [key for key in found if not key.startswith("model.layers") or ".experts." not in key]
    source = built(FLASH, form)[0]
    assert_same({key: found[key] for key in untouched}, {key: source[key] for key in untouched})
