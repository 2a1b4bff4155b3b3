"""Keys and shapes of the parts that see and hear, as the released files store them, from config values alone.

The names are those of the V2.5 listing; with them, elements and number of tensors of all published totals come out
exactly. So the projections of the merger and of the audio side have no biases in the files, though the released vision
code declares some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automimo.errors import ConfigError

VISION_PREFIX = "visual."
AUDIO_PREFIXES = ("audio_encoder.", "speech_embeddings.")
# Width of a vision head when the config has no qk_channels and kv_channels, as the released ones.
VISION_HEAD_DIM = 64
# The hidden width of the audio projection, in units of its input (4096 -> 16384 in all released models, although the
# output of Pro is wider).
PROJECTION_FACTOR = 4

Shapes = dict[str, tuple[int, ...]]


def vision_shapes(vision_config: Mapping[str, Any]) -> Shapes:
    """Keys of the vision tower and their shapes. Raises ConfigError, with the key, for a value that is missing."""
    read = _Sizes("vision_config", vision_config)
    hidden, inner, patch = read("hidden_size"), read("intermediate_size"), read("patch_size")
    heads, kv_heads = read("num_heads"), read("num_key_value_heads")
    qk, v = read("qk_channels", VISION_HEAD_DIM), read("kv_channels", VISION_HEAD_DIM)
    merged = hidden * read("spatial_merge_size") ** 2
    shapes: Shapes = {
        f"{VISION_PREFIX}patch_embed.proj.weight": (
            *(hidden, read("in_chans"), read("temporal_patch_size")),
            *(patch, patch),
        )
    }
    windowed = _windowed_blocks(vision_config, read("depth"))
    linears = {
        "attn.qkv": ((heads + kv_heads) * qk + kv_heads * v, hidden),
        "attn.proj": (hidden, heads * v),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(read("depth")):
        block = f"{VISION_PREFIX}blocks.{i}."
        for name, shape in linears.items():
            shapes[f"{block}{name}.weight"] = shape
            shapes[f"{block}{name}.bias"] = shape[:1]
        shapes[f"{block}norm1.weight"] = shapes[f"{block}norm2.weight"] = (hidden,)
        if i in windowed:
            shapes[f"{block}attn.sinks"] = (heads,)
    shapes[f"{VISION_PREFIX}merger.ln_q.weight"] = (hidden,)
    shapes[f"{VISION_PREFIX}merger.mlp.0.weight"] = (merged, merged)
    shapes[f"{VISION_PREFIX}merger.mlp.2.weight"] = (read("out_hidden_size"), merged)
    return shapes


def audio_shapes(audio_config: Mapping[str, Any]) -> Shapes:
    """Keys of the speech embeddings, the patch encoder and the audio projection, and their shapes.

    The released config has some numbers as strings. Raises ConfigError, with the key, for a value that is missing.
    """
    read = _Sizes("audio_config", audio_config)
    dim, inner = read("input_local_dim"), read("input_local_intermediate_size")
    attention = read("input_local_attn_heads") * read("input_local_head_dim")
    encoder = "audio_encoder.input_local_transformer."
    shapes: Shapes = {
        f"speech_embeddings.{i}.weight": (read("speech_vocab_size"), dim) for i in range(read("audio_channels"))
    }
    for i in range(read("input_local_layers")):
        layer = f"{encoder}layers.{i}."
        for part in ("q", "k", "v"):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (attention, dim)
            shapes[f"{layer}self_attn.{part}_proj.bias"] = (attention,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (dim, attention)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (inner, dim)
        shapes[f"{layer}mlp.down_proj.weight"] = (dim, inner)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (dim,)
    shapes[f"{encoder}norm.weight"] = (dim,)
    group = read("group_size") * dim
    shapes["audio_encoder.projection.mlp.0.weight"] = (PROJECTION_FACTOR * group, group)
    shapes["audio_encoder.projection.mlp.2.weight"] = (read("out_hidden_size"), PROJECTION_FACTOR * group)
    return shapes


class _Sizes:
    """Reads sizes of one nested config, which may be numbers or strings of digits."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: must be a JSON object, got {values!r:.80}")
        self.name = name
        self.values = values

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.name}.{key}: must be a whole number of at least 1, got {value!r}")
        return value


def _windowed_blocks(vision_config: Mapping[str, Any], depth: int) -> set[int]:
    """The blocks with sinks: those whose attention is windowed. Blocks are full where the list of types has -1."""
    if not vision_config.get("use_sink"):
        return set()
    types, full = vision_config.get("vit_window_attn_types"), vision_config.get("fullatt_block_indexes")
    for name, value in (("vit_window_attn_types", types), ("fullatt_block_indexes", full)):
        if value is not None and not (isinstance(value, list) and all(isinstance(item, int) for item in value)):
            raise ConfigError(f"vision_config.{name}: must be a list of whole numbers, got {value!r:.80}")
    if types is None:
        return set(range(depth)) - set(full or ())
    return {i for i, kind in enumerate(types[:depth]) if kind != -1}
