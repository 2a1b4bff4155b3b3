"""How a checkpoint stores each tensor of the model.

The common language is the split layout: q_proj, k_proj, v_proj and one matrix per expert, in floating point. A
`StoredMatrix` says, for one tensor of it, which stored tensors hold it: which rows of which weight, and for FP8 which
row of scales belongs to which rows. Every layout (fused, per-head grids, MXFP4) is a value of this class; reading and
writing know nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.geometry import AttentionShape, attention_shape, is_full, released_tp
from automimo.quantization import BLOCK, GROUP, Strip, block_strips, scale_shape

Encoding = Literal["plain", "fp8", "mxfp4"]
Quantisation = Literal["none", "fp8", "mxfp4"]
VScales = Literal["strip", "own"]

FP8_SCALE = "_scale_inv"  # after `.weight`, as in the released files
MXFP4_SCALE = "_scale"
PARTS = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv_proj"

# What the released files quantise: q, k, v, and the MLPs of blocks, experts and MTP. Everything else stays as it is.
_QUANTISED = re.compile(
    r"model\.(mtp\.)?layers\.\d+\.(self_attn\.(q|k|v)_proj|mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj)"
    r"\.weight$"
)
_ROUTED_EXPERT = re.compile(r"model\.(mtp\.)?layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file; `dtype` is the safetensors name."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Where one tensor of the split layout lies in a checkpoint.

    `key` and `shape` are those of the split layout. Its rows are the `rows` (first, count) of `weight`, in this order;
    without `rows` it is all of `weight`. For FP8, `strips` give each of its rows a row of `scales` (several tensors
    count as one on top of the other).
    """

    key: str
    shape: tuple[int, ...]
    encoding: Encoding
    weight: StoredTensor
    rows: tuple[tuple[int, int], ...] = ()
    scales: tuple[StoredTensor, ...] = ()
    strips: tuple[Strip, ...] = ()

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """All tensors that hold a part of it."""
        return (self.weight, *self.scales)


def is_quantised(key: str) -> bool:
    """Whether the released files store this key of the split layout quantised."""
    return _QUANTISED.match(key) is not None


def is_routed_expert(key: str) -> bool:
    """Whether this key of the split layout is a matrix of a routed expert (MXFP4 in V2.6)."""
    return _ROUTED_EXPERT.match(key) is not None


def plain_matrix(key: str, dtype: str, shape: Sequence[int]) -> StoredMatrix:
    """A tensor stored under its own name, unquantised."""
    return StoredMatrix(key, tuple(shape), "plain", StoredTensor(key, dtype, tuple(shape)))


def fp8_matrix(key: str, shape: tuple[int, int]) -> StoredMatrix:
    """A matrix stored under its own name in FP8, one scale per 128 x 128 block."""
    scale = StoredTensor(f"{key}{FP8_SCALE}", "F32", scale_shape(*shape))
    weight = StoredTensor(key, "F8_E4M3", shape)
    return StoredMatrix(key, shape, "fp8", weight, scales=(scale,), strips=block_strips(shape[0]))


