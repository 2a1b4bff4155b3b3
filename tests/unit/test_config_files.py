"""config.json in both vocabularies: released files, transformers' own, ours; contradictions; overrides."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mimo_v2_flash import MiMoV2FlashConfig as NativeConfig

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig

V25_PATTERN = [0 if i in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for i in range(48)]
PRO_PATTERN = [0 if i in (0, 7, 15, 23, 31, 39, 47, 55, 62, 69) else 1 for i in range(70)]
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "ignored_layers": ["model.layers.0.self_attn.o_proj", "model.decoder.self_attn.o_proj"],
}


def v25_file() -> dict[str, Any]:
    """The keys of the V2.5 config.json, with its spellings."""
    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mimo_v2.MiMoV2Config",
            "AutoModelForCausalLM": "modeling_mimo_v2.MiMoV2ForCausalLM",
        },
        "model_type": "mimo_v2",
        "vocab_size": 152576,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "swa_num_attention_heads": 64,
        "num_key_value_heads": 4,
        "swa_num_key_value_heads": 8,
        "head_dim": 192,
        "swa_head_dim": 192,
        "v_head_dim": 128,
        "swa_v_head_dim": 128,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10000000,
        "swa_rope_theta": 10000,
        "rope_scaling": {"rope_type": "default", "type": "default"},
        "max_position_embeddings": 1048576,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "attention_value_scale": 0.707,
        "attention_projection_layout": "fused_qkv",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": V25_PATTERN,
        "moe_layer_freq": [0] + [1] * 47,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "pad_token_id": 151643,
        "transformers_version": "4.57.1",
        "vision_model_type": "mimovl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": {"depth": 28, "hidden_size": 1280},
        "audio_config": {"speech_vocab_size": "1280"},
        "processor_config": {"pad_token_id": 151643},
        "quantization_config": {**FP8, "store_dtype": "fp8"},
    }


def flash_file() -> dict[str, Any]:
    """V2-Flash: as V2.5, other theta and length, no layout key, no media."""
    values = v25_file()
    gone = (
        "attention_projection_layout",
        "vision_config",
        "audio_config",
        "processor_config",
        "vision_model_type",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )
    for key in gone:
        del values[key]
    values.update(
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="mimo_v2_flash",
        rope_theta=5000000,
        max_position_embeddings=262144,
    )
    return values


def pro_file() -> dict[str, Any]:
    """V2.5-Pro: text only, `torch_dtype`, no rope_scaling, no token ids."""
    values = flash_file()
    for key in ("rope_scaling", "hybrid_block_size", "dtype", "eos_token_id", "pad_token_id"):
        del values[key]
    values.update(
        architectures=["MiMoV2ForCausalLM"],
        model_type="mimo_v2",
        hidden_size=6144,
        num_hidden_layers=70,
        num_attention_heads=128,
        swa_num_attention_heads=128,
        num_key_value_heads=8,
        rope_theta=10000000,
        max_position_embeddings=1048576,
        attention_value_scale=0.612,
        attention_projection_layout="fused_qkv",
        n_routed_experts=384,
        hybrid_layer_pattern=PRO_PATTERN,
        moe_layer_freq=[0] + [1] * 69,
        torch_dtype="bfloat16",
        quantization_config=FP8,
    )
    return values


def v26_file() -> dict[str, Any]:
    """V2.6-Flash-RL: V2.5 with eps 1e-6, flat rope_parameters, MXFP4."""
    values = v25_file()
    values.update(
        layernorm_epsilon=1e-6,
        moe_router_dtype="bfloat16",
        num_nextn_predict_layers=3,
        rope_parameters={"partial_rotary_factor": 0.334, "rope_theta": 10000000.0, "rope_type": "default"},
        quantization_config={**FP8, "store_dtype": "mxfp4", "mxfp4_block_size": 32},
        eos_token_id=[151643, 151645, 151672],
    )
    return values


RELEASED: dict[str, tuple[type[MiMoV2FlashConfig], dict[str, Any]]] = {
    "V2-Flash": (MiMoV2FlashConfig, flash_file()),
    "V2.5": (MiMoV2Config, v25_file()),
    "V2.5-Pro": (MiMoV2Config, pro_file()),
    "V2.6-Flash": (MiMoV2Config, v26_file()),
}


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def shape(config: MiMoV2FlashConfig) -> dict[str, Any]:
    """Everything the model is built from."""
    unread = ("rope_scaling", "torch_dtype", "hybrid_block_size", "sliding_window_size", "attention_chunk_size")
    fields = [name for name in inspect.signature(MiMoV2FlashConfig).parameters if name not in (*unread, "kwargs")]
    derived = ["layer_types", "mlp_layer_types", "rope_parameters", "dtype"]
    return {key: getattr(config, key) for key in fields + derived}


# -- transformers' own files ------------------------------------------------------------------------------------------

SMALL_NATIVE: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"],
    "rms_norm_eps": 3e-6,
    "attention_value_scale": 0.5,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "attention_bias": True,
    "sliding_window": 33,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 640000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
    },
}


def test_the_default_file_of_transformers(tmp_path: Path) -> None:
    NativeConfig().save_pretrained(tmp_path)
    assert read(tmp_path)["sliding_window"] == 129
    config = MiMoV2FlashConfig.from_pretrained(tmp_path)
    # Apart from window and length, transformers' defaults are V2-Flash.
    expected = MiMoV2FlashConfig(sliding_window=129, max_position_embeddings=131072)
    assert shape(config) == shape(expected)


def test_a_file_of_transformers_with_everything_changed(tmp_path: Path) -> None:
    NativeConfig(**SMALL_NATIVE, dtype="float32").save_pretrained(tmp_path)
    config = MiMoV2FlashConfig.from_pretrained(tmp_path)
    for key, value in SMALL_NATIVE.items():
        assert getattr(config, key) == value, key
    assert config.hybrid_layer_pattern == [1, 0, 0, 1, 0]
    assert config.moe_layer_freq == [1, 0, 1, 0, 1]
    assert (config.rope_theta, config.swa_rope_theta, config.partial_rotary_factor) == (640000.0, 20000.0, 0.5)
    assert config.layernorm_epsilon == 3e-6
    # transformers knows no swa_* key: heads and widths are those of the full layers, key-value heads twice as many.
    assert config.swa_num_attention_heads == 8
    assert config.swa_num_key_value_heads == 4
    assert (config.swa_head_dim, config.swa_v_head_dim) == (24, 16)
    assert config.dtype == torch.float32


def test_a_released_file_that_went_through_transformers(tmp_path: Path) -> None:
    """transformers reads `sliding_window_size` 128 as a window of 129 and writes both."""
    NativeConfig.from_pretrained(write(tmp_path / "in", flash_file())).save_pretrained(tmp_path / "out")
    values = read(tmp_path / "out")
    assert (values["sliding_window"], values["sliding_window_size"]) == (129, 128)
    config = MiMoV2FlashConfig.from_pretrained(tmp_path / "out")
    assert config.sliding_window == 129
    direct = MiMoV2FlashConfig.from_pretrained(tmp_path / "in")
    assert {**shape(config), "sliding_window": 128} == shape(direct)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 7, "hybrid_block_size": 3, "moe_layer_freq": 2},
        {"sliding_window": 129, "rope_theta": 640000.0, "swa_rope_theta": 123.0, "partial_rotary_factor": 0.25},
        {"layernorm_epsilon": 1e-6, "routed_scaling_factor": None, "n_group": 8, "topk_group": 2},
        {"attention_value_scale": None, "attention_bias": True, "torch_dtype": "float32", "eos_token_id": [1, 2]},
    ],
)
def test_ours_is_read_by_transformers_and_by_us(changes: dict[str, Any], tmp_path: Path) -> None:
    config = MiMoV2FlashConfig(**changes)
    config.save_pretrained(tmp_path)
    values = read(tmp_path)
    # transformers would add one to them.
    assert not {"sliding_window_size", "attention_chunk_size"} & values.keys()
    assert {"hybrid_layer_pattern", "layer_types", "moe_layer_freq", "mlp_layer_types"} <= values.keys()
    assert {"layernorm_epsilon", "rms_norm_eps", "rope_theta", "swa_rope_theta", "rope_parameters"} <= values.keys()
    again = MiMoV2FlashConfig.from_pretrained(tmp_path)
    assert again == config
    assert shape(again) == shape(config)
    for native in (NativeConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(native) is NativeConfig
        for key in (
            *SMALL_NATIVE,
            "max_position_embeddings",
            "initializer_range",
            "hidden_act",
            "attention_dropout",
            "tie_word_embeddings",
            "use_cache",
            "dtype",
        ):
            assert getattr(native, key) == getattr(config, key), key
        assert native.eos_token_id == changes.get("eos_token_id")


# -- released files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config_class", "values"), RELEASED.values(), ids=RELEASED.keys())
def test_released_files_load(config_class: type[MiMoV2FlashConfig], values: dict[str, Any], tmp_path: Path) -> None:
    config = config_class.from_pretrained(write(tmp_path, values))
    skipped = ("rope_scaling", "rope_parameters", "routed_scaling_factor", "torch_dtype", "dtype", "auto_map")
    for key, value in values.items():
        if key not in (*skipped, "transformers_version"):
            assert getattr(config, key) == value, key
    assert config.dtype == torch.bfloat16
    assert config.routed_scaling_factor == 1.0
    assert config.rms_norm_eps == values["layernorm_epsilon"]
    assert config.rope_parameters["full_attention"]["rope_theta"] == values["rope_theta"]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    layout = values.get("attention_projection_layout", "split")
    assert config.attention_projection_layout == layout
    assert [kind == "sliding_attention" for kind in config.layer_types] == [
        bool(x) for x in config.hybrid_layer_pattern
    ]


@pytest.mark.parametrize(("config_class", "values"), RELEASED.values(), ids=RELEASED.keys())
def test_a_round_trip_keeps_the_keys(
    config_class: type[MiMoV2FlashConfig], values: dict[str, Any], tmp_path: Path
) -> None:
    config = config_class.from_pretrained(write(tmp_path / "in", values))
    config.save_pretrained(tmp_path / "out")
    after = read(tmp_path / "out")
    changed = ("rope_parameters", "torch_dtype", "transformers_version", "routed_scaling_factor")
    for key, value in values.items():
        if key not in changed:
            assert key in after, key
            assert after[key] == value, key
    assert after["dtype"] == "bfloat16"
    assert after["routed_scaling_factor"] == 1.0
    assert after["rope_parameters"]["full_attention"]["rope_theta"] == values["rope_theta"]
    again = config_class.from_pretrained(tmp_path / "out")
    assert again == config
    again.save_pretrained(tmp_path / "third")
    assert (tmp_path / "third" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_v2_flash_is_the_same_model_in_both_vocabularies(tmp_path: Path) -> None:
    NativeConfig(sliding_window=128, max_position_embeddings=262144).save_pretrained(tmp_path / "native")
    released = MiMoV2FlashConfig.from_pretrained(write(tmp_path / "released", flash_file()))
    native = MiMoV2FlashConfig.from_pretrained(tmp_path / "native")
    assert shape(native) == shape(released) == shape(MiMoV2FlashConfig())


@pytest.mark.parametrize("spelling", [{"torch_dtype": "float16"}, {"dtype": "float16"}])
def test_both_dtype_spellings_of_a_file(spelling: dict[str, Any]) -> None:
    values = flash_file()
    del values["dtype"]
    assert MiMoV2FlashConfig.from_dict({**values, **spelling}).dtype == torch.float16
    both = {**values, "torch_dtype": "float32", "dtype": "float16"}
    assert MiMoV2FlashConfig.from_dict(both).dtype == torch.float16
    assert MiMoV2FlashConfig.from_dict(values).dtype == torch.bfloat16


def test_absent_keys_of_a_file() -> None:
    values = flash_file()
    for key in list(values):
        if key.startswith("swa_"):
            del values[key]
    values.update(num_key_value_heads=16, head_dim=96, v_head_dim=64, rope_theta=777.0)
    config = MiMoV2FlashConfig.from_dict(values)
    # No swa_* key at all and flat thetas: the sliding layers are like the full ones.
    assert config.swa_num_attention_heads == 64
    assert config.swa_num_key_value_heads == 16
    assert (config.swa_head_dim, config.swa_v_head_dim) == (96, 64)
    assert config.swa_rope_theta == 777.0
    # A flat rope_parameters (as in the V2.6 files) does not make it a file of transformers.
    flat = {**values, "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}}
    assert MiMoV2FlashConfig.from_dict(flat).swa_num_key_value_heads == 16
    assert MiMoV2FlashConfig.from_dict({"model_type": "mimo_v2_flash"}) == MiMoV2FlashConfig()


@pytest.mark.parametrize(
    "key", ["hybrid_layer_pattern", "moe_layer_freq", "layer_types", "rms_norm_eps", "rope_scaling"]
)
def test_null_means_absent(key: str) -> None:
    values = {name: value for name, value in flash_file().items() if name != key}
    assert shape(MiMoV2FlashConfig.from_dict({**values, key: None})) == shape(MiMoV2FlashConfig.from_dict(values))


def test_null_layernorm_epsilon_takes_the_other_name() -> None:
    config = MiMoV2FlashConfig.from_dict({**flash_file(), "layernorm_epsilon": None, "rms_norm_eps": 2e-6})
    assert config.layernorm_epsilon == config.rms_norm_eps == 2e-6


def test_null_value_scale_means_no_scaling() -> None:
    assert MiMoV2FlashConfig.from_dict({**flash_file(), "attention_value_scale": None}).attention_value_scale is None


def test_a_period_in_a_file() -> None:
    config = MiMoV2FlashConfig.from_dict({**flash_file(), "moe_layer_freq": 3})
    assert config.moe_layer_freq == [int(i % 3 == 0) for i in range(48)]
    words = ["sparse" if i % 3 == 0 else "dense" for i in range(48)]
    assert MiMoV2FlashConfig.from_dict({**flash_file(), "moe_layer_freq": 3, "mlp_layer_types": words}) == config


@pytest.mark.parametrize(("window", "size"), [(128, 128), (129, 128), (1, 0), (1, 1)])
def test_window_sizes_that_agree(window: int, size: int) -> None:
    values = {**flash_file(), "sliding_window": window, "sliding_window_size": size, "attention_chunk_size": size}
    config = MiMoV2FlashConfig.from_dict(values)
    assert config.sliding_window == window
    saved = config.to_diff_dict()
    assert (saved["sliding_window_size"], saved["attention_chunk_size"]) == (size, size)


# -- contradictions ---------------------------------------------------------------------------------------------------

ALL_FULL = ["full_attention"] * 48


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ALL_FULL}, ["hybrid_layer_pattern", "layer_types", str([0] * 48), str(V25_PATTERN)]),
        ({"mlp_layer_types": ["dense"] * 48}, ["moe_layer_freq", "mlp_layer_types", str([0] * 48)]),
        ({"moe_layer_freq": 2, "mlp_layer_types": ["dense"] * 48}, ["moe_layer_freq 2", "mlp_layer_types"]),
        ({"layer_types": ALL_FULL[:-1]}, ["layer_types", "47", "48"]),
        ({"mlp_layer_types": ["dense"] * 49}, ["mlp_layer_types", "49", "48"]),
        ({"hybrid_layer_pattern": [0, 1]}, ["hybrid_layer_pattern", "2 entries", "48"]),
        ({"layer_types": ["chunked_attention"] * 48}, ["layer_types", "chunked_attention", "sliding_attention"]),
        ({"mlp_layer_types": ["moe"] * 48}, ["mlp_layer_types", "'moe'", "sparse"]),
        ({"rms_norm_eps": 1e-6}, ["layernorm_epsilon", "1e-05", "rms_norm_eps", "1e-06"]),
        ({"sliding_window": 64}, ["sliding_window", "64", "sliding_window_size", "128"]),
        ({"sliding_window_size": 129}, ["sliding_window_size", "129", "128"]),
        ({"attention_chunk_size": 256}, ["attention_chunk_size", "256", "128"]),
        ({"sliding_window": None}, ["sliding_window_size", "128", "sliding_window"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["5000000.0", "10000.0", "rope_theta"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default"}},
            ["partial_rotary_factor", "0.334", "0.5"],
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type", "yarn"]),
        ({"rope_parameters": {"full_attention": {"type": "linear"}}}, ["full_attention", "linear"]),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5e6, "rope_type": "default"}}},
            ["swa_rope_theta", "10000.0", "5000000.0"],
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
                }
            },
            ["partial_rotary_factor", "0.334", "0.25", "sliding_attention"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["rope_scaling", "yarn"]),
        ({"num_local_experts": 128}, ["num_local_experts", "128", "n_routed_experts", "256"]),
        ({"text_config": {"hidden_size": 4096}}, ["text_config", "top level"]),
        ({"model_type": "qwen3_moe"}, ["qwen3_moe", "mimo_v2_flash"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
    ids=str,
)
def test_contradictions_in_a_file_show_both_values(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        MiMoV2FlashConfig.from_pretrained(write(tmp_path, {**flash_file(), **changes}))
    for word in words:
        assert word in str(error.value)


def test_the_file_is_not_changed_by_reading() -> None:
    values = v26_file()
    before = copy.deepcopy(values)
    MiMoV2Config.from_dict(values)
    assert values == before


# -- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_come_before_the_derivations(tmp_path: Path) -> None:
    config = MiMoV2FlashConfig.from_pretrained(
        write(tmp_path / "in", flash_file()), num_hidden_layers=4, rope_theta=640000, layernorm_epsilon=1e-6
    )
    assert config.layer_types == ["full_attention", *["sliding_attention"] * 3]
    assert config.mlp_layer_types == ["dense", *["sparse"] * 3]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 640000.0
    assert config.rms_norm_eps == 1e-6
    config.save_pretrained(tmp_path / "out")
    assert shape(MiMoV2FlashConfig.from_pretrained(tmp_path / "out")) == shape(config)
    assert NativeConfig.from_pretrained(tmp_path / "out").layer_types == config.layer_types


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_override(key: str) -> None:
    assert MiMoV2FlashConfig.from_dict(flash_file(), **{key: "float32"}).dtype == torch.float32
    assert MiMoV2FlashConfig.from_dict(flash_file(), **{key: "auto"}).dtype == torch.bfloat16


def test_a_derived_key_cannot_be_overridden() -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        MiMoV2FlashConfig.from_dict(flash_file(), layer_types=ALL_FULL)


def test_unused_keywords_are_handed_back() -> None:
    config, unused = MiMoV2FlashConfig.from_dict(
        flash_file(), return_unused_kwargs=True, num_hidden_layers=2, cache_dir="x"
    )
    assert config.num_hidden_layers == 2
    assert unused == {"cache_dir": "x"}


@pytest.mark.parametrize("window", [64, 129, 200])
def test_a_window_changed_after_reading_saves_no_contradiction(window: int, tmp_path: Path) -> None:
    config = MiMoV2FlashConfig.from_dict(flash_file())
    config.sliding_window = window
    config.save_pretrained(tmp_path)
    assert MiMoV2FlashConfig.from_pretrained(tmp_path).sliding_window == window
    # transformers agrees: either it finds no size, or one less than the window.
    assert NativeConfig.from_pretrained(tmp_path).sliding_window == window


def test_a_saved_file_does_not_say_where_the_config_came_from(tmp_path: Path) -> None:
    MiMoV2FlashConfig(num_hidden_layers=2).save_pretrained(tmp_path / "first")
    MiMoV2FlashConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "config.json").read_text() for name in ("first", "second"))
    assert first == second
    assert str(tmp_path) not in second
