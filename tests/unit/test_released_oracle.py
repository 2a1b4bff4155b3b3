"""The oracle itself: numbers of the published layouts, values within the error of their formats, readable folders."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from released_folders import built, config, released, values
from released_oracle import (
    E4M3,
    FLASH,
    FORMS,
    FP8_SUFFIXES,
    OMNI,
    PRO,
    TP2,
    Shape,
    decode_fp8_plain,
    decode_mxfp4,
    encode_fp8,
    split_shards,
    store,
)
from safetensors import safe_open
from torch import Tensor

SHAPES = {"flash": FLASH, "omni": OMNI, "pro": PRO, "tp2": TP2}
CASES = [
    *[("flash", form) for form in FORMS],
    *[("omni", form) for form in ("bf16-split", "mxfp4-fused")],
    *[("pro", form) for form in ("bf16-contiguous", "fp8-fused", "mxfp4-fused")],
    *[("tp2", form) for form in ("bf16-fused", "fp8-fused", "fp8-flash", "fp8-flash-own", "mxfp4-fused")],
]

# Head counts of the releases; rows do not depend on the hidden size, which would only cost time.
SMALL = {"hidden_size": 2, "pattern": (0, 1), "n_routed_experts": 1, "mtp_layers": 1}
REAL_FLASH = replace(FLASH, **SMALL, num_attention_heads=64, swa_num_attention_heads=64)
REAL_PRO = replace(PRO, **SMALL, num_attention_heads=128, swa_num_attention_heads=128)
FULL, SLIDING, MTP = "model.layers.0.self_attn.", "model.layers.1.self_attn.", "model.mtp.layers.0.self_attn."


@pytest.mark.parametrize(
    ("shape", "form", "rows"),
    [
        (
            REAL_FLASH,
            "fp8-fused",
            {FULL + "qkv": (13568, 108), SLIDING + "qkv": (14848, 116), MTP + "qkv": (14848, 116)},
        ),
        (REAL_PRO, "fp8-fused", {FULL + "qkv": (27136, 216), SLIDING + "qkv": (27136, 216), MTP + "qkv": (27136, 216)}),
        (REAL_FLASH, "fp8-contiguous", {FULL + "qkv": (13568, 106), SLIDING + "qkv": (14848, 116)}),
        (REAL_PRO, "fp8-contiguous", {FULL + "qkv": (27136, 212)}),
        (REAL_FLASH, "fp8-split-plain", {FULL + "q": (12288, 96), FULL + "k": (768, 6), FULL + "v": (512, 4)}),
        (REAL_FLASH, "fp8-flash", {FULL + "q": (12288, 96), FULL + "k": (768, 8), FULL + "v": (512, 4)}),
        (REAL_FLASH, "fp8-flash", {SLIDING + "k": (1536, 12), SLIDING + "v": (1024, 8), MTP + "k": (1536, 12)}),
        (REAL_FLASH, "fp8-flash-own", {FULL + "k": (768, 8), FULL + "v": (512, 4), SLIDING + "k": (1536, 12)}),
    ],
)
def test_rows_and_scale_rows_of_the_releases(shape: Shape, form: str, rows: dict[str, tuple[int, int]]) -> None:
    logical = {key: x for key, x in values(shape).items() if ".self_attn." in key}
    stored, _ = store(logical, shape, form)
    for name, (weight_rows, scale_rows) in rows.items():
        assert stored[f"{name}_proj.weight"].shape == (weight_rows, 2)
        assert stored[f"{name}_proj.weight_scale_inv"].shape == (scale_rows, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_scale_rows_of_full_layers_fit_one_shard_count(name: str) -> None:
    stored, _ = built(SHAPES[name], "fp8-fused")
    rows = stored[FULL + "qkv_proj.weight"].shape[0]
    scale_rows = stored[FULL + "qkv_proj.weight_scale_inv"].shape[0]
    fitting = [t for t in range(1, rows + 1) if rows % t == 0 and t * math.ceil(rows / t / 128) == scale_rows]
    assert fitting == [SHAPES[name].checkpoint_tp]


def largest_of_neighbours(logical: dict[str, Tensor], key: str) -> Tensor:
    """Largest magnitude among the tensors that can share an FP8 block with `key`: q, k and v share some."""
    keys = [key]
    if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        keys = [key[: -len("q_proj.weight")] + f"{name}_proj.weight" for name in ("q", "k", "v")]
    return torch.stack([logical[name].abs().max() for name in keys]).max()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_decoded_values_are_the_logical_ones_within_the_error_of_the_form(name: str, form: str) -> None:
    logical = values(SHAPES[name])
    _, decoded = built(SHAPES[name], form)
    assert decoded.keys() == logical.keys()
    for key, value in logical.items():
        result = decoded[key]
        assert result.dtype == torch.float32
        assert result.shape == value.shape
        if key == "speech_embeddings.1.weight":  # float16, half a subnormal step
            assert torch.allclose(result, value, rtol=0, atol=2.0**-25)
        elif form == "mxfp4-fused" and key.endswith("mlp.gate.weight"):
            assert torch.equal(result, value.bfloat16().float()), key
        elif form.startswith("bf16") or not key.startswith("model.") or not key.endswith(FP8_SUFFIXES):
            assert torch.equal(result, value), key
        elif not (form == "mxfp4-fused" and ".experts." in key):
            # Half a unit of three fraction bits, or of the subnormal step 2^-9 under the largest scale there can be.
            allowed = value.abs() / 16 * (1 + 1e-6) + largest_of_neighbours(logical, key) / 448 / 1024
            assert bool(((result - value).abs() <= allowed).all()), key


def outside_fp8_error(result: Tensor, value: Tensor) -> Tensor:
    """Rows of which most values are further away than any FP8 rounding puts them."""
    return ((result - value).abs() > value.abs() / 15 + value.abs().max() / 448 / 1024).float().mean(1) > 0.5


def test_one_grid_over_all_shards_or_contiguous_rows_are_other_numbers() -> None:
    stored, decoded = built(FLASH, "fp8-fused")
    weight, scale = stored[FULL + "qkv_proj.weight"], stored[FULL + "qkv_proj.weight_scale_inv"]
    rows = decode_fp8_plain(weight, scale)
    continuous = split_shards(rows, 16, 4, 4)
    assert torch.equal(continuous["q"][: 4 * 192], decoded[FULL + "q_proj.weight"][: 4 * 192])  # the first shard
    assert (
        outside_fp8_error(continuous["q"][4 * 192 :], decoded[FULL + "q_proj.weight"][4 * 192 :]).float().mean() > 0.3
    )
    contiguous = split_shards(rows, 16, 4, 1)
    assert bool(outside_fp8_error(contiguous["k"], decoded[FULL + "k_proj.weight"]).all())


def test_flash_v_alone_has_other_first_halves_of_heads() -> None:
    stored, decoded = built(FLASH, "fp8-flash")
    alone = decode_fp8_plain(stored[FULL + "v_proj.weight"], stored[FULL + "v_proj.weight_scale_inv"])
    strip = decoded[FULL + "v_proj.weight"]
    for n in range(4):
        start = 128 * n
        assert torch.equal(alone[start + 64 : start + 128], strip[start + 64 : start + 128])
        assert bool((alone[start : start + 64] != strip[start : start + 64]).any(1).all())
    own, own_decoded = built(FLASH, "fp8-flash-own")
    plain = decode_fp8_plain(own[FULL + "v_proj.weight"], own[FULL + "v_proj.weight_scale_inv"])
    assert torch.equal(plain, own_decoded[FULL + "v_proj.weight"])


def test_byte_values() -> None:
    everything = torch.arange(256, dtype=torch.uint8)
    by_torch = everything.view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(E4M3).nan_to_num(7e9), by_torch.nan_to_num(7e9))
    assert by_torch[0x7E] == 448
    assert E4M3[0x7E] == 448
    assert E4M3[0x81] == -(2.0**-9)
    # 0x2F: low nibble F = -6 is the earlier element, high nibble 2 = 1.
    packed = torch.tensor([[0x2F] * 16 + [0x98] * 16], dtype=torch.uint8)
    one, least, most = (decode_mxfp4(packed, torch.tensor([[127, byte]], dtype=torch.uint8)) for byte in (127, 0, 254))
    assert one[0, :4].tolist() == [-6, 1, -6, 1]
    assert math.copysign(1, one[0, 32].item()) == -1  # code 8 is the negative zero
    assert one[0, 33] == -0.5
    assert least[0, 33] == -(2.0**-128)
    assert most[0, 33] == -(2.0**126)


def test_zero_blocks_have_scale_one() -> None:
    codes, scale = encode_fp8(torch.cat([torch.zeros(128, 130), torch.full((1, 130), 448.0)]))
    assert scale.tolist() == [[1, 1], [1, 1]]
    assert float(codes[128, 129]) == 448
    key = "model.layers.0.mlp.gate_proj.weight"
    stored, decoded = built(TP2, "fp8-split-plain")
    assert stored[f"{key}_scale_inv"].shape == (2, 2)
    assert stored[f"{key}_scale_inv"][0, 0] == 1
    assert not decoded[key][:128, :128].any()


def test_mxfp4_experts_are_canonical() -> None:
    stored, decoded = built(TP2, "mxfp4-fused")
    scales = [key for key in stored if key.endswith("weight_scale")]
    assert len(scales) == 2 * 12 * 3
    for key in scales:
        weight = key.removesuffix("_scale")
        assert stored[weight].dtype == stored[key].dtype == torch.uint8
        assert stored[weight].shape == (160, 80)
        assert stored[key].shape == (160, 5)
        largest = decoded[weight].view(160, 5, 32).abs().amax(-1) / torch.exp2(stored[key].float() - 127)
        assert set(largest.unique().tolist()) == {4.0, 6.0}
        assert torch.equal(decoded[weight], decoded[weight].bfloat16().float())
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert built(TP2, "fp8-fused")[0]["model.layers.1.mlp.gate.weight"].dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_config_names_layout_and_storage(form: str) -> None:
    content = json.loads(json.dumps(config(FLASH, form)))
    fused = form.endswith(("-fused", "-contiguous"))
    assert content["model_type"] == ("mimo_v2" if fused else "mimo_v2_flash")
    assert content.get("attention_projection_layout") == ("fused_qkv" if fused else None)
    quantisation = content.get("quantization_config")
    assert (quantisation is None) == form.startswith("bf16")
    if quantisation is not None:
        assert quantisation["store_dtype"] == form.partition("-")[0]
        assert quantisation["ignored_layers"][-2:] == [
            "model.layers.2.self_attn.o_proj",
            "model.decoder.self_attn.o_proj",
        ]
    assert "store_dtype" not in config(PRO, "fp8-fused")["quantization_config"]
    assert config(PRO, "bf16-split")["model_type"] == "mimo_v2"  # V2-Flash readers assume twice the kv heads


def test_folder_opens_and_its_index_is_true(tmp_path: Path) -> None:
    decoded = released(tmp_path / "model", OMNI, "mxfp4-fused", shards=3, metadata={"tp_size": 4})
    stored, again = built(OMNI, "mxfp4-fused")
    assert decoded.keys() == again.keys()
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in stored.values()), "tp_size": 4}
    found: dict[str, str] = {}
    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                found[key] = path.name
                tensor = file.get_tensor(key)
                assert tensor.dtype == stored[key].dtype
                assert torch.equal(tensor.reshape(-1).view(torch.uint8), stored[key].reshape(-1).view(torch.uint8))
    assert found == index["weight_map"]
    assert found.keys() == stored.keys()
    assert {name for key, name in found.items() if ".mtp." in key} == {"model_mtp.safetensors"}
    pair = "model.layers.1.self_attn.qkv_proj.weight"
    assert found[pair] != found[f"{pair}_scale_inv"]
    names = {path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*")}
    assert names >= {"dflash/model.safetensors", "audio_tokenizer/config.json", "NOTICE.txt", "chat_template.jinja"}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    released(tmp_path / "model", replace(TP2, mtp_layers=0), "bf16-split", side_files=False)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_forms_that_were_never_released_are_refused() -> None:
    with pytest.raises(ValueError, match="no fp8-flash of"):
        store({}, PRO, "fp8-flash")
    with pytest.raises(ValueError, match="no fp7 of"):
        store({}, FLASH, "fp7")
