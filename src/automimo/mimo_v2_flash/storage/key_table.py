"""Every tensor of a checkpoint of a given config: stored key, dtype and shape, in each of the released forms.

`text_shapes` is the model in the split layout, from config arithmetic alone; `target_matrices` brings it into a form.
The element totals and tensor counts of the published checkpoints follow from these tables exactly (see the tests).
"""

from __future__ import annotations

from typing import Literal

from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.geometry import AttentionShape, full_shape, sliding_shape
from automimo.mimo_v2_flash.storage.matrices import Quantisation, StoredTensor
from automimo.mimo_v2_flash.storage.media_keys import Shapes, audio_shapes, vision_shapes
from automimo.mimo_v2_flash.storage.target import KEPT_SUFFIXES, target_form, target_matrices

# All released checkpoints hold 3 MTP blocks; most of their configs do not say so.
RELEASED_MTP_LAYERS = 3
_MTP_NORMS = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")


def key_table(
    config: MiMoV2FlashConfig,
    *,
    quantisation: Quantisation,
    layout: Literal["split", "fused"] | None = None,
    tp: int | None = None,
    mtp_layers: int = RELEASED_MTP_LAYERS,
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint of `config` with `mtp_layers` MTP blocks: text, MTP, and vision and audio if the
    config has them.

    `layout` and `tp` default as in `target_form`: as the variant was released, split without quantisation. Router
    weights are F32, or BF16 where the config has moe_router_dtype "bfloat16"; correction biases are F32, and everything
    else that is not quantised is BF16. Raises CheckpointError for what the form cannot hold, ConfigError for a vision
    or audio config without sizes.
    """
    shapes = text_shapes(config, mtp_layers)
    form = target_form(config, quantisation, layout=layout, tp=tp)
    matrices = target_matrices(shapes, _kept_dtypes(shapes, config), config, form)
    table = {tensor.key: tensor for matrix in matrices.values() for tensor in matrix.stored}
    media = media_shapes(config)
    return {**table, **{key: StoredTensor(key, "BF16", shape) for key, shape in media.items()}}


def text_shapes(config: MiMoV2FlashConfig, mtp_layers: int) -> Shapes:
    """Keys and shapes of the text model in the split layout, and of `mtp_layers` MTP blocks."""
    hidden, experts = config.hidden_size, config.n_routed_experts
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        full = config.layer_types[i] == "full_attention"
        shapes |= _attention(f"{layer}self_attn.", config, full)
        if config.moe_layer_freq[i] and experts is not None:
            shapes[f"{layer}mlp.gate.weight"] = (experts, hidden)
            shapes[f"{layer}mlp.gate.e_score_correction_bias"] = (experts,)
            for expert in range(experts):
                shapes |= _mlp(f"{layer}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
        else:
            shapes |= _mlp(f"{layer}mlp.", hidden, config.intermediate_size)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(mtp_layers):
        block = f"model.mtp.layers.{i}."
        shapes[f"{block}eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= {f"{block}{norm}.weight": (hidden,) for norm in _MTP_NORMS}
        shapes |= _attention(f"{block}self_attn.", config, False)
        shapes |= _mlp(f"{block}mlp.", hidden, config.intermediate_size)
    return shapes


def media_shapes(config: MiMoV2FlashConfig) -> Shapes:
    """Keys and shapes of the vision and audio parts that the config has. Raises ConfigError for missing sizes."""
    vision = vision_shapes(config.vision_config) if config.vision_config else {}
    return {**vision, **(audio_shapes(config.audio_config) if config.audio_config else {})}


def _attention(prefix: str, config: MiMoV2FlashConfig, full: bool) -> Shapes:
    shape: AttentionShape = full_shape(config) if full else sliding_shape(config)
    hidden = config.hidden_size
    shapes: Shapes = {}
    for part, rows in (("q", shape.q), ("k", shape.k), ("v", shape.v)):
        shapes[f"{prefix}{part}_proj.weight"] = (rows, hidden)
        if config.attention_bias:
            shapes[f"{prefix}{part}_proj.bias"] = (rows,)
    shapes[f"{prefix}o_proj.weight"] = (hidden, shape.heads * shape.v_head_dim)
    if config.add_full_attention_sink_bias if full else config.add_swa_attention_sink_bias:
        shapes[f"{prefix}attention_sink_bias"] = (shape.heads,)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _kept_dtypes(shapes: Shapes, config: MiMoV2FlashConfig) -> dict[str, str]:
    """Dtypes of what every conversion leaves in its own dtype, as released."""
    router = "BF16" if config.to_dict().get("moe_router_dtype") == "bfloat16" else "F32"
    by_suffix = dict(zip(KEPT_SUFFIXES, (router, "F32", "BF16"), strict=True))
    return {key: dtype for key in shapes for suffix, dtype in by_suffix.items() if key.endswith(suffix)}