def mxfp4_matrix(key: str, shape: tuple[int, int]) -> StoredMatrix:
    """A matrix stored under its own name in MXFP4: two codes per byte, one scale per 32 columns."""
    rows, columns = shape
    weight = StoredTensor(key, "U8", (rows, columns // 2))
    scale = StoredTensor(f"{key}{MXFP4_SCALE}", "U8", (rows, columns // GROUP))
    return StoredMatrix(key, shape, "mxfp4", weight, scales=(scale,))


def fused_matrices(prefix: str, shape: AttentionShape, hidden: int, tp: int, dtype: str) -> tuple[StoredMatrix, ...]:
    """q, k and v in one `qkv_proj` of `tp` stacked shards [q | k | v]; `tp` 1 is the contiguous order.

    With dtype F8_E4M3 each shard has a grid of scales of its own, which restarts at its first row. Raises
    CheckpointError unless the heads are divisible by `tp`.
    """
    shard = shape.shard(tp)
    key = f"{prefix}.{FUSED}.weight"
    weight = StoredTensor(key, dtype, (shape.rows, hidden))
    fp8 = dtype == "F8_E4M3"
    blocks = ceil(shard.rows / BLOCK)
    scales = (StoredTensor(f"{key}{FP8_SCALE}", "F32", (tp * blocks, ceil(hidden / BLOCK))),) if fp8 else ()
    result = []
    offset = 0
    for part, count in zip(PARTS, (shard.q, shard.k, shard.v), strict=True):
        rows = tuple((t * shard.rows + offset, count) for t in range(tp))
        strips = _shard_strips(offset, count, tp, lambda t, block: t * blocks + block) if fp8 else ()
        name, size = f"{prefix}.{part}.weight", (tp * count, hidden)
        result.append(StoredMatrix(name, size, "fp8" if fp8 else "plain", weight, rows, scales, strips))
        offset += count
    return tuple(result)


def flash_kv_matrices(
    prefix: str, shape: AttentionShape, hidden: int, tp: int, v_scales: VScales
) -> tuple[StoredMatrix, StoredMatrix]:
    """k and v of a full layer of V2-Flash in FP8: `tp` shards, whose grids restart, under split names.

    k and v of a shard were quantised as one strip of rows [k | v] (320 rows: 3 rows of scales). k stores the rows of
    scales its own rows touch (2), v the rest (1), so the first rows of v are scaled by k's last row. With `v_scales`
    "own" v has a grid of its own instead.
    """
    shard = shape.shard(tp)
    k_key, v_key = f"{prefix}.k_proj.weight", f"{prefix}.v_proj.weight"
    columns = ceil(hidden / BLOCK)
    k_blocks = ceil(shard.k / BLOCK)
    v_blocks = (ceil((shard.k + shard.v) / BLOCK) - k_blocks) if v_scales == "strip" else ceil(shard.v / BLOCK)
    k_scale = StoredTensor(f"{k_key}{FP8_SCALE}", "F32", (tp * k_blocks, columns))
    v_scale = StoredTensor(f"{v_key}{FP8_SCALE}", "F32", (tp * v_blocks, columns))

    def scale_row(t: int, block: int) -> int:
        own = block - k_blocks
        return t * k_blocks + block if own < 0 else tp * k_blocks + t * v_blocks + own

    k_strips = _shard_strips(0, shard.k, tp, scale_row)
    k_weight = StoredTensor(k_key, "F8_E4M3", (shape.k, hidden))
    v_weight = StoredTensor(v_key, "F8_E4M3", (shape.v, hidden))
    k = StoredMatrix(k_key, k_weight.shape, "fp8", k_weight, scales=(k_scale,), strips=k_strips)
    if v_scales == "own":
        own = block_strips(shape.v, tp)
        return k, StoredMatrix(v_key, v_weight.shape, "fp8", v_weight, scales=(v_scale,), strips=own)
    v_strips = _shard_strips(shard.k, shard.v, tp, scale_row)
    return k, StoredMatrix(v_key, v_weight.shape, "fp8", v_weight, scales=(k_scale, v_scale), strips=v_strips)


def flash_shards(config: MiMoV2FlashConfig, prefix: str) -> int | None:
    """The shards whose grids restart in k and v of an attention in V2-Flash's FP8, None where their grids are plain.

    A full layer has grids of its own, if the numbers of scale rows show it: k must have more than in a plain grid, and
    v at least one. (In V2-Flash: 8 instead of 6, and 4.)
    """
    shape, tp = attention_shape(config, prefix), released_tp(config)
    if not is_full(config, prefix):
        return None
    k, v = shape.k // tp, shape.v // tp
    own, strip = ceil(k / BLOCK), ceil((k + v) / BLOCK)
    return tp if tp * own > ceil(shape.k / BLOCK) and strip > own else None


def stored_together(matrices: Iterable[StoredMatrix]) -> list[tuple[StoredMatrix, ...]]:
    """Group matrices that share a stored tensor (fused q, k, v; k and v of V2-Flash), in the order of their first."""
    group_of: dict[str, int] = {}
    groups: dict[int, list[StoredMatrix]] = {}
    for number, matrix in enumerate(matrices):
        found = sorted({group_of[tensor.key] for tensor in matrix.stored if tensor.key in group_of})
        home = found[0] if found else number
        members = groups.setdefault(home, [])
        for other in found[1:]:
            members += groups.pop(other)
        members.append(matrix)
        for member in members if len(found) > 1 else (matrix,):
            group_of.update((tensor.key, home) for tensor in member.stored)
    return [tuple(members) for members in groups.values()]


def stored_tensors(group: Sequence[StoredMatrix]) -> tuple[StoredTensor, ...]:
    """The stored tensors of a group, each once: weights first, then scales."""
    weights = dict.fromkeys(matrix.weight for matrix in group)
    scales = dict.fromkeys(scale for matrix in group for scale in matrix.scales)
    return (*weights, *scales)


def _shard_strips(offset: int, count: int, tp: int, scale_row: Callable[[int, int], int]) -> tuple[Strip, ...]:
    """Strips of the `count` rows that start at row `offset` of each of `tp` shards, whose blocks count from the shard's
    first row; `scale_row(shard, block)` is where their scales are."""
    strips = []
    for t in range(tp):
        row = offset
        while row < offset + count:
            block = row // BLOCK
            end = min((block + 1) * BLOCK, offset + count)
            strips.append(Strip(t * count + row - offset, end - row, scale_row(t, block)))
            row = end
    return tuple(strips)
