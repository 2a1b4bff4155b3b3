"""What a config.json may say, in both vocabularies, and how it becomes constructor arguments.

Released files speak of `hybrid_layer_pattern`, `moe_layer_freq`, `swa_*`, flat thetas, `layernorm_epsilon`.
transformers writes `layer_types`, `mlp_layer_types`, `rope_parameters` per layer kind, `rms_norm_eps`. Ours has both,
so that either reader opens it. Keys that are present must agree; a contradiction is an error that shows both values,
never a guess. Torch-free.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from automimo.errors import ConfigError

KINDS = ("full_attention", "sliding_attention")
# Only written when the file we read had them: transformers adds one to `sliding_window_size` to get its window.
OPTIONAL_KEYS = (
    "sliding_window_size",
    "attention_chunk_size",
    "rope_scaling",
    "hybrid_block_size",
    "checkpoint_tp_size",
)
WINDOW_KEYS = ("sliding_window_size", "attention_chunk_size")
NESTED_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
# A sliding-layer size that a file leaves out is the full layers' one (reference behaviour for released files).
SWA_FALLBACK = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


class _Kind(NamedTuple):
    """What the values of some keys must be: the test, and its words for the error message."""

    accepts: Callable[[Any], bool]
    wanted: str


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # Python counts true as 1


def _is_number(value: Any) -> bool:
    # Compared as it stands: float() of a whole number with 400 digits overflows. NaN fails both comparisons.
    largest = sys.float_info.max
    return (_is_whole(value) or isinstance(value, float)) and -largest <= value <= largest


def _is_pattern(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_whole(entry) for entry in value)


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)


_SIZE = _Kind(lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1, without quotes or point")
_EXPERTS = _Kind(lambda value: _is_whole(value) and value >= 0, "a whole number of at least 0 or null")
# The least value of these has its own reason, which is told where it is checked.
_WHOLE = _Kind(_is_whole, "a whole number of at least 1, without quotes or point, or null")
_NUMBER = _Kind(_is_number, "a finite number without quotes")
_FLAG = _Kind(lambda value: isinstance(value, bool), "true or false without quotes")
_OBJECT = _Kind(lambda value: isinstance(value, dict), "a JSON object, or be left out")
_PATTERN = _Kind(_is_pattern, "a list with 0 or 1 for each layer")
_PATTERN_OR_PERIOD = _Kind(lambda value: _is_whole(value) or _is_pattern(value), "a list with 0 or 1, or a period")
_WORDS = _Kind(_is_words, "a list with one word for each layer")

_KINDS: tuple[tuple[_Kind, tuple[str, ...]], ...] = (
    (
        _SIZE,
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"),
            *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
            *("max_position_embeddings", "num_experts_per_tok", "n_group", "topk_group"),
        ),
    ),
    (_EXPERTS, ("n_routed_experts", "num_local_experts", "n_shared_experts")),
    (
        _WHOLE,
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "hybrid_block_size", "checkpoint_tp_size"),
    ),
    (
        _NUMBER,
        (
            *("initializer_range", "layernorm_epsilon", "rms_norm_eps", "rope_theta", "swa_rope_theta"),
            *("attention_dropout", "attention_value_scale", "partial_rotary_factor", "routed_scaling_factor"),
        ),
    ),
    (
        _FLAG,
        (
            *("use_cache", "tie_word_embeddings", "attention_bias", "add_full_attention_sink_bias"),
            *("add_swa_attention_sink_bias", "norm_topk_prob", "apply_router_weight_after_down"),
        ),
    ),
    (
        _OBJECT,
        (
            *("quantization_config", "vision_config", "audio_config", "processor_config"),
            *("rope_parameters", "rope_scaling"),
        ),
    ),
    (_PATTERN, ("hybrid_layer_pattern",)),
    (_PATTERN_OR_PERIOD, ("moe_layer_freq",)),
    (_WORDS, ("layer_types", "mlp_layer_types")),
)
# Null in these is not a value but the absence of one, which a model cannot do without.
_NEVER_NULL = frozenset(
    {key for kind, keys in _KINDS if kind in (_SIZE, _NUMBER) for key in keys}
    - {"num_key_value_heads", "swa_num_key_value_heads", "rms_norm_eps", "swa_rope_theta"}
    - {"attention_dropout", "attention_value_scale", "routed_scaling_factor"}
)


def check_values(values: Mapping[str, Any]) -> None:
    """Raise a ConfigError, with key and value, for the first constructor argument that is not what its key must be.

    Nothing is converted: a size "160" or 3.0 is a sign that another tool wrote the file, and true is not 1. Keys that
    are absent or unknown are not looked at; what is inside `vision_config`, `audio_config`, `processor_config` and
    `quantization_config` is not either (released audio configs have sizes in quotes).
    """
    _check_kinds(values, _NEVER_NULL, "")


def _check_kinds(values: Mapping[str, Any], never_null: frozenset[str], where: str) -> None:
    for kind, keys in _KINDS:
        for key in keys:
            if key in values and (values[key] is not None or key in never_null):
                _check_kind(where + key, values[key], kind)


def _check_kind(name: str, value: Any, kind: _Kind) -> None:
    if not kind.accepts(value):
        raise ConfigError(f"{name}: must be {kind.wanted}, got {value!r:.200}")


def constructor_arguments(file: dict[str, Any], model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn the contents of a config.json into constructor arguments of our configs.

    Returns the arguments and the optional keys the file had (to be written again on saving). Raises ConfigError for a
    nested text config, an unsupported model type, values of the wrong kind or keys that contradict each other.
    """
    nested = [key for key in NESTED_KEYS if file.get(key) is not None]
    if nested:
        raise ConfigError(
            f"config.json: the text model is nested under {nested[0]!r}; MiMo-V2 files keep its keys at the top level. "
            f"Move the contents of {nested[0]!r} up"
        )
    found_type = file.get("model_type")
    if found_type not in (None, "", model_type):
        raise ConfigError(f"config.json: model_type is {found_type!r}, this class reads {model_type!r}")
    _check_kinds(file, frozenset(), "config.json: ")  # here null may still mean "absent"
    file_keys = {key: file[key] for key in OPTIONAL_KEYS if key in file}
    arguments = dict(file)
    # An explicit null means what an absent key means, except where null itself has a meaning.
    for key in ("hybrid_layer_pattern", "moe_layer_freq", "rms_norm_eps", "layer_types", "mlp_layer_types"):
        if arguments.get(key, 0) is None:
            del arguments[key]
    experts = arguments.pop("num_local_experts", None)
    if experts is not None:
        _agree("num_local_experts", experts, "n_routed_experts", arguments.setdefault("n_routed_experts", experts))
    _read_layer_patterns(arguments)
    _read_sliding_sizes(arguments)
    _read_rope(arguments)
    _read_epsilon(arguments)
    _read_window(arguments)
    _read_dtype(arguments)
    return arguments, file_keys


