"""Key tables of the released checkpoints against the published totals, the published shapes and our own model."""

from collections import Counter
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from released_folders import config as file_config
from released_folders import store, values
from released_forms import CASES
from released_oracle import FLASH, Shape

from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.errors import CheckpointError, ConfigError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MODEL_CLASSES, MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import PRESETS, preset_config
from automimo.mimo_v2_flash.storage import StoredTensor
from automimo.mimo_v2_flash.storage.key_table import key_table, text_shapes
from automimo.mimo_v2_flash.storage.media_keys import audio_shapes, vision_shapes
from automimo.mimo_v2_flash.weights import checkpoint_places

QUANTISATION: dict[str, Any] = {
    "flash": "fp8", "v2.5": "fp8", "v2.5-pro": "fp8", "v2.6-flash": "mxfp4", "v2.6-pro": "mxfp4",
}  # fmt: skip


@cache
def table(name: str) -> dict[str, StoredTensor]:
    """The released form of a preset."""
    return key_table(preset_config(name), quantisation=QUANTISATION[name])


# -- published totals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "elements"), [("v2.5", 73_081, 310_775_040_000), ("v2.5-pro", 159_581, 1_023_244_718_976)]
)
def test_totals_of_the_fp8_releases(name: str, tensors: int, elements: int) -> None:
    """The listings count scales as elements."""
    assert len(table(name)) == tensors
    assert sum(prod(tensor.shape) for tensor in table(name).values()) == elements


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        (
            "v2.6-flash", 73_081,
            {"BF16": 4_101_308_032, "F32": 248_192, "F8_E4M3": 3_859_808_256, "U8": 160_859_947_008},
        ),
        (
            "v2.6-pro", 160_040,
            {"BF16": 10_647_286_656, "F32": 857_088, "F8_E4M3": 13_378_781_184, "U8": 531_351_207_936},
        ),
    ],
)  # fmt: skip
def test_totals_of_the_mxfp4_releases(name: str, tensors: int, elements: dict[str, int]) -> None:
    found: Counter[str] = Counter()
    for tensor in table(name).values():
        found[tensor.dtype] += prod(tensor.shape)
    assert len(table(name)) == tensors
    assert found == elements


@pytest.mark.parametrize(
    ("name", "size", "unit"),
    [("v2.5", 293.40, 2**30), ("v2.5-pro", 962.4, 2**30), ("v2.6-flash", 173, 1e9), ("v2.6-pro", 566, 1e9)],
)
def test_meta_tensors_of_the_table_have_the_published_size(name: str, size: float, unit: float) -> None:
    """The sizes of the V2.5 files are published in GiB (as "GB"), those of V2.6 in GB."""
    total = elements = 0
    for tensor in table(name).values():
        made = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        total += made.nbytes
        elements += made.numel()
    assert elements == sum(prod(tensor.shape) for tensor in table(name).values())
    # Half a unit of the last published digit; headers are a few MB of that.
    assert total / unit == pytest.approx(size, abs=0.005 if size == 293.40 else 0.05 if size == 962.4 else 0.5)


