"""The stored forms that a checkpoint can be written in: layout of the attention, quantisation, dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.geometry import AttentionShape, attention_shape, released_tp
from automimo.mimo_v2_flash.storage.matrices import (
    FUSED,
    PARTS,
    Quantisation,
    StoredMatrix,
    VScales,
    flash_kv_matrices,
    flash_shards,
    fp8_matrix,
    fused_matrices,
    is_quantised,
    is_routed_expert,
    mxfp4_matrix,
    plain_matrix,
)
from automimo.quantization import GROUP

# Rounding these changes which experts a token goes to, or how much attention it pays to nothing.
ROUTER_SUFFIXES = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
KEPT_SUFFIXES = (*ROUTER_SUFFIXES, ".self_attn.attention_sink_bias")
_PROJECTION = re.compile(
    r"(?P<prefix>model\.(mtp\.)?layers\.\d+\.self_attn)\.(?P<part>q|k|v)_proj\.(?P<kind>weight|bias)$"
)

_STATED = ("store_dtype", "mxfp4_block_size", "ignored_layers")
_FP8_CONFIG: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True)
class TargetForm:
    """How to write a checkpoint. `tp` are the shards of a fused attention; `dtype` (a safetensors name) is that of what
    is not quantised, except for router weights, correction biases and sinks, which keep theirs.

    `flash_grid` gives k and v of full layers in FP8 the grids of V2-Flash, with `v_scales` as in `flash_kv_matrices`.
    """

    quantisation: Quantisation
    layout: Literal["split", "fused"]
    tp: int
    flash_grid: bool = False
    v_scales: VScales = "strip"
    dtype: str = "BF16"


def target_form(
    config: MiMoV2FlashConfig,
    quantisation: Quantisation,
    *,
    layout: Literal["split", "fused"] | None = None,
    tp: int | None = None,
    v_scales: VScales = "strip",
) -> TargetForm:
    """The form for `quantisation`; what is not given is split for "none" (what every trainer reads) and otherwise as
    the variant was released. Raises CheckpointError for shards that do not divide the heads."""
    flash = config.model_type == MiMoV2FlashConfig.model_type
    if layout is None:
        layout = "split" if quantisation == "none" or flash else "fused"
    if tp is not None and layout == "split":
        raise CheckpointError(f"--checkpoint-tp {tp}: only a fused layout has shards; add --layout fused")
    return TargetForm(quantisation, layout, released_tp(config) if tp is None else tp, flash, v_scales)


def target_matrices(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], config: MiMoV2FlashConfig, form: TargetForm
) -> dict[str, StoredMatrix]:
    """Where each tensor of the split layout goes, in the order of `shapes`; keys that keep their dtype have it in
    `dtypes` (safetensors names).

    Raises CheckpointError, with the key, for what the form cannot hold: an attention whose q, k and v are not all
    there or have biases (fused), a matrix whose columns MXFP4 does not divide.
    """
    result: dict[str, StoredMatrix] = {}
    for key, shape in shapes.items():
        if key in result:
            continue
        match = _PROJECTION.match(key)
        if match is None:
            result[key] = _named(key, shape, dtypes, form)
        elif form.layout == "fused":
            result.update(_fused(match, shapes, config, form))
        else:
            result.update(_split(match, shapes, config, form))
    return {key: result[key] for key in shapes}


def quantization_config(
    form: TargetForm, config: MiMoV2FlashConfig, existing: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """`quantization_config` of a config.json in this form, None without one.

    Keys of an `existing` FP8 one that say nothing about what changes are kept; one of another method says nothing about
    the result. The layers listed as not quantised are the
    output projections, under the names of the released files (the last one is how they name that of the MTP blocks).
    """
    if form.quantisation == "none":
        return None
    if existing is not None and existing.get("quant_method") != _FP8_CONFIG["quant_method"]:
        existing = None
    # Only what the released files say is taken over: a word of another tool (scale_fmt) would not fit our scales.
    values = {key: value for key, value in (existing or {}).items() if key in (*_FP8_CONFIG, *_STATED)} | _FP8_CONFIG
    outputs = [f"model.layers.{i}.self_attn.o_proj" for i in range(config.num_hidden_layers)]
    listed = [name for name in values.get("ignored_layers") or [] if not _has_quantised(name)]
    missing = [name for name in (*outputs, "model.decoder.self_attn.o_proj") if name not in listed]
    values["ignored_layers"] = [*listed, *missing]
    if form.quantisation == "mxfp4":
        values.update(store_dtype="mxfp4", mxfp4_block_size=GROUP)
    else:
        values.pop("mxfp4_block_size", None)
        # Only V2.5-Pro has no store_dtype; who has one must not keep "mxfp4".
        pro = config.model_type == MiMoV2Config.model_type and config.vision_config is None
        if "store_dtype" in values or (existing is None and not pro):
            values["store_dtype"] = "fp8"
    return values


def _has_quantised(name: str) -> bool:
    """Whether the module `name` is, or contains, a matrix that is quantised."""
    inside = (
        "",
        ".gate_proj",
        ".0.gate_proj",
        ".mlp.gate_proj",
        ".experts.0.gate_proj",
        ".mlp.experts.0.gate_proj",
        ".q_proj",
    )
    fused = name.replace(f".{FUSED}", ".q_proj")
    return any(is_quantised(f"{fused}{part}.weight") for part in inside)


def _named(key: str, shape: tuple[int, ...], dtypes: Mapping[str, str], form: TargetForm) -> StoredMatrix:
    """A tensor that keeps its own name."""
    if form.quantisation == "none" or not is_quantised(key):
        return plain_matrix(key, dtypes[key] if key.endswith(KEPT_SUFFIXES) else form.dtype, shape)
    if len(shape) != 2:
        raise CheckpointError(f"{key}: has shape {list(shape)}, a matrix is expected")
    rows, columns = shape
    if form.quantisation == "mxfp4" and is_routed_expert(key):
        if columns % GROUP:
            raise CheckpointError(f"{key}: MXFP4 needs columns in groups of {GROUP}, it has {columns}")
        return mxfp4_matrix(key, (rows, columns))
    return fp8_matrix(key, (rows, columns))


def _fused(
    match: re.Match[str], shapes: Mapping[str, tuple[int, ...]], config: MiMoV2FlashConfig, form: TargetForm
) -> dict[str, StoredMatrix]:
    prefix = match["prefix"]
    if match["kind"] == "bias":
        raise CheckpointError(f"{match[0]}: the fused layout has no place for biases; use --layout split")
    attention = _attention(prefix, shapes, config)
    dtype = form.dtype if form.quantisation == "none" else "F8_E4M3"
    hidden = shapes[f"{prefix}.q_proj.weight"][1]
    return {matrix.key: matrix for matrix in fused_matrices(prefix, attention, hidden, form.tp, dtype)}


def _split(
    match: re.Match[str], shapes: Mapping[str, tuple[int, ...]], config: MiMoV2FlashConfig, form: TargetForm
) -> dict[str, StoredMatrix]:
    key, shape = match[0], shapes[match[0]]
    if match["kind"] == "bias" or form.quantisation == "none":
        return {key: plain_matrix(key, form.dtype, shape)}
    attention = _attention(match["prefix"], shapes, config)
    shards = flash_shards(config, match["prefix"]) if form.flash_grid and match["part"] != "q" else None
    if shards is None:
        return {key: fp8_matrix(key, (shape[0], shape[1]))}
    pair = flash_kv_matrices(match["prefix"], attention, shape[1], shards, form.v_scales)
    return {matrix.key: matrix for matrix in pair}


def _attention(prefix: str, shapes: Mapping[str, tuple[int, ...]], config: MiMoV2FlashConfig) -> AttentionShape:
    """The shape of an attention, after checking that its three projections are there and have it."""
    attention = attention_shape(config, prefix)
    for part, rows in zip(PARTS, (attention.q, attention.k, attention.v), strict=True):
        key = f"{prefix}.{part}.weight"
        if key not in shapes:
            raise CheckpointError(f"{prefix}: has no {part}, so its attention is incomplete")
        if shapes[key] != (rows, config.hidden_size):
            asked = [rows, config.hidden_size]
            raise CheckpointError(f"{key}: has shape {list(shapes[key])}, config.json asks for {asked}")
    return attention