def serialised(values: dict[str, Any], file_keys: dict[str, Any], window: int | None) -> dict[str, Any]:
    """The dictionary a config is saved as: both vocabularies, without what would mislead a reader.

    A window size of the file that no longer fits `window` (it was changed after reading) is left out.
    """
    result = {key: value for key, value in values.items() if not key.startswith("_") or key == "_name_or_path"}
    for key in OPTIONAL_KEYS:
        result.pop(key, None)
    for key, value in file_keys.items():
        if key not in WINDOW_KEYS or value is None or _fits(value, window):
            result[key] = value
    return result


def with_window(file: dict[str, Any], window: int | None) -> dict[str, Any]:
    """The contents of a config.json with another sliding window; as they are when it has that one."""
    if file.get("sliding_window") == window:
        return file
    changed = {**file, "sliding_window": window}
    return {key: v for key, v in changed.items() if key not in WINDOW_KEYS or v is None or _fits(v, window)}


def _agree(key_a: str, a: Any, key_b: str, b: Any) -> None:
    if a != b:
        raise ConfigError(f"config.json: {key_a} says {a} but {key_b} says {b}; correct the wrong one or remove it")


def _read_layer_patterns(arguments: dict[str, Any]) -> None:
    layers = arguments.get("num_hidden_layers")
    for ours, theirs, one, zero in (
        ("hybrid_layer_pattern", "layer_types", "sliding_attention", "full_attention"),
        ("moe_layer_freq", "mlp_layer_types", "sparse", "dense"),
    ):
        if theirs not in arguments:
            continue
        words = arguments.pop(theirs)
        unknown = sorted({word for word in words if word not in (one, zero)})
        if unknown:
            raise ConfigError(f"config.json: {theirs} has {unknown[0]!r}; known are {one!r} and {zero!r}")
        if layers is not None and len(words) != layers:
            raise ConfigError(f"config.json: {theirs} has {len(words)} entries for num_hidden_layers {layers}")
        pattern = [int(word == one) for word in words]
        known = arguments.get(ours)
        if isinstance(known, list):
            _agree(ours, known[: len(pattern)], theirs, pattern)
        elif isinstance(known, int):
            period = [int(known > 0 and i % known == 0) for i in range(len(pattern))]
            _agree(f"{ours} {known} (a period)", period, theirs, pattern)
            arguments[ours] = pattern
        else:
            arguments[ours] = pattern


