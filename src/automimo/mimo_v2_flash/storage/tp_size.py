"""In how many tensor-parallel shards a fused q, k, v projection was written, and who says so.

The number decides the order of the rows, and a wrong one scrambles the attention without an error. So it is never
guessed: it is stated (option, index, config), or follows from the number of scale rows, and all that speak must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.storage.geometry import AttentionShape
from automimo.quantization import BLOCK

INDEX = "metadata.tp_size"
CONFIG = "config.json checkpoint_tp_size"


@dataclass(frozen=True)
class FusedProjection:
    """A fused projection of a checkpoint; `scale_rows` is None when it is not quantised."""

    prefix: str
    shape: AttentionShape
    scale_rows: int | None
    full: bool


@dataclass(frozen=True)
class CheckpointTP:
    """The number of shards and what it is known from."""

    size: int
    found_by: str


def index_tp_size(metadata: Mapping[str, Any]) -> int | None:
    """`tp_size` of an index's metadata, None when it has none. Raises CheckpointError for anything but a number > 0."""
    value = metadata.get("tp_size")
    if value is None:
        return None
    if type(value) is not int or value < 1:  # bool is an int too
        raise CheckpointError(
            f"invalid metadata.tp_size {value!r} in the index: it must be a whole number of at least 1"
        )
    return value


def resolve_tp(
    projections: Sequence[FusedProjection], *, given: CheckpointTP | None, index: int | None, config: int | None
) -> CheckpointTP:
    """The number of shards of all fused projections of a checkpoint.

    Precedence: `given` (an option), `index` (metadata), `config`, then detection from the scale rows, first of full
    layers. Raises CheckpointError when two disagree, when the scale rows fit no number of shards, or when nothing tells
    (the message says which option to pass).
    """
    stated = [given] if given is not None else []
    stated += [CheckpointTP(value, name) for value, name in ((index, INDEX), (config, CONFIG)) if value is not None]
    for other in stated[1:]:
        if other.size != stated[0].size:
            raise CheckpointError(
                f"{stated[0].found_by} is {stated[0].size}, which disagrees with {other.found_by} {other.size}; "
                "correct the wrong one"
            )
    if not stated:
        return _detect(projections)
    tp = stated[0]
    for projection in projections:
        try:
            projection.shape.shard(tp.size)
        except CheckpointError as error:
            raise CheckpointError(f"{projection.prefix}: {error} ({tp.found_by})") from error
        fitting = fitting_tp(projection)
        if projection.scale_rows is not None and tp.size not in fitting:
            raise CheckpointError(
                f"{tp.found_by} {tp.size} disagrees with {projection.prefix}.qkv_proj.weight_scale_inv: "
                f"{projection.scale_rows} scale rows for {projection.shape.rows} rows fit "
                f"{_alternatives(fitting) if fitting else 'no number of'} shards"
            )
    return tp


def fitting_tp(projection: FusedProjection) -> list[int]:
    """The numbers of shards that divide the heads of a quantised projection and explain its scale rows."""
    shape = projection.shape
    dividing = [t for t in range(1, shape.kv_heads + 1) if shape.kv_heads % t == 0 and shape.heads % t == 0]
    return [t for t in dividing if t * ceil(shape.rows // t / BLOCK) == projection.scale_rows]


def _detect(projections: Sequence[FusedProjection]) -> CheckpointTP:
    quantised = [projection for projection in projections if projection.scale_rows is not None]
    if not quantised:
        raise CheckpointError(
            f"{projections[0].prefix}.qkv_proj.weight is fused and not quantised, so nothing tells the order of its "
            "rows; pass --source-tp N for the released order of N shards [q | k | v], or --source-layout contiguous "
            "for all of q, then k, then v (in a recipe: model.source_tp, model.source_layout)"
        )
    # Full layers first: with 192-row heads a shard of theirs ends inside a block, which shows where grids restart.
    quantised.sort(key=lambda projection: not projection.full)
    fitting = fitting_tp(quantised[0])
    for projection in quantised:
        also = fitting_tp(projection)
        if not also:
            raise CheckpointError(
                f"{projection.prefix}.qkv_proj.weight_scale_inv has {projection.scale_rows} rows for "
                f"{projection.shape.rows} rows of weight; no number of shards explains that"
            )
        fitting = [t for t in fitting if t in also]
    first = quantised[0]
    if not fitting:
        raise CheckpointError(
            f"{first.prefix}: its scale rows and those of other layers fit no common number of shards"
        )
    if fitting == [1]:
        raise CheckpointError(
            f"{first.prefix}.qkv_proj.weight has the scale rows of one shard: a re-quantised export whose rows may be "
            "in plain order; if so, pass --source-layout contiguous"
        )
    if len(fitting) > 1:
        raise CheckpointError(
            f"{first.prefix}.qkv_proj.weight: {first.scale_rows} scale rows fit {_alternatives(fitting)} shards; pass "
            f"--source-tp N, or --source-layout contiguous when its rows are all of q, then k, then v"
        )
    kind = "a full-attention layer" if first.full else "a sliding layer"
    return CheckpointTP(fitting[0], f"the scale rows of {kind} ({first.prefix})")


def _alternatives(numbers: Sequence[int]) -> str:
    return " or ".join(str(number) for number in numbers)
