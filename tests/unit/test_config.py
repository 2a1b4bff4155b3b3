"""MiMoV2FlashConfig and MiMoV2Config: fields, defaults, derivations, impossible values."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig

# The fields of the interface page, typed from it.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "layernorm_epsilon": 1e-05,
    "rms_norm_eps": None,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_projection_layout": "split",
    "attention_value_scale": 0.707,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": None,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "apply_router_weight_after_down": False,
    "moe_layer_freq": None,
    "torch_dtype": "bfloat16",
    "vision_config": None,
    "audio_config": None,
    "processor_config": None,
}
V25_PATTERN = [0 if i in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for i in range(48)]


# -- constructor ------------------------------------------------------------------------------------------------------


def test_fields_and_defaults_are_those_of_the_interface() -> None:
    parameters = inspect.signature(MiMoV2FlashConfig.__init__).parameters
    found = {name: p.default for name, p in parameters.items() if name not in ("self", "kwargs")}
    assert list(found) == list(DEFAULTS)
    assert found == DEFAULTS
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    v2 = inspect.signature(MiMoV2Config.__init__).parameters
    assert [(name, p.kind) for name, p in v2.items() if name != "self"] == [("kwargs", inspect.Parameter.VAR_KEYWORD)]


def test_every_default_becomes_an_attribute() -> None:
    config = MiMoV2FlashConfig()
    derived = {
        "rms_norm_eps": 1e-5,
        "hybrid_layer_pattern": V25_PATTERN,
        "moe_layer_freq": [0] + [1] * 47,
        "torch_dtype": torch.bfloat16,
    }
    for name, value in {**DEFAULTS, **derived}.items():
        if name not in ("rope_scaling", "torch_dtype"):
            assert getattr(config, name) == value, name
    assert config.dtype == torch.bfloat16
    assert config.model_type == "mimo_v2_flash"
    assert config.attribute_map == {"num_local_experts": "n_routed_experts"}
    assert config.keys_to_ignore_at_inference == ["past_key_values"]
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
    }
    assert config.layer_types == ["sliding_attention" if kind else "full_attention" for kind in V25_PATTERN]
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 47


def test_none_is_filled_in() -> None:
    config = MiMoV2FlashConfig(
        num_attention_heads=12,
        num_key_value_heads=None,  # type: ignore[arg-type]
        swa_num_attention_heads=6,
        swa_num_key_value_heads=None,  # type: ignore[arg-type]
        swa_rope_theta=None,  # type: ignore[arg-type]
        routed_scaling_factor=None,
        layernorm_epsilon=3e-6,
    )
    assert (config.num_key_value_heads, config.swa_num_key_value_heads) == (12, 6)
    assert config.swa_rope_theta == config.rope_theta == 5000000.0
    assert config.routed_scaling_factor == 1.0
    assert config.rms_norm_eps == config.layernorm_epsilon == 3e-6
    assert MiMoV2FlashConfig(layernorm_epsilon=1e-6, rms_norm_eps=2e-6).rms_norm_eps == 2e-6


def test_the_alias_reads_and_writes_the_experts() -> None:
    config = MiMoV2FlashConfig(n_routed_experts=12)
    assert config.num_local_experts == 12
    config.num_local_experts = 16
    assert config.n_routed_experts == 16


@pytest.mark.parametrize("given", ["float32", torch.float32, "torch.float32"])
def test_dtype_spellings(given: object) -> None:
    for key in ("dtype", "torch_dtype"):
        assert MiMoV2FlashConfig(**{key: given}).dtype == torch.float32
    assert MiMoV2FlashConfig(dtype=given, torch_dtype="float16").dtype == torch.float32


def test_mimo_v2_defaults() -> None:
    config = MiMoV2Config()
    assert config.model_type == "mimo_v2"
    assert (config.attention_projection_layout, config.apply_router_weight_after_down) == ("fused_qkv", True)
    other = MiMoV2Config(attention_projection_layout="split", apply_router_weight_after_down=False, image_token_id=7)
    assert (other.attention_projection_layout, other.apply_router_weight_after_down) == ("split", False)
    assert other.image_token_id == 7
    for name, value in DEFAULTS.items():
        if name in ("hidden_size", "swa_num_key_value_heads", "sliding_window", "vocab_size"):
            assert getattr(config, name) == value


@pytest.mark.parametrize("layers", [1, 2, 5, 6, 7, 12, 13, 70])
def test_published_pattern(layers: int) -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=layers)
    full = [i for i, word in enumerate(config.layer_types) if word == "full_attention"]
    assert full == [i for i in range(layers) if i == 0 or i % 6 == 5]


@pytest.mark.parametrize(("block", "full"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (8, [])])
def test_hybrid_block_size(block: int, full: list[int]) -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=7, hybrid_block_size=block)
    assert [i for i, word in enumerate(config.layer_types) if word == "full_attention"] == full
    assert config.hybrid_layer_pattern == [0 if i in full else 1 for i in range(7)]


def test_a_pattern_wins_over_a_block_size_and_may_be_longer_than_the_model() -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=3, hybrid_layer_pattern=[1, 1, 0, 0, 1], hybrid_block_size=2)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.hybrid_layer_pattern == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("period", "expected"), [(0, [0, 0, 0, 0, 0]), (1, [1, 1, 1, 1, 1]), (2, [1, 0, 1, 0, 1]), (3, [1, 0, 0, 1, 0])]
)
def test_an_integer_moe_layer_freq_is_a_period(period: int, expected: list[int]) -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=5, moe_layer_freq=period)  # type: ignore[arg-type]
    assert config.moe_layer_freq == expected
    assert config.mlp_layer_types == ["sparse" if one else "dense" for one in expected]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_projection_layout": "qkv"}, ["attention_projection_layout must be either", "'qkv'"]),
        ({"checkpoint_tp_size": 0}, ["checkpoint_tp_size must be positive, got 0"]),
        ({"checkpoint_tp_size": "4"}, ["checkpoint_tp_size: must be a whole number of at least 1", "got '4'"]),
        ({"checkpoint_tp_size": True}, ["checkpoint_tp_size: must be a whole number of at least 1", "got True"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"topk_method": "greedy"}, ["topk_method", "'greedy'"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}, ["rope_scaling", "mrope_section"]),
        ({"hybrid_layer_pattern": [0, 1]}, ["hybrid_layer_pattern", "2 entries", "48"]),
        ({"hybrid_layer_pattern": [2] * 48}, ["hybrid_layer_pattern", "[2]"]),
        ({"hybrid_block_size": 0}, ["hybrid_block_size", "0"]),
        ({"moe_layer_freq": [0, 1]}, ["moe_layer_freq", "2 entries", "48"]),
        ({"moe_layer_freq": [0, 3] * 24}, ["moe_layer_freq", "[0, 3]"]),
        ({"moe_layer_freq": -1}, ["moe_layer_freq", "-1"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads 64", "num_key_value_heads 5"]),
        ({"swa_num_key_value_heads": 7}, ["swa_num_attention_heads 64", "swa_num_key_value_heads 7"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "at least 1", "got 0"]),
        ({"sliding_window": None}, ["sliding_window", "None"]),
        ({"sliding_window": 0}, ["sliding_window", "0"]),
        ({"torch_dtype": "bf16x"}, ["dtype", "bf16x", "bfloat16"]),
        ({"dtype": torch.int8}, ["dtype", "int8"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters", "5000000.0"]),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], words: list[str]) -> None:
    for config_class in (MiMoV2FlashConfig, MiMoV2Config):
        with pytest.raises(ConfigError) as error:
            config_class(**changes)
        assert isinstance(error.value, ValueError)
        for word in words:
            assert word in str(error.value)


def test_a_model_of_full_layers_needs_no_window() -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=2, hybrid_layer_pattern=[0, 0], sliding_window=None)
    assert config.sliding_window is None


def test_configs_compare_by_their_own_keys() -> None:
    """transformers makes every config class a dataclass; the comparison it generates would see none of our fields."""
    assert MiMoV2FlashConfig() == MiMoV2FlashConfig()
    assert MiMoV2FlashConfig() != MiMoV2FlashConfig(hidden_size=64)
    assert MiMoV2Config() == MiMoV2Config()
    assert MiMoV2Config() != MiMoV2Config(sliding_window=129)
    assert MiMoV2Config(attention_projection_layout="split") != MiMoV2FlashConfig(apply_router_weight_after_down=True)
    assert MiMoV2FlashConfig() != "config"


# -- transformers stays as it is --------------------------------------------------------------------------------------


def test_importing_automimo_changes_nothing_in_transformers() -> None:
    code = """
import json, sys, tempfile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
before = dict(CONFIG_MAPPING._extra_content), dict(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content)
import automimo, automimo.mimo_v2_flash
from automimo import MiMoV2Config, MiMoV2FlashConfig, MiMoV2FlashForCausalLM
MiMoV2FlashForCausalLM, MiMoV2Config()
assert before == (dict(CONFIG_MAPPING._extra_content), dict(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content))
native = AutoConfig.for_model("mimo_v2_flash")
assert type(native).__module__.startswith("transformers."), type(native)
with tempfile.TemporaryDirectory() as folder:
    MiMoV2FlashConfig().save_pretrained(folder)
    assert type(AutoConfig.from_pretrained(folder)) is type(native)
try:
    AutoConfig.for_model("mimo_v2")
except ValueError:
    print("unchanged")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "unchanged", done.stderr