def _read_sliding_sizes(arguments: dict[str, Any]) -> None:
    given = [key for key in SWA_FALLBACK if arguments.get(key) is not None]
    # transformers' class knows no swa_* key: there the sliding layers have twice the key-value heads. It writes one
    # entry of rope_parameters per layer kind, which no released file does.
    per_kind = KINDS[1] in (arguments.get("rope_parameters") or {})
    native = not given and per_kind and "swa_rope_theta" not in arguments
    for key, full_key in SWA_FALLBACK.items():
        if key in given:
            continue
        if full_key not in arguments:
            arguments.pop(key, None)
        elif native and key == "swa_num_key_value_heads" and arguments[full_key] is not None:
            arguments[key] = 2 * arguments[full_key]
        else:
            arguments[key] = arguments[full_key]


def _read_rope(arguments: dict[str, Any]) -> None:
    """Collect every statement about a theta or the rotary share, demand that they agree, keep the flat keys."""
    statements: dict[str, list[tuple[str, float]]] = {
        "rope_theta": [],
        "swa_rope_theta": [],
        "partial_rotary_factor": [],
    }
    for key, found in statements.items():
        if arguments.get(key) is not None:
            found.append((key, arguments[key]))
    parameters = arguments.pop("rope_parameters", None) or {}
    per_kind = {kind: parameters[kind] for kind in KINDS if kind in parameters}
    entries = [("rope_theta", KINDS[0]), ("swa_rope_theta", KINDS[1])] if per_kind else [("rope_theta", "")]
    for theta_key, kind in entries:
        entry = per_kind.get(kind, {}) if per_kind else parameters
        where = f"rope_parameters.{kind}" if kind else "rope_parameters"
        _check_kind(f"config.json: {where}", entry, _OBJECT)
        rope_type = entry.get("rope_type", entry.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(f"config.json: {where}.rope_type is {rope_type!r}; MiMo-V2 knows only 'default'")
        for key, statement in (("rope_theta", theta_key), ("partial_rotary_factor", "partial_rotary_factor")):
            if key in entry:
                _check_kind(f"config.json: {where}.{key}", entry[key], _NUMBER)
                statements[statement].append((f"{where}.{key}", entry[key]))
    for key, found in statements.items():
        for name, value in found[1:]:
            _agree(found[0][0], float(found[0][1]), name, float(value))
        if found:
            arguments[key] = float(found[0][1])
    if "rope_theta" in arguments and arguments.get("swa_rope_theta") is None:
        arguments["swa_rope_theta"] = arguments["rope_theta"]


def _read_epsilon(arguments: dict[str, Any]) -> None:
    if arguments.get("layernorm_epsilon", 0) is None:
        del arguments["layernorm_epsilon"]
    eps = arguments.pop("rms_norm_eps", None)
    if eps is not None:
        _agree("layernorm_epsilon", arguments.setdefault("layernorm_epsilon", eps), "rms_norm_eps", eps)


def _read_window(arguments: dict[str, Any]) -> None:
    window = arguments.get("sliding_window")
    for key in WINDOW_KEYS:
        size = arguments.get(key)
        if size is None:
            continue
        if window is None:
            raise ConfigError(
                f"config.json: {key} is {size} but sliding_window is missing, and readers disagree whether {key} "
                f"counts the query itself; add sliding_window (the number of keys a query sees, itself included)"
            )
        if not _fits(size, window):
            raise ConfigError(
                f"config.json: sliding_window is {window}, so {key} must be {window} (released files) or {window - 1} "
                f"(files that transformers wrote), got {size}"
            )


def _fits(size: int, window: int | None) -> bool:
    return window is not None and size in (window, window - 1)


def _read_dtype(arguments: dict[str, Any]) -> None:
    """`dtype` wins over `torch_dtype` (both spellings occur in released files)."""
    old = arguments.pop("torch_dtype", None)
    if arguments.get("dtype") is None and old is not None:
        arguments["dtype"] = old
