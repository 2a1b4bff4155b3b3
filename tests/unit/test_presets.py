"""Presets against the published values, and the size of the models they make against the published element totals."""

from functools import cache
from math import sqrt
from typing import Any

import pytest
import torch

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import PRESETS, preset_config

NAMES = ("tiny", "tiny-omni", "flash", "v2.5", "v2.5-pro", "v2.6-flash", "v2.6-pro")
V25_FULL = [0, 5, 11, 17, 23, 29, 35, 41, 47]
PRO_FULL = [0, 7, 15, 23, 31, 39, 47, 55, 62, 69]

# The table of the released config files, typed again.
SHARED: dict[str, Any] = {
    "vocab_size": 152576,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "partial_rotary_factor": 0.334,
    "swa_rope_theta": 10000.0,
    "sliding_window": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "dtype": torch.bfloat16,
}
FLASH_SIZE: dict[str, Any] = {
    **SHARED,
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "moe_layer_freq": [0] + [1] * 47,
    "full_layers": V25_FULL,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
PRO_SIZE: dict[str, Any] = {
    **SHARED,
    "hidden_size": 6144,
    "num_hidden_layers": 70,
    "num_attention_heads": 128,
    "swa_num_attention_heads": 128,
    "num_key_value_heads": 8,
    "attention_value_scale": 0.612,
    "n_routed_experts": 384,
    "moe_layer_freq": [0] + [1] * 69,
    "full_layers": PRO_FULL,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 1048576,
    "attention_projection_layout": "fused_qkv",
}
V25: dict[str, Any] = {
    **FLASH_SIZE,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 1048576,
    "attention_projection_layout": "fused_qkv",
    "layernorm_epsilon": 1e-5,
    "vision_model_type": "mimovl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
EXPECTED: dict[str, dict[str, Any]] = {
    "flash": {
        **FLASH_SIZE,
        "rope_theta": 5000000.0,
        "max_position_embeddings": 262144,
        "attention_projection_layout": "split",
        "layernorm_epsilon": 1e-5,
        "vision_config": None,
        "audio_config": None,
    },
    "v2.5": V25,
    "v2.5-pro": {**PRO_SIZE, "layernorm_epsilon": 1e-5, "vision_config": None, "audio_config": None},
    "v2.6-flash": {
        **V25,
        "layernorm_epsilon": 1e-6,
        "moe_router_dtype": "bfloat16",
        "num_nextn_predict_layers": 3,
    },
    "v2.6-pro": {**PRO_SIZE, "vision_model_type": "mimovl"},
}
FP8_KEYS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTISATION: dict[str, tuple[int, dict[str, Any]]] = {
    "v2.5": (48, {**FP8_KEYS, "store_dtype": "fp8"}),
    "v2.5-pro": (70, FP8_KEYS),
    "v2.6-flash": (48, {**FP8_KEYS, "store_dtype": "mxfp4", "mxfp4_block_size": 32}),
    "v2.6-pro": (70, {**FP8_KEYS, "store_dtype": "mxfp4", "mxfp4_block_size": 32}),
}
VISION: dict[str, Any] = {
    "depth": 28,
    "hidden_size": 1280,
    "intermediate_size": 4608,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "num_query_groups": 4,
    "in_chans": 3,
    "patch_size": 16,
    "spatial_patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "tokens_per_second": 2,
    "hidden_act": "silu",
    "fullatt_block_indexes": [0, 9, 18, 27],
    "use_sink": True,
    "visual_token_window_size": 64,
    "window_size": 128,
    "vit_window_attn_types": [
        *(-1, 0, 0, 0, 0, 1, 1, 1, 1),
        *(-1, 0, 0, 0, 0, 1, 1, 1, 1),
        *(-1, 0, 0, 0, 0, 1, 1, 1, 1),
        -1,
    ],
}
AUDIO: dict[str, Any] = {
    "add_post_norm": True,
    "audio_channels": 20,
    "audio_segment_size": 6000,
    "group_size": 4,
    "input_full_attention": True,
    "input_local_attn_heads": 16,
    "input_local_dim": 1024,
    "input_local_head_dim": 64,
    "input_local_hidden_dropout": 0.0,
    "input_local_intermediate_size": 4096,
    "input_local_layers": 6,
    "partial_rotary_factor": 1.0,
    "projection_layers": 2,
    "rope_theta": 640000,
    "speech_vocab_size": "1280",
    "speech_zeroemb_idx": "1024",
}
# The three groups of the release, with the short names they are listed under.
PROCESSOR_AUDIO = {
    "avg_pooler": 2,
    "channels": 20,
    "fmin": 0,
    "fmax": None,
    "group_size": 4,
    "hop_length": 240,
    "nfft": 960,
    "window_size": 960,
    "n_mels": 128,
    "sampling_rate": 24000,
    "kernel_size": 3,
    "stride_size": 2,
    "segment_size": 6000,
    "input_id_per_second": 25.0,
    "zeroemb_idx": [1024] * 20,
    "token_id": 151669,
    "start_token_id": 151673,
    "end_token_id": 151674,
}
PROCESSOR_REST = {
    "image_min_pixels": 8192,
    "image_max_pixels": 8388608,
    "merge_size": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "image_token_id": 151655,
    "fps": 1.0,
    "min_frames": None,
    "max_frames": 3600,
    "num_frames": None,
    "video_min_pixels": 8192,
    "video_max_pixels": 8388608,
    "video_total_max_pixels": 268435456,
    "video_tokens_per_second": 2,
    "temporal_compression_ratio": 1,
    "use_video_timestamps": True,
    "use_per_grid_t_timestamps": False,
    "video_audio_interleave_length": 0.0,
    "video_process_num_threads": 16,
    "video_token_id": 151656,
    "video_start_token_id": 151670,
    "video_end_token_id": 151671,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "pad_token_id": 151643,
    "rope_type": "rope",
}


@cache
def meta_model(name: str) -> MiMoV2FlashForCausalLM:
    with torch.device("meta"):
        return MiMoV2FlashForCausalLM(preset_config(name))


def elements(name: str, *parts: str) -> int:
    """Elements of the tensors of a preset's text model whose name contains one of `parts` (no parts: all)."""
    state = meta_model(name).state_dict()
    return sum(t.numel() for key, t in state.items() if not parts or any(part in key for part in parts))


def test_the_names() -> None:
    assert tuple(PRESETS) == NAMES
    with pytest.raises(ConfigError) as error:
        preset_config("flesh")
    assert "'flesh'" in str(error.value)
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_text_values(name: str) -> None:
    config = preset_config(name)
    for key, value in EXPECTED[name].items():
        if key == "full_layers":
            assert [i for i, word in enumerate(config.layer_types) if word == "full_attention"] == value
        else:
            assert getattr(config, key) == value, key
    assert config.rms_norm_eps == config.layernorm_epsilon
    assert type(config) is (MiMoV2FlashConfig if name == "flash" else MiMoV2Config)
    # What the released scale rows need for q, k and v: T_ckpt divides the heads of both kinds.
    assert config.swa_num_key_value_heads % config.num_key_value_heads == 0


@pytest.mark.parametrize("name", QUANTISATION)
def test_quantisation_config(name: str) -> None:
    layers, keys = QUANTISATION[name]
    ignored = [f"model.layers.{i}.self_attn.o_proj" for i in range(layers)] + ["model.decoder.self_attn.o_proj"]
    assert preset_config(name).quantization_config == {**keys, "ignored_layers": ignored}


@pytest.mark.parametrize(("name", "out"), [("v2.5", 4096), ("v2.6-flash", 4096), ("v2.6-pro", 6144)])
def test_media_values(name: str, out: int) -> None:
    config = preset_config(name)
    assert config.vision_config == {**VISION, "out_hidden_size": out}
    assert config.audio_config == {**AUDIO, "out_hidden_size": out}
    audio = {f"audio_{key}": value for key, value in PROCESSOR_AUDIO.items()}
    assert config.processor_config == {**audio, **PROCESSOR_REST}


def test_every_call_gives_a_fresh_config() -> None:
    first = preset_config("v2.5")
    first.vision_config["depth"] = 1  # type: ignore[index]
    first.hybrid_layer_pattern[0] = 1
    assert preset_config("v2.5").vision_config["depth"] == 28  # type: ignore[index]
    assert preset_config("v2.5").hybrid_layer_pattern[0] == 0
    assert preset_config("v2.6-flash", hidden_size=64).hidden_size == 64


def test_tiny_presets_fit_transformers_rules() -> None:
    for name in ("tiny", "tiny-omni"):
        config = preset_config(name)
        assert config.attention_projection_layout == "split"
        assert config.swa_num_key_value_heads == 2 * config.num_key_value_heads
        assert config.swa_num_attention_heads == config.num_attention_heads
        # transformers does not round an odd rotary width down.
        assert int(config.head_dim * config.partial_rotary_factor) % 2 == 0
        assert len(config.layer_types) == 6
        assert set(config.layer_types) == {"full_attention", "sliding_attention"}
        assert config.mlp_layer_types == ["dense", *["sparse"] * 5]
        assert config.n_routed_experts is not None
        assert config.n_routed_experts >= 8
        # The rule that gives the published 0.707 and 0.612.
        assert config.attention_value_scale == pytest.approx(
            sqrt(config.hidden_size / (config.num_attention_heads * config.v_head_dim)), abs=5e-4
        )
    vision = preset_config("tiny-omni").vision_config
    assert vision is not None
    assert vision["out_hidden_size"] == preset_config("tiny-omni").hidden_size
    assert len(vision["vit_window_attn_types"]) == vision["depth"]
    assert [i for i, kind in enumerate(vision["vit_window_attn_types"]) if kind == -1] == vision[
        "fullatt_block_indexes"
    ]


# -- sizes ------------------------------------------------------------------------------------------------------------

# Elements of the parts we do not build, from the listings: the vision tower and everything audio, for Flash and Pro.
VISUAL = {"v2.5": 728_594_432, "v2.6-flash": 728_594_432, "v2.6-pro": 739_080_192}
SOUND = {"v2.5": 261_127_168, "v2.6-flash": 261_127_168, "v2.6-pro": 294_681_600}
MTP_LAYERS = 3


def scales(rows: int, columns: int, shards: int = 1) -> int:
    """FP8 scales of a matrix in 128 x 128 blocks, whose grid restarts at every shard."""
    return shards * -(-(rows // shards) // 128) * -(-columns // 128)


class Release:
    """Element counts of a released checkpoint by dtype, from the tensor table and the text model's own shapes."""

    def __init__(self, name: str, hidden: int, heads: int, kv_full: int, layers: int, full: int, experts: int) -> None:
        self.moe_layers = layers - 1
        self.name = name
        shards = kv_full
        q, o = heads * 192, hidden * heads * 128
        dense = 3 * hidden * 16384
        rows = {"full": q + kv_full * (192 + 128), "sliding": q + 8 * (192 + 128)}
        counts = {"full": full, "sliding": layers - full + MTP_LAYERS}
        self.qkv = sum(counts[kind] * rows[kind] * hidden for kind in rows)
        self.fp8 = self.qkv + (1 + MTP_LAYERS) * dense
        self.fp8_scales = sum(counts[kind] * scales(rows[kind], hidden, shards) for kind in rows)
        self.fp8_scales += (1 + MTP_LAYERS) * (2 * scales(16384, hidden) + scales(hidden, 16384))
        self.experts = self.moe_layers * experts * 3 * hidden * 2048
        self.expert_scales = self.moe_layers * experts * (2 * scales(2048, hidden) + scales(hidden, 2048))
        self.router = self.moe_layers * experts * hidden
        self.router_bias = self.moe_layers * experts
        mtp = MTP_LAYERS * (2 * hidden * hidden + 5 * hidden + heads + o)
        embeddings, norms, sinks = 2 * 152576 * hidden, (2 * layers + 1) * hidden, (layers - full) * heads
        self.bf16 = embeddings + norms + sinks + layers * o + mtp + VISUAL.get(name, 0) + SOUND.get(name, 0)
        self.mtp_total = mtp + MTP_LAYERS * (rows["sliding"] * hidden + dense)


FLASH = {"hidden": 4096, "heads": 64, "kv_full": 4, "layers": 48, "full": 9, "experts": 256}
PRO = {"hidden": 6144, "heads": 128, "kv_full": 8, "layers": 70, "full": 10, "experts": 384}


def test_text_experts_of_v25() -> None:
    assert elements("v2.5", ".mlp.experts.") == 302_795_194_368


@pytest.mark.parametrize(
    ("name", "sizes"), [("v2.5", FLASH), ("v2.6-flash", FLASH), ("v2.5-pro", PRO), ("v2.6-pro", PRO)]
)
def test_text_model_plus_the_rest_gives_the_published_totals(name: str, sizes: dict[str, int]) -> None:
    """Our tensors, counted on the meta device, are exactly the listing without MTP, media and scales."""
    release = Release(name, **sizes)
    ours = elements(name)
    assert elements(name, ".mlp.experts.") == release.experts
    assert elements(name, ".mlp.gate.weight") == release.router
    assert elements(name, "e_score_correction_bias") == release.router_bias
    media = VISUAL.get(name, 0) + SOUND.get(name, 0)
    all_scales = release.fp8_scales + release.expert_scales
    if name == "v2.5":
        assert ours + release.mtp_total + media + all_scales == 310_775_040_000
    if name == "v2.5-pro":
        assert ours + release.mtp_total + media + all_scales == 1_023_244_718_976
    totals = {
        "v2.6-flash": (4_101_308_032, 248_192, 3_859_808_256, 160_859_947_008),
        "v2.6-pro": (10_647_286_656, 857_088, 13_378_781_184, 531_351_207_936),
    }
    if name in totals:
        bf16, f32, fp8, u8 = totals[name]
        # Two expert weights per byte and one scale per 32 of them; the router is BF16 here, its bias F32.
        assert release.experts // 2 + release.experts // 32 == u8
        assert release.router_bias + release.fp8_scales == f32
        assert release.bf16 + release.router == bf16
        assert release.fp8 == fp8
        assert ours == bf16 + release.router_bias + fp8 + release.experts - media - release.mtp_total


def test_an_mtp_layer_has_the_published_size() -> None:
    assert Release("v2.5", **FLASH).mtp_total / MTP_LAYERS == pytest.approx(329.3e6, rel=2e-4)


def test_the_headline_sizes_of_v2_flash() -> None:
    """309 B parameters with 15 B active: with MTP and without vision."""
    total = elements("flash") + Release("flash", **FLASH).mtp_total
    assert round(total / 1e9) in (309, 310)
    idle = elements("flash", ".mlp.experts.") * (256 - 8) // 256
    assert round((elements("flash") - idle) / 1e9) == 15
