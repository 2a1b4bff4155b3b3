"""The verb `inspect` on checkpoint folders: what it says of every form, and that it finds what is wrong."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from inspect_output import inspect, line
from released_folders import built, config, released, store, values, write_folder
from released_forms import CASES, options_of
from released_oracle import FLASH, FLASH_FORMS, TP2, V_HEAD_DIM, Shape
from tiny_folders import saved
from torch import Tensor

from automimo.checkpoint.safetensors_file import tensor_bytes
from automimo.checkpoint.tensor_reader import TensorReader
from automimo.inspect_checkpoint import variant
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.storage import SourceOptions, StoredTensor
from automimo.mimo_v2_flash.storage.key_table import key_table

Stored = dict[str, Tensor]
Config = dict[str, Any]


# -- every form -------------------------------------------------------------------------------------------------------


# OMNI has the text part of FLASH.
@pytest.mark.parametrize(("shape", "form"), [case for case in CASES if case[0] is not FLASH])
def test_what_is_said_of_every_form(shape: Shape, form: str, tmp_path: Path) -> None:
    released(tmp_path / "m", shape, form, shards=3, side_files=True)
    code, text = inspect(tmp_path / "m", options_of(shape, form))
    assert code == 0, text
    assert text.endswith("no problems\n")
    assert text.startswith("MiMo-V2 shape, not a released size\n")
    assert line(text, "folder") == str(tmp_path / "m")
    stored, _ = built(shape, form)
    sizes = sum(path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors"))
    assert line(text, "weights").startswith(f"4 files, {sizes:,} bytes")
    assert line(text, "weights").endswith(f"{len(stored):,} tensors")

    layout, found_by = {
        "bf16-fused": ("fused", "--source-tp"),
        "bf16-contiguous": ("contiguous", "--source-layout contiguous"),
        "fp8-contiguous": ("contiguous", "--source-layout contiguous"),
        "fp8-fused": ("fused", "the scale rows of a full-attention layer"),
        "mxfp4-fused": ("fused", "the scale rows of a full-attention layer"),
    }.get(form, ("split", ""))
    attention = line(text, "attention")
    assert attention.startswith(layout)
    if layout != "split":
        tp = shape.checkpoint_tp if layout == "fused" else 1
        assert f"checkpoint TP {tp}, found by {found_by}" in attention

    plain = form.startswith("bf16")
    experts = "not quantised" if plain else "MXFP4" if form == "mxfp4-fused" else "FP8"
    assert f"  experts     {experts}: " in text
    rest = "not quantised" if plain else "FP8"
    assert f"  attention   {rest}: " in text
    assert f"  dense MLP   {rest}: " in text
    assert f"  MTP         {rest}: " in text
    store = "mxfp4" if form == "mxfp4-fused" else "fp8"
    stated = "fp8" if shape.pro and store == "fp8" else f"fp8, store_dtype {store}"  # V2.5-Pro has no store_dtype
    assert line(text, "stored as") == f"(config.json says {'not quantised' if plain else stated})"
    router = "BF16" if form == "mxfp4-fused" else "F32"
    assert line(text, "router").startswith(f"weights {router}, biases F32")

    media = ["vision", "audio"] if shape.vision else []
    names = ", ".join(["text", *media])
    assert line(text, "modalities") == f"{names} (config.json says {names})"
    says = f"says {shape.mtp_layers}" if form == "mxfp4-fused" else "does not say"
    layers = f"{shape.mtp_layers} layer{'s' if shape.mtp_layers > 1 else ''}"
    assert f"\nMTP           {layers} (config.json {says})\n" in text
    assert line(text, "layers") == ("3: 2 full (0, 2), 1 sliding over 128 keys; 1 dense (0), 2 with 2 of 12 experts")
    assert line(text, "side files") == (
        "NOTICE.txt, audio_tokenizer/ (2 files), chat_template.jinja, dflash/ (2 files), generation_config.json, "
        "modeling_mimo_v2.py, tokenizer.json, tokenizer_config.json"
    )
    assert ("V scales" in text) == (form in FLASH_FORMS)
    check_parameters(shape, text)


def check_parameters(shape: Shape, text: str) -> None:
    """Decoded elements: the same numbers for every form of a model, whether its layout is known or not."""
    logical = {key: value.numel() for key, value in values(shape).items()}
    experts = sum(n for key, n in logical.items() if ".mlp.experts." in key)
    mtp = sum(n for key, n in logical.items() if key.startswith("model.mtp."))
    vision = sum(n for key, n in logical.items() if key.startswith("visual."))
    audio = sum(n for key, n in logical.items() if key.startswith(("audio_encoder.", "speech_embeddings.")))
    text_part = sum(logical.values()) - experts - mtp - vision - audio
    found = line(text, "parameters")
    assert found.startswith(f"{sum(logical.values()):,} (")
    # 2 of 12 experts are active; MTP, vision and audio are not counted.
    assert f"active per token {text_part + experts * 2 // 12:,} (" in found
    assert f"\n  text        {text_part:,} (without experts)\n" in text
    assert f"\n  experts     {experts:,}\n" in text
    assert f"\n  MTP         {mtp:,}\n" in text
    assert (f"\n  vision      {vision:,}\n" in text) == bool(vision)
    assert (f"\n  audio       {audio:,}\n" in text) == bool(audio)


@pytest.mark.parametrize(
    ("form", "remedy"),
    [
        ("bf16-fused", "pass --source-tp N for the released order"),
        ("bf16-contiguous", "or --source-layout contiguous"),
        ("fp8-contiguous", "or --source-layout contiguous"),
    ],
)
def test_an_order_that_cannot_be_told_is_a_problem_with_a_remedy(form: str, remedy: str, tmp_path: Path) -> None:
    released(tmp_path / "m", FLASH, form)
    code, text = inspect(tmp_path / "m")
    assert code == 1
    assert line(text, "attention") == "fused (qkv_proj), in an order that is not known"
    check_parameters(FLASH, text)
    assert "\n1 problem (exit code 1)\n" in text
    assert remedy in text.partition("1 problem")[2]
    # The rest is there all the same.
    for label in ("parameters", "stored as", "modalities", "layers", "router", "side files"):
        line(text, label)


@pytest.mark.parametrize(
    ("metadata", "changes", "found_by"),
    [
        ({"tp_size": 4}, {}, "metadata.tp_size"),
        (None, {"checkpoint_tp_size": 4}, "config.json checkpoint_tp_size"),
        ({"tp_size": 4}, {"checkpoint_tp_size": 4}, "metadata.tp_size"),
    ],
)
def test_where_the_checkpoint_tp_comes_from(
    metadata: dict[str, Any] | None, changes: Config, found_by: str, tmp_path: Path
) -> None:
    stored, _ = built(FLASH, "bf16-fused")
    write_folder(tmp_path / "m", stored, config(FLASH, "bf16-fused") | changes, metadata=metadata)
    code, text = inspect(tmp_path / "m")
    assert code == 0
    assert line(text, "attention").endswith(f"checkpoint TP 4, found by {found_by}")


def test_our_own_folders_have_no_problems(tmp_path: Path) -> None:
    code, text = inspect(saved(tmp_path / "m"))
    assert code == 0, text
    assert "\nMTP           0 layers (config.json does not say)\n" in text
    assert line(text, "attention") == "split (q_proj, k_proj, v_proj)"


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = {
    "flash": "MiMo-V2-Flash",
    "v2.5": "MiMo-V2.5",
    "v2.5-pro": "MiMo-V2.5-Pro",
    "v2.6-flash": "MiMo-V2.6-Flash",
    "v2.6-pro": "MiMo-V2.6-Pro",
    "tiny": "MiMo-V2 shape, not a released size",
    "tiny-omni": "MiMo-V2 shape, not a released size",
}


@pytest.mark.parametrize("preset", NAMES)
def test_the_name_of_every_preset(preset: str) -> None:
    config = preset_config(preset)
    assert variant(config, config.to_dict(), {}) == NAMES[preset]


def test_a_changed_size_is_no_release() -> None:
    for preset in ("flash", "v2.5", "v2.6-pro"):
        changed = preset_config(preset, num_experts_per_tok=4)
        assert variant(changed, changed.to_dict(), {}) == "MiMo-V2 shape, not a released size"


# -- the scales of V --------------------------------------------------------------------------------------------------


def flash_folder(path: Path, form: str, k_size: float, v_size: float) -> Path:
    """A V2-Flash folder whose k and v rows are all of one size each."""
    logical = dict(values(FLASH))
    generator = torch.Generator().manual_seed(1)
    for key, value in logical.items():
        for part, size in (("k_proj", k_size), ("v_proj", v_size)):
            if key.endswith(f"self_attn.{part}.weight"):
                logical[key] = (size * torch.randn(value.shape, generator=generator)).bfloat16().float()
    stored, _ = store(logical, FLASH, form)
    return write_folder(path, stored, config(FLASH, form), side_files=False)


@pytest.mark.parametrize(
    ("right", "k_size", "v_size"), [("strip", 0.12, 0.02), ("own", 0.12, 0.02), ("own", 0.01, 0.06)]
)
def test_row_norms_tell_how_v_is_scaled(right: Any, k_size: float, v_size: float, tmp_path: Path) -> None:
    folder = flash_folder(tmp_path / "m", "fp8-flash" if right == "strip" else "fp8-flash-own", k_size, v_size)
    wrong: Any = "own" if right == "strip" else "strip"
    code, text = inspect(folder, SourceOptions(v_scales=right))
    assert code == 0, text
    said = line(text, "V scales")
    assert said.startswith(f"{right}; in 8 heads of 2 full layers the two readings differ by ")
    assert said.endswith(f"{right} is right, as read")
    # A wrong reading is off by the ratio of two largest values, which is near the ratio of the sizes.
    found = re.findall(r"(\d+\.\d+)x", said)
    assert float(found[0]) == pytest.approx(6, rel=0.35)
    assert min(float(found[1]), float(found[2])) == pytest.approx(1, abs=0.1)
    code, text = inspect(folder, SourceOptions(v_scales=wrong))
    assert code == 1
    assert line(text, "V scales").endswith(f"{right} is right, not as read")
    assert f"the row norms contradict the reading in use; pass --flash-v-scales {right}" in text


# In a strip the larger of k and v decides the scale: where that is v, both readings use the scale of v.
@pytest.mark.parametrize(("form", "k_size"), [("fp8-flash", 0.02), ("fp8-flash", 0.004), ("fp8-flash-own", 0.02)])
def test_alike_readings_tell_nothing(form: str, k_size: float, tmp_path: Path) -> None:
    folder = flash_folder(tmp_path / "m", form, k_size, 0.02)
    for name in ("strip", "own"):
        reading: Any = name
        code, text = inspect(folder, SourceOptions(v_scales=reading))
        assert code == 0, text
        assert line(text, "V scales").endswith("nothing can be told")


def test_damaged_scales_of_v_are_a_problem(tmp_path: Path) -> None:
    stored = dict(built(FLASH, "fp8-flash")[0])
    key = "model.layers.0.self_attn.v_proj.weight_scale_inv"
    stored[key] = torch.full_like(stored[key], float("nan"))
    write_folder(tmp_path / "m", stored, config(FLASH, "fp8-flash"), side_files=False)
    code, text = inspect(tmp_path / "m")
    assert code == 1
    assert "the scales of V cannot be checked" in text
    assert key in text


def test_zero_rows_of_v_are_left_out(tmp_path: Path) -> None:
    stored = dict(built(TP2, "fp8-flash")[0])
    for number, layer in enumerate((0, 2)):
        key = f"model.layers.{layer}.self_attn.v_proj.weight"
        stored[key] = torch.zeros(2 * V_HEAD_DIM, 160).to(torch.float8_e4m3fn)
        write_folder(tmp_path / str(number), stored, config(TP2, "fp8-flash"), side_files=False)
    code, text = inspect(tmp_path / "0")
    assert code == 0
    assert line(text, "V scales").startswith("strip; in 2 heads of 2 full layers")
    code, text = inspect(tmp_path / "1")
    assert code == 0
    assert line(text, "V scales") == "strip; V of 2 full layers is zero: nothing can be told"


# -- the real size ----------------------------------------------------------------------------------------------------


def write_hollow(folder: Path, table: dict[str, StoredTensor], files: int) -> int:
    """A folder with these headers, whose tensors are holes in the files; the apparent size of the files."""
    folder.mkdir()
    index: dict[str, str] = {}
    size = 0
    shards: list[list[StoredTensor]] = [[] for _ in range(files)]
    for number, tensor in enumerate(table.values()):
        shards[number * files // len(table)].append(tensor)
    for number, tensors in enumerate(shards):
        header, end = {}, 0
        for tensor in tensors:
            begin, end = end, end + tensor_bytes(tensor.dtype, tensor.shape)
            header[tensor.key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        name = f"model_pp0_ep0_shard{number}.safetensors"
        index |= dict.fromkeys(header, name)
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
            size += 8 + len(raw) + end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return size


def test_a_whole_v25_is_inspected_by_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """315 GB of holes with the headers of the real thing: no byte of a tensor is read."""
    config = preset_config("v2.5")
    folder = tmp_path / "v2.5"
    size = write_hollow(folder, key_table(config, quantisation="fp8"), files=17)
    (folder / "config.json").write_text(json.dumps(config.to_diff_dict()))
    assert size > 315e9
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 64e6

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(TensorReader, "_fill", refuse)
    began = time.monotonic()
    code, text = inspect(folder)
    print(f"inspected in {time.monotonic() - began:.1f} s\n{text}")
    assert code == 0, text
    assert text.startswith("MiMo-V2.5\n")
    assert line(text, "weights") == f"17 files, {size:,} bytes ({size / 1e9:,.3f} GB), 73,081 tensors"
    # 310,775,040,000 elements with scales, 68,012,416 F32 of which the router and its bias are no scales.
    scales = 68_012_416 - 47 * 256 * 4096 - 47 * 256
    assert line(text, "parameters").startswith(f"{310_775_040_000 - scales:,} (310.756 B), active per token 15,")
    assert "\n  experts     302,795,194,368\n" in text
    assert "\n  vision      728,594,432\n" in text
    assert "\n  audio       261,127,168\n" in text
    assert line(text, "attention") == (
        "fused (qkv_proj), checkpoint TP 4, found by the scale rows of a full-attention layer "
        "(model.layers.0.self_attn)"
    )
    assert line(text, "layers") == (
        "48: 9 full (0, 5, 11, 17, 23, 29, 35, 41, 47), 39 sliding over 128 keys; 1 dense (0), 47 with 8 of 256 experts"
    )
    assert line(text, "router") == "weights F32, biases F32 (config.json does not say)"
    assert "\nMTP           3 layers (config.json does not say)\n" in text