def total(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> int:
    return sum(prod(shape) for key, shape in shapes.items() if key.startswith(prefix))


@pytest.mark.parametrize(
    ("name", "vision", "audio"),
    [
        ("v2.5", 728_594_432, 261_127_168),
        ("v2.6-flash", 728_594_432, 261_127_168),
        ("v2.6-pro", 739_080_192, 294_681_600),
    ],
)
def test_totals_of_vision_and_audio(name: str, vision: int, audio: int) -> None:
    config = preset_config(name)
    assert config.vision_config is not None
    assert config.audio_config is not None
    assert total(vision_shapes(config.vision_config)) == vision
    assert total(audio_shapes(config.audio_config)) == audio
    # 459 tensors are what V2.6-Pro has and V2.5-Pro has not.
    assert len(vision_shapes(config.vision_config)) + len(audio_shapes(config.audio_config)) == 160_040 - 159_581


def test_parts_of_vision_and_audio() -> None:
    config = preset_config("v2.5")
    assert config.vision_config is not None
    assert config.audio_config is not None
    vision, audio = vision_shapes(config.vision_config), audio_shapes(config.audio_config)
    assert total(vision) - total(vision, "visual.merger.") == pytest.approx(681.5e6, abs=0.1e6)
    assert total(vision, "visual.merger.") == pytest.approx(47.2e6, abs=0.05e6)
    assert total(audio, "audio_encoder.input_local_transformer.") == pytest.approx(100.7e6, abs=0.05e6)
    assert total(audio, "speech_embeddings.") == pytest.approx(26.2e6, abs=0.05e6)
    assert total(audio, "audio_encoder.projection.") == pytest.approx(134.2e6, abs=0.05e6)
    sinks = [int(key.split(".")[2]) for key in vision if key.endswith(".sinks")]
    assert sinks == [*range(1, 9), *range(10, 18), *range(19, 27)]


# -- published shapes -------------------------------------------------------------------------------------------------

V25_ATTENTION = {"model.layers.0": (13568, 108), "model.layers.1": (14848, 116), "model.mtp.layers.2": (14848, 116)}
SHAPES: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "v2.5": {
        "lm_head.weight": ("BF16", (152576, 4096)),
        "model.layers.47.self_attn.o_proj.weight": ("BF16", (4096, 8192)),
        "model.layers.1.self_attn.attention_sink_bias": ("BF16", (64,)),
        "model.layers.0.mlp.down_proj.weight": ("F8_E4M3", (4096, 16384)),
        "model.layers.0.mlp.down_proj.weight_scale_inv": ("F32", (32, 128)),
        "model.layers.1.mlp.gate.weight": ("F32", (256, 4096)),
        "model.layers.47.mlp.gate.e_score_correction_bias": ("F32", (256,)),
        "model.layers.9.mlp.experts.255.gate_proj.weight": ("F8_E4M3", (2048, 4096)),
        "model.layers.9.mlp.experts.255.down_proj.weight_scale_inv": ("F32", (32, 16)),
        "model.mtp.layers.0.eh_proj.weight": ("BF16", (4096, 8192)),
        "model.mtp.layers.2.final_layernorm.weight": ("BF16", (4096,)),
        "visual.patch_embed.proj.weight": ("BF16", (1280, 3, 2, 16, 16)),
        "visual.blocks.27.attn.qkv.bias": ("BF16", (3072,)),
        "visual.blocks.0.attn.proj.weight": ("BF16", (1280, 2048)),
        "visual.merger.mlp.0.weight": ("BF16", (5120, 5120)),
        "speech_embeddings.19.weight": ("BF16", (1280, 1024)),
        "audio_encoder.projection.mlp.0.weight": ("BF16", (16384, 4096)),
        **{
            f"{prefix}.self_attn.qkv_proj.{name}": pair
            for prefix, (rows, scales) in V25_ATTENTION.items()
            for name, pair in {"weight": ("F8_E4M3", (rows, 4096)), "weight_scale_inv": ("F32", (scales, 32))}.items()
        },
    },
    "v2.5-pro": {
        "model.layers.69.self_attn.qkv_proj.weight": ("F8_E4M3", (27136, 6144)),
        "model.layers.69.self_attn.qkv_proj.weight_scale_inv": ("F32", (216, 48)),
        "model.mtp.layers.0.self_attn.qkv_proj.weight_scale_inv": ("F32", (216, 48)),
        "model.layers.1.mlp.gate.weight": ("F32", (384, 6144)),
        "model.mtp.layers.1.self_attn.attention_sink_bias": ("BF16", (128,)),
    },
    "flash": {
        "model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", (96, 32)),
        "model.layers.0.self_attn.k_proj.weight": ("F8_E4M3", (768, 4096)),
        "model.layers.0.self_attn.k_proj.weight_scale_inv": ("F32", (8, 32)),
        "model.layers.0.self_attn.v_proj.weight_scale_inv": ("F32", (4, 32)),
        "model.layers.1.self_attn.k_proj.weight_scale_inv": ("F32", (12, 32)),
        "model.layers.1.self_attn.v_proj.weight_scale_inv": ("F32", (8, 32)),
    },
    "v2.6-flash": {
        "model.layers.1.mlp.gate.weight": ("BF16", (256, 4096)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (256,)),
        "model.layers.1.mlp.experts.0.up_proj.weight": ("U8", (2048, 2048)),
        "model.layers.1.mlp.experts.0.up_proj.weight_scale": ("U8", (2048, 128)),
        "model.layers.1.mlp.experts.0.down_proj.weight_scale": ("U8", (4096, 64)),
        "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (128, 32)),
    },
    "v2.6-pro": {
        "model.layers.1.mlp.experts.383.gate_proj.weight": ("U8", (2048, 3072)),
        "model.layers.1.mlp.experts.383.down_proj.weight_scale": ("U8", (6144, 64)),
        "visual.merger.mlp.2.weight": ("BF16", (6144, 5120)),
        "audio_encoder.projection.mlp.2.weight": ("BF16", (6144, 16384)),
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str) -> None:
    found = {key: (table(name)[key].dtype, table(name)[key].shape) for key in SHAPES[name]}
    assert found == SHAPES[name]


