"""The verb `inspect` on a checkpoint folder: what it is, how it is stored, and what is wrong with it.

Headers only, but for V2-Flash in FP8, where a few MB of weights tell how its values are scaled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.ledger import group_keys
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import model_class_of
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.source import config_values, read_config, resolve_folder
from automimo.mimo_v2_flash.storage import Description, SourceOptions, describe, is_routed_expert
from automimo.mimo_v2_flash.storage.consistency import (
    MTP_PREFIX,
    consistency_problems,
    is_quantised_text,
    mtp_layers,
)
from automimo.mimo_v2_flash.storage.media_keys import AUDIO_PREFIXES, VISION_PREFIX
from automimo.mimo_v2_flash.storage.v_scales import VReadings, v_readings

NAMES = {"F8_E4M3": "FP8", "U8": "MXFP4"}
LABEL_WIDTH = 13
SHOWN_GROUPS = 8

_ATTENTION = re.compile(r"model\.layers\.\d+\.self_attn\.")
_DENSE = re.compile(r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.")
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.")


@dataclass
class Inspection:
    """Everything that the report says: what was read, and the problems (what is wrong, key or nothing)."""

    reader: CheckpointReader
    config: MiMoV2FlashConfig
    values: dict[str, Any]
    options: SourceOptions
    description: Description
    readings: VReadings | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)


def run_inspect_checkpoint(
    path: str | Path, options: SourceOptions | None = None, console: Console | None = None
) -> int:
    """Print what a checkpoint folder (or Hub id in the cache) is and how it is stored; 0, or 1 if it has problems.

    A problem is what would make a reader fail or read something else than was meant: tensors that do not fit each other
    or config.json, missing and unknown keys, a layout that cannot be told from the files (the text says which option to
    pass). The rest is printed all the same. Raises CheckpointError when there is no checkpoint to speak of: no
    config.json, another family, weight files that are missing or damaged.
    """
    console = console or Console(highlight=False)
    folder = resolve_folder(path, download=False)  # nobody wants 300 GB for a look at the headers
    config = read_config(folder, model_class_of(folder).config_class)
    with CheckpointReader(folder) as reader:
        inspection = examine(reader, config, config_values(folder), options or SourceOptions())
    console.print(Text(variant(config, inspection.values, reader.tensors), style="bold"), soft_wrap=True)
    for label, text in report_lines(inspection):
        console.print(Text(f"{label:<{LABEL_WIDTH}} {text}".rstrip()), soft_wrap=True)
    _print_problems(console, inspection.problems)
    return 1 if inspection.problems else 0


def examine(
    reader: CheckpointReader, config: MiMoV2FlashConfig, values: dict[str, Any], options: SourceOptions
) -> Inspection:
    """Describe an open checkpoint and collect everything that is wrong with it."""
    description = describe(reader, config, options)
    result = Inspection(reader, config, values, options, description)
    result.problems = [*description.problems, *consistency_problems(reader, config, values, description)]
    try:
        result.readings = v_readings(reader, config, description)
    except CheckpointError as error:
        result.problems.append((f"the scales of V cannot be checked: {error}", ""))
    verdict = result.readings.verdict if result.readings else None
    if verdict is not None and verdict != options.v_scales:
        result.problems.append(
            (f"v_proj of full layers: the row norms contradict the reading in use; pass --flash-v-scales {verdict}", "")
        )
    return result


def variant(config: MiMoV2FlashConfig, values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The release that a checkpoint is or comes from, by model type, size, quantisation and modalities.

    V2.6 is told from V2.5 by its router dtype, and for Pro also by having vision and audio. MXFP4 experts alone do not
    do: there are V2.5 files with them.
    """
    flash, pro = (_sizes(config) == _sizes(preset_config(name)) for name in ("flash", "v2.5-pro"))
    if config.model_type == MiMoV2FlashConfig.model_type:
        name = "MiMo-V2-Flash" if flash else None
    elif flash or pro:
        newer = values.get("moe_router_dtype") == "bfloat16" or (pro and bool(config.vision_config))
        name = f"MiMo-V2.{6 if newer else 5}" + ("-Pro" if pro else "-Flash" if newer else "")
        if not newer and any(_EXPERT.match(key) and info.dtype == "U8" for key, info in tensors.items()):
            name += " with MXFP4 experts"
    else:
        name = None
    return name or "MiMo-V2 shape, not a released size"


