"""What a config.json may say, in both vocabularies, and how it becomes constructor arguments.

Released files speak of `hybrid_layer_pattern`, `moe_layer_freq`, `swa_*`, flat thetas, `layernorm_epsilon`.
transformers writes `layer_types`, `mlp_layer_types`, `rope_parameters` per layer kind, `rms_norm_eps`. Ours has both,
so that either reader opens it. Keys that are present must agree; a contradiction is an error that shows both values,
never a guess. Torch-free.
"""

from __future__ import annotations

from typing import Any

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


def constructor_arguments(file: dict[str, Any], model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn the contents of a config.json into constructor arguments of our configs.

    Returns the arguments and the optional keys the file had (to be written again on saving). Raises ConfigError for a
    nested text config, an unsupported model type or keys that contradict each other.
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
        elif native and key == "swa_num_key_value_heads":
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
        rope_type = entry.get("rope_type", entry.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(f"config.json: {where}.rope_type is {rope_type!r}; MiMo-V2 knows only 'default'")
        if "rope_theta" in entry:
            statements[theta_key].append((f"{where}.rope_theta", entry["rope_theta"]))
        if "partial_rotary_factor" in entry:
            statements["partial_rotary_factor"].append(
                (f"{where}.partial_rotary_factor", entry["partial_rotary_factor"])
            )
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
