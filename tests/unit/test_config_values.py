"""Values of a config.json that are of the wrong kind are refused by name; nothing is converted or guessed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_config_files import RELEASED, SMALL_NATIVE, flash_file, v25_file, v26_file

from automimo.errors import AutoMiMoError, CheckpointError, ConfigError
from automimo.mimo_v2_flash.config import DERIVED_KEYS, MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.source import MAX_CONFIG_DEPTH, config_values, read_config

SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("max_position_embeddings", "num_experts_per_tok", "n_group", "topk_group"),
]
OPTIONAL_COUNTS = [
    *("n_routed_experts", "n_shared_experts", "sliding_window", "sliding_window_size", "attention_chunk_size"),
    *("hybrid_block_size", "checkpoint_tp_size"),
]
NUMBERS = [
    *("initializer_range", "layernorm_epsilon", "rms_norm_eps", "rope_theta", "swa_rope_theta"),
    *("attention_dropout", "attention_value_scale", "partial_rotary_factor", "routed_scaling_factor"),
]
FLAGS = [
    *("use_cache", "tie_word_embeddings", "attention_bias", "add_full_attention_sink_bias"),
    *("add_swa_attention_sink_bias", "norm_topk_prob", "apply_router_weight_after_down"),
]
OBJECTS = ["quantization_config", "vision_config", "audio_config", "processor_config", "rope_parameters"]


def check_refused(key: str, value: Any, *words: str) -> None:
    """In a file, as an override of a file, and as an argument."""
    makers = [lambda: MiMoV2Config.from_dict({**v25_file(), key: value}), lambda: MiMoV2Config(**{key: value})]
    if key not in DERIVED_KEYS:  # which are refused as overrides
        makers.append(lambda: MiMoV2FlashConfig.from_dict(flash_file(), **{key: value}))
    for make in makers:
        with pytest.raises(ConfigError) as error:
            make()
        for word in (f"{key}: must be", f"got {value!r:.200}", *words):
            assert word in str(error.value)


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*SIZES, *OPTIONAL_COUNTS])
def test_counts_are_whole_numbers(key: str) -> None:
    for value in ("128", 128.0, 1.5, True, [128], {}):
        check_refused(key, value, "a whole number of at least")


@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_at_least_one(key: str) -> None:
    for value in (0, -1):
        check_refused(key, value, "at least 1")


def test_the_least_value_of_optional_counts() -> None:
    for key in ("n_routed_experts", "n_shared_experts"):
        check_refused(key, -1, "at least 0")
    for value in (0, -4):
        with pytest.raises(ConfigError, match=f"checkpoint_tp_size must be positive, got {value}; give a whole number"):
            MiMoV2Config(checkpoint_tp_size=value)
        with pytest.raises(ConfigError, match=f"checkpoint_tp_size must be positive, got {value}; give a whole number"):
            MiMoV2Config.from_dict({**v25_file(), "checkpoint_tp_size": value})
    assert MiMoV2Config(checkpoint_tp_size=4).checkpoint_tp_size == 4


def test_an_override_of_an_optional_key_of_the_file_is_what_is_saved() -> None:
    file = {**v25_file(), "checkpoint_tp_size": 4}
    config = MiMoV2Config.from_dict(file, checkpoint_tp_size=8, hybrid_block_size=6)
    saved = config.to_dict()
    assert (saved["checkpoint_tp_size"], saved["hybrid_block_size"]) == (8, 6)
    assert MiMoV2Config.from_dict(saved) == config
    assert MiMoV2Config.from_dict(file).to_dict()["checkpoint_tp_size"] == 4


def test_null_stays_allowed_where_it_was() -> None:
    config = MiMoV2Config.from_dict({**v25_file(), **dict.fromkeys(OPTIONAL_COUNTS[1:2] + OPTIONAL_COUNTS[3:])})
    assert (config.n_shared_experts, config.hybrid_block_size, config.checkpoint_tp_size) == (None, None, None)
    heads = MiMoV2Config.from_dict({**v25_file(), "num_key_value_heads": None, "swa_num_key_value_heads": None})
    assert (heads.num_key_value_heads, heads.swa_num_key_value_heads) == (64, 64)
    widths = MiMoV2Config.from_dict({**v25_file(), "swa_head_dim": None, "swa_v_head_dim": None})
    assert (widths.swa_head_dim, widths.swa_v_head_dim) == (192, 128)
    native = {**SMALL_NATIVE, "model_type": "mimo_v2_flash", "num_key_value_heads": None}
    assert MiMoV2FlashConfig.from_dict(native).num_key_value_heads == 8
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size"):
        with pytest.raises(ConfigError, match=f"{key}: must be a whole number of at least 1.* got None"):
            MiMoV2Config.from_dict({**v25_file(), key: None})


# -- other kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers(key: str) -> None:
    for value in ("1e-5", "x", True, [1.0], math.nan, math.inf, -math.inf, 10**400):
        check_refused(key, value, "a finite number")


@pytest.mark.parametrize("key", FLAGS)
def test_flags(key: str) -> None:
    """The string "false" would count as true."""
    for value in ("false", "true", 0, 1, [], {}):
        check_refused(key, value, "true or false")


@pytest.mark.parametrize("key", OBJECTS)
def test_objects(key: str) -> None:
    for value in ("fp8", "", ["fp8"], [], 8, False):
        check_refused(key, value, "a JSON object", "left out")


@pytest.mark.parametrize("value", ["yarn", ["yarn"], 4.0, {"type": ["default"]}, {"rope_type": {}}])
def test_rope_scaling(value: Any) -> None:
    with pytest.raises(ConfigError, match="rope_scaling: "):
        MiMoV2Config.from_dict({**v25_file(), "rope_scaling": value})


@pytest.mark.parametrize("value", ["01", 5, [[0]] * 48, [0.0] * 48, [True] * 48, [None] * 48, {"0": 1}])
def test_layer_patterns(value: Any) -> None:
    check_refused("hybrid_layer_pattern", value)
    if value != 5:  # a period
        check_refused("moe_layer_freq", value)
    for key in ("layer_types", "mlp_layer_types"):
        with pytest.raises(ConfigError, match=rf"config\.json: {key}: must be a list"):
            MiMoV2Config.from_dict({**v25_file(), key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_attention": 5}, r"rope_parameters\.full_attention: must be a JSON object.*got 5"),
        ({"full_attention": {"rope_theta": "5e6"}}, r"rope_parameters\.full_attention\.rope_theta: .* got '5e6'"),
        ({"sliding_attention": {"partial_rotary_factor": None}}, r"sliding_attention\.partial_.*: .* got None"),
    ],
)
def test_rope_parameters_of_a_layer_kind(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MiMoV2Config.from_dict({**v25_file(), "rope_parameters": changes})


@pytest.mark.parametrize(
    "value", ["x", "1", 1.5, True, [], [[1]], ["x"], {}, {"a": []}, None, -1, 0, math.nan, 10**400]
)
def test_no_value_of_any_key_is_an_internal_error(value: Any) -> None:
    native = {**SMALL_NATIVE, "model_type": "mimo_v2_flash"}
    ours = {**v26_file(), "checkpoint_tp_size": 4}
    # These belong to transformers, which reads them in its own way.
    theirs = {"architectures", "auto_map", "eos_token_id", "pad_token_id", "transformers_version"}
    refused = 0
    for config_class, file in ((MiMoV2Config, ours), (MiMoV2FlashConfig, native)):
        for key in file.keys() - theirs - {key for key in file if key.endswith("_token_id")}:
            try:
                config_class.from_dict({**file, key: value})
            except ConfigError as error:
                assert key in str(error)
                refused += 1
    assert refused >= 10


def test_what_is_inside_a_part_is_not_looked_at() -> None:
    """Released audio configs have sizes in quotes."""
    audio = {"speech_vocab_size": "1280-1280", "group_size": "4", "rope_theta": "640000"}
    config = MiMoV2Config.from_dict({**v25_file(), "audio_config": audio})
    assert config.audio_config == audio


@pytest.mark.parametrize("name", RELEASED)
def test_released_files_have_values_of_the_right_kind(name: str) -> None:
    config_class, values = RELEASED[name]
    assert config_class.from_dict(values).num_hidden_layers == values["num_hidden_layers"]


# -- the file ---------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str | bytes) -> Path:
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "cannot be read as JSON"),
        ('{"head_dim": 192, "head_dim": 128}', "the key 'head_dim' appears twice"),
        ('{"vision_config": {"depth": 1, "depth": 2}}', "the key 'depth' appears twice"),
        ('{"rope_theta": NaN}', "NaN is no finite number"),
        ('{"rope_theta": -Infinity}', "-Infinity is no finite number"),
        ('{"rope_theta": 1e999}', "1e999 is no finite number"),
        ("[1]", "holds a list where a JSON object is expected"),
        ('{"a": ' * 100_000, "cannot be read as JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read as JSON"),
    ],
    ids=range(10),
)
def test_a_config_that_is_no_strict_json(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        config_values(write(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert words in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_nesting_ends_before_the_stack_does(left: str, right: str, tmp_path: Path) -> None:
    def nested(depth: int) -> str:
        file = {**v25_file(), "extra": "HERE"}
        inner = left * (depth - 1) + "1" + right * (depth - 1)
        return json.dumps(file).replace('"HERE"', inner)

    config = read_config(write(tmp_path, nested(MAX_CONFIG_DEPTH)), MiMoV2Config)
    assert json.loads(json.dumps(config.to_diff_dict()))["extra"] == config_values(tmp_path)["extra"]
    for depth in (MAX_CONFIG_DEPTH + 1, 200, 400, 900, 5000):  # the parser gives up first at about 1,000
        with pytest.raises(AutoMiMoError, match=r"config\.json: (objects and lists are nested|cannot be read)"):
            read_config(write(tmp_path, nested(depth)), MiMoV2Config)


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: "):
        config_values(tmp_path)
