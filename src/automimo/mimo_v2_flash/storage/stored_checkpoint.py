"""What is in a checkpoint folder, in terms of the split layout: found from headers and config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.ledger import group_keys
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.decode import read_matrix
from automimo.mimo_v2_flash.storage.geometry import attention_shape, is_full
from automimo.mimo_v2_flash.storage.matrices import (
    FP8_SCALE,
    FUSED,
    MXFP4_SCALE,
    StoredMatrix,
    StoredTensor,
    VScales,
    flash_kv_matrices,
    flash_shards,
    fp8_matrix,
    fused_matrices,
    mxfp4_matrix,
    plain_matrix,
)
from automimo.mimo_v2_flash.storage.tp_size import CheckpointTP, FusedProjection, index_tp_size, resolve_tp
from automimo.quantization import GROUP

FLOATING = ("F64", "F32", "BF16", "F16")
TEXT_PREFIXES = ("model.", "lm_head.")
SourceLayout = Literal["split", "fused", "contiguous"]

_K, _V = ".self_attn.k_proj.weight", ".self_attn.v_proj.weight"
_FUSED_WEIGHT = f".{FUSED}.weight"


@dataclass(frozen=True)
class SourceOptions:
    """What a user says about a source that its files do not: layout and shards of its attention, scales of v."""

    layout: SourceLayout | None = None
    tp: int | None = None
    v_scales: VScales = "strip"


@dataclass
class Description:
    """What the headers of a folder say. `problems` are (what is wrong, key); with none, every key is accounted for.

    `matrices` are by key of the split layout; `raw` are the keys of other parts (vision, audio, unknown), which nobody
    interprets; `tp` is None without fused projections.
    """

    matrices: dict[str, StoredMatrix] = field(default_factory=dict)
    raw: list[str] = field(default_factory=list)
    tp: CheckpointTP | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def layout(self) -> str:
        """`split`, `fused` (in shards), `contiguous` (fused, in one shard)."""
        if self.tp is None:
            return "split"
        return "contiguous" if self.tp.size == 1 else "fused"


class StoredCheckpoint:
    """An open checkpoint read as the split layout, whatever its own layout and quantisation are.

    Raises CheckpointError, with all keys concerned, for tensors that do not fit each other or the config: a scale
    without its weight, a weight without its scale, a grid of scales that no layout explains, an unknown dtype, an order
    of fused rows that cannot be told.
    """

    def __init__(
        self, reader: CheckpointReader, config: MiMoV2FlashConfig, options: SourceOptions | None = None
    ) -> None:
        self.reader = reader
        self.config = config
        self.description = describe(reader, config, options or SourceOptions())
        if self.description.problems:
            raise CheckpointError(problem_text(str(reader.folder), self.description.problems))
        self.matrices = self.description.matrices
        self.raw = self.description.raw

    def read(self, key: str, dtype: torch.dtype | None = None, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor of the split layout, decoded; only their bytes are read.

        `dtype` defaults to that of a plain tensor and to bfloat16 for a quantised one.
        """
        return read_matrix(self.reader, self._matrix(key), dtype=dtype, start=start, stop=stop)

    def read_into(self, key: str, destination: Tensor, *, start: int = 0, stop: int | None = None) -> None:
        """Fill `destination` (any strides and device, floating) with rows `start` to `stop` of a tensor of the split
        layout, decoded in fp32; only their bytes are read, a bounded number at a time."""
        read_matrix(self.reader, self._matrix(key), out=destination, start=start, stop=stop)

    def _matrix(self, key: str) -> StoredMatrix:
        try:
            return self.matrices[key]
        except KeyError:
            raise CheckpointError(f"{self.reader.folder}: has no {key}, in no layout") from None


def describe(reader: CheckpointReader, config: MiMoV2FlashConfig, options: SourceOptions) -> Description:
    """Find out how every tensor of a folder is stored. Problems are collected, never raised."""
    result = Description()
    tensors = reader.tensors
    claimed: set[str] = set()
    fused: dict[str, str] = {}
    for key, info in tensors.items():
        if not key.startswith(TEXT_PREFIXES):
            result.raw.append(key)
        elif key.endswith(f".{FUSED}.bias"):
            result.problems.append(
                ("is the bias of a fused projection, which no released file has and nothing reads", key)
            )
        elif key.endswith(_FUSED_WEIGHT):
            fused[key.removesuffix(_FUSED_WEIGHT)] = key
        elif not key.endswith((FP8_SCALE, MXFP4_SCALE)) and key not in claimed:
            _describe_named(result, claimed, tensors, info, config, options)
    _describe_fused(result, claimed, reader, fused, config, options)
    for key in tensors:
        if key.startswith(TEXT_PREFIXES) and key.endswith((FP8_SCALE, MXFP4_SCALE)) and key not in claimed:
            result.problems.append(_orphan_scale(key, tensors))
    _check_layout_option(result, options)
    order = {key: number for number, key in enumerate(tensors)}
    result.matrices = dict(sorted(result.matrices.items(), key=lambda item: order[item[1].weight.key]))
    return result