# -- other references -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_text_shapes_are_those_of_our_model(name: str) -> None:
    config = preset_config(name)
    check_against_model(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"add_full_attention_sink_bias": True, "add_swa_attention_sink_bias": False},
        {"n_routed_experts": None},
        {"moe_layer_freq": 2},
        {"swa_num_attention_heads": 4, "swa_head_dim": 32, "swa_v_head_dim": 16, "hybrid_block_size": 2},
    ],
)
def test_text_shapes_of_unusual_configs(changes: dict[str, Any]) -> None:
    check_against_model(preset_config("tiny", **changes))


def check_against_model(config: MiMoV2FlashConfig) -> None:
    with torch.device("meta"):
        state = MiMoV2FlashForCausalLM(config).state_dict()
    places = checkpoint_places(state)
    expected = {key: tuple(place.view(state[place.parameter]).shape) for key, place in places.items()}
    assert text_shapes(config, 0) == expected


# The grid of V2-Flash follows from its model type, and the oracle gives this form the plain one. OMNI has all of FLASH.
FORMS_WITH_A_TABLE = [
    (shape, form) for shape, form in CASES if shape is not FLASH and (form != "fp8-split-plain" or shape.pro)
]


@pytest.mark.parametrize(("shape", "form"), FORMS_WITH_A_TABLE)
def test_the_table_of_every_form_is_what_the_oracle_stores(shape: Shape, form: str) -> None:
    file = file_config(shape, form)
    config = MODEL_CLASSES[file["model_type"]].config_class.from_dict(file)
    stored, _ = store(values(shape), shape, form)
    quantisation: Any = {"bf16": "none", "fp8": "fp8", "mxfp4": "mxfp4"}[form.partition("-")[0]]
    fused = form.endswith(("fused", "contiguous"))
    found = key_table(
        config,
        quantisation=quantisation,
        layout="fused" if fused else "split",
        tp=1 if form.endswith("contiguous") else None,
        mtp_layers=shape.mtp_layers,
    )
    # The oracle stores these in other dtypes than the releases, to see that they are kept.
    odd = {key for key in stored if key.endswith(".attn.sinks") or key == "speech_embeddings.1.weight"}
    expected = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in stored.items()}
    assert {key: tensor.shape for key, tensor in found.items()} == {key: shape for key, (_, shape) in expected.items()}
    for key in expected.keys() - odd:
        assert TORCH_DTYPES[found[key].dtype] == expected[key][0], key
    assert all(found[key].dtype == "BF16" for key in odd)


def test_without_mtp_and_media_nothing_is_left_of_them() -> None:
    config = preset_config("tiny")
    keys = key_table(config, quantisation="none", mtp_layers=0)
    assert keys.keys() == text_shapes(config, 0).keys()
    assert {tensor.dtype for tensor in keys.values()} == {"BF16", "F32"}


def test_what_has_no_table() -> None:
    with pytest.raises(CheckpointError, match="not divisible by 3 checkpoint shards"):
        key_table(preset_config("tiny"), quantisation="fp8", layout="fused", tp=3)
    with pytest.raises(ConfigError, match=r"vision_config\.hidden_size.*None"):
        vision_shapes({"depth": 2})
    audio = dict(preset_config("v2.5").audio_config or {})
    with pytest.raises(ConfigError, match=r"audio_config\.speech_vocab_size.*'many'"):
        audio_shapes({**audio, "speech_vocab_size": "many"})
    # A number does as well as the string in the released file.
    assert audio_shapes({**audio, "speech_vocab_size": 1280}) == audio_shapes(audio)


def test_vision_without_a_list_of_window_types() -> None:
    vision = dict(preset_config("v2.5").vision_config or {})
    del vision["vit_window_attn_types"]
    assert vision_shapes(vision) == vision_shapes(preset_config("v2.5").vision_config or {})
    assert not any(key.endswith("sinks") for key in vision_shapes({**vision, "use_sink": False}))