def _sizes(config: MiMoV2FlashConfig) -> tuple[object, ...]:
    return (
        *(config.vocab_size, config.hidden_size, config.intermediate_size, config.moe_intermediate_size),
        *(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.v_head_dim),
        *(config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim, config.swa_v_head_dim),
        *(config.layer_types, config.mlp_layer_types, config.n_routed_experts, config.num_experts_per_tok),
    )


def report_lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """(label, text) of the report, in order."""
    reader, config, values = inspection.reader, inspection.config, inspection.values
    tensors = reader.tensors
    size = sum((reader.folder / name).stat().st_size for name in reader.files)
    yield "folder", str(reader.folder)
    in_units = _short(size, ("MB", "GB"))
    yield (
        "weights",
        f"{_count(len(reader.files), 'file')}, {size:,} bytes ({in_units}), {_count(len(tensors), 'tensor')}",
    )
    yield from _parameter_lines(inspection)
    yield "attention", _attention_text(inspection)
    yield "stored as", _stated_quantisation(values)
    yield from _dtype_lines(tensors)
    if inspection.readings is not None:
        yield "V scales", _readings_text(inspection.readings, inspection.options)
    yield "modalities", _modalities_text(config, tensors)
    stated = values.get("num_nextn_predict_layers")
    says = "does not say" if stated is None else f"says {stated}"
    yield "MTP", f"{_count(mtp_layers(tensors), 'layer')} (config.json {says})"
    yield "layers", _layers_text(config)
    router = values.get("moe_router_dtype")
    weights = _dtypes(tensors, ".mlp.gate.weight")
    biases = _dtypes(tensors, ".mlp.gate.e_score_correction_bias")
    yield "router", f"weights {weights}, biases {biases} (config.json {f'says {router}' if router else 'does not say'})"
    yield "side files", ", ".join(_side_files(reader)) or "none"


def elements_by_part(inspection: Inspection) -> Counter[str]:
    """Decoded elements (scales are none) of text, experts, MTP, vision, audio and unknown tensors."""
    result: Counter[str] = Counter()
    described: set[str] = set()
    for key, matrix in inspection.description.matrices.items():
        result[_part(key)] += prod(matrix.shape)
        described.update(tensor.key for tensor in matrix.stored)
    for key, info in inspection.reader.tensors.items():
        # Text tensors that could not be described are still counted, as the weights that they look like.
        if key not in described and not key.endswith(("_scale_inv", "_scale")):
            result[_part(key)] += info.numel * (2 if is_quantised_text(info) and info.dtype == "U8" else 1)
    return result


def _parameter_lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    config, parts = inspection.config, elements_by_part(inspection)
    experts = parts["experts"]
    active = parts["text"] + experts * config.num_experts_per_tok // (config.n_routed_experts or 1)
    total = sum(parts.values())
    yield "parameters", f"{total:,} ({_short(total)}), active per token {active:,} ({_short(active)})"
    for name in ("text", "experts", "MTP", "vision", "audio", "unknown"):
        if parts[name]:
            yield f"  {name}", f"{parts[name]:,}" + (" (without experts)" if name == "text" and experts else "")


def _part(key: str) -> str:
    """The part of a model that a key of the split layout belongs to."""
    if key.startswith(MTP_PREFIX):
        return "MTP"
    if is_routed_expert(key):
        return "experts"
    if key.startswith(("model.", "lm_head.")):
        return "text"
    if key.startswith(VISION_PREFIX):
        return "vision"
    return "audio" if key.startswith(AUDIO_PREFIXES) else "unknown"


def _attention_text(inspection: Inspection) -> str:
    tp = inspection.description.tp
    fused = any(key.endswith(".qkv_proj.weight") for key in inspection.reader.tensors)
    if tp is None:
        return "fused (qkv_proj), in an order that is not known" if fused else "split (q_proj, k_proj, v_proj)"
    return f"{inspection.description.layout} (qkv_proj), checkpoint TP {tp.size}, found by {tp.found_by}"


def _stated_quantisation(values: Mapping[str, Any]) -> str:
    stated = values.get("quantization_config")
    if not isinstance(stated, dict):
        return "(config.json says not quantised)"
    store = f", store_dtype {stated['store_dtype']}" if "store_dtype" in stated else ""
    return f"(config.json says {stated.get('quant_method')}{store})"