def problem_text(where: str, problems: list[tuple[str, str]]) -> str:
    """One message for all problems; keys that share one are folded."""
    kinds: dict[str, list[str]] = {}
    for what, key in problems:
        kinds.setdefault(what, []).append(key)
    lines = [f"{where}: the tensors do not fit each other or config.json"]
    for what, keys in list(kinds.items())[:8]:
        groups = group_keys(key for key in keys if key)
        lines += [f"  {what}", *(f"    {group}" for group in groups[:8])]
        if len(groups) > 8:
            lines.append(f"    ... and {len(groups) - 8} more groups")
    if len(kinds) > 8:
        lines.append(f"  ... and {len(kinds) - 8} more kinds of problems")
    return "\n".join(lines)


def _describe_named(
    result: Description,
    claimed: set[str],
    tensors: Mapping[str, TensorInfo],
    info: TensorInfo,
    config: MiMoV2FlashConfig,
    options: SourceOptions,
) -> None:
    """A text tensor that is stored under its own name: plain, FP8 or MXFP4."""
    key, matrix_like = info.name, len(info.shape) == 2
    claimed.add(key)
    if info.dtype in FLOATING:
        for suffix in (FP8_SCALE, MXFP4_SCALE):
            if f"{key}{suffix}" in tensors:
                claimed.add(f"{key}{suffix}")
                result.problems.append((f"has a scale ({suffix[1:]}) but is stored as {info.dtype}", key))
        result.matrices[key] = plain_matrix(key, info.dtype, info.shape)
        return
    if info.dtype == "F8_E4M3" and matrix_like:
        for candidates in _fp8_candidates(key, tensors, config, options):
            if all(_is_stored(tensors, tensor) for matrix in candidates for tensor in matrix.stored):
                _accept(result, claimed, candidates)
                return
        result.problems.append(_fp8_problem(key, tensors))
    elif info.dtype == "U8" and matrix_like:
        matrix = mxfp4_matrix(key, (info.shape[0], 2 * info.shape[1]))
        if matrix.shape[1] % GROUP == 0 and all(_is_stored(tensors, tensor) for tensor in matrix.stored):
            _accept(result, claimed, (matrix,))
        else:
            result.problems.append(_mxfp4_problem(matrix, tensors))
    else:
        result.problems.append((f"is stored as {info.dtype}, which no MiMo-V2 text tensor is", key))
    claimed.update(scale for suffix in (FP8_SCALE, MXFP4_SCALE) if (scale := f"{key}{suffix}") in tensors)


def _fp8_candidates(
    key: str, tensors: Mapping[str, TensorInfo], config: MiMoV2FlashConfig, options: SourceOptions
) -> list[tuple[StoredMatrix, ...]]:
    """What an FP8 matrix may be, the likelier first: k and v of a full layer of V2-Flash have a grid of their own."""
    shape = tensors[key].shape
    plain = (fp8_matrix(key, (shape[0], shape[1])),)
    suffix = next((suffix for suffix in (_K, _V) if key.endswith(suffix)), None)
    if suffix is None:
        return [plain]
    prefix = key.removesuffix(suffix) + ".self_attn"
    try:
        tp = flash_shards(config, prefix)
    except CheckpointError:  # a layer that the config does not have
        return [plain]
    if tp is None:
        return [plain]
    pair = flash_kv_matrices(prefix, attention_shape(config, prefix), shape[1], tp, options.v_scales)
    return [pair, plain] if config.model_type == MiMoV2FlashConfig.model_type else [plain, pair]


