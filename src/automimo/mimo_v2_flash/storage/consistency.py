"""Whether the tensors of a checkpoint, its config.json and each other agree, beyond what `describe` needs to read them.

Everything is found in headers. Problems are (what is wrong, key), as in `Description`; the key may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.key_table import media_shapes, text_shapes
from automimo.mimo_v2_flash.storage.matrices import FP8_SCALE, FUSED, MXFP4_SCALE, PARTS, is_quantised, is_routed_expert
from automimo.mimo_v2_flash.storage.media_keys import AUDIO_PREFIXES, VISION_PREFIX
from automimo.mimo_v2_flash.storage.stored_checkpoint import FLOATING, TEXT_PREFIXES, Description
from automimo.quantization import BLOCK, GROUP

Problem = tuple[str, str]
MTP_PREFIX = "model.mtp.layers."
_MODALITIES = {"vision": (VISION_PREFIX,), "audio": AUDIO_PREFIXES}
_FUSED_WEIGHT = f".{FUSED}.weight"
_SPLIT_WEIGHT = ".self_attn.q_proj.weight"


def consistency_problems(
    reader: CheckpointReader, config: MiMoV2FlashConfig, values: Mapping[str, Any], description: Description
) -> list[Problem]:
    """What `describe` does not report. `values` is the config.json as it stands, since a config knows only defaults of
    what the file leaves out."""
    return [
        *key_problems(reader, config, description),
        *_layout_problems(reader, values),
        *_quantisation_problems(reader, values, description),
        *_dtype_problems(reader),
        *_mtp_problems(reader, values),
        *_file_problems(reader),
    ]


def mtp_layers(keys: Iterable[str]) -> int:
    """The number of MTP blocks that the keys speak of."""
    return len({key.removeprefix(MTP_PREFIX).partition(".")[0] for key in keys if key.startswith(MTP_PREFIX)})


def is_quantised_text(info: TensorInfo) -> bool:
    """Whether a stored tensor is the codes of a quantised text matrix."""
    return info.name.startswith(TEXT_PREFIXES) and info.dtype not in FLOATING and not _is_scale(info.name)


def _is_scale(key: str) -> bool:
    return key.endswith((f".weight{FP8_SCALE}", f".weight{MXFP4_SCALE}"))


def _logical_keys(reader: CheckpointReader) -> Iterator[tuple[str, str]]:
    """(key of the split layout, stored key) of every tensor that is no scale of the text part."""
    for key in reader.tensors:
        if not key.startswith(TEXT_PREFIXES):
            yield key, key
        elif key.endswith(_FUSED_WEIGHT):
            yield from ((f"{key.removesuffix(_FUSED_WEIGHT)}.{part}.weight", key) for part in PARTS)
        elif not _is_scale(key):
            yield key, key


def key_problems(reader: CheckpointReader, config: MiMoV2FlashConfig, description: Description) -> Iterator[Problem]:
    """Keys that a model of this config lacks or does not know, and wrong shapes."""
    expected = text_shapes(config, mtp_layers(reader.tensors))
    ignored: tuple[str, ...] = ()
    try:
        expected |= media_shapes(config)
    except ConfigError as error:
        yield f"config.json: {error}", ""
        ignored = (VISION_PREFIX, *AUDIO_PREFIXES)
    for name, prefixes in _MODALITIES.items():
        stated = config.vision_config if name == "vision" else config.audio_config
        present = any(key.startswith(prefixes) for key in reader.tensors)
        if present != bool(stated):
            absent = f"no {' or '.join(f'{prefix}*' for prefix in prefixes)} tensors but a"
            yield f"{name}: there are {'tensors but no' if present else absent} {name}_config in config.json", ""
            ignored += prefixes
    found = dict(_logical_keys(reader))
    shapes = {key: matrix.shape for key, matrix in description.matrices.items()}
    shapes |= {key: reader.tensors[key].shape for key in description.raw}
    for key, shape in expected.items():
        if key not in found and not key.startswith(ignored):
            yield "is missing", key
        elif shapes.get(key, shape) != shape:  # what could not be described has a problem already
            yield f"has shape {list(shapes[key])}, config.json asks for {list(shape)}", key
    # A fused tensor is known when the three it stands for are.
    unknown = dict.fromkeys(stored for key, stored in found.items() if key not in expected)
    yield from (
        ("is unknown: no tensor of a model of this config.json", key) for key in unknown if not key.startswith(ignored)
    )


def _layout_problems(reader: CheckpointReader, values: Mapping[str, Any]) -> Iterator[Problem]:
    """attention_projection_layout against the keys. Readers take an absent one for split."""
    stated = values.get("attention_projection_layout")
    fused = [key for key in reader.tensors if key.startswith(TEXT_PREFIXES) and key.endswith(_FUSED_WEIGHT)]
    split = [key for key in reader.tensors if key.startswith(TEXT_PREFIXES) and key.endswith(_SPLIT_WEIGHT)]
    if fused and split:
        yield "is split while other layers are fused (qkv_proj)", split[0]
    elif fused and stated != "fused_qkv":
        said = "absent, which readers take for split," if stated is None else repr(stated)
        yield f"config.json: attention_projection_layout is {said} but the projections are fused (qkv_proj)", ""
    elif split and stated == "fused_qkv":
        yield "config.json: attention_projection_layout is 'fused_qkv' but the projections are split (q_proj)", ""


def _quantisation_problems(
    reader: CheckpointReader, values: Mapping[str, Any], description: Description
) -> Iterator[Problem]:
    """quantization_config against the tensors."""
    stated = values.get("quantization_config")
    quantised = any(is_quantised_text(info) for info in reader.tensors.values())
    if not stated or not isinstance(stated, dict):
        if quantised:
            yield "config.json: has no quantization_config, but tensors are quantised", ""
        return
    if not quantised:
        yield "config.json: has a quantization_config, but no tensor is quantised", ""
        return
    experts = [matrix.encoding for key, matrix in description.matrices.items() if is_routed_expert(key)]
    store, group = stated.get("store_dtype"), stated.get("mxfp4_block_size")
    if "mxfp4" in experts and store != "mxfp4":
        yield f"config.json: quantization_config.store_dtype is {store!r}, but experts are stored in MXFP4", ""
    if "mxfp4" not in experts and store == "mxfp4":
        yield "config.json: quantization_config.store_dtype is 'mxfp4', but no expert is stored in MXFP4", ""
    if group != GROUP and ("mxfp4" in experts or group is not None):
        yield f"config.json: quantization_config.mxfp4_block_size is {group}; MXFP4 has {GROUP}", ""
    blocks = stated.get("weight_block_size")
    if blocks != [BLOCK, BLOCK]:
        yield f"config.json: quantization_config.weight_block_size is {blocks}; FP8 blocks are [{BLOCK}, {BLOCK}]", ""
    yield from _ignored_problems(stated, description)


def _ignored_problems(stated: Mapping[str, Any], description: Description) -> Iterator[Problem]:
    listed = stated.get("ignored_layers")
    ignored = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    for key, matrix in description.matrices.items():
        # A layer is named by itself, or by a part that contains it, under its name in the file or in the split layout.
        names = {module for name in (key, matrix.weight.key) for module in _modules(name)}
        if matrix.encoding != "plain":
            if names & ignored:
                yield "is quantised, but config.json lists it in quantization_config.ignored_layers", matrix.weight.key
        elif is_quantised(key) and not names & ignored:
            yield (
                (
                    f"is stored as {matrix.weight.dtype}, but config.json does not list it in "
                    "quantization_config.ignored_layers"
                ),
                matrix.weight.key,
            )


def _modules(key: str) -> Iterator[str]:
    name = key.removesuffix(".weight")
    while name:
        yield name
        name = name.rpartition(".")[0]


def _dtype_problems(reader: CheckpointReader) -> Iterator[Problem]:
    for key, info in reader.tensors.items():
        if key.endswith(".mlp.gate.e_score_correction_bias") and info.dtype != "F32":
            yield (
                f"is stored as {info.dtype}; correction biases are F32, rounding one changes the choice of experts",
                key,
            )


def _mtp_problems(reader: CheckpointReader, values: Mapping[str, Any]) -> Iterator[Problem]:
    stated, found = values.get("num_nextn_predict_layers"), mtp_layers(reader.tensors)
    if stated is not None and stated != found:
        yield f"config.json: num_nextn_predict_layers is {stated}, but there are tensors of {found} MTP layers", ""


def _file_problems(reader: CheckpointReader) -> Iterator[Problem]:
    known = {*reader.files, "model.safetensors"}
    for path in sorted(reader.folder.glob("*.safetensors")):
        if path.name not in known:
            yield f"{path.name}: the index does not mention this file, so nothing reads it", ""