def _dtype_lines(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Stored tensors by dtype, of the parts that are quantised in their own ways."""
    counts: dict[str, Counter[str]] = {}
    for key, info in tensors.items():
        counts.setdefault(_storage_group(key), Counter())[info.dtype] += 1
    for name in ("attention", "dense MLP", "experts", "MTP", "other text", "vision", "audio", "unknown"):
        if name in counts:
            dtypes = counts[name]
            kinds = " and ".join(NAMES[dtype] for dtype in NAMES if dtype in dtypes) or "not quantised"
            yield f"  {name}", f"{kinds}: " + ", ".join(f"{n:,} {dtype}" for dtype, n in dtypes.most_common())


def _storage_group(key: str) -> str:
    for name, pattern in (("experts", _EXPERT), ("attention", _ATTENTION), ("dense MLP", _DENSE)):
        if pattern.match(key):
            return name
    part = _part(key)
    return "other text" if part == "text" else part


def _readings_text(readings: VReadings, options: SourceOptions) -> str:
    layers = _count(readings.layers, "full layer")
    if not readings.heads:
        return f"{options.v_scales}; V of {layers} is zero: nothing can be told"
    measured = (
        f"{options.v_scales}; in {_count(readings.heads, 'head')} of {layers} the two readings differ by "
        f"{readings.difference:.2f}x; the parts of a head differ by {readings.strip:.2f}x read as strips, "
        f"{readings.own:.2f}x with V's own scales"
    )
    if readings.verdict is None:
        return f"{measured}: nothing can be told"
    return f"{measured}: {readings.verdict} is right, {'' if readings.verdict == options.v_scales else 'not '}as read"


def _modalities_text(config: MiMoV2FlashConfig, tensors: Mapping[str, TensorInfo]) -> str:
    prefixes = {"text": ("model.layers.",), "vision": (VISION_PREFIX,), "audio": AUDIO_PREFIXES}
    found = [name for name, start in prefixes.items() if any(key.startswith(start) for key in tensors)]
    stated = ["text", *["vision"] * bool(config.vision_config), *["audio"] * bool(config.audio_config)]
    return f"{', '.join(found) or 'none'} (config.json says {', '.join(stated)})"


def _layers_text(config: MiMoV2FlashConfig) -> str:
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    dense = [i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
    sliding = len(config.layer_types) - len(full)
    window = f", {sliding} sliding over {config.sliding_window} keys" if sliding else ""
    moe = len(config.mlp_layer_types) - len(dense)
    experts = f", {moe} with {config.num_experts_per_tok} of {config.n_routed_experts} experts" if moe else ""
    return (
        f"{len(config.layer_types)}: {len(full)} full{_numbers(full)}{window}; "
        f"{len(dense)} dense{_numbers(dense)}{experts}"
    )


def _numbers(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:12])) + (", ..." if len(layers) > 12 else "")
    return f" ({shown})" if layers else ""


def _dtypes(tensors: Mapping[str, TensorInfo], suffix: str) -> str:
    found = Counter(info.dtype for key, info in tensors.items() if key.endswith(suffix))
    return " and ".join(f"{dtype}" if len(found) == 1 else f"{n} {dtype}" for dtype, n in found.items()) or "none"


def _side_files(reader: CheckpointReader) -> Iterator[str]:
    """Names next to weights, index and config; folders with the number of their files."""
    own = {*reader.files, "config.json", "model.safetensors", "model.safetensors.index.json"}
    for path in sorted(reader.folder.iterdir()):
        if path.name.startswith(".") or path.name in own or path.suffix == ".safetensors":
            continue
        if path.is_dir():
            yield f"{path.name}/ ({_count(sum(child.is_file() for child in path.rglob('*')), 'file')})"
        else:
            yield path.name


def _print_problems(console: Console, problems: Sequence[tuple[str, str]]) -> None:
    """The problems with their keys folded, or that there are none."""
    kinds: dict[str, list[str]] = {}
    for what, key in problems:
        kinds.setdefault(what, []).append(key)
    if not kinds:
        console.print(Text("no problems", style="green"))
        return
    console.print(Text(f"{_count(len(kinds), 'problem')} (exit code 1)", style="bold red"), soft_wrap=True)
    for what, keys in kinds.items():
        named = [key for key in keys if key]
        console.print(Text(f"  {what}" + (f" ({_count(len(named), 'tensor')}):" if named else "")), soft_wrap=True)
        groups = group_keys(named)
        for group in groups[:SHOWN_GROUPS]:
            console.print(Text(f"    {group}"), soft_wrap=True)
        if len(groups) > SHOWN_GROUPS:
            console.print(Text(f"    ... and {len(groups) - SHOWN_GROUPS} more groups"), soft_wrap=True)


def _short(number: int, units: tuple[str, str] = ("M", "B")) -> str:
    """`number` in millions, or from 10^8 on in billions, with the name of the unit."""
    return f"{number / 1e9:,.3f} {units[1]}" if number >= 1e8 else f"{number / 1e6:,.3f} {units[0]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