def _describe_fused(
    result: Description,
    claimed: set[str],
    reader: CheckpointReader,
    fused: Mapping[str, str],
    config: MiMoV2FlashConfig,
    options: SourceOptions,
) -> None:
    """The fused projections (prefix -> key): first the number of shards, which all share, then their rows and grids."""
    tensors = reader.tensors
    claimed.update(key for weight in fused.values() for key in (weight, f"{weight}{FP8_SCALE}") if key in tensors)
    found = [_fused_projection(result, tensors, prefix, key, config) for prefix, key in fused.items()]
    projections = [projection for projection in found if projection is not None]
    if options.layout == "split" and fused:
        result.problems.append(("source layout: said to be split, but qkv_proj is there", ""))
        return
    if not projections:
        return
    given = None if options.tp is None else CheckpointTP(options.tp, "--source-tp")
    if options.layout == "contiguous" and given is None:
        given = CheckpointTP(1, "--source-layout contiguous")
    try:
        index = index_tp_size(reader.metadata)
        result.tp = resolve_tp(projections, given=given, index=index, config=config.checkpoint_tp_size)
    except CheckpointError as error:
        result.problems.append((str(error), ""))
        return
    for projection in projections:
        info = tensors[fused[projection.prefix]]
        matrices = fused_matrices(projection.prefix, projection.shape, info.shape[1], result.tp.size, info.dtype)
        wrong = [tensor for tensor in matrices[0].stored if not _is_stored(tensors, tensor)]
        doubled = [matrix.key for matrix in matrices if matrix.key in result.matrices]
        if wrong:
            shape = list(tensors[wrong[0].key].shape)
            result.problems.append((f"has shape {shape}, its layout asks for {list(wrong[0].shape)}", wrong[0].key))
        elif doubled:
            result.problems.append(("is there twice: fused and under its own name", doubled[0]))
        else:
            _accept(result, claimed, matrices)


def _fused_projection(
    result: Description, tensors: Mapping[str, TensorInfo], prefix: str, key: str, config: MiMoV2FlashConfig
) -> FusedProjection | None:
    """What one fused tensor is, or None and a problem."""
    info, scale = tensors[key], tensors.get(f"{key}{FP8_SCALE}")
    try:
        shape = attention_shape(config, prefix)
    except CheckpointError as error:
        result.problems.append((str(error), key))
        return None
    full = is_full(config, prefix)
    if len(info.shape) != 2 or info.shape[0] != shape.rows:
        result.problems.append((f"has shape {list(info.shape)}, config.json asks for {shape.rows} rows", key))
    elif info.dtype in FLOATING and scale is None:
        return FusedProjection(prefix, shape, None, full)
    elif info.dtype == "F8_E4M3" and scale is not None and scale.dtype == "F32" and len(scale.shape) == 2:
        return FusedProjection(prefix, shape, scale.shape[0], full)
    elif info.dtype == "F8_E4M3":
        result.problems.append(_fp8_problem(key, tensors))
    else:
        result.problems.append((f"is stored as {info.dtype}{' with a scale' if scale is not None else ''}", key))
    return None


def _accept(result: Description, claimed: set[str], matrices: tuple[StoredMatrix, ...]) -> None:
    for matrix in matrices:
        result.matrices[matrix.key] = matrix
        claimed.update(tensor.key for tensor in matrix.stored)


def _is_stored(tensors: Mapping[str, TensorInfo], tensor: StoredTensor) -> bool:
    info = tensors.get(tensor.key)
    return info is not None and (info.dtype, info.shape) == (tensor.dtype, tensor.shape)


def _fp8_problem(key: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, str]:
    scale = tensors.get(f"{key}{FP8_SCALE}")
    if scale is None:
        return f"is stored as F8_E4M3 without its scale ({FP8_SCALE[1:]})", key
    if scale.dtype != "F32":
        return f"has a scale stored as {scale.dtype}; the scales of FP8 matrices are F32", key
    shape = list(tensors[key].shape)
    return f"{shape} has scales {list(scale.shape)}, which no grid of 128 x 128 blocks explains", key


def _mxfp4_problem(matrix: StoredMatrix, tensors: Mapping[str, TensorInfo]) -> tuple[str, str]:
    scale = tensors.get(matrix.scales[0].key)
    if scale is None:
        return f"is stored as U8 without its scale ({MXFP4_SCALE[1:]})", matrix.key
    return (
        f"(U8 {list(matrix.weight.shape)}) has scales {scale.dtype} {list(scale.shape)}; MXFP4 needs U8 "
        f"{list(matrix.scales[0].shape)}, one per {GROUP} columns"
    ), matrix.key


def _orphan_scale(key: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, str]:
    weight = key.removesuffix(FP8_SCALE if key.endswith(FP8_SCALE) else MXFP4_SCALE)
    if weight in tensors:
        return f"is a scale of another kind than its weight ({tensors[weight].dtype}) has", key
    return "is a scale without its weight", key


def _check_layout_option(result: Description, options: SourceOptions) -> None:
    """What the user said about the layout must not contradict what the keys say."""
    if options.layout == "contiguous" and options.tp not in (None, 1):
        result.problems.append((f"source layout: contiguous is one shard, --source-tp says {options.tp}", ""))
    if options.layout in ("fused", "contiguous") or options.tp is not None:
        if result.tp is None and not result.problems:
            result.problems.append(("source layout: said to be fused, but there is no qkv_proj", ""))
        elif options.layout == "fused" and result.tp is not None and result.tp.size == 1 and options.tp is None:
            result.problems.append(("source layout: said to be fused in shards, but it is in one", ""))
